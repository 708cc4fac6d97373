"""`epsilon_lower` is what some real neighbours cost: brute force over the terms that two rows and all others may have.

On a line or in the plane, every pair of terms that `terms` allows: of full and of shorter norm, at angles of 0 to 90
degrees, opposite ones only if terms are general. At `epsilon_lower` the worst of them costs at least delta, at
`epsilon` at most delta.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ive

from silobayes.privacy import accounting
from silobayes.privacy.accounting import profiles
from silobayes.privacy.events import (
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    Relation,
    Sampling,
    Scheme,
    SkellamEvent,
    Terms,
)

SUBSTITUTE = Relation.SUBSTITUTE
DELTA = 1e-3
# Sums over a lattice of a eighth of a standard deviation miss kinks by about this much of delta.
TOLERANCE = 1.5e-2
SAMPLINGS = [
    None,
    Sampling(scheme=Scheme.POISSON, rate=0.3),
    Sampling(scheme=Scheme.POISSON, rate=0.8),
    Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.3),
]
NOISES = {
    "gaussian": GaussianEvent(clip_norm=1.0, std=1.0),
    "fine_gaussian": GaussianEvent(clip_norm=1.0, std=0.5),
    "laplace": LaplaceEvent(clip_norm=1.0, scale=0.8),
    "discrete_gaussian": DiscreteGaussianEvent(clip_norm=2.0, std=2.0, dimension=2),
    "discrete_gaussian_of_many": DiscreteGaussianEvent(clip_norm=2.9, std=3.0),
    "discrete_gaussian_on_a_line": DiscreteGaussianEvent(clip_norm=3.0, std=2.5, dimension=1),
    "replaced_gaussian": DiscreteGaussianEvent(clip_norm=8.0, std=8.0, dimension=2),
    "replaced_gaussian_on_a_line": DiscreteGaussianEvent(clip_norm=70.0, std=60.0, dimension=1),
    "skellam": SkellamEvent(clip_norm=2.0, std=2.0, dimension=2),
    "skellam_on_a_line": SkellamEvent(clip_norm=3.0, std=2.5, dimension=1),
}


def cases():
    for (name, event), terms, sampling in itertools.product(NOISES.items(), Terms, SAMPLINGS):
        # On a line every number >= 0 is PSD, and in the plane diagonal matrices are: the same terms for both.
        if terms is not Terms.PSD:
            label = "all" if sampling is None else f"{sampling.scheme.value}{sampling.rate}"
            yield pytest.param(
                dataclasses.replace(event, terms=terms, sampling=sampling), id=f"{name}-{terms.value}-{label}"
            )


def candidates(event) -> list[tuple[float, float]]:
    """Terms in the plane; on a line the second coordinate is 0."""
    norm, signs = event.clip_norm, (-1, 1) if event.terms is Terms.GENERAL else (1,)
    line = getattr(event, "dimension", None) == 1
    if isinstance(event, GaussianEvent):
        lengths, angles = (0.0, 0.6, 1.0), np.linspace(0.0, math.pi / 2, 4)
        found = {(norm * c * math.cos(a), norm * c * math.sin(a)) for c in lengths for a in angles}
    elif isinstance(event, LaplaceEvent):
        found = {(norm * c * s, norm * c * (1 - s)) for c in (0.0, 0.5, 1.0) for s in (0.0, 0.5, 1.0)}
    else:
        steps = sorted({0, int(norm) // 2, int(norm)})
        found = {(a, 0 if line else b) for a in steps for b in steps if a * a + (0 if line else b * b) <= norm**2}
    return sorted({(sign * a, other * b) for (a, b) in found for sign in signs for other in signs})


def law(event):
    """Mass of the noise at a shifted lattice, and the lattice."""
    if isinstance(event, GaussianEvent):
        lattice = np.arange(-8.0 * event.std, 8.0 * event.std + 2.0, event.std / 8)
        return lambda shift: stats.norm.pdf(lattice - shift, scale=event.std) * event.std / 8
    if isinstance(event, LaplaceEvent):
        lattice = np.arange(-10.0, 10.0, 0.05) + 0.025  # kinks lie between points
        return lambda shift: stats.laplace.pdf(lattice - shift, scale=event.scale) * 0.05
    reach = math.ceil(9 * event.std) + 2 * int(event.clip_norm)
    z = np.arange(-reach, reach + 1.0)
    if isinstance(event, SkellamEvent):
        return lambda shift: ive(np.abs(z - shift), event.std**2)
    weights = np.exp(-0.5 * (z / event.std) ** 2).sum()
    return lambda shift: np.exp(-0.5 * ((z - shift) / event.std) ** 2) / weights


def worst(event, epsilons: tuple[float, float]) -> list[float]:
    """The largest hockey-stick divergence of real neighbours at each epsilon."""
    one, terms = law(event), candidates(event)
    plane = any(b for _, b in terms)
    cache: dict[tuple[float, float], np.ndarray] = {}

    def at(a: float, b: float) -> np.ndarray:
        key = (round(a, 9), round(b, 9))
        if key not in cache:
            cache[key] = np.multiply.outer(one(a), one(b)).ravel() if plane else one(a)
        return cache[key]

    sampling, rate = event.sampling, 1.0 if event.sampling is None else event.sampling.rate
    # Without replacement every other row is zero or like the old one, and sums are seen from where they all are.
    fixed_size = sampling is not None and sampling.scheme is Scheme.WITHOUT_REPLACEMENT
    found = [0.0, 0.0]
    for x, y, like_old in itertools.product(terms, terms, (False, True) if fixed_size else (False,)):
        if x == y:
            continue
        rest = y if like_old else (0.0, 0.0)
        p, q = ((1 - rate) * at(0.0, 0.0) + rate * at(own[0] - rest[0], own[1] - rest[1]) for own in (x, y))
        for k, epsilon in enumerate(epsilons):
            found[k] = max(found[k], float(np.maximum(0.0, p - math.exp(epsilon) * q).sum()))
    return found


@pytest.mark.parametrize("event", list(cases()))
def test_epsilon_lower_is_at_most_what_the_worst_real_neighbours_cost(event):
    price = accounting.price([event], relation=SUBSTITUTE, delta=DELTA)
    at_lower, at_price = worst(event, (price.epsilon_lower, price.epsilon))
    assert at_lower >= DELTA * (1 - TOLERANCE)
    assert at_price <= DELTA * (1 + TOLERANCE)
    assert price.epsilon_lower >= 0.3 * price.epsilon


@pytest.mark.parametrize("mu", [0.02, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_terms_at_right_angles_are_priced_from_below_and_closely(mu, rate):
    """By the trapezoidal rule in the plane, for eps where there is something to see."""
    from tests.privacy.accounting.test_profiles import hockey_stick_2d

    for share in (0.0, 0.1, 0.5, 1.0):
        epsilon = share * mu * rate * 5
        exact = hockey_stick_2d(rate, (mu, 0.0), (0.0, mu), epsilon)
        ours = profiles.right_angled_pair_delta(mu, rate, np.array([epsilon]))[0]
        assert exact * (1 - 2e-3) - 1e-13 <= ours <= exact * (1 + 1e-6) + 1e-13


def test_terms_at_right_angles_are_finite_however_long_or_short():
    for mu, rate in ((1e-6, 1e-9), (1e-2, 1 - 1e-9), (29.0, 1e-9), (1e6, 0.5)):
        deltas = profiles.right_angled_pair_delta(mu, rate, np.array([0.0, 1e-6, 1.0, 1e3, 1e5]))
        assert np.isfinite(deltas).all()
        assert np.all(np.diff(deltas) <= 0.0)
        assert 0.0 <= deltas[-1] <= deltas[0] <= rate


def test_composed_terms_at_right_angles_are_bounded_by_their_exact_sum():
    """Four runs: the losses in cells of the plane, rounded up, added by convolution; an upper bound for this pair."""
    mu, rate, runs, width = 1.0, 0.4, 4, 0.002
    z = np.arange(-8.0, 9.5, 0.02) + 0.01
    cell = (
        stats.norm.cdf(z + 0.01) - stats.norm.cdf(z - 0.01),
        stats.norm.cdf(z + 0.01 - mu) - stats.norm.cdf(z - 0.01 - mu),
    )
    absent = np.multiply.outer(cell[0], cell[0])
    p = (1 - rate) * absent + rate * np.multiply.outer(cell[1], cell[0])
    # The loss grows with x and falls with y: in a cell it is largest at a corner.
    x, y = z[:, None] + 0.01, z[None, :] - 0.01
    loss = np.log(1 - rate + rate * np.exp(mu * x - mu**2 / 2)) - np.log(1 - rate + rate * np.exp(mu * y - mu**2 / 2))
    bins = np.ceil(loss / width).astype(int)
    one = np.bincount((bins - bins.min()).ravel(), weights=p.ravel())
    law_of_sum = one
    for _ in range(runs - 1):
        law_of_sum = np.convolve(law_of_sum, one)
    losses = (np.arange(law_of_sum.size) + runs * bins.min()) * width
    event = GaussianEvent(
        clip_norm=1.0, std=1 / mu, terms=Terms.PSD, count=runs, sampling=Sampling(scheme=Scheme.POISSON, rate=rate)
    )
    price = accounting.price([event], relation=SUBSTITUTE, delta=1e-5)
    exact = lambda eps: float(np.dot(law_of_sum, np.maximum(0.0, -np.expm1(np.minimum(eps - losses, 0.0)))))  # noqa: E731
    assert exact(price.epsilon_lower) >= 1e-5 > exact(price.epsilon)
    assert exact(price.epsilon_lower * 1.03) < 1e-5


def test_laplace_noise_on_two_coordinates_equals_its_integral():
    loss, z = 0.9, np.arange(-16.0, 17.0, 0.02) + 0.01
    here, there = stats.laplace.pdf(z) * 0.02, stats.laplace.pdf(z - loss) * 0.02
    p, q = np.multiply.outer(there, here), np.multiply.outer(here, there)
    pair = profiles.laplace_plane_pair(loss)
    for epsilon in (0.0, 0.5, 1.0, 1.7, 1.9):
        exact = np.maximum(0.0, p - math.exp(epsilon) * q).sum()
        assert pair.forward(np.array([epsilon]))[0] == pytest.approx(exact, abs=2e-4)
