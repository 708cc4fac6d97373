"""Laws of what is made of a noisy curvature; constants may change, these may not."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.inference.noisy_curvature import Curvature, Guess, Products, Scores, condition, positive, shrink

DIM = 6
seeds = st.integers(0, 10**6)


def psd(rng: np.random.Generator, dim: int = DIM, condition_number: float = 30.0) -> np.ndarray:
    rotation, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    return (rotation * np.geomspace(1.0, condition_number, dim)) @ rotation.T


def guess_of(matrix: np.ndarray) -> Guess:
    squares = np.diag(matrix)
    return Guess(matrix=matrix, spread=np.minimum.outer(squares, squares))


def scores_of(dim: int = DIM, noise_variance: float = 0.5, rows_share: float = 1.0, prior: float = 4.0) -> Scores:
    return Scores(noise_variance=noise_variance, rows_share=rows_share, prior_covariance=prior * np.eye(dim))


def noise(rng: np.random.Generator, dim: int, packed_variance: float) -> np.ndarray:
    root = rng.normal(size=(dim, dim)) * np.sqrt(packed_variance)
    return (root + root.T) / 2.0


@given(seeds)
@settings(max_examples=30)
def test_without_noise_a_curvature_stays_as_it_is(seed):
    rng = np.random.default_rng(seed)
    j, t0 = psd(rng), psd(rng)
    guess, u = guess_of(t0), rng.normal(size=(DIM, 2))
    shrunk = shrink(j, 0.0, guess)
    np.testing.assert_allclose(shrunk.matrix, j, rtol=1e-9)
    assert not shrunk.variance.any()
    exact = Products(directions=u, values=j @ u, variances=np.full(2, 1e-12))
    told = condition(shrunk, exact, guess)
    np.testing.assert_allclose(told, j, rtol=1e-6, atol=1e-9)
    for products in (None, exact):
        found = positive(told, shrunk.variance, guess, scores_of(), products)
        np.testing.assert_allclose(found.matrix, j, rtol=1e-5, atol=1e-6)
        assert found.num_hidden == 0


@given(seeds, st.floats(1e-6, 1e6))
@settings(max_examples=30)
def test_what_noise_leaves_is_no_more_than_the_noise(seed, packed_variance):
    rng = np.random.default_rng(seed)
    noisy, guess = psd(rng) + noise(rng, DIM, packed_variance), guess_of(psd(rng))
    shrunk = shrink(noisy, packed_variance, guess)
    allowed = np.where(np.eye(DIM) > 0, packed_variance, packed_variance / 2) * (1 + 1e-9)
    assert np.isfinite(shrunk.matrix).all()
    assert (shrunk.variance >= 0.0).all()
    assert (shrunk.variance <= allowed).all()
    np.testing.assert_allclose(shrunk.matrix, shrunk.matrix.T, atol=1e-9 * np.abs(noisy).max())
    np.testing.assert_allclose(shrunk.variance, shrunk.variance.T)


def test_more_noise_is_shrunk_more():
    rng = np.random.default_rng(0)
    j, guess = psd(rng), guess_of(np.eye(DIM) * 5.0)
    unit = noise(rng, DIM, 1.0)
    distances = []
    for packed_variance in (1e-4, 1.0, 1e4, 1e8):
        shrunk = shrink(j + np.sqrt(packed_variance) * unit, packed_variance, guess)
        distances.append(np.linalg.norm(shrunk.matrix - guess.matrix) / np.sqrt(packed_variance))
    assert (np.diff(distances) < 0.0).all()


def test_shrinking_helps_where_there_is_much_noise_and_costs_little_where_there_is_little():
    """Squared errors, over matrices without any directions that stand out, which is where a look at them errs most.

    Next to none: what was released. As much as the signal: less than that and than the guess. In between, a direction
    that seems to stand out costs up to half as much again.
    """
    rng = np.random.default_rng(1)
    for packed_variance, of_released, of_guess in (
        (1e-6, 1.01, 1.0),
        (0.1, 1.6, 0.3),
        (1.0, 0.8, 0.8),
        (10.0, 0.2, 1.4),
    ):
        released, guessed, made = 0.0, 0.0, 0.0
        for _ in range(40):
            guess = guess_of(np.eye(12) * 4.0)
            offset = rng.normal(size=(12, 12))
            j = guess.matrix + (offset + offset.T) / 2.0
            noisy = j + noise(rng, 12, packed_variance)
            released += np.sum((noisy - j) ** 2)
            guessed += np.sum((guess.matrix - j) ** 2)
            made += np.sum((shrink(noisy, packed_variance, guess).matrix - j) ** 2)
        assert made <= of_released * released
        assert made <= of_guess * guessed


@given(seeds, st.floats(0.01, 100.0), st.integers(1, 2))
@settings(max_examples=30)
def test_products_pin_a_curvature_along_their_directions(seed, packed_variance, num_products):
    rng = np.random.default_rng(seed)
    j, guess, u = psd(rng), guess_of(psd(rng)), rng.normal(size=(DIM, num_products))
    shrunk = shrink(j + noise(rng, DIM, packed_variance), packed_variance, guess)
    exact = Products(directions=u, values=j @ u, variances=np.full(num_products, 1e-10))
    told = condition(shrunk, exact, guess)
    np.testing.assert_allclose(told, told.T, atol=1e-9)
    np.testing.assert_allclose(told @ u, j @ u, rtol=1e-4, atol=1e-4 * np.abs(j @ u).max())
    # Products of endless noise tell nothing.
    vague = Products(directions=u, values=j @ u + 1.0, variances=np.full(num_products, 1e18))
    np.testing.assert_allclose(condition(shrunk, vague, guess), shrunk.matrix, atol=1e-6)


def test_conditioning_is_that_of_a_normal_law():
    """Against the formula written out for every entry of the triangle."""
    rng = np.random.default_rng(2)
    dim, guess = 4, guess_of(psd(rng, 4))
    curvature = Curvature(matrix=psd(rng, 4), variance=guess.spread * rng.uniform(0.5, 1.0))
    curvature = Curvature(matrix=curvature.matrix, variance=(curvature.variance + curvature.variance.T) / 2.0)
    products = Products(
        directions=rng.normal(size=(dim, 2)), values=rng.normal(size=(dim, 2)), variances=np.array([0.3, 0.7])
    )
    told, (rows, columns) = condition(curvature, products, guess), np.triu_indices(dim)
    # The prior's variance is found from what one entry alone is moved by.
    basis = np.zeros((len(rows), dim, dim))
    basis[np.arange(len(rows)), rows, columns] = basis[np.arange(len(rows)), columns, rows] = 1.0
    measure = np.stack([(b @ products.directions).T.ravel() for b in basis], axis=1)
    extra = [0.0, 0.2**2, 0.5**2]
    errors = []
    for slack in extra:  # how much slack the entries have is a constant of its own
        prior = np.diag((curvature.variance + slack * guess.spread**2)[rows, columns])
        gain = prior @ measure.T
        whole = measure @ gain + np.diag(np.repeat(products.variances, dim))
        missing = (products.values - curvature.matrix @ products.directions).T.ravel()
        expected = curvature.matrix + np.tensordot(gain @ np.linalg.solve(whole, missing), basis, 1)
        errors.append(np.abs(told - expected).max())
    assert min(errors) <= 1e-9
    np.testing.assert_allclose(
        products.covariance(curvature.variance),
        measure @ np.diag(curvature.variance[rows, columns]) @ measure.T + np.diag(np.repeat(products.variances, dim)),
        atol=1e-12,
    )


def test_what_products_tell_of_a_form_is_what_its_law_loses():
    rng = np.random.default_rng(3)
    dim, variance = 4, np.ones((4, 4)) + psd(rng, 4) ** 2
    along = rng.normal(size=(dim, 3))
    products = Products(directions=rng.normal(size=(dim, 2)), values=np.zeros((dim, 2)), variances=np.array([0.3, 0.7]))
    rows, columns = np.triu_indices(dim)
    basis = np.zeros((len(rows), dim, dim))
    basis[np.arange(len(rows)), rows, columns] = basis[np.arange(len(rows)), columns, rows] = 1.0
    forms = np.einsum("ia,nij,ja->an", along, basis, along)
    measure = np.stack([(b @ products.directions).T.ravel() for b in basis], axis=1)
    prior = np.diag(variance[rows, columns])
    whole = measure @ prior @ measure.T + np.diag(np.repeat(products.variances, dim))
    shared = measure @ prior @ forms.T
    lost = np.sum(shared * np.linalg.solve(whole, shared), axis=0)
    np.testing.assert_allclose(products.told(variance, along), lost, rtol=1e-9)
    assert (lost <= np.einsum("an,nm,am->a", forms, prior, forms)).all()


@given(seeds, st.floats(1e-4, 1e6), st.booleans())
@settings(max_examples=40)
def test_eigenvalues_are_positive_whatever_noise_does(seed, packed_variance, with_products):
    rng = np.random.default_rng(seed)
    j, guess = psd(rng), guess_of(psd(rng))
    shrunk = shrink(j + noise(rng, DIM, packed_variance), packed_variance, guess)
    u = rng.normal(size=(DIM, 2))
    spread = np.sqrt(np.maximum(packed_variance, 1.0))
    products = Products(directions=u, values=j @ u + 0.1 * spread, variances=np.full(2, 0.01 * packed_variance))
    told = condition(shrunk, products, guess) if with_products else shrunk.matrix
    found = positive(told, shrunk.variance, guess, scores_of(), products if with_products else None)
    assert np.isfinite(found.matrix).all()
    np.testing.assert_allclose(found.matrix, found.matrix.T, atol=1e-9 * np.abs(found.matrix).max())
    assert np.linalg.eigvalsh(found.matrix)[0] > 0.0
    assert 0 <= found.num_hidden <= DIM


@given(seeds, st.floats(0.0, 1e4))
@settings(max_examples=30)
def test_known_null_directions_stay_null(seed, packed_variance):
    """An intercept beside all the indicators of a category: J v = 0 where v is (1, ..., 1, -1)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(4, size=200)
    x = np.concatenate([np.eye(4)[codes], rng.uniform(-1, 1, (200, 1)), np.ones((200, 1))], axis=1)
    typical = np.zeros((6, 6))
    typical[:4, :4] = np.eye(4) / 4.0
    typical[:4, 5] = typical[5, :4] = 0.25
    typical[4, 4], typical[5, 5] = 1.0 / 9.0, 1.0
    null = np.array([1.0, 1.0, 1.0, 1.0, 0.0, -1.0])
    assert np.abs(typical @ null).max() < 1e-12
    guess = guess_of(200.0 * typical)
    shrunk = shrink(x.T @ x + noise(rng, 6, packed_variance), packed_variance, guess)
    found = positive(shrunk.matrix, shrunk.variance, guess, scores_of(6), None)
    assert np.abs(found.matrix @ null).max() <= 1e-6 * np.abs(found.matrix).max()
    assert np.linalg.eigvalsh(found.matrix)[1] > 0.0


def test_a_direction_that_noise_hides_is_wide_rather_than_certain():
    """What it is worth lies below what one without noise of the same centre is worth, and it is counted."""
    guess = guess_of(np.eye(3))
    matrix = np.diag([1.0, 1.0, 0.3])
    certain = positive(matrix, np.zeros((3, 3)), guess, scores_of(3), None)
    hidden = positive(matrix, np.diag([1e-6, 1e-6, 1.0]), guess, scores_of(3), None)
    assert (certain.num_hidden, hidden.num_hidden) == (0, 1)
    np.testing.assert_allclose(certain.matrix, matrix, atol=1e-6)
    np.testing.assert_allclose(hidden.matrix[:2, :2], matrix[:2, :2], atol=1e-3)
    assert 0.0 < hidden.matrix[2, 2] < 2.0


@given(seeds, st.floats(1e-3, 1e3))
@settings(max_examples=20)
def test_the_unit_of_curvatures_does_not_matter(seed, unit):
    """Noise and guess in the same unit: shrunk and told alike, eigenvalues above any floor."""
    rng = np.random.default_rng(seed)
    guess, noisy, u = guess_of(psd(rng)), psd(rng) + noise(rng, DIM, 2.0), rng.normal(size=(DIM, 2))
    values, found = rng.normal(size=(DIM, 2)), []
    for scale in (1.0, unit):
        own = Guess(matrix=guess.matrix * scale, spread=guess.spread * scale)
        products = Products(directions=u, values=values * scale, variances=np.array([0.3, 0.7]) * scale**2)
        shrunk = shrink(noisy * scale, 2.0 * scale**2, own)
        found.append((shrunk.matrix / scale, shrunk.variance / scale**2, condition(shrunk, products, own) / scale))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
