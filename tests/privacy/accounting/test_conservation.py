"""Nothing of a loss distribution is lost: mass and infinite mass are 1, and no epsilon makes the latter vanish."""

import dataclasses
import itertools
import math

import mpmath
import numpy as np
import pytest
from tests.privacy.accounting.test_laws import BASES, POISSON, cases

from silobayes.privacy import accounting
from silobayes.privacy.accounting import grid, profiles
from silobayes.privacy.accounting.pld import Pair, Rule, Total, connect_dots, directions
from silobayes.privacy.events import (
    ApproximateDPEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Relation,
    Sampling,
    Scheme,
)

SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE
FAR = (0.0, 0.3, 1.0, 5.0, 30.0, 300.0, 1e4)


def rules(event, relation):
    """Of the event: the priced rule and the one of its lower bound, where they have a pair."""
    found = profiles.rule(event, relation)
    return [one for one in (found, found.lower) if one is not None and one.pair is not None]


@pytest.mark.parametrize(("event", "relation"), list(cases()))
def test_mass_and_infinite_mass_are_one(event, relation):
    for rule in rules(event, relation):
        for pair in (rule.pair, rule.pair.swapped()):
            for points in (np.linspace(0.0, 20.0, 300), np.append(0.0, np.geomspace(1e-6, 3.0, 200))):
                losses = connect_dots(pair, points)
                # Dropped negative masses (of bounds that are not convex) only add.
                assert 1.0 - 1e-9 <= losses.probs.sum() + losses.infinite <= 1.05
                assert losses.infinite >= pair.forward(points[-1:])[0]
        for way in directions([(rule.pair, 3)]):
            for part in way.parts:
                assert 1.0 - 1e-9 <= part.probs.sum() + part.infinite <= 1.05
                assert part.infinite >= 0.0


@pytest.mark.parametrize(("std", "skellam"), [(0.7, False), (4.0, False), (40.0, False), (0.7, True), (4.0, True)])
def test_the_losses_of_grid_noise_lose_nothing_when_they_are_cut_and_added(std, skellam):
    spacing = 1.0 / (2.0 * std**2) if std <= 20.0 and not skellam else 1.0 / (50.0 * std)
    for shift in (1, 3):
        one = grid.shift_losses(std, shift, skellam=skellam)
        assert one.probs.sum() + one.infinite == pytest.approx(1.0, abs=1e-12)
    low, probs, infinite = grid._on_lattice(std, 2, spacing, skellam)
    assert probs.sum() + infinite == pytest.approx(1.0, abs=1e-9)
    heavy = (low, probs * 0.9, 0.1)  # as if a tenth were infinite
    both = grid._convolved([heavy, heavy, (low, probs, infinite)], spacing)
    assert both.probs.sum() == pytest.approx(0.81, abs=1e-9)
    assert 1.0 - 0.81 - 1e-9 <= both.infinite <= 0.2 + 1e-9


@pytest.mark.parametrize("width", [4, 30])
def test_tails_that_a_sum_of_losses_cuts_off_become_infinite(width):
    """Laws with a tail far below what is kept: it may move up and never vanish."""
    tail = np.exp(-np.arange(400.0) / width * 8)
    part = (0, tail / tail.sum(), 0.0)
    both = grid._convolved([part, part], 0.1)
    assert math.fsum(both.probs) + both.infinite == pytest.approx(1.0, abs=1e-13)
    exact = np.convolve(part[1], part[1])
    last = round(float(both.losses[-1]) / 0.1)
    if last + 1 < exact.size:
        assert both.infinite >= math.fsum(exact[last + 1 :]) > 0.0


BOXES = [ApproximateDPEvent(epsilon=0.3, delta=1e-6), ApproximateDPEvent(epsilon=0.0, delta=1e-4)]
BESIDES = [
    [],
    [RandomisedResponseEvent(categories=3, gamma=0.5, count=2)],
    [GaussianEvent(clip_norm=1.0, std=2.0, sampling=POISSON, count=5)],
    [GaussianEvent(clip_norm=1.0, std=2.0)],
    [LaplaceEvent(clip_norm=1.0, scale=3.0, count=2)],
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("besides", BESIDES, ids=lambda events: events[0].mechanism if events else "alone")
@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_what_fails_for_certain_stays_in_delta_at_any_epsilon(box, besides, count):
    events = [dataclasses.replace(box, count=count), *besides]
    certain = -math.expm1(count * math.log1p(-box.delta))
    for epsilon in FAR:
        assert accounting.delta_at(events, relation=SUBSTITUTE, epsilon=epsilon) >= certain * (1 - 1e-12)
    # No epsilon helps below it, and some does above (the sum of the deltas is what is charged).
    assert accounting.price(events, relation=SUBSTITUTE, delta=certain * 0.999).epsilon == math.inf
    assert accounting.price(events, relation=SUBSTITUTE, delta=count * box.delta * 1.01).epsilon < math.inf
    assert accounting.price(events, relation=SUBSTITUTE, delta=certain * 0.99).epsilon_lower > 1e3


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("accountant", ["basic", "advanced", "optimal"])
def test_other_compositions_keep_it_too(box, accountant):
    events = [dataclasses.replace(box, count=10), *BESIDES[1]]
    certain = -math.expm1(10 * math.log1p(-box.delta))
    for epsilon in (1.0, 5.0, 50.0):
        spent = accounting.delta_at(events, relation=SUBSTITUTE, epsilon=epsilon, accountant=accountant)
        assert spent >= certain * (1 - 1e-9)


def responses(event: RandomisedResponseEvent) -> list[tuple[float, float]]:
    other = event.gamma / event.categories
    keep = 1.0 - event.gamma + other
    loss = math.log(keep / other)
    return [(loss, keep), (-loss, other), (0.0, 1.0 - keep - other)]


def box_outcomes(event: ApproximateDPEvent) -> list[tuple[float, float]]:
    keep = (1.0 - event.delta) / (1.0 + math.exp(-event.epsilon))
    return [(math.inf, event.delta), (event.epsilon, keep), (-event.epsilon, 1.0 - event.delta - keep)]


@pytest.mark.parametrize("delta", [0.0, 1e-9, 1e-3, 0.2])
@pytest.mark.parametrize("count", [1, 3])
def test_boxes_and_answers_together_equal_the_list_of_all_outcomes(delta, count):
    box = ApproximateDPEvent(epsilon=0.4, delta=delta, count=count)
    answer = RandomisedResponseEvent(categories=3, gamma=0.5, count=2)
    outcomes = [box_outcomes(box)] * count + [responses(answer)] * 2
    for epsilon in (0.0, 0.2, 0.9, 2.0, 5.0, 50.0):
        exact = 0.0
        for chosen in itertools.product(*outcomes):
            loss = sum(own for own, _ in chosen)
            exact += math.prod(own for _, own in chosen) * max(0.0, -math.expm1(min(epsilon - loss, 0.0)))
        spent = accounting.delta_at([box, answer], relation=SUBSTITUTE, epsilon=epsilon)
        union = (count * delta) ** 2  # deltas are added up, not multiplied
        assert exact * (1 - 1e-12) <= spent <= min(1.0, (exact + union) * (1 + 1e-4) + 1e-14)


def test_truncated_tails_are_charged_as_infinite():
    """A law whose tail is a power: what lies beyond the grid of one run stays in delta at the end of the grid."""
    pair = Pair(forward=lambda epsilon: 0.3 / (1.0 + epsilon) ** 2)
    for count in (1, 4):
        total = Total([(Rule(pair=pair), count)])
        for epsilon in (3.0, 30.0, 3e3):
            assert total.delta(epsilon) >= float(pair.forward(np.array([epsilon]))[0])


def test_windows_are_wide_enough_or_charged(monkeypatch):
    """A window that leaves out a hundredth of the tilted mass must say so: delta stays above the truth."""
    from silobayes.privacy.accounting import gaussian, pld

    monkeypatch.setattr(pld, "WINDOW_TAIL", 1e-2)
    mu, count = 0.3, 30
    (way,) = directions([(Pair(forward=lambda epsilon: gaussian.delta(mu, epsilon)), count)])
    for epsilon in (0.5, 2.0, 5.0):
        exact = float(gaussian.delta(mu * math.sqrt(count), np.asarray(epsilon)))
        assert way.delta_lower(epsilon) <= exact <= way.delta(epsilon)
        finite, error = way._finite(epsilon)
        assert finite + error >= exact * 1.005


def cut_cases():
    """Each rule at both rates and under both relations; the other combinations are slow."""
    for number, name in enumerate(BASES):
        for rate, relation in itertools.product((0.05, 1.0), Relation):
            is_quick = (rate == 1.0) == (relation is (ADD_REMOVE, SUBSTITUTE)[number % 2])
            yield pytest.param(name, rate, relation, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "rate", "relation"), list(cut_cases()))
def test_every_rule_charges_batches_that_were_cut(name, rate, relation):
    """Also at rate 1, where nothing is gained by sampling."""
    whole = dataclasses.replace(BASES[name], count=7, sampling=Sampling(scheme=Scheme.POISSON, rate=rate))
    cut = dataclasses.replace(whole, sampling=Sampling(scheme=Scheme.POISSON, rate=rate, overflow=1e-6))
    for accountant in ("pld", "rdp"):
        plain, charged = (
            accounting.delta_at([one], relation=relation, epsilon=0.0, accountant=accountant) for one in (whole, cut)
        )
        assert charged >= min(1.0, plain + 14e-6) * (1 - 1e-6)
    spent = accounting.delta_at([cut], relation=relation, epsilon=60.0, accountant="basic")
    assert spent >= 7e-6


def test_rounding_of_the_fft_is_charged_for_every_run(monkeypatch):
    from silobayes.privacy.accounting import gaussian, pld

    def charged(count: int) -> float:
        pair = Pair(forward=lambda epsilon: gaussian.delta(1.0 / math.sqrt(count), epsilon))
        found = []
        for error in (0.0, 1e-7):
            monkeypatch.setattr(pld, "FFT_ERROR", error)
            found.append(directions([(pair, count)])[0].delta(2.0))
        return found[1] / found[0] - 1.0

    few, many = charged(10), charged(1000)
    assert few > 10 * 1e-7  # times log2 N and the root of N
    assert many > 50 * few


@pytest.mark.parametrize("skellam", [False, True])
@pytest.mark.parametrize("std", [0.7, 4.0])
def test_what_lies_beyond_the_array_of_a_law_is_infinite(std, skellam):
    """Below what double precision adds to 1, so compared with the tail itself."""
    one = grid.shift_losses(std, 2, skellam=skellam)
    reach = (one.probs.size - 3) // 2
    with mpmath.workdps(50):
        if skellam:
            tail = mpmath.nsum(lambda z: mpmath.besseli(z, std**2) * mpmath.exp(-(std**2)), [reach - 1, reach + 60])
        else:
            weight = lambda z: mpmath.exp(-(mpmath.mpf(z) ** 2) / (2 * std**2))  # noqa: E731
            tail = mpmath.nsum(weight, [reach - 1, reach + 60]) / mpmath.nsum(weight, [-200, 200])
    assert one.infinite >= float(tail) > 0.0
