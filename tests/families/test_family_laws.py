"""Laws that hold for every family: one contract, many examples, float32 and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import (
    BY_NAME,
    CASES,
    DTYPES,
    FLOOR,
    compiled,
    compiled_build,
    compiled_projection,
    flat,
    precision,
    raw_size,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.flatten_util import ravel_pytree

from silobayes import families as fam

NAMES = [case.name for case in CASES]
LAW = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
every = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize("dtype", DTYPES)
EXACTLY_PROJECTED = {"mean_field_gaussian", "gamma", "beta", "dirichlet", "bernoulli", "categorical", "independent"}


def numbers(size, bound=1.0):
    return arrays(np.float32, size, elements=st.floats(-bound, bound, width=32))


def look(name, dtype, u, v):
    with precision(dtype):
        standard, q, _ = compiled_build(name)(jnp.asarray(u, dtype))
        _, p, x = compiled_build(name)(jnp.asarray(v, dtype))
        return jax.tree.map(np.asarray, compiled(name)(q, p, x) | {"given": standard})


def example(name):
    """Textbook parameters, eta and one event of a fixed member of the family."""
    return compiled_build(name)(jnp.linspace(-0.5, 0.7, BY_NAME[name].size))


def tolerance(dtype, *values):
    """Absolute tolerance: rounding of the largest number that took part, with room for the conditioning of the case."""
    size = max(1.0, *[float(np.max(np.abs(v))) for v in values])
    return size * {"float32": 3e-4, "float64": 1e-10}[dtype]


def pairs(name):
    return st.tuples(numbers(BY_NAME[name].size), numbers(BY_NAME[name].size))


@every
@both
def test_mean_parameters_are_the_gradient_of_the_log_partition(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        mean, gradient = flat(out["mean"]), flat(out["gradient"])
        np.testing.assert_allclose(mean, gradient, rtol=0, atol=tolerance(dtype, mean))

    law()


@every
@both
def test_log_prob_is_linear_in_the_statistics_up_to_one_constant(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        atol = tolerance(dtype, out["log_prob"], out["log_partition"], *jax.tree.leaves(out["eta_q"]))
        np.testing.assert_allclose(out["log_prob"], out["log_prob_identity"], rtol=0, atol=10 * atol)

    law()


@every
@both
def test_kl_is_the_bregman_divergence_of_the_log_partition(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        size = flat(out["mean"]) * np.maximum(1, np.abs(flat(out["eta_p"])) + np.abs(flat(out["eta_q"])))
        np.testing.assert_allclose(out["kl"], out["bregman"], rtol=0, atol=tolerance(dtype, size))

    law()


@every
@both
def test_kl_is_never_negative_and_zero_iff_equal(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        tiny = {"float32": 2e-5, "float64": 1e-13}[dtype]
        assert out["kl"] >= -tiny
        assert abs(out["kl_self"]) <= tiny
        apart = np.max(np.abs(flat(out["standard_q"]) - flat(out["standard_p"])))
        if dtype == "float64" and apart > 0.05:
            assert out["kl"] > 1e-7

    law()


@every
@both
def test_entropy_is_minus_the_mean_of_log_prob(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        size = flat(out["mean"]) * np.maximum(1, np.abs(flat(out["eta_q"])))
        np.testing.assert_allclose(out["entropy"], out["entropy_identity"], rtol=0, atol=tolerance(dtype, size))

    law()


@every
@both
def test_standard_parameters_convert_back_and_forth(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        given_flat = flat(jax.tree.leaves({k: out["given"][k] for k in sorted(out["given"])}))
        standard = out["standard_q"] if isinstance(out["standard_q"], dict) else out["standard_q"]._asdict()
        nested = {k: (v._asdict() if hasattr(v, "_asdict") else v) for k, v in standard.items()}
        np.testing.assert_allclose(
            flat(nested), given_flat, rtol=0, atol=tolerance(dtype, *jax.tree.leaves(out["eta_q"]))
        )
        eta, back = flat(out["eta_q"]), flat(out["eta_back"])
        np.testing.assert_allclose(back, eta, rtol=0, atol=tolerance(dtype, eta))

    law()


@every
@both
def test_projection_is_the_identity_on_what_is_above_the_floor(name, dtype):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, dtype, *uv)
        assert out["proper"]
        np.testing.assert_array_equal(flat(out["projected"]), flat(out["eta_q"]))

    law()


@every
@both
def test_projection_is_proper_idempotent_and_keeps_the_floor(name, dtype):
    case = BY_NAME[name]

    @LAW
    @given(numbers(raw_size(case), bound=10.0))
    def law(raw):
        with precision(dtype):
            out = jax.tree.map(np.asarray, compiled_projection(name)(jnp.asarray(raw, dtype)))
        once, twice = flat(out["once"]), flat(out["twice"])
        rounding = 0.0 if name in EXACTLY_PROJECTED else tolerance(dtype, once)
        assert out["proper"]
        assert out["margin"] >= FLOOR - tolerance(dtype, once) / 10
        np.testing.assert_allclose(twice, once, rtol=0, atol=rounding)

    law()


@every
@both
def test_product_and_quotient_are_inverse_and_improper_factors_add_exactly(name, dtype):
    case = BY_NAME[name]
    size = raw_size(case)

    @LAW
    @given(st.lists(arrays(np.int32, size, elements=st.integers(-1000, 1000)), min_size=2, max_size=5))
    def law(factors):
        # Integers are exact in floats, so that the invariant eta_q = eta_p + sum_m eta_m is checked without tolerance.
        with precision(dtype):
            unravel = ravel_pytree(case.family.zeros(dtype))[1]
            etas = [unravel(jnp.asarray(f, dtype)) for f in factors]
            total = case.family.zeros(dtype)
            for eta in etas:
                total = fam.product(total, eta)
            np.testing.assert_array_equal(flat(total), flat(unravel(jnp.asarray(sum(factors), dtype))))
            cavity = fam.quotient(total, etas[0])
            np.testing.assert_array_equal(flat(fam.product(cavity, etas[0])), flat(total))
            np.testing.assert_array_equal(flat(total - etas[0] + etas[0]), flat(total))

    law()


@every
def test_damping_endpoints_are_exact(name):
    @LAW
    @given(pairs(name))
    def law(uv):
        out = look(name, "float32", *uv)
        old, new = out["eta_q"], out["eta_p"]
        np.testing.assert_array_equal(flat(fam.damp(old, new, 0.0)), flat(old))
        np.testing.assert_array_equal(flat(fam.damp(old, new, 1.0)), flat(new))
        step = old + 0.25 * (new - old)
        np.testing.assert_allclose(flat(fam.damp(old, new, 0.25)), flat(step), rtol=1e-5, atol=1e-4)

    law()


@every
def test_a_finite_eta_outside_the_cone_gives_nan_and_is_refused_only_by_is_proper(name):
    case = BY_NAME[name]
    _, good, x = example(name)
    scalars, trees = ("log_partition", "entropy", "kl", "kl_self", "log_prob"), ("mean", "standard_q")
    right = compiled(name)(good, good, x)
    assert bool(right["proper"])
    assert all(np.all(np.isfinite(flat(right[key]))) for key in scalars + trees)
    for leaf, value in case.broken:
        bad = case.break_(good, leaf, value)
        out = compiled(name)(bad, good, x)
        assert not bool(out["proper"]), (leaf, value)
        assert bool(out["projected_is_proper"]), (leaf, value)
        for key in scalars:
            assert np.isnan(out[key]), (leaf, value, key)
        for key in trees:
            assert np.any(np.isnan(flat(out[key]))), (leaf, value, key)
        assert np.isnan(compiled(name)(good, bad, x)["kl"]), (leaf, value)


@every
def test_nan_and_infinity_are_improper_and_projection_does_not_hide_nan(name):
    _, good, x = example(name)
    vector, unravel = ravel_pytree(good)
    for index in range(vector.shape[0]):
        for value in (jnp.nan, jnp.inf, -jnp.inf):
            out = compiled(name)(unravel(vector.at[index].set(value)), good, x)
            assert not bool(out["proper"]), (index, value)
            assert not (np.isnan(value) and bool(out["projected_is_proper"])), index


@every
def test_vmap_over_silos_equals_a_loop(name):
    family = BY_NAME[name].family
    us = np.random.default_rng(0).uniform(-1, 1, (4, BY_NAME[name].size))
    built = [compiled_build(name)(jnp.asarray(u, jnp.float32)) for u in us]
    x = built[0][2]
    etas = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[eta for _, eta, _ in built])
    eta_p = built[0][1]

    @jax.jit
    @jax.vmap
    def batched(q):
        return family.kl(q, eta_p), family.entropy(q), family.is_proper(q)

    kl, entropy, proper = batched(etas)
    for i, (_, eta, _) in enumerate(built):
        one = compiled(name)(eta, eta_p, x)
        np.testing.assert_allclose([kl[i], entropy[i]], [one["kl"], one["entropy"]], rtol=2e-4, atol=2e-4)
        assert bool(proper[i])
    assert len(np.unique(np.asarray(entropy))) == 4


@every
def test_float32_stays_float32_beside_float64(name):
    case = BY_NAME[name]
    family = case.family
    with precision("float64"):

        def everything(u):
            q = case.build(u)
            x = family.sample(jax.random.key(0), q, (2,))
            one = jax.tree.map(lambda leaf: leaf[0], x)
            return (
                q, x, family.log_partition(q), family.mean_parameters(q), family.entropy(q), family.kl(q, q),
                family.log_prob(q, one), family.project(q, FLOOR), family.to_standard(q), fam.damp(q, q, 0.5), 0.5 * q,
            )  # fmt: skip

        shapes = jax.eval_shape(everything, jnp.zeros(case.size, jnp.float32))
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert dtypes == {jnp.dtype("float32")}


@every
def test_uniform_factor_is_the_unit(name):
    case = BY_NAME[name]
    _, eta, _ = example(name)
    np.testing.assert_array_equal(flat(eta + case.family.zeros()), flat(eta))
    uniform_is_proper = name in {"beta", "dirichlet", "bernoulli", "categorical"}
    assert bool(case.family.is_proper(case.family.zeros())) == uniform_is_proper


@every
def test_family_is_static(name):
    family = BY_NAME[name].family
    assert jax.tree.leaves(family) == []
    assert len({family, BY_NAME[name].family}) == 1
    assert sum(family == other.family for other in CASES) == 1
    zeros = jax.jit(lambda f: f.zeros())(family)  # passes through jit as an argument
    assert jax.tree.structure(zeros) == jax.tree.structure(family.zeros())
