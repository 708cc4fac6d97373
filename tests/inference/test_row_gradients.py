"""Closed-form and ghost gradients against explicit ones; the bound against hostile rows; the bias of clipping."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from silobayes.inference.coordinates import FullPoint, MeanFieldPoint
from silobayes.inference.row_gradients import RowGradients, clipped_gradient, row_gradients, row_lengths
from silobayes.inference.rows import Rows
from silobayes.models.base import aligned
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP
from silobayes.models.poisson_regression import PoissonRegression
from tests.inference.oracles import explicit_gradients
from tests.models.cases import MODELS, D, sample

# The full Gaussian has one path for GLMs and one for all others.
# Models that take the same path as another one of the list wait for the slow suite.
REPEATS = ("mlp_real", "mlp_classes", "negative_binomial_unknown", "gaussian_mean")
CASES = [pytest.param(name, "mean_field", marks=[pytest.mark.slow] if name in REPEATS else []) for name in MODELS]
CASES += [(name, "full") for name in ("negative_binomial", "softmax")]


def make_point(kind: str, dim: int, seed: int = 1):
    rng = np.random.default_rng(seed)
    mean = jnp.asarray(0.5 * rng.normal(size=dim), dtype=jnp.float32)
    if kind == "mean_field":
        return MeanFieldPoint(mean=mean, log_stddev=jnp.asarray(rng.normal(size=dim) * 0.3 - 1, dtype=jnp.float32))
    lower = np.tril(rng.normal(size=(dim, dim)) * 0.1, -1) + np.diag(np.exp(rng.normal(size=dim) * 0.3 - 1))
    return FullPoint(mean=mean, factor=jnp.asarray(lower, dtype=jnp.float32))


def make_case(name: str, kind: str, num_rows: int = 7):
    model = MODELS[name]
    data = sample(model, num_rows)
    e = jax.random.normal(jax.random.key(5), (model.dim,))
    return model, make_point(kind, model.dim), e, jnp.asarray(data.x), jnp.asarray(data.y)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_norms_and_sums_equal_those_of_vmap_grad(name, kind):
    model, point, e, x, y = make_case(name, kind)
    weights = np.linspace(0, 1, len(x)).astype(np.float32)
    labels = () if model.worst_labels is None else model.worst_labels

    @jax.jit
    def explicit_norms(point, y):
        return explicit_gradients(model, point, e, x, y)

    @jax.jit
    def closed(point, clip_norms):
        rows = row_gradients(model, point, e, x, y)
        everyone = jnp.ones(len(x), dtype=bool)
        clipped = jax.vmap(lambda clip_norm: clipped_gradient(rows, everyone, clip_norm, "ordinary"))(clip_norms)
        return rows.norms, rows.worst_norms, rows.weighted_sum(weights), clipped

    explicit = np.asarray(explicit_norms(point, y), dtype=np.float64)
    norms = np.linalg.norm(explicit, axis=1)
    clip_norms = np.array([0.5 * norms.min(), np.median(norms), 2 * norms.max()], dtype=np.float32)
    got_norms, got_worst, got_sum, got_clipped = closed(point, clip_norms)
    # Expected derivatives in closed form against 12 quadrature nodes differ by a little more than float32 rounding.
    atol = 5e-5 * np.abs(explicit).max()
    np.testing.assert_allclose(got_norms, norms, rtol=5e-5)
    np.testing.assert_allclose(got_sum, weights @ explicit, rtol=5e-5, atol=atol)
    factors = np.minimum(1, clip_norms[:, None] / norms)
    np.testing.assert_allclose(got_clipped, factors @ explicit, rtol=1e-4, atol=atol)
    if labels:
        others = [np.linalg.norm(explicit_norms(point, jnp.full(len(x), label, y.dtype)), axis=1) for label in labels]
        np.testing.assert_allclose(got_worst, np.max(others, axis=0), rtol=5e-5)
        assert (np.asarray(got_worst) >= norms * (1 - 1e-4)).all()
    else:
        np.testing.assert_array_equal(got_worst, got_norms)


HOSTILE = {
    "large": [3.0, -2.0, 5.0],
    "huge": [1e8, -1e8, 1e8],
    "beyond float32 squares": [1e25, 1.0, -1e25],
    "tiny": [1e-30, 1e-38, 0.0],
    "tiny squares": [9e-20, 0.0, 0.0],
    "one huge": [1e9, 0.0, 1e-20],
    "nan": [np.nan, 1.0, 1.0],
    "inf": [np.inf, -np.inf, 0.0],
}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_term_enters_with_norm_at_most_clip_norm_whatever_its_values(name, kind):
    model, point, e, _, y = make_case(name, kind)
    labels = [0, 1] if jnp.issubdtype(y.dtype, jnp.integer) else [0, 1, 1e6, 1e19, -1e30, np.nan, np.inf]
    x = jnp.asarray([row for row in HOSTILE.values() for _ in labels], dtype=jnp.float32)
    y = jnp.asarray([label for _ in HOSTILE for label in labels], dtype=y.dtype)
    rows = Rows(x=x, y=y, present=jnp.ones(len(x), dtype=bool))

    @jax.jit
    def terms(point, clip_norm):
        gradients = row_gradients(model, point, e, rows.x, rows.y)
        alone = jnp.eye(len(x), dtype=bool) & rows.present

        def both(mask):
            return [clipped_gradient(gradients, mask, clip_norm, clipping) for clipping in ("label_free", "ordinary")]

        return jnp.concatenate(jax.vmap(both)(alone))

    wide = jax.tree.map(lambda leaf: leaf * 30.0, point)  # huge means, huge and tiny deviations: what noise can do to q
    for clip_norm in (1e-3, 1.0, 1e3):
        for q in (point, wide):
            got = np.asarray(terms(q, clip_norm), dtype=np.float64)
            assert np.isfinite(got).all()
            assert (np.linalg.norm(got, axis=1) <= clip_norm).all()
    assert (np.linalg.norm(np.asarray(terms(point, 1e-3)), axis=1) > 0.999e-3).any()  # not all of them are zero


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.floats(-10, 10, width=32)


def test_a_row_is_within_the_norm_where_weights_of_a_network_cancel():
    """Its norm is small and its features are huge: a second backward pass rounded to up to 227 clip norms."""
    model = BinaryMLP(num_features=2, hidden=(1, 2))
    mean = jnp.array([0.0, 1.0, 0.0, 3.0, -5.0, 0.0, 6.0, 5.0, 3.0, -17.0])
    point, e = MeanFieldPoint(mean=mean, log_stddev=jnp.full(model.dim, -3.0)), jnp.zeros(model.dim)

    @jax.jit
    def clipped(x, clip_norm):
        gradients = row_gradients(model, point, e, x, jnp.array([0]))
        return clipped_gradient(gradients, jnp.array([True]), clip_norm, "label_free")

    for size in (1e3, 1e6, 1e9):
        for clip_norm in np.linspace(0.1, 1.0, 60):
            total = np.asarray(clipped(jnp.array([[size, 1.0]]), clip_norm), dtype=np.float64)
            assert np.linalg.norm(total) <= clip_norm


def test_a_row_is_within_the_norm_where_a_full_factor_cancels():
    """The generic path: L' times a sum is not the sum of what was measured."""
    rng, dim = np.random.default_rng(0), 12
    factor = np.tril(rng.normal(size=(dim, dim))) * 2e4
    point = FullPoint(mean=jnp.zeros(dim), factor=jnp.asarray(factor, jnp.float32))
    e = jnp.asarray(rng.normal(size=dim), jnp.float32)
    for _ in range(200):
        gradients = np.linalg.solve(factor.T, rng.normal(size=dim))[None] * 1e5
        pulled = point.pull_rows(jnp.asarray(gradients, jnp.float32), e)
        norm = float(np.linalg.norm(np.asarray(pulled.weighted_sum(jnp.ones(1)), dtype=np.float64)))
        assert norm <= float(pulled.norms[0]) * (1 + 5e-6)


@pytest.mark.parametrize("name", ["logistic", "poisson", "mlp_binary", "linear_unknown_noise"])
def test_all_rows_of_a_person_together_enter_with_norm_at_most_clip_norm_whatever_their_values(name):
    """Hypothesis finds hostile rows; persons of several rows all alike are added, whose sum is as long as it can be."""
    model, point, e, _, y = make_case(name, "mean_field")
    num_persons, rows_per_person = 3, 4
    shape = (num_persons, rows_per_person)

    @jax.jit
    def terms(x, y, present, clip_norm):
        rows = Rows(x=x, y=y, present=present)
        gradients = row_gradients(model, point, e, rows.x, rows.y)
        alone = jnp.repeat(jnp.eye(num_persons, dtype=bool), rows_per_person, axis=1) & rows.present
        return jnp.stack(
            [
                clipped_gradient(gradients, mask, clip_norm, clipping, rows_per_person)
                for mask in alone
                for clipping in ("label_free", "ordinary")
            ]
        )

    @given(
        arrays(np.float32, (*shape, D), elements=numbers),
        arrays(np.int8, shape, elements=st.integers(0, 1)),
        arrays(bool, shape),
        st.booleans(),
        st.sampled_from([1e-3, 1.0, 1e3]),
    )
    @settings(max_examples=150, deadline=None)
    def check(x, labels, present, are_alike, clip_norm):
        if are_alike:
            x, labels, present = (np.repeat(a[:, :1], rows_per_person, axis=1) for a in (x, labels, present))
        got = terms(x.reshape(-1, D), labels.reshape(-1).astype(y.dtype), present.reshape(-1), clip_norm)
        got = np.asarray(got, dtype=np.float64)
        assert np.isfinite(got).all()
        assert (np.linalg.norm(got, axis=1) <= clip_norm).all()

    check()


def test_persons_share_one_weight_and_a_row_without_a_finite_norm_takes_nobody_along():
    norms = jnp.array([3.0, 1.0, 0.2, 0.3, jnp.inf, 8.0, jnp.nan, 5.0])
    rows = RowGradients(norms=norms, worst_norms=norms, weighted_sum=lambda weights: weights)
    mask = jnp.array([True, True, True, True, True, True, True, False])
    got = clipped_gradient(rows, mask, 2.0, "ordinary", 2)
    np.testing.assert_allclose(got, [0.5, 0.5, 1.0, 1.0, 0.0, 0.25, 0.0, 0.0], rtol=2e-5)


@pytest.mark.parametrize("kind", ["mean_field", "full"])
def test_columns_of_zeros_and_lengths_computed_before_change_nothing(kind):
    model, point, e, x, y = make_case("logistic", kind)
    wide = aligned(x)
    assert wide.shape == (len(x), 16)
    plain = row_gradients(model, point, e, x, y)
    prepared = row_gradients(model, point, e, wide, y, row_lengths(x))
    np.testing.assert_allclose(prepared.norms, plain.norms, rtol=1e-6)
    np.testing.assert_allclose(prepared.worst_norms, plain.worst_norms, rtol=1e-6)
    weights = jnp.linspace(0.0, 1.0, len(x))
    np.testing.assert_allclose(prepared.weighted_sum(weights), plain.weighted_sum(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["logistic", "linear_unknown_noise", "mlp_binary"])
def test_a_masked_or_non_finite_term_contributes_zero(name):
    model, point, e, x, y = make_case(name, "mean_field")
    keep = jnp.arange(len(x)) < 4

    @jax.jit
    def clipped(x, mask):
        rows = Rows(x=x, y=y, present=mask)
        return clipped_gradient(row_gradients(model, point, e, rows.x, rows.y), rows.present, 1.0, "label_free")

    expected = clipped_gradient(row_gradients(model, point, e, x[:4], y[:4]), keep[:4], 1.0, "label_free")
    for got in (clipped(x, keep), clipped(x.at[4:].set(jnp.nan), jnp.ones_like(keep)), clipped(x * 1e30, keep) * 0):
        assert np.isfinite(got).all()
    np.testing.assert_allclose(clipped(x, keep), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(clipped(x.at[4:].set(jnp.nan), jnp.ones_like(keep)), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(clipped(x * 1e30, keep), np.zeros_like(expected))


@pytest.mark.parametrize("name", ["logistic", "softmax", "mlp_binary", "poisson"])
def test_label_free_clipping_keeps_the_expected_score_zero(name):
    """Labels are summed out exactly, so there is no false alarm: E over y of the clipped score at the true theta."""
    model = PoissonRegression(num_features=D, max_count=60) if name == "poisson" else MODELS[name]
    data = sample(model, 40, seed=3)
    x, theta = jnp.asarray(0.5 * data.x), jnp.asarray(data.theta)  # Poisson: rates stay far below max_count
    point = MeanFieldPoint(mean=theta, log_stddev=jnp.full(model.dim, -14.0))  # q is the true theta
    labels = jnp.arange(61.0) if model.target == "count" else jnp.asarray(model.worst_labels)

    @partial(jax.jit, static_argnames=("clipping", "rows_per_unit"))
    def expected_score(clipping, rows_per_unit=1):
        def of(label):
            y = jnp.full(len(x), label)
            gradients = row_gradients(model, point, jnp.zeros(model.dim), x, y)
            return weighted_by(jnp.exp(model.log_predictive(theta, x, y)), gradients, 0.3, clipping, rows_per_unit)

        return jax.vmap(of)(labels).sum(axis=0)[: model.dim]

    assert np.abs(expected_score("label_free")).max() < 1e-4
    assert np.abs(expected_score("ordinary")).max() > 0.1
    assert np.abs(expected_score("label_free", rows_per_unit=4)).max() < 1e-4  # persons of four rows


def weighted_by(probabilities, gradients, clip_norm, clipping, rows_per_unit=1):
    """The clipped sum with each row's term weighted by the probability of its label."""
    shaded = gradients._replace(weighted_sum=lambda weights: gradients.weighted_sum(weights * probabilities))
    return clipped_gradient(shaded, jnp.ones(probabilities.shape, dtype=bool), clip_norm, clipping, rows_per_unit)


def test_ordinary_clipping_biases_the_estimate_and_label_free_does_not():
    """The root of the clipped expected score over y, with more rows of one kind than the clip norm can carry."""
    model = LogisticRegression(num_features=1)
    x = jnp.asarray([[1.0], [4.0]])
    truth = jnp.array([0.8])
    p = jax.nn.sigmoid(x @ truth)

    @partial(jax.jit, static_argnames="clipping")
    def expected_score(theta, clipping):
        point = MeanFieldPoint(mean=jnp.array([theta]), log_stddev=jnp.array([-14.0]))
        total = 0.0
        for label, weight in ((0.0, 1 - p), (1.0, p)):
            gradients = row_gradients(model, point, None, x, jnp.full(2, label))
            total = total + weighted_by(weight, gradients, 0.2, clipping)[0]
        return total

    def root(clipping):
        low, high = -3.0, 5.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if expected_score(middle, clipping) > 0 else (low, middle)
        return low

    assert abs(root("label_free") - 0.8) < 1e-3
    assert abs(root("ordinary") - 0.8) > 0.3


def test_the_number_of_features_is_that_of_the_cases():
    assert all(sample(model).x.shape[1] == D for model in MODELS.values())
