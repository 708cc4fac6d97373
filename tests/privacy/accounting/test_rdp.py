"""Renyi accountant: closed forms, quadrature by other means, published values, laws over every event type."""

import dataclasses
import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ive
from scipy.stats import norm

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.accounting import rdp, renyi
from silobayes.privacy.events import (
    AbstractEvent,
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
    SkellamEvent,
)

REFERENCE = Path(__file__).resolve().parents[4] / "shared" / "reference" / "accounting.json"
SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE
HIGH_ORDERS = 2.0 ** np.arange(1, 15)


def poisson(rate: float, overflow: float = 0.0) -> Sampling:
    return Sampling(scheme="poisson", rate=rate, overflow=overflow)  # type: ignore[arg-type]


def fixed(rate: float) -> Sampling:
    return Sampling(scheme="without_replacement", rate=rate)  # type: ignore[arg-type]


EVENTS: list[tuple[AbstractEvent, Relation]] = [
    (GaussianEvent(clip_norm=1.0, std=3.0), SUBSTITUTE),
    (GaussianEvent(clip_norm=1.0, std=3.0), ADD_REMOVE),
    (GaussianEvent(clip_norm=1.0, std=1.5, sampling=poisson(0.02)), SUBSTITUTE),
    (GaussianEvent(clip_norm=1.0, std=1.5, sampling=poisson(0.02, 1e-12)), ADD_REMOVE),
    (GaussianEvent(clip_norm=1.0, std=4.0, sampling=fixed(0.02)), SUBSTITUTE),
    (DiscreteGaussianEvent(clip_norm=5.0, std=15.0), SUBSTITUTE),
    (DiscreteGaussianEvent(clip_norm=5.0, std=15.0, sampling=poisson(0.02)), ADD_REMOVE),
    (DiscreteGaussianEvent(clip_norm=5.0, std=25.0, sampling=fixed(0.02)), SUBSTITUTE),
    (SkellamEvent(clip_norm=5.0, std=15.0, dimension=3), SUBSTITUTE),
    (SkellamEvent(clip_norm=5.0, std=25.0, sampling=poisson(0.02)), SUBSTITUTE),
    (LaplaceEvent(clip_norm=1.0, scale=10.0), SUBSTITUTE),
    (LaplaceEvent(clip_norm=1.0, scale=10.0, sampling=fixed(0.02)), SUBSTITUTE),
    (LaplaceEvent(clip_norm=1.0, scale=10.0, sampling=poisson(0.02)), ADD_REMOVE),
    (RandomisedResponseEvent(categories=4, gamma=0.9), SUBSTITUTE),
    (ApproximateDPEvent(epsilon=0.1, delta=1e-9), SUBSTITUTE),
]
NAMES = [f"{item.mechanism}-{getattr(item, 'sampling', None) and item.sampling.scheme}-{rel}" for item, rel in EVENTS]  # type: ignore[attr-defined]
EVERY_EVENT = pytest.mark.parametrize(("item", "relation"), EVENTS, ids=NAMES)


def reference(setting: str) -> list:
    if not REFERENCE.exists():
        pytest.skip("shared/reference/accounting.json is not beside the repository")
    return next(entry["values"] for entry in json.loads(REFERENCE.read_text()) if entry["setting"] == setting)


def value(setting: str, source: str) -> float:
    return next(row["value"] for row in reference(setting) if source in row["source"])


# Laws over every event type.


@EVERY_EVENT
def test_k_repeats_of_an_event_cost_what_one_event_with_count_k_costs(item: AbstractEvent, relation: Relation) -> None:
    repeated = rdp.epsilon([item] * 7, relation=relation, delta=1e-6)
    counted = rdp.epsilon([dataclasses.replace(item, count=7)], relation=relation, delta=1e-6)
    assert repeated == pytest.approx(counted, rel=1e-9)
    assert counted > 1.01 * rdp.epsilon([item], relation=relation, delta=1e-6)
    moments = rdp.moments_epsilon([item] * 7, relation=relation, delta=1e-6)
    assert moments == pytest.approx(
        rdp.moments_epsilon([dataclasses.replace(item, count=7)], relation=relation, delta=1e-6), rel=1e-9
    )


@pytest.mark.parametrize("relation", list(Relation))
def test_the_order_of_events_does_not_matter(relation: Relation) -> None:
    events = [item for item, own in EVENTS if own is relation]
    forward = rdp.epsilon(events, relation=relation, delta=1e-6)
    assert forward == pytest.approx(rdp.epsilon(events[::-1], relation=relation, delta=1e-6), rel=1e-12)


@EVERY_EVENT
def test_delta_at_epsilon_at_d_is_at_most_d(item: AbstractEvent, relation: Relation) -> None:
    events = [dataclasses.replace(item, count=20)]
    for target in (1e-3, 1e-7):
        found = rdp.epsilon(events, relation=relation, delta=target)
        back = rdp.delta(events, relation=relation, epsilon=found)
        assert back <= target * (1 + 1e-9)
        assert back >= target * 0.9
        found = rdp.moments_epsilon(events, relation=relation, delta=target)
        assert rdp.moments_delta(events, relation=relation, epsilon=found) == pytest.approx(target, rel=1e-4)


@EVERY_EVENT
def test_moments_epsilon_is_never_below_epsilon(item: AbstractEvent, relation: Relation) -> None:
    events = [dataclasses.replace(item, count=20)]
    assert rdp.moments_epsilon(events, relation=relation, delta=1e-6) > rdp.epsilon(
        events, relation=relation, delta=1e-6
    )


@EVERY_EVENT
def test_price_grows_with_count_and_rate_and_falls_with_noise(item: AbstractEvent, relation: Relation) -> None:
    def at(changed: AbstractEvent) -> float:
        return rdp.epsilon([changed], relation=relation, delta=1e-6)

    base = dataclasses.replace(item, count=50)
    assert at(base) < at(dataclasses.replace(base, count=60))
    for noise in ("std", "scale", "gamma"):
        if hasattr(item, noise):
            assert at(base) > at(dataclasses.replace(base, **{noise: 1.1 * getattr(item, noise)}))
    if getattr(item, "sampling", None) is not None:
        more = dataclasses.replace(item.sampling, rate=1.1 * item.sampling.rate)  # type: ignore[attr-defined]
        assert at(base) < at(dataclasses.replace(base, sampling=more))  # type: ignore[call-arg]
        full = dataclasses.replace(item.sampling, rate=1.0, overflow=0.0)  # type: ignore[attr-defined]
        assert at(dataclasses.replace(base, sampling=full)) == at(dataclasses.replace(base, sampling=None))  # type: ignore[call-arg]


@EVERY_EVENT
def test_curves_are_stable_at_all_orders(item: AbstractEvent, relation: Relation) -> None:
    """Finite, non-negative, non-decreasing in the order, and never above the unsampled curve."""
    orders = np.sort(np.concatenate([HIGH_ORDERS, HIGH_ORDERS + 0.5, [1.01, 1.5, 3.0, 255.0, 257.0, 1000.3]]))
    orders = orders[orders <= renyi.MAX_ORDER]
    curve = rdp.curve([item], relation=relation, orders=orders).rdp
    assert np.all(np.isfinite(curve))
    assert np.all(curve > 0.0)
    assert np.all(np.diff(curve) >= -1e-8 * curve[1:])
    if getattr(item, "sampling", None) is not None:
        whole = rdp.curve([dataclasses.replace(item, sampling=None)], relation=relation, orders=orders).rdp  # type: ignore[call-arg]
        assert np.all(curve <= whole * (1 + 1e-8))
        assert curve[0] < 0.1 * whole[0]


@EVERY_EVENT
def test_renyi_is_never_below_the_loss_distribution(item: AbstractEvent, relation: Relation) -> None:
    events = [dataclasses.replace(item, count=20)]
    exact = accounting.price(events, relation=relation, delta=1e-6)
    found = rdp.epsilon(events, relation=relation, delta=1e-6)
    assert found >= exact.epsilon * (1 - 1e-9) >= exact.epsilon_lower * (1 - 1e-9)


# Closed forms and brute force.


@given(st.floats(0.05, 20.0), st.floats(1e-12, 1e-2))
@settings(max_examples=60, deadline=None)
def test_epsilon_is_never_below_the_exact_epsilon_of_a_gaussian(shift: float, target: float) -> None:
    found = rdp.epsilon([GaussianEvent(sensitivity=shift, std=1.0)], relation=SUBSTITUTE, delta=target)
    with mpmath.workdps(40):
        mu, eps = mpmath.mpf(shift), mpmath.mpf(found)
        exact = mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)
    assert exact <= target


def test_gaussians_of_any_mix_add_their_squared_ratios() -> None:
    mix = [
        GaussianEvent(sensitivity=3.0, std=10.0, count=4),
        DiscreteGaussianEvent(sensitivity=4.0, std=20.0, count=16),
    ]
    one = GaussianEvent(sensitivity=1.0, std=1.0)
    assert rdp.epsilon(mix, relation=SUBSTITUTE, delta=1e-5) == pytest.approx(
        rdp.epsilon([one], relation=SUBSTITUTE, delta=1e-5)
    )


def test_laplace_and_responses_match_direct_sums() -> None:
    for order in (1.1, 2.0, 7.5, 60.0):
        for ratio in (0.01, 0.5, 3.0):

            def integrand(x: float, order: float = order, ratio: float = ratio) -> float:
                return 0.5 * math.exp(-order * abs(x) - (1 - order) * abs(x - ratio))

            direct = sum(
                quad(integrand, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in ((-60, 0), (0, ratio), (ratio, 60))
            )
            (found,) = renyi.laplace(np.array([order]), ratio)
            assert found == pytest.approx(math.log(direct) / (order - 1), rel=1e-6)
            assert found >= (math.log(direct) - 1e-12) / (order - 1) - 1e-12
        for categories, gamma in ((2, 0.5), (4, 0.25), (10, 0.99)):
            p, b = 1 - gamma + gamma / categories, gamma / categories
            exact = p**order * b ** (1 - order) + b**order * p ** (1 - order) + (categories - 2) * b
            (found,) = renyi.randomised_response(np.array([order]), p, b)
            assert found == pytest.approx(math.log(exact) / (order - 1), rel=1e-6)
        (found,) = renyi.pure(np.array([order]), 0.3)
        (binary,) = renyi.randomised_response(np.array([order]), 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(0.3)))
        assert found == pytest.approx(binary, rel=1e-8)


def mixture_divergence(order: float, rate: float, shift: float, *, opposite: bool) -> float:
    """D of the two sampled laws with 25 digits."""
    with mpmath.workdps(25):
        w, m, a = mpmath.mpf(rate), mpmath.mpf(shift), mpmath.mpf(order)

        def density(x: mpmath.mpf, centre: mpmath.mpf) -> mpmath.mpf:
            return (1 - w) * mpmath.npdf(x) + w * mpmath.npdf(x, centre, 1)

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            q = density(x, -m) if opposite else mpmath.npdf(x)
            return density(x, m) ** a * q ** (1 - a)

        ends = mpmath.linspace(-m - 12, a * m + 12, 13)
        return float(mpmath.log(mpmath.quad(integrand, ends)) / (a - 1))


@pytest.mark.parametrize("opposite", [False, True])
@pytest.mark.parametrize(
    ("order", "rate", "shift"),
    [(1.3, 0.01, 1.0), (2.0, 1e-6, 0.5), (6.7, 0.3, 0.2), (12.0, 0.05, 0.7), (3.5, 0.9, 2.0)],
)
def test_poisson_gaussian_matches_quadrature_from_above(
    order: float, rate: float, shift: float, opposite: bool
) -> None:
    by_us = renyi.poisson_gaussian_opposite if opposite else renyi.poisson_gaussian
    (found,) = by_us(np.array([order]), rate, shift)
    exact = mixture_divergence(order, rate, shift, opposite=opposite)
    assert exact <= found <= exact * (1 + 1e-6)


def test_the_other_direction_of_poisson_sampling_is_never_worse() -> None:
    """Mironov et al. 2019, Thm. 5, pointwise: the sum over an involution's orbit is what is compared."""
    rng = np.random.default_rng(7)
    log_ratio, rate = rng.uniform(0.0, 30.0, 200_000), np.exp(-rng.uniform(0.0, 12.0, 200_000))
    order = 1.0 + np.exp(rng.uniform(-6.0, 5.0, 200_000))
    up, down = (np.log1p(rate * np.expm1(sign * log_ratio)) for sign in (1.0, -1.0))
    forward = np.logaddexp(order * up, log_ratio + order * down)
    backward = np.logaddexp((1.0 - order) * up, log_ratio + (1.0 - order) * down)
    assert np.all(forward >= backward - 1e-12 * np.maximum(1.0, forward))


def test_skellam_bound_covers_the_exact_divergence() -> None:
    for std, shift in ((0.5, 1), (1.0, 2), (2.0, 3), (5.0, 1), (10.0, 5)):
        points = np.arange(-int(12 * std + 60), int(12 * std + 60 + shift) + 1)
        with np.errstate(divide="ignore"):
            log_p, log_q = np.log(ive(np.abs(points), std**2)), np.log(ive(np.abs(points - shift), std**2))
        seen = np.isfinite(log_p) & np.isfinite(log_q)
        for order in (1.5, 2.0, 4.0, 16.0):
            exact = math.log(np.sum(np.exp((order * log_p + (1 - order) * log_q)[seen]))) / (order - 1)
            (bound,) = renyi.skellam(np.array([order]), float(shift), float(shift), std**2)
            assert bound >= exact - 1e-12
            assert std < 5.0 or bound <= 1.3 * exact or order < 2.0


def test_skellam_without_a_dimension_uses_that_integers_are_below_their_squares() -> None:
    event = SkellamEvent(sensitivity=3.0, std=10.0)
    assert rdp.epsilon([event], relation=SUBSTITUTE, delta=1e-5) == rdp.epsilon(
        [dataclasses.replace(event, dimension=9)], relation=SUBSTITUTE, delta=1e-5
    )
    assert rdp.epsilon([event], relation=SUBSTITUTE, delta=1e-5) > rdp.epsilon(
        [dataclasses.replace(event, dimension=1)], relation=SUBSTITUTE, delta=1e-5
    )


@pytest.mark.parametrize("shift", [0.05, 0.3, 1.0, 2.0])
def test_even_moments_match_exact_forward_differences(shift: float) -> None:
    found = renyi._log_even_moments(shift, 40)
    with mpmath.workdps(120):
        s2 = mpmath.mpf(shift) ** 2
        for index in range(min(20, len(found))):
            j = 2 * (index + 1)
            terms = (mpmath.binomial(j, i) * (-1) ** (j - i) * mpmath.exp(i * (i - 1) * s2 / 2) for i in range(j + 1))
            exact = mpmath.log(mpmath.fsum(terms))
            assert float(exact) <= found[index] <= float(exact) + 1e-8 + 1e-12 * abs(float(exact))


def test_without_replacement_covers_the_two_laws_it_bounds() -> None:
    """Against the mixtures of three Gaussians that WBK19 bounds, at right and opposite positions on a line."""
    orders = np.array([2.0, 3.0, 8.0, 20.0])
    for rate, shift in ((0.1, 0.5), (0.3, 1.0), (0.01, 0.2)):
        bound = renyi.without_replacement_gaussian(orders, rate, shift)
        for centre_r, centre_p, centre_q in ((0.0, shift, 0.0), (0.0, 0.0, shift), (0.0, shift / 2, -shift / 2)):
            points = np.linspace(-15, 15 + 20 * shift, 40_001)
            rest = (1 - rate) * norm.pdf(points, centre_r)
            p, q = rest + rate * norm.pdf(points, centre_p), rest + rate * norm.pdf(points, centre_q)
            for order, limit in zip(orders, bound, strict=True):
                exact = math.log(np.trapezoid(q * (p / q) ** order, points)) / (order - 1)
                assert limit >= exact


# Published and independent values.


@pytest.mark.parametrize(("std", "count"), [(1.0, 1), (2.0, 1), (2.0, 10), (5.0, 1)])
def test_reference_gaussian(std: float, count: int) -> None:
    setting = f"Gaussian sens=1 sigma={std} T={count} delta=1e-5"
    found = rdp.epsilon([GaussianEvent(sensitivity=1.0, std=std, count=count)], relation=ADD_REMOVE, delta=1e-5)
    assert value(setting, "analytic") < found <= value(setting, "RdpAccountant") * (1 + 1e-6)


def test_reference_laplace() -> None:
    found = rdp.epsilon([LaplaceEvent(sensitivity=1.0, scale=1.0, count=10)], relation=ADD_REMOVE, delta=1e-5)
    setting = "Laplace b=1 sens=1 T=10 delta=1e-5"
    assert value(setting, "PLD") < found <= value(setting, "RdpAccountant")


@pytest.mark.parametrize("std", [1.0, 2.0])
def test_reference_poisson(std: float) -> None:
    event = GaussianEvent(clip_norm=1.0, std=std, count=1000, sampling=poisson(0.01))
    found = rdp.epsilon([event], relation=ADD_REMOVE, delta=1e-5)
    setting = f"Poisson add/remove q=0.01 sigma={std} T=1000 delta=1e-05"
    assert value(setting, "disc=1e-4") < found <= value(setting, "RdpAccountant")
    setting = f"Poisson-pair replace-one (qN(1)+(1-q)N(0) vs qN(-1)+(1-q)N(0)) q=0.01 sigma={std} T=1000 delta=1e-05"
    found = rdp.epsilon([event], relation=SUBSTITUTE, delta=1e-5)
    assert value(setting, "PLD") < found < 1.15 * value(setting, "PLD")


@pytest.mark.parametrize("std", [1.0, 2.0, 4.0])
def test_reference_without_replacement(std: float) -> None:
    event = GaussianEvent(clip_norm=1.0, std=std, count=1000, sampling=fixed(0.01))
    found = rdp.epsilon([event], relation=SUBSTITUTE, delta=1e-5)
    setting = f"WOR replace-one q=0.01 sigma={std} (per-record norm 1 => replace sens 2) T=1000 delta=1e-05"
    assert value(setting, "proto") < found == pytest.approx(value(setting, "RdpAccountant"), rel=1e-8)


# 002 section 6.4 (Adult, 100 steps at rate .004), section 7 (SBN on 60,000 digits), section 5 (Wikipedia).
VIPS = [
    (0.004, 1.0, 100, 1e-3, 0.816),
    (0.004, 6.0, 100, 1e-3, 0.0520),
    (0.004, 12.0, 100, 1e-3, 0.0258),
    (400 / 60_000, 1.0, 150, 1e-4, 1.3453),
    (800 / 60_000, 1.0, 75, 1e-4, 1.7434),
    (1600 / 60_000, 1.0, 37, 1e-4, 2.4475),
    (3200 / 60_000, 1.0, 18, 1e-4, 3.3683),
    (0.05, 1.24, 20, 1e-4, 2.3826),
]


@pytest.mark.parametrize(("rate", "std", "steps", "target", "published"), VIPS)
def test_moments_epsilon_reproduces_the_published_epsilon_of_vips(
    rate: float, std: float, steps: int, target: float, published: float
) -> None:
    event = GaussianEvent(sensitivity=1.0, std=std, count=steps, sampling=fixed(rate))
    found = rdp.moments_epsilon([event], relation=SUBSTITUTE, delta=target)
    assert found == pytest.approx(published, rel=1.5e-3)
    assert f"{found:.3g}" == f"{published:.3g}"


# What a divergence cannot hold.


def test_black_box_delta_is_paid_at_the_end() -> None:
    boxes = [ApproximateDPEvent(epsilon=0.1, delta=1e-8, count=50)]
    pure = [ApproximateDPEvent(epsilon=0.1, delta=0.0, count=50)]
    expected = rdp.epsilon(pure, relation=SUBSTITUTE, delta=1e-6 - 50e-8)
    assert rdp.epsilon(boxes, relation=SUBSTITUTE, delta=1e-6) == pytest.approx(expected, rel=1e-9)
    assert rdp.epsilon(boxes, relation=SUBSTITUTE, delta=5e-7) == math.inf


@pytest.mark.parametrize("moments", [False, True])
def test_overflow_is_charged_with_one_plus_e_to_the_epsilon(moments: bool) -> None:
    to_epsilon, to_delta = (rdp.moments_epsilon, rdp.moments_delta) if moments else (rdp.epsilon, rdp.delta)
    cut = [GaussianEvent(clip_norm=1.0, std=1.0, count=100, sampling=poisson(0.01, 1e-9))]
    whole = [GaussianEvent(clip_norm=1.0, std=1.0, count=100, sampling=poisson(0.01))]
    for eps in (0.5, 2.0):
        charged = to_delta(whole, relation=ADD_REMOVE, epsilon=eps) + 100 * (1 + math.exp(eps)) * 1e-9
        assert to_delta(cut, relation=ADD_REMOVE, epsilon=eps) == pytest.approx(charged, rel=1e-9)
    found = to_epsilon(cut, relation=ADD_REMOVE, delta=1e-5)
    assert found > to_epsilon(whole, relation=ADD_REMOVE, delta=1e-5)
    assert to_delta(cut, relation=ADD_REMOVE, epsilon=found) <= 1e-5 * (1 + 1e-9)
    assert to_epsilon(cut, relation=ADD_REMOVE, delta=1.9e-7) == math.inf


def test_overflow_counts_at_rate_one_too() -> None:
    cut = [GaussianEvent(clip_norm=1.0, std=3.0, sampling=poisson(1.0, 1e-7))]
    whole = [GaussianEvent(clip_norm=1.0, std=3.0)]
    assert rdp.delta(cut, relation=SUBSTITUTE, epsilon=1.0) == pytest.approx(
        rdp.delta(whole, relation=SUBSTITUTE, epsilon=1.0) + (1 + math.e) * 1e-7, rel=1e-9
    )


@pytest.mark.parametrize("kind", [GaussianEvent, DiscreteGaussianEvent, SkellamEvent])
@pytest.mark.parametrize("sampling", [None, poisson(0.1), fixed(0.1)])
def test_extreme_noise_costs_infinity_or_almost_nothing(kind: type, sampling: Sampling | None) -> None:
    small = kind(clip_norm=1.0, std=1e-200, sampling=sampling)
    assert rdp.epsilon([small], relation=SUBSTITUTE, delta=1e-5) == math.inf
    assert rdp.delta([small], relation=SUBSTITUTE, epsilon=1.0) == 1.0
    large = kind(clip_norm=1.0, std=1e200, sampling=sampling)
    assert 0.0 <= rdp.epsilon([large], relation=SUBSTITUTE, delta=1e-5) < 1e-3


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, math.nan, math.inf])
def test_a_delta_outside_the_unit_interval_is_refused(bad: float) -> None:
    with pytest.raises(InvalidInput, match="delta"):
        rdp.epsilon([GaussianEvent(sensitivity=1.0, std=1.0)], relation=SUBSTITUTE, delta=bad)


def test_what_has_no_meaning_under_a_relation_is_refused() -> None:
    sampled = GaussianEvent(clip_norm=1.0, std=1.0, sampling=fixed(0.1))
    with pytest.raises(InvalidInput, match="relation"):
        rdp.epsilon([sampled], relation=ADD_REMOVE, delta=1e-5)
    with pytest.raises(InvalidInput, match="relation"):
        rdp.epsilon([RandomisedResponseEvent(categories=2, gamma=0.5)], relation=ADD_REMOVE, delta=1e-5)
    for kind in (GaussianEvent, SkellamEvent):
        with pytest.raises(InvalidInput, match="clip_norm"):
            rdp.epsilon([kind(sensitivity=1.0, std=1.0, sampling=poisson(0.1))], relation=SUBSTITUTE, delta=1e-5)
    with pytest.raises(InvalidInput, match="epsilon"):
        rdp.delta([GaussianEvent(sensitivity=1.0, std=1.0)], relation=SUBSTITUTE, epsilon=math.nan)


def test_an_unknown_event_is_refused() -> None:
    class Unknown(AbstractEvent):
        mechanism = "unknown"

    with pytest.raises(InvalidInput, match="unknown"):
        rdp.epsilon([Unknown()], relation=SUBSTITUTE, delta=1e-5)
