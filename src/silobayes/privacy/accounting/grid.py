"""Noise on an integer grid, in any dimension: discrete Gaussian and Skellam (SPEC 8).

`std` and norms divided by `grid` are integer units: s, and vectors x - x' in Z^n with |x - x'| <= D. Three routes.

**Small sensitivity, exact.** Both laws are symmetric and log-concave, so a coordinate's profile grows with its shift,
and the worst vectors are the integer vectors with |v|^2 <= D^2 that cannot be enlarged. If these are few, the largest
of their profiles is the profile, and sampling amplifies it as any other. Losses of a discrete Gaussian are multiples of
1 / (2 s^2), which makes its composition exact.

**Discrete Gaussian, otherwise: a continuous Gaussian in disguise.** Let `theta_r(y) = sum_z exp(-(z - y)^2 / 2r^2)`. By
Poisson summation `theta_r(y) = r sqrt(2 pi) (1 + 2 sum_k cos(2 pi k y) e^(-2 pi^2 r^2 k^2))`, within a factor 1 +- e of
`r sqrt(2 pi)`, `e = 2 sum_k e^(-2 pi^2 r^2 k^2)`. Draw `y = x + N(0, s^2 - r^2)` and then z from the discrete Gaussian
of scale r around y: z has the mass `integral N(y; x, s^2 - r^2) e^(-(z - y)^2 / 2r^2) / theta_r(y) dy`, which is
`N(z; x, s^2)` up to a factor 1 / (1 +- e); and so is the discrete Gaussian of scale s around the integer x. So noise of
scale s is, up to a factor `e^kappa = (1 + e) / (1 - e)` a coordinate, a post-processing of Gaussian noise of standard
deviation `sqrt(s^2 - r^2)`. The other way round, discrete Gaussian noise plus N(0, r'^2) is Gaussian noise of variance
`s^2 + r'^2` up to a factor with `r^2 = s^2 r'^2 / (s^2 + r'^2)`: the lower bound. Both survive sampling (mixtures keep
factors) and composition (factors multiply). Only coordinates that differ between neighbours count: the rest is noise
of one law in both. There are at most min(dimension, D^2) of them, because a non-zero integer has square >= 1.

**Skellam, otherwise: a discrete Gaussian in disguise.** Let Lambda be the sum of `ln S(z) / G(z)` over the m
coordinates of all runs. By Chernoff `S[Lambda > a]` and `G[Lambda < -a]` are at most beta for an a that the
one-dimensional moments `sum G (S/G)^(1 + t)` and `sum G (S/G)^-t` give; noise beyond U s is charged to beta by its own
Chernoff bound. (Moments also hold conditionally, so queries and the coordinates that differ may be chosen adaptively.)

**What closeness costs.** If `P <= e^a P~ + beta` and `Q~ <= e^b Q + beta'` on every set, then
`P(E) - e^eps Q(E) <= e^a (P~(E) - e^(eps - a - b) Q~(E)) + beta + e^(eps - b) beta'`: pld.Total charges exactly this.
Skellam noise is heavier in the tails, so a is the larger one and b, which meets the stricter beta', is tiny.

`ln S/G` is computed from Debye's expansion of the Bessel function to its fourth term (relative error < 1e-9 where
used); Skellam's part of a carries a margin of 1 % for that. What is lost against the exact price falls with the grid:
in epsilon about 100 / s^2 for Skellam (one coordinate far out decides it), relative 1 / s^2 for the discrete Gaussian.

Guarantees:
    - small cases equal brute force over the laws themselves
    - a coarse grid is refused with a clear error
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.privacy.accounting.pld import Losses, Pair, Rule, connect_dots
from silobayes.privacy.accounting.profiles import effective_scheme, rule, sampled_rule
from silobayes.privacy.events import (
    AbstractGridEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    Relation,
    Scheme,
    SkellamEvent,
    Terms,
)

_KAPPA_PER_RUN = 1e-17
_LOG_TAIL = -72.0
_MARGIN = 1.01


@rule.register
def _discrete_gaussian(item: DiscreteGaussianEvent, relation: Relation) -> Rule:
    return _grid_rule(item, relation, skellam=False)


@rule.register
def _skellam(item: SkellamEvent, relation: Relation) -> Rule:
    return _grid_rule(item, relation, skellam=True)


def _grid_rule(item: AbstractGridEvent, relation: Relation, *, skellam: bool) -> Rule:
    std, distance = item.std / item.grid, item.l2_sensitivity(relation) / item.grid
    # Rounded up: a norm that is an integer but for its last bits must count as that integer.
    squares = _reach(item, item.l2_sensitivity(relation))
    if squares == 0:
        raise _too_coarse(item.grid, distance * item.grid)
    scheme = effective_scheme(item, relation)
    opposite = scheme is Scheme.POISSON and relation is Relation.SUBSTITUTE
    # The opposite pair of Gaussians is tighter than joint convexity, unless replacing the noise costs more.
    if _is_small(std, squares, item.dimension) and not (opposite and std >= (50.0 if skellam else 4.0)):
        return _small_rule(item, relation, std, squares, skellam)
    coordinates = squares if item.dimension is None else min(item.dimension, squares)
    smoothing = math.log(4.0 * coordinates / _KAPPA_PER_RUN) / (2.0 * math.pi**2)
    if not std**2 >= 2.0 * smoothing:
        least = math.sqrt(2.0 * smoothing)
        fix = "Use a finer grid, which costs nothing, or more noise."
        raise InvalidInput("std", f"at least {least:.2f} grid steps", f"{std:g} grid steps", fix)
    ripple = 2.0 * math.exp(-2.0 * math.pi**2 * smoothing) * (1.0 + 1e-9)
    close = NoiseCloseness(
        coordinates=coordinates,
        kappa=math.log1p(ripple) - math.log1p(-ripple),
        skellam_std=std if skellam else None,
    )
    norm = item.clip_norm if item.clip_norm is not None else item.sensitivity
    assert norm is not None
    attained = math.floor(norm / item.grid) * item.grid / norm
    lower = Rule()
    if attained > 0.0:
        wider = _attained_gaussian(item, relation, math.sqrt(std**4 / (std**2 - smoothing)) * item.grid / attained)
        lower = dataclasses.replace(wider.lower or wider, closeness=close)
    narrower = rule(_gaussian(item, std=math.sqrt(std**2 - smoothing) * item.grid), relation)
    return dataclasses.replace(narrower, closeness=close, lower=lower)


def _too_coarse(grid: float, norm: float) -> InvalidInput:
    fix = "Use a finer grid: on this one no two neighbours could differ at all."
    return InvalidInput("grid", f"a grid no coarser than the norm bound {norm:g}", grid, fix)


def _gaussian(item: AbstractGridEvent, *, std: float) -> GaussianEvent:
    return GaussianEvent(
        clip_norm=item.clip_norm, sensitivity=item.sensitivity, terms=item.terms, sampling=item.sampling, std=std
    )


def _attained_gaussian(item: AbstractGridEvent, relation: Relation, std: float) -> Rule:
    """Gaussian noise on two terms that are there; on a line no two terms are at right angles, but one may be zero."""
    event = _gaussian(item, std=std)
    if not _is_half_line(item) or relation is Relation.ADD_REMOVE:
        return rule(event, relation)
    if effective_scheme(item, relation) is Scheme.POISSON:
        return rule(event, Relation.ADD_REMOVE)
    return rule(dataclasses.replace(event, clip_norm=None, sensitivity=item.clip_norm, terms=Terms.GENERAL), relation)


def _is_half_line(item: AbstractGridEvent) -> bool:
    """Whether terms are numbers >= 0."""
    return item.dimension == 1 and item.terms is not Terms.GENERAL


@dataclass(frozen=True, kw_only=True)
class NoiseCloseness:
    """How far grid noise is from smoothed Gaussian noise; `skellam_std` is None for the discrete Gaussian."""

    coordinates: int
    kappa: float
    skellam_std: float | None

    @property
    def exceptional(self) -> bool:
        """Skellam noise has heavier tails than Gaussian noise: far out they are not close."""
        return self.skellam_std is not None

    def log_factors(self, runs: int, log_beta: float, log_beta_back: float) -> tuple[float, float]:
        """(a, b): Skellam <= e^a Gaussian and back, on all coordinates of `runs` runs, but for beta."""
        m = self.coordinates * runs
        smooth = m * self.kappa
        if self.skellam_std is None:
            return smooth, smooth
        # Whole steps downward: a smaller beta is a stricter bound, and repeated calls are free.
        there, back = float(math.floor(log_beta)), float(math.floor(log_beta_back))
        return (
            smooth + _MARGIN * skellam_log_factor(self.skellam_std, m, there, forward=True),
            smooth + _MARGIN * skellam_log_factor(self.skellam_std, m, back, forward=False),
        )


@lru_cache(maxsize=1024)
def skellam_log_factor(std: float, m: int, log_beta: float, *, forward: bool) -> float:
    """Chernoff's a for m coordinates: Skellam <= e^a discrete Gaussian of the same variance; backward, the converse."""
    x = std**2
    edge = _edge(std, math.log(8.0 * m) - log_beta)
    # Both laws are even. Sums over a fine grid equal the integral to rounding (Poisson summation), so 1000 points do.
    z = np.arange(math.floor(edge * std) + 1.0) if edge * std <= 1000.0 else np.linspace(0.0, edge, 1001) * std
    log_weights = -0.5 * (z / std) ** 2
    log_weights[0] -= math.log(2.0)
    log_weights -= math.log(np.exp(log_weights).sum())
    variance = 1.0 / (24.0 * x * x)
    budget = math.log(2.0) - log_beta
    orders = math.sqrt(2.0 * budget / (m * variance)) * np.geomspace(1e-5, 10.0, 50)
    power = 1.0 + orders if forward else -orders
    exponents = power[:, None] * skellam_log_ratio(z, x)
    # Far out a weight may vanish while its factor overflows: there the two meet in the exponent. A moment that still
    # overflows is infinite, never capped: a capped one would make its order look cheap.
    near = np.expm1(np.minimum(exponents, 1.0)) * np.exp(log_weights)
    with np.errstate(over="ignore"):
        excess = np.where(exponents > 1.0, np.exp(exponents + log_weights), near).sum(axis=1)
    # The second-order term is a floor: below it there is only rounding.
    log_moments = np.log1p(np.maximum(excess, 0.99 * orders * (orders + 1.0) / 2.0 * variance))
    return float(np.min((m * log_moments + budget) / orders))


def _edge(std: float, exponent: float) -> float:
    """U such that either noise exceeds U std with probability at most 2 e^-exponent."""
    edge = math.sqrt(2.0 * exponent)
    while _skellam_exponent(std, edge) < exponent:
        edge *= 1.02
    return edge


def _skellam_exponent(std: float, edge: float) -> float:
    """Chernoff: ln P[z > U s] <= -(U s asinh(U/s) - s^2 (sqrt(1 + U^2/s^2) - 1))."""
    t = edge / std
    return std**2 * (t * math.asinh(t) - t * t / (math.sqrt(1.0 + t * t) + 1.0))


def skellam_log_ratio(z: np.ndarray, x: float) -> np.ndarray:
    """Ln of the Skellam mass over the discrete Gaussian mass at z, both of variance x."""
    if x <= 400.0:
        from scipy.special import ive

        log_theta = 0.5 * math.log(2.0 * math.pi * x) + math.log1p(2.0 * math.exp(-2.0 * math.pi**2 * x))
        return np.log(ive(np.abs(z), x)) + 0.5 * z**2 / x + log_theta
    t = z / x
    w, q = np.hypot(z, x), t**2 / (1.0 + t**2)
    # sqrt(1+t^2) - 1 - t asinh t + t^2/2, by its series where the closed form cancels.
    series = t**4 * (1 / 24 - t**2 * (1 / 80 - t**2 * (5 / 896 - t**2 * (7 / 2304 - t**2 * (21 / 11264)))))
    closed = t**2 / (np.sqrt(1.0 + t**2) + 1.0) - t * np.arcsinh(t) + 0.5 * t**2
    exponent = x * np.where(np.abs(t) < 0.1, series, closed)
    debye = (3.0 - 5.0 * q) / (24.0 * w) + (81.0 - 462.0 * q + 385.0 * q**2) / (1152.0 * w**2)
    debye += (30375.0 - 369603.0 * q + 765765.0 * q**2 - 425425.0 * q**3) / (414720.0 * w**3)
    debye += (4465125.0 - 94121676.0 * q + 349922430.0 * q**2 - 446185740.0 * q**3 + 185910725.0 * q**4) / (
        39813120.0 * w**4
    )
    return exponent - 0.25 * np.log1p(t**2) + np.log1p(debye)


def _is_small(std: float, squares: int, dimension: int | None) -> bool:
    return std <= 300.0 and squares <= (64**2 if dimension == 1 else 16)


def _small_rule(item: AbstractGridEvent, relation: Relation, std: float, squares: int, skellam: bool) -> Rule:
    base, attained = _small_pair(std, squares, item.dimension, skellam), _attained_pair(item, relation, std, skellam)
    scheme = effective_scheme(item, relation)
    if scheme is None:
        overflow = 0.0 if item.sampling is None else item.sampling.overflow
        return Rule(pair=base, overflow=overflow, lower=Rule(pair=attained))
    if scheme is not Scheme.POISSON or relation is not Relation.SUBSTITUTE:
        return sampled_rule(item, relation, base, attained=attained)
    assert item.clip_norm is not None
    reach = _reach(item, item.clip_norm)
    if reach == 0:
        raise _too_coarse(item.grid, item.clip_norm)
    absent = _small_pair(std, reach, item.dimension, skellam)
    return sampled_rule(item, relation, base, absent=absent, attained=_axis_pair(std, math.isqrt(reach), skellam))


def _reach(item: AbstractGridEvent, norm: float) -> int:
    """The largest square of an integer vector of this norm."""
    return math.floor((norm / item.grid) ** 2 * (1.0 + 1e-12))


def _attained_pair(item: AbstractGridEvent, relation: Relation, std: float, skellam: bool) -> Pair:
    """One coordinate moved as far as two terms (or two queries) can be apart there; or two, by non-negative terms."""
    if item.clip_norm is None:
        return _axis_pair(std, math.isqrt(_reach(item, item.l2_sensitivity(relation))), skellam)
    longest = math.isqrt(_reach(item, item.clip_norm))
    if longest == 0:
        return Pair(forward=np.zeros_like)
    if item.terms is Terms.GENERAL and relation is Relation.SUBSTITUTE:
        return _axis_pair(std, 2 * longest, skellam)
    # Connected dots lie above the truth: without a lattice, one of the two terms is zero.
    if relation is Relation.ADD_REMOVE or _is_half_line(item) or not _has_lattice(std, skellam):
        return _axis_pair(std, longest, skellam)
    return _joint_pair(std, [(longest, longest)], skellam)


def _axis_pair(std: float, shift: int, skellam: bool) -> Pair:
    """One coordinate moved as far as it goes: a pair that is always attained."""
    return Pair(forward=shift_losses(std, shift, skellam=skellam).profile)


@lru_cache(maxsize=64)
def _small_pair(std: float, squares: int, dimension: int | None, skellam: bool) -> Pair:
    vectors = largest_vectors(squares, dimension)
    if vectors == [(math.isqrt(squares),)] and skellam:
        return _axis_pair(std, math.isqrt(squares), skellam)
    return _joint_pair(std, vectors, skellam)


def _joint_pair(std: float, vectors: list[tuple[int, ...]], skellam: bool) -> Pair:
    """All coordinates of a vector moved; of several vectors, the larger profile at each epsilon."""
    spacing = 1.0 / (2.0 * std**2) if _has_lattice(std, skellam) else 1.0 / (50.0 * std)
    coordinates = {v: _on_lattice(std, v, spacing, skellam) for vector in vectors for v in vector}
    all_losses = [_convolved([coordinates[v] for v in vector], spacing) for vector in vectors]
    return Pair(
        forward=lambda epsilon: np.max([losses.profile(epsilon) for losses in all_losses], axis=0),
        atom=spacing,
        exact=True,
    )


def _has_lattice(std: float, skellam: bool) -> bool:
    """Losses of a discrete Gaussian are multiples of 1 / (2 s^2); when these are too many, dots are connected."""
    return not skellam and std <= 20.0


def largest_vectors(squares: int, dimension: int | None) -> list[tuple[int, ...]]:
    """Integer vectors with |v|^2 <= squares that cannot be enlarged in any coordinate, as descending shifts."""
    length = squares if dimension is None else min(dimension, squares)
    found: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], left: int) -> None:
        top = min(math.isqrt(left), prefix[-1] if prefix else left)
        full = len(prefix) == length or left == 0
        if (full or top == 0) and prefix and all(2 * v + 1 > left for v in prefix):
            found.append(prefix)
        if not full:
            for value in range(top, 0, -1):
                extend((*prefix, value), left - value * value)

    extend((), squares)
    return found


def shift_losses(std: float, shift: int, *, skellam: bool) -> Losses:
    """The exact loss of one coordinate of grid noise at 0 against the same at `shift`."""
    edge = _edge(std, -_LOG_TAIL) if skellam else math.sqrt(-2.0 * _LOG_TAIL)
    reach = math.ceil(edge * std) + shift + 1
    z = np.arange(-reach - shift, reach + shift + 1.0)
    if skellam:
        from scipy.special import ive

        with np.errstate(divide="ignore"):
            log_mass = np.log(ive(np.abs(z), std**2))
    else:
        log_mass = -0.5 * (z / std) ** 2
        log_mass -= math.log(np.exp(log_mass).sum())
    # Descending z is ascending loss; the ends, which have no partner in the array, are beyond e^-72.
    upper, lower = log_mass[shift:], log_mass[:-shift]
    losses, probs = (upper - lower)[::-1], np.exp(upper)[::-1]
    return Losses(losses=losses, probs=probs, infinite=math.exp(_LOG_TAIL) * 2.0)


def _on_lattice(std: float, shift: int, spacing: float, skellam: bool) -> tuple[int, np.ndarray, float]:
    """One coordinate's loss in bins of `spacing`: exact where the losses are multiples of it, else connect-the-dots."""
    one = shift_losses(std, shift, skellam=skellam)
    if skellam or spacing != 1.0 / (2.0 * std**2):
        bins = math.ceil(float(one.losses[-1]) / spacing) + 1
        dots = connect_dots(Pair(forward=one.profile), np.arange(bins + 1) * spacing)
        return -bins, dots.probs, dots.infinite
    indices = np.rint(one.losses / spacing).astype(int)
    probs = np.zeros(indices[-1] - indices[0] + 1)
    probs[indices - indices[0]] = one.probs
    return int(indices[0]), probs, one.infinite


def _convolved(parts: list[tuple[int, np.ndarray, float]], spacing: float) -> Losses:
    """The sum of independent losses by plain convolution: all terms are positive, so tails keep their accuracy."""
    low, probs, infinite = parts[0]
    for next_low, next_probs, next_infinite in parts[1:]:
        low, infinite = low + next_low, infinite + next_infinite
        probs = np.convolve(probs, next_probs)
        heavy = np.flatnonzero(np.cumsum(probs[::-1])[::-1] > 1e-33)
        infinite += float(probs[heavy[-1] + 1 :].sum())
        probs = probs[: heavy[-1] + 1]
        light = max(int(np.searchsorted(np.cumsum(probs), 1e-33)) - 1, 0)
        # The lowest losses move up to the first bin that is kept.
        probs, low = np.concatenate([[probs[: light + 1].sum()], probs[light + 1 :]]), low + light
    return Losses(losses=(low + np.arange(len(probs))) * spacing, probs=probs, infinite=infinite)
