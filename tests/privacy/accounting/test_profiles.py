"""One rule per event, against integrals and brute force."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats
from scipy.special import ndtr

from silobayes.core.errors import InvalidInput
from silobayes.privacy import accounting
from silobayes.privacy.accounting import profiles
from silobayes.privacy.events import (
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
    Scheme,
)

SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE


def poisson(rate: float) -> Sampling:
    return Sampling(scheme=Scheme.POISSON, rate=rate)


def without_replacement(rate: float) -> Sampling:
    return Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=rate)


def integral(p, q, epsilon: float, edge: float = 30.0) -> float:
    x = np.linspace(-edge, edge, 60_001)
    return float(integrate.trapezoid(np.maximum(0.0, p(x) - math.exp(epsilon) * q(x)), x))


def mixture(density, rate: float, centre: float):
    return lambda x: (1 - rate) * density(x) + rate * density(x - centre)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 2.0])
def test_poisson_profiles_equal_their_integrals(rate, epsilon):
    std, at = 0.8, np.array([epsilon])
    plain, present = stats.norm(scale=std).pdf, mixture(stats.norm(scale=std).pdf, rate, 1.0)
    opposite = mixture(stats.norm(scale=std).pdf, rate, -1.0)
    item = GaussianEvent(clip_norm=1.0, std=std, sampling=poisson(rate))
    pair = profiles.rule(item, ADD_REMOVE).pair
    assert pair is not None
    assert pair.backward is not None
    assert pair.forward(at)[0] == pytest.approx(integral(present, plain, epsilon), abs=1e-7)
    assert pair.backward(at)[0] == pytest.approx(integral(plain, present, epsilon), abs=1e-7)
    both = profiles.rule(item, SUBSTITUTE).pair
    assert both is not None
    assert both.forward(at)[0] == pytest.approx(integral(present, opposite, epsilon), abs=1e-7)


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_sampled_laplace_equals_its_integral_or_bounds_it(rate, epsilon):
    plain = stats.laplace(scale=0.7).pdf
    present, opposite = mixture(plain, rate, 1.0), mixture(plain, rate, -1.0)
    item, at = LaplaceEvent(clip_norm=1.0, scale=0.7, sampling=poisson(rate)), np.array([epsilon])
    pair = profiles.rule(item, ADD_REMOVE).pair
    assert pair is not None
    assert pair.backward is not None
    assert pair.forward(at)[0] == pytest.approx(integral(present, plain, epsilon), abs=1e-4)
    assert pair.backward(at)[0] == pytest.approx(integral(plain, present, epsilon), abs=1e-4)
    bound = profiles.rule(item, SUBSTITUTE).pair
    assert bound is not None
    assert bound.forward(at)[0] >= integral(present, opposite, epsilon) - 1e-4


def test_laplace_profile_equals_its_integral_and_one_coordinate_is_the_worst():
    a, b = 0.6, 0.9
    pair = profiles.laplace_pair(a + b)
    plain = stats.laplace().pdf
    for epsilon in (0.0, 0.4, 1.2):
        one = pair.forward(np.array([epsilon]))[0]
        assert one == pytest.approx(integral(lambda x: plain(x - a - b), plain, epsilon), abs=1e-4)
        x = np.linspace(-12, 12, 1501)
        p, q = plain(x - a)[:, None] * plain(x - b), plain(x)[:, None] * plain(x)
        two = np.maximum(0.0, p - math.exp(epsilon) * q).sum() * (x[1] - x[0]) ** 2
        assert two <= one + 1e-3


def test_randomised_response_equals_its_table():
    item = RandomisedResponseEvent(categories=4, gamma=0.3)
    table = np.full((4, 4), 0.3 / 4) + 0.7 * np.eye(4)
    pair = profiles.rule(item, SUBSTITUTE).pair
    assert pair is not None
    for epsilon in (0.0, 0.5, 2.0, 3.0):
        exact = np.maximum(0.0, table[0] - math.exp(epsilon) * table[1]).sum()
        assert pair.forward(np.array([epsilon]))[0] == pytest.approx(exact, abs=1e-15)


def test_a_count_of_randomised_responses_is_not_forgotten():
    one, ten = (RandomisedResponseEvent(categories=4, gamma=0.25, count=count) for count in (1, 10))
    price = lambda item: accounting.price([item], relation=SUBSTITUTE, delta=1e-10).epsilon  # noqa: E731
    assert price(ten) == pytest.approx(10 * price(one), rel=1e-3)


def test_fully_random_answers_cost_nothing():
    item = RandomisedResponseEvent(categories=3, gamma=1.0, count=100)
    assert accounting.price([item], relation=SUBSTITUTE, delta=1e-10).epsilon == 0.0


def test_a_black_box_costs_what_it_says():
    item = ApproximateDPEvent(epsilon=0.7, delta=1e-6)
    assert accounting.delta_at([item], relation=ADD_REMOVE, epsilon=0.7) == pytest.approx(1e-6, rel=1e-6)
    assert accounting.price([item], relation=ADD_REMOVE, delta=2e-6).epsilon <= 0.7 + 1e-9
    assert accounting.price([item], relation=ADD_REMOVE, delta=1e-7).epsilon == math.inf


@pytest.mark.parametrize("scheme", list(Scheme))
@pytest.mark.parametrize("event", [GaussianEvent(clip_norm=1.0, std=1.0), LaplaceEvent(clip_norm=1.0, scale=1.0)])
def test_sampling_never_raises_a_price(scheme, event):
    full = accounting.price([event], relation=SUBSTITUTE, delta=1e-6).epsilon
    for rate in (0.1, 0.5, 0.99):
        sampled = dataclasses.replace(event, sampling=Sampling(scheme=scheme, rate=rate))
        assert accounting.price([sampled], relation=SUBSTITUTE, delta=1e-6).epsilon <= full * (1 + 1e-9)


def test_a_rate_of_one_is_no_sampling():
    for scheme in Scheme:
        plain = GaussianEvent(sensitivity=1.0, std=1.0)
        full = GaussianEvent(sensitivity=1.0, std=1.0, sampling=Sampling(scheme=scheme, rate=1.0))
        prices = [accounting.price([e], relation=SUBSTITUTE, delta=1e-6).epsilon for e in (plain, full)]
        assert prices[0] == prices[1]


def test_non_negative_terms_help_without_poisson_sampling_only():
    def price(terms, sampling):
        item = GaussianEvent(clip_norm=1.0, std=2.0, terms=terms, sampling=sampling)
        return accounting.price([item], relation=SUBSTITUTE, delta=1e-6).epsilon

    assert price("psd", None) < price("general", None)
    assert price("psd", without_replacement(0.1)) < price("general", without_replacement(0.1))
    assert price("psd", poisson(0.1)) == price("general", poisson(0.1))


@pytest.mark.parametrize(
    ("event", "relation", "key"),
    [
        (RandomisedResponseEvent(categories=2, gamma=0.5), ADD_REMOVE, "relation"),
        (GaussianEvent(clip_norm=1.0, std=1.0, sampling=without_replacement(0.1)), ADD_REMOVE, "relation"),
        (LaplaceEvent(clip_norm=1.0, scale=1.0, sampling=without_replacement(0.1)), ADD_REMOVE, "relation"),
        (GaussianEvent(sensitivity=1.0, std=1.0, sampling=poisson(0.1)), SUBSTITUTE, "sensitivity"),
        (LaplaceEvent(sensitivity=1.0, scale=1.0, sampling=poisson(0.1)), SUBSTITUTE, "sensitivity"),
        (DiscreteGaussianEvent(sensitivity=9.0, std=9.0, sampling=poisson(0.1)), SUBSTITUTE, "sensitivity"),
    ],
)
def test_a_relation_that_a_mechanism_cannot_be_priced_under_is_refused(event, relation, key):
    with pytest.raises(InvalidInput) as caught:
        accounting.price([event], relation=relation, delta=1e-6)
    assert caught.value.key == key


def hockey_stick_2d(rate, a, b, epsilon):
    """(1-w)N(0) + wN(a) from (1-w)N(0) + wN(b) in the plane: exact along x between roots, trapezoid along y."""
    e, x = math.exp(epsilon), np.linspace(-12.0, 12.0, 1201)
    ys = np.linspace(-8.5, 8.5, 171)
    total = 0.0
    for y in ys:

        def excess(x, y=y):
            here = rate * np.exp(a[0] * x + a[1] * y - 0.5 * (a[0] ** 2 + a[1] ** 2))
            there = rate * np.exp(b[0] * x + b[1] * y - 0.5 * (b[0] ** 2 + b[1] ** 2))
            return (1 - rate) * (1 - e) + here - e * there

        signs = np.sign(excess(x))
        changes = np.flatnonzero(signs[1:] != signs[:-1])
        ends = [-np.inf, *(optimize.brentq(excess, x[i], x[i + 1]) for i in changes), np.inf]
        for low, high in itertools.pairwise(ends):
            if excess(0.5 * (max(low, -12.0) + min(high, 12.0))) > 0.0:
                parts = [((1 - rate) * (1 - e), (0.0, 0.0)), (rate, a), (-e * rate, b)]
                total += sum(
                    w * (ndtr(c[0] - low) - ndtr(c[0] - high)) * math.exp(-0.5 * (y - c[1]) ** 2) for w, c in parts
                )
    return total * (ys[1] - ys[0]) / math.sqrt(2 * math.pi)


@pytest.mark.slow
def test_opposite_rows_of_full_norm_are_the_worst_under_poisson_sampling():
    """A numerical check, not a proof: angles, shorter rows, both directions, 24 settings of norm, rate and eps."""
    for norm, rate, epsilon in itertools.product((0.3, 1.0, 2.0), (0.01, 0.3), (0.01, 0.2, 0.7, 2.0)):
        worst = profiles.opposite_pair_delta(norm, rate, np.array([epsilon]))[0]
        same = hockey_stick_2d(rate, (norm, 0.0), (-norm, 0.0), epsilon)
        assert same == pytest.approx(worst, rel=1e-6, abs=1e-12)
        for angle, short in itertools.product(np.linspace(0.0, math.pi, 5)[1:], (0.0, 0.5, 0.9, 1.0)):
            row = (short * norm * math.cos(angle), short * norm * math.sin(angle))
            for one, two in (((norm, 0.0), row), (row, (norm, 0.0))):
                assert hockey_stick_2d(rate, one, two, epsilon) <= worst * (1 + 1e-6) + 1e-12


def test_a_shorter_opposite_row_is_not_worse_on_the_line():
    """The same check, quick and one-dimensional, by the exact crossing of the loss."""
    rate, epsilon, norm = 0.1, 0.3, 1.5
    worst = profiles.opposite_pair_delta(norm, rate, np.array([epsilon]))[0]
    for short in np.linspace(-1.0, 0.9, 12):
        p, q = mixture(stats.norm.pdf, rate, norm), mixture(stats.norm.pdf, rate, short * norm)
        for one, two in ((p, q), (q, p)):
            assert integral(one, two, epsilon) <= worst + 1e-8
    assert optimize.minimize_scalar(
        lambda c: -integral(mixture(stats.norm.pdf, rate, norm), mixture(stats.norm.pdf, rate, c), epsilon),
        bounds=(-norm, 0.0),
        method="bounded",
    ).x == pytest.approx(-norm, abs=1e-3)
