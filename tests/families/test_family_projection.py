"""Projection, conversion and float32 at the edge; refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import BY_NAME, flat, precision

from silobayes import families as fam
from silobayes.core.errors import InvalidInput
from silobayes.families import _linalg


def test_projection_never_flips_the_sign_of_a_negative_precision():
    family = fam.MeanFieldGaussian(event_shape=(3,))
    eta = fam.MeanFieldGaussianEta(linear=jnp.asarray([1.0, 2.0, 3.0]), quadratic=jnp.asarray([50.0, 1e-3, -2.0]))
    out = family.project(eta, 0.25)
    np.testing.assert_array_equal(-2 * out.quadratic, [0.25, 0.25, 4.0])  # a flip would give 100
    np.testing.assert_array_equal(out.linear, eta.linear)


def test_full_projection_is_the_nearest_matrix_and_keeps_unraised_directions():
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    values = np.array([-30.0, 0.01, 2.0, 5.0])
    matrix = (vectors * values) @ vectors.T
    with precision("float64"):
        family = fam.FullGaussian(dimension=4)
        linear = jnp.asarray(rng.normal(size=4))
        eta = fam.FullGaussianEta(linear=linear, quadratic=jnp.asarray(-0.5 * matrix))
        out = jax.jit(lambda eta: family.project(eta, 0.1))(eta)
        projected = np.asarray(-2 * out.quadratic)
        np.testing.assert_allclose(projected, (vectors * np.maximum(values, 0.1)) @ vectors.T, atol=1e-12)
        np.testing.assert_array_equal(out.linear, linear)
        mean = jax.jit(family.to_standard)(out).mean
        kept = np.asarray(vectors[:, 2:].T @ np.asarray(mean))
        np.testing.assert_allclose(kept, (vectors[:, 2:].T @ np.asarray(linear)) / values[2:], rtol=1e-10)
    distance = np.linalg.norm(projected - matrix)
    for _ in range(200):
        root = rng.normal(size=(4, 4)) * rng.uniform(0.01, 1)
        assert np.linalg.norm(0.1 * np.eye(4) + root @ root.T - matrix) >= distance


@pytest.mark.parametrize("dimension", [2, 20])
@pytest.mark.parametrize("largest", [1.0, 1e4, 1e10])
def test_full_projection_in_float32_has_a_cholesky_factor_whatever_the_scale(dimension, largest):
    rng = np.random.default_rng(dimension)
    family = fam.FullGaussian(dimension=dimension)
    quadratic = []
    for _ in range(20):
        vectors, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
        values = largest * rng.uniform(-1, 1, dimension) * 10.0 ** rng.uniform(-8, 0, dimension)
        quadratic.append(-0.5 * (vectors * values) @ vectors.T)
    batch = fam.FullGaussianEta(
        linear=jnp.ones((20, dimension)), quadratic=jnp.asarray(np.stack(quadratic), jnp.float32)
    )
    once = jax.jit(jax.vmap(lambda eta: family.project(eta, 1e-6)))(batch)
    assert bool(jnp.all(jax.jit(jax.vmap(family.is_proper))(once)))
    assert bool(jnp.all(jnp.isfinite(jax.jit(jax.vmap(family.entropy))(once))))


@pytest.mark.parametrize("name", ["normal_inverse_gamma", "normal_wishart"])
def test_projection_in_float32_survives_large_linear_parts(name):
    # The scale is a difference with the square of the linear part: a tiny floor would be lost in its rounding.
    case = BY_NAME[name]
    size = flat(case.family.zeros()).shape[0]
    rng = np.random.default_rng(1)
    _, unravel = jax.flatten_util.ravel_pytree(case.family.zeros())
    raw = rng.normal(size=(50, size)) * 10.0 ** rng.uniform(-2, 4, (50, size))
    etas = jax.vmap(unravel)(jnp.asarray(raw, jnp.float32))
    once = jax.jit(jax.vmap(lambda eta: case.family.project(eta, 1e-6)))(etas)
    assert bool(jnp.all(jax.jit(jax.vmap(case.family.is_proper))(once)))
    alone = jax.jit(case.family.is_proper)  # other kernels than the batched ones, so other roundings
    assert all(bool(alone(jax.tree.map(lambda a, i=i: a[i], once))) for i in range(50))


@pytest.mark.parametrize("name", ["gamma", "beta", "dirichlet"])
def test_a_floor_below_rounding_still_gives_a_proper_shape(name):
    case = BY_NAME[name]
    bad = -5.0 * jax.tree.map(jnp.ones_like, case.family.zeros())
    assert bool(case.family.is_proper(case.family.project(bad, 1e-30)))


def test_projection_is_differentiable_even_at_equal_eigenvalues():
    with precision("float64"):
        floor, zero = jnp.asarray(0.5), jnp.asarray(0.0)

        @jax.jit
        def total(matrix):
            weights = jnp.arange(9.0).reshape(3, 3)
            return jnp.sum(weights * _linalg.floor_eigenvalues(matrix, floor, zero))

        gradient = jax.jit(jax.grad(total))
        for diagonal in ([0.1, 0.1, 2.0], [-1.0, -1.0, -1.0], [3.0, 3.0, 3.0]):
            assert np.all(np.isfinite(gradient(jnp.diag(jnp.asarray(diagonal)))))
        rng = np.random.default_rng(2)
        matrix, direction = rng.normal(size=(2, 3, 3))
        matrix, direction = jnp.asarray(matrix + matrix.T), jnp.asarray(direction + direction.T)
        slope = jnp.sum(gradient(matrix) * direction)
        step = 1e-6
        numeric = (total(matrix + step * direction) - total(matrix - step * direction)) / (2 * step)
        assert float(jnp.min(jnp.linalg.eigvalsh(matrix))) < 0.5  # the floor acts
        np.testing.assert_allclose(slope, numeric, rtol=1e-6)


def test_a_mean_field_gaussian_converts_to_a_full_one_and_back():
    field, full = fam.MeanFieldGaussian(event_shape=(3,)), fam.FullGaussian(dimension=3)
    eta = field.from_standard(mean=jnp.asarray([1.0, -2.0, 0.5]), stddev=jnp.asarray([0.5, 2.0, 1.0]))
    other = field.from_standard(mean=jnp.asarray([0.0, 1.0, 0.5]), stddev=jnp.asarray([1.0, 1.5, 1.0]))
    as_full = full.from_mean_field(eta)
    np.testing.assert_allclose(flat(full.to_mean_field(as_full)), flat(eta), rtol=1e-6)
    x = jnp.asarray([0.3, 0.1, -1.0])
    np.testing.assert_allclose(full.log_prob(as_full, x), field.log_prob(eta, x), rtol=1e-5)
    np.testing.assert_allclose(full.kl(as_full, full.from_mean_field(other)), field.kl(eta, other), rtol=1e-5)


def test_conversion_from_mean_field_is_linear_so_improper_factors_convert_too():
    full = fam.FullGaussian(dimension=2)
    a = fam.MeanFieldGaussianEta(linear=jnp.asarray([1.0, 2.0]), quadratic=jnp.asarray([3.0, -4.0]))
    b = fam.MeanFieldGaussianEta(linear=jnp.asarray([5.0, -2.0]), quadratic=jnp.asarray([-7.0, 1.0]))
    together = full.from_mean_field(a + b)
    np.testing.assert_array_equal(flat(together), flat(full.from_mean_field(a) + full.from_mean_field(b)))


def test_mean_field_of_a_full_gaussian_has_its_marginals():
    full = fam.FullGaussian(dimension=2)
    field = fam.MeanFieldGaussian(event_shape=(2,))
    covariance = jnp.asarray([[2.0, 1.2], [1.2, 1.0]])
    eta = full.from_standard(mean=jnp.asarray([1.0, -1.0]), covariance=covariance)
    mean, stddev = field.to_standard(full.to_mean_field(eta))
    np.testing.assert_allclose(mean, [1.0, -1.0], rtol=1e-5)
    np.testing.assert_allclose(stddev, np.sqrt([2.0, 1.0]), rtol=1e-5)


def test_kl_in_float32_keeps_its_digits_at_large_counts():
    # A Dirichlet and a Gamma posterior of 10^5 rows, and a Gaussian far from the origin.
    cases = [
        (fam.Dirichlet(event_shape=(3,)), {"concentration": [5e4, 3e4, 2e4]}, {"concentration": [50100, 3e4, 19950]}),
        (fam.Gamma(event_shape=()), {"shape": 50000.0, "rate": 1000.0}, {"shape": 50100.0, "rate": 1000.0}),
        (fam.MeanFieldGaussian(event_shape=()), {"mean": 1000.0, "stddev": 0.5}, {"mean": 1000.5, "stddev": 0.75}),
    ]  # fmt: skip
    for family, q, p in cases:
        values = {}
        for dtype in ("float32", "float64"):
            with precision(dtype):
                eta_q = family.from_standard(**{k: jnp.asarray(v, dtype) for k, v in q.items()})
                eta_p = family.from_standard(**{k: jnp.asarray(v, dtype) for k, v in p.items()})
                values[dtype] = jax.jit(lambda q, p, f=family: (f.kl(q, p), f.entropy(q)))(eta_q, eta_p)
        np.testing.assert_allclose(values["float32"], values["float64"], rtol=2e-3, err_msg=str(family))


def test_log_prob_in_float32_keeps_its_digits_at_large_counts():
    family = fam.Gamma(event_shape=())
    wishart = fam.NormalWishart(dimension=2)
    values = {}
    for dtype in ("float32", "float64"):
        with precision(dtype):
            eta = family.from_standard(shape=jnp.asarray(1e5, dtype), rate=jnp.asarray(1e3, dtype))
            gamma = float(jax.jit(family.log_prob)(eta, jnp.asarray(100.25, dtype)))
            zero, eye = jnp.zeros(2, dtype), jnp.eye(2, dtype=dtype)
            eta = wishart.from_standard(
                location=zero, strength=jnp.asarray(1.0, dtype), degrees=jnp.asarray(1e5, dtype), scale=eye
            )
            x = fam.MeanPrecision(mean=zero, precision=1.001e5 * eye)
            values[dtype] = [gamma, float(jax.jit(wishart.log_prob)(eta, x))]
    np.testing.assert_allclose(values["float32"], values["float64"], rtol=1e-3)


def test_parts_add_up():
    gaussian, gamma = fam.MeanFieldGaussian(event_shape=(2,)), fam.Gamma(event_shape=())
    both = fam.independent(weights=gaussian, noise=gamma)
    case = BY_NAME["independent"]
    q, p = case.build(jnp.linspace(-1, 1, 6)), case.build(jnp.linspace(0.5, -0.2, 6))
    x = case.point(jnp.linspace(-1, 1, 6))
    for method, args in [
        ("log_partition", (q.parts,)),
        ("entropy", (q.parts,)),
        ("kl", (q.parts, p.parts)),
        ("log_prob", (q.parts, x)),
    ]:
        wrapped = [fam.IndependentEta(parts=a) if a is not x else a for a in args]
        expected = getattr(gaussian, method)(*[a["weights"] for a in args])
        expected += getattr(gamma, method)(*[a["noise"] for a in args])
        np.testing.assert_allclose(getattr(both, method)(*wrapped), expected, rtol=1e-6)
    assert both == fam.independent(noise=gamma, weights=gaussian)
    assert not fam.independent(weights=gaussian, label=fam.Bernoulli(event_shape=())).is_reparameterised
    nested = fam.independent(outer=both, coin=fam.Bernoulli(event_shape=()))
    assert float(
        nested.entropy(fam.IndependentEta(parts={"outer": q, "coin": fam.BernoulliEta(logit=jnp.zeros(()))}))
    ) == (pytest.approx(float(both.entropy(q)) + np.log(2), rel=1e-6))


def test_scalars_of_every_kind_scale_from_both_sides():
    eta = fam.GammaEta(log=jnp.asarray(2.0), linear=jnp.asarray(-4.0))
    for half in (0.5, np.float64(0.5), np.float32(0.5), jnp.asarray(0.5)):
        for out in (half * eta, eta * half, fam.scale(eta, half)):
            assert isinstance(out, fam.GammaEta)
            np.testing.assert_array_equal(flat(out), [1.0, -2.0])


def test_factors_of_different_families_do_not_add():
    with pytest.raises(ValueError, match=r"."):
        fam.product(fam.Gamma(event_shape=()).zeros(), fam.Beta(event_shape=()).zeros())


def test_a_negative_deviation_does_not_hide_behind_its_square():
    family = fam.MeanFieldGaussian(event_shape=())
    eta = family.from_standard(mean=jnp.asarray(0.0), stddev=jnp.asarray(-1.0))
    assert not bool(family.is_proper(eta))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: fam.MeanFieldGaussian(event_shape=3), "event_shape"),
        (lambda: fam.Gamma(event_shape=(0,)), "event_shape"),
        (lambda: fam.Dirichlet(event_shape=()), "event_shape"),
        (lambda: fam.FullGaussian(dimension=0), "dimension"),
        (lambda: fam.NormalInverseGamma(dimension=-1), "dimension"),
        (lambda: fam.NormalWishart(dimension=1.5), "dimension"),
        (lambda: fam.Categorical(event_shape=(), categories=1), "categories"),
        (lambda: fam.independent(), "parts"),
        (lambda: fam.Gamma(event_shape=()).entropy(fam.Gamma(event_shape=(4,)).zeros()), "eta.log"),
        (lambda: fam.Gamma(event_shape=()).is_proper(fam.Beta(event_shape=()).zeros()), "eta"),
        (lambda: BY_NAME["independent"].family.entropy(fam.IndependentEta(parts={})), "eta"),
        (lambda: BY_NAME["independent"].family.from_standard(weights={}), "parts"),
        (lambda: fam.FullGaussian(dimension=2).to_standard(fam.FullGaussian(dimension=3).zeros()), "eta.linear"),
    ],
)  # fmt: skip
def test_bad_input_names_its_key(call, key):
    with pytest.raises(InvalidInput) as caught:
        call()
    assert caught.value.key == key


@pytest.mark.parametrize("floor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_bad_floor_is_refused(name, floor):
    family = BY_NAME[name].family
    with pytest.raises(InvalidInput) as caught:
        family.project(family.zeros(), floor)
    assert caught.value.key == "floor"
