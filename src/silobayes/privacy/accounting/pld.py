"""Composition by privacy-loss distributions: connect-the-dots, exponential tilting, one FFT (SPEC 8).

A *pair* (P, Q) is known by its two hockey-stick profiles at eps >= 0: `forward` of P from Q, `backward` of Q from P.
Connect-the-dots (Doroshenko et al. 2022, Algorithm 1) replaces the profile by its chords in `e^eps` between the points
of a grid: an upper bound that is the profile of a discrete loss on the grid. We differ from the common code in four
ways, all for accuracy:

1. The half-line of negative losses is read from the backward profile (chords commute with
   `h(-eps) = 1 - e^-eps + e^-eps h*(eps)`), so both tails keep their relative accuracy.
2. The loss is tilted by `e^(theta L)` before the FFT and back afterwards. Rounding in an FFT is relative to the whole
   mass; after tilting, the mass sits where delta(eps) is decided, so the error is relative to Chernoff's bound of delta
   and not to 1. All events are multiplied in the frequency domain: the order of composition cannot matter.
3. Folding: the FFT is cyclic, which only adds mass inside the window; mass above the window is bounded by Chernoff's
   inequality and charged. A loss beyond the grid of a single event counts as infinite.
4. The truth is also bounded from below. A chord moves a loss within its cell by xi with `E[e^-xi] = 1`, so `E[xi] <=
   d^2 / 8` and, by Hoeffding, the composed losses differ by more than `t = k d^2 / 8 + d sqrt(k ln(1/beta) / 2)` with
   probability at most beta. Hence `delta(eps - t) >= delta_upper(eps) - beta`.

Float error is charged too: `FFT_ERROR` times log2 N times sqrt(N) times the number of runs, relative to the tilted mass
(the usual 2-norm bound of the FFT, times a safety factor), and a relative `MARGIN` for the profiles themselves.

Guarantees:
    - delta is never below the delta of the composed pairs
    - delta_lower is never above it
    - composition of pairs with all losses on one grid is exact to the margin
    - mass and infinite mass are one; what fails for certain stays in delta at any epsilon
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from silobayes.privacy.accounting import gaussian

Profile = Callable[[np.ndarray], np.ndarray]

MARGIN = 1e-7
"""Relative margin on delta for rounding in profiles and their second differences."""
FFT_ERROR = 16.0 * 2.0**-53
TAIL = 1e-28
"""Probability beyond which the loss of one run counts as infinite; deltas are >= 1e-15."""
WINDOW_TAIL = 1e-11
"""Tilted probability left outside the window; it is charged."""

_LADDER = np.exp2(np.arange(-16.0, 24.0))
_RESOLUTION = 0.01
_SHARE = 5e-5
_FAR = 1e5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two laws by their profiles on eps >= 0; `backward` is None when both directions are the same.

    `atom`: losses have atoms at multiples of this, so the grid should contain it. `exact`: there are no other losses.
    """

    forward: Profile
    backward: Profile | None = None
    atom: float | None = None
    exact: bool = False

    def swapped(self) -> "Pair":
        """The pair (Q, P)."""
        if self.backward is None:
            return self
        return Pair(forward=self.backward, backward=self.forward, atom=self.atom, exact=self.exact)


class Closeness(Protocol):
    """Noise S replaced by noise G: S <= e^a G + e^log_beta and G <= e^b S + e^log_beta' on every set."""

    @property
    def exceptional(self) -> bool:
        """Whether the exceptional sets are needed at all."""
        ...

    def log_factors(self, runs: int, log_beta: float, log_beta_back: float) -> tuple[float, float]:
        """(a, b) for `runs` runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The price of one run: a Gaussian of shift `mu`, a `pair`, the chance of a cut batch, and replaced noise.

    `lower` is a rule that real neighbours attain, for mechanisms whose priced pair is only an upper bound.
    """

    mu: float = 0.0
    pair: Pair | None = None
    overflow: float = 0.0
    closeness: Closeness | None = None
    lower: "Rule | None" = None


@dataclass(frozen=True, kw_only=True)
class Losses:
    """A discrete loss under P: `losses` ascending, `probs` >= 0, and the probability of an infinite loss."""

    losses: np.ndarray
    probs: np.ndarray
    infinite: float

    def profile(self, epsilon: np.ndarray) -> np.ndarray:
        """Hockey-stick divergence at every epsilon >= 0."""
        reference = float(self.losses[-1])
        above = np.cumsum(self.probs[::-1])[::-1]
        # E[e^-L; L > eps] relative to the largest loss, so that nothing under- or overflows on the way down.
        scaled = np.cumsum((self.probs * np.exp(np.minimum(reference - self.losses, 700.0)))[::-1])[::-1]
        index = np.searchsorted(self.losses, epsilon, side="right")
        above, scaled = np.append(above, 0.0), np.append(scaled, 0.0)
        return self.infinite + np.maximum(
            0.0, above[index] - np.exp(np.minimum(epsilon - reference, 0.0)) * scaled[index]
        )


def connect_dots(pair: Pair, grid: np.ndarray) -> Losses:
    """The pessimistic loss on `-grid[1:]`, 0 and `grid[1:]` (grid[0] = 0); the last grid point closes both tails.

    Negative masses, which appear when a profile is an upper bound that is not convex, are dropped: that only adds.
    """
    h = pair.forward(grid)
    h_back = h if pair.backward is None else pair.backward(grid)
    steps = np.diff(grid)
    right = _one_sided(h, steps)
    left = right if pair.backward is None else _one_sided(h_back, steps)
    zero = 1.0 - ((h[0] - h[1]) + (math.exp(steps[0]) * h[0] - h_back[1])) / math.expm1(steps[0])
    probs = np.concatenate([(np.exp(-grid[1:]) * left)[::-1], [max(0.0, zero)], right])
    return Losses(losses=np.concatenate([-grid[:0:-1], grid]), probs=probs, infinite=float(max(h[-1], 0.0)))


def _one_sided(h: np.ndarray, steps: np.ndarray) -> np.ndarray:
    drops = h[:-1] - h[1:]
    probs = drops / -np.expm1(-steps)
    with np.errstate(over="ignore"):
        probs[:-1] -= drops[1:] / np.expm1(steps[1:])
    return np.maximum(probs, 0.0)


def reach(pair: Pair) -> float:
    """A loss that either law exceeds (finitely) with probability about `TAIL` at most."""
    ladder = np.geomspace(1e-9, _FAR, 700)
    top = ladder[0]
    for profile in (pair.forward, pair.backward):
        if profile is not None:
            values = profile(ladder)
            top = max(top, ladder[np.argmax(values - values[-1] <= TAIL)])
    return float(top)


@dataclass(kw_only=True)
class _Part:
    """One kind of run on the common grid: bins `low`, `low + 1`, ..., repeated `count` times."""

    low: int
    probs: np.ndarray
    infinite: float
    moved: float
    count: int
    chord: bool


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The tilted law on bins `low`, `low + 1`, ...: sums over all higher bins of mass times e^(-rate (bin - low))."""

    low: int
    slow: np.ndarray
    fast: np.ndarray
    log_mgf: float
    error: float


@dataclass(kw_only=True)
class Direction:
    """All runs composed in one direction; windows are computed once for every tilt that is asked for."""

    spacing: float
    parts: list[_Part]
    rough: list[tuple[Losses, int]]
    scale: float
    windows: dict[float, _Window] = field(default_factory=dict)

    def delta(self, epsilon: float) -> float:
        """Upper bound of the composed hockey-stick divergence at `epsilon` >= 0."""
        finite, error = self._finite(epsilon)
        return min(1.0, (finite + error + self.infinite) * (1.0 + MARGIN))

    @property
    def infinite(self) -> float:
        """Upper bound of the probability that some run has an infinite loss."""
        return math.fsum(part.count * part.infinite for part in self.parts)

    def delta_lower(self, epsilon: float, share: float = 1e-3) -> float:
        """Lower bound at `epsilon`, by Hoeffding's inequality as in the module's docstring."""
        runs = sum(part.count for part in self.parts if part.chord)
        scale = max(self.delta(epsilon), 1e-300)
        beta = share * scale
        shift = 0.0
        if runs:
            d = self.spacing
            shift = runs * d * d / 8.0 + d * math.sqrt(runs * math.log(1.0 / beta) / 2.0)
        else:
            beta = 0.0
        finite, error = self._finite(epsilon + shift)
        moved = sum(part.count * part.moved for part in self.parts)
        sure = -math.expm1(sum(part.count * math.log1p(-min(part.infinite, 1.0 - 1e-16)) for part in self.parts))
        return max(0.0, (finite - error + sure) * (1.0 - MARGIN) - beta - moved)

    def rough_epsilon(self, delta: float) -> float:
        """Chernoff's estimate of the composed epsilon: where a search starts."""
        return max(0.0, float(np.min((self._ladder_log_mgf + self._peaks - math.log(delta)) / _LADDER)))

    def _finite(self, epsilon: float) -> tuple[float, float]:
        if epsilon >= self._top:
            return 0.0, 0.0
        theta = self._tilt(epsilon)
        window = self.windows.get(theta)
        if window is None:
            window = self.windows[theta] = self._compose(theta)
        bin_index = min(max(math.floor(epsilon / self.spacing) + 1 - window.low, 0), len(window.slow) - 1)
        over = window.low * self.spacing - epsilon
        log_chernoff = window.log_mgf - theta * epsilon
        if log_chernoff - theta * over > 600.0:
            # The sums below would have lost more than e^-100 by underflow: no statement in either direction.
            return 0.0, math.inf
        slow = math.exp(log_chernoff - theta * over) * float(window.slow[bin_index])
        fast = math.exp(min(log_chernoff - (theta + 1.0) * over, 700.0)) * float(window.fast[bin_index])
        return max(0.0, slow - fast), math.exp(min(log_chernoff + _log_peak(theta), 700.0)) * window.error

    def _rough_log_mgf(self, theta: np.ndarray) -> np.ndarray:
        return sum((count * _log_mgf(losses.losses, losses.probs, theta) for losses, count in self.rough), np.zeros(1))

    def _tilt(self, epsilon: float) -> float:
        bounds = self._ladder_log_mgf + self._peaks - _LADDER * epsilon
        # 16 standard deviations reach any delta that is priced; beyond, the sums over a window would underflow.
        bounds[_LADDER * self.scale > 16.0] = math.inf
        # The smallest tilt within e^3 of the best: laws with rare large losses spread wide when tilted more.
        return float(_LADDER[int(np.argmax(bounds <= bounds.min() + 3.0))])

    def __post_init__(self) -> None:
        self._ladder_log_mgf = self._rough_log_mgf(_LADDER)
        self._top = sum((part.low + len(part.probs) - 1) * part.count for part in self.parts) * self.spacing
        self._peaks = np.array([_log_peak(theta) for theta in _LADDER])

    def _fine_log_mgf(self, theta: float) -> float:
        total = 0.0
        for part in self.parts:
            losses = (part.low + np.arange(len(part.probs))) * self.spacing
            total += part.count * float(_log_mgf(losses, part.probs, np.array([theta]))[0])
        return total

    def _compose(self, theta: float) -> _Window:
        from scipy import fft

        log_mgf = self._fine_log_mgf(theta)
        low, high, outside = self._range(theta, log_mgf)
        size = int(fft.next_fast_len(high - low + 1, real=True) or 1)
        product, shift, runs = np.ones(size // 2 + 1, dtype=complex), 0, 0
        for part in self.parts:
            losses = (part.low + np.arange(len(part.probs))) * self.spacing
            one = _log_mgf(losses, part.probs, np.array([theta]))[0]
            with np.errstate(divide="ignore"):
                tilted = np.exp(np.log(part.probs) + theta * losses - one)
            product *= np.asarray(fft.rfft(_fold(tilted, size))) ** part.count
            shift += part.low * part.count
            runs += part.count
        cyclic = np.asarray(fft.irfft(product, size))
        tilted = np.maximum(np.roll(cyclic, -((low - shift) % size)), 0.0)
        rounding = FFT_ERROR * math.log2(size + 1) * math.sqrt(size) * runs
        heights = np.arange(size) * self.spacing
        slow, fast = (_suffix_sums(tilted * np.exp(-rate * heights)) for rate in (theta, theta + 1.0))
        return _Window(low=low, slow=slow, fast=fast, log_mgf=log_mgf, error=outside + rounding)

    def _range(self, theta: float, log_mgf: float) -> tuple[int, int, float]:
        """Bins that hold the tilted law but for `WINDOW_TAIL` on each side, by Chernoff's inequality."""
        steps = np.geomspace(1e-3, 60.0, 60) / self.scale
        here, log_tail = float(self._rough_log_mgf(np.array([theta]))[0]), -math.log(WINDOW_TAIL)
        ups = (self._rough_log_mgf(theta + steps) - here + log_tail) / steps
        downs = (here - self._rough_log_mgf(theta - steps) - log_tail) / steps
        up, down = float(steps[np.nanargmin(ups)]), float(steps[np.nanargmax(downs)])
        high = (self._fine_log_mgf(theta + up) - log_mgf + log_tail) / up
        low = (log_mgf - self._fine_log_mgf(theta - down) - log_tail) / down
        bottom = sum(part.low * part.count for part in self.parts)
        top = sum((part.low + len(part.probs) - 1) * part.count for part in self.parts)
        first = max(math.floor(low / self.spacing) - 1, bottom)
        last = min(math.ceil(high / self.spacing) + 1, top)
        return first, max(last, first), 2.0 * WINDOW_TAIL


def _log_peak(theta: float) -> float:
    """Ln max_x e^(-theta x) (1 - e^-x): what one unit of tilted mass can add to delta."""
    return theta * math.log(theta) - (1.0 + theta) * math.log1p(theta)


def _log_mgf(losses: np.ndarray, probs: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Ln sum p e^(theta L), one number for every theta."""
    keep = probs > 0.0
    exponents = np.log(probs[keep])[None, :] + theta[:, None] * losses[keep][None, :]
    top = exponents.max(axis=1)
    return top + np.log(np.exp(exponents - top[:, None]).sum(axis=1))


def _suffix_sums(values: np.ndarray) -> np.ndarray:
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def _fold(values: np.ndarray, size: int) -> np.ndarray:
    if len(values) <= size:
        return np.pad(values, (0, size - len(values)))
    padded = np.pad(values, (0, -len(values) % size))
    return padded.reshape(-1, size).sum(axis=0)


def directions(pairs: Sequence[tuple[Pair, int]], *, max_bins: int = 2**18) -> list[Direction]:
    """Compose `(pair, count)` on one grid: two directions, or one if all pairs are symmetric."""
    turned = [pairs]
    if any(pair.backward is not None for pair, _ in pairs):
        turned.append([(pair.swapped(), count) for pair, count in pairs])
    reaches = [reach(pair) for pair, _ in pairs]
    roughs = [[(_rough(pair, top), count) for (pair, count), top in zip(way, reaches, strict=True)] for way in turned]
    variance = max(sum(count * _variance(losses) for losses, count in rough) for rough in roughs)
    spacing = _spacing(pairs, reaches, variance, max_bins)
    return [
        Direction(
            spacing=spacing,
            parts=[_part(pair, count, top, spacing) for (pair, count), top in zip(way, reaches, strict=True)],
            rough=rough,
            scale=math.sqrt(variance),
        )
        for way, rough in zip(turned, roughs, strict=True)
    ]


def _rough(pair: Pair, top: float) -> Losses:
    return connect_dots(pair, np.concatenate([[0.0], np.geomspace(1e-7 * top, 1.01 * top, 500)]))


def _variance(losses: Losses) -> float:
    mean = float(np.dot(losses.probs, losses.losses))
    return float(np.dot(losses.probs, (losses.losses - mean) ** 2)) + 1e-300


def _spacing(pairs: Sequence[tuple[Pair, int]], reaches: list[float], variance: float, max_bins: int) -> float:
    """Fine against the spread of one run, coarse enough for `max_bins`, and a divisor of the atoms if they agree."""
    atoms = {pair.atom for pair, _ in pairs if pair.atom is not None}
    coarsest = max(*reaches, 16.0 * math.sqrt(variance)) / max_bins
    if len(atoms) == 1 and all(pair.exact for pair, _ in pairs) and (atom := min(atoms)) >= coarsest:
        return atom / math.ceil(atom / 32.0)
    runs = sum(count for pair, count in pairs if not pair.exact) or sum(count for _, count in pairs)
    spacing = max(_RESOLUTION * math.sqrt(variance / runs), coarsest)
    if atoms and (atom := max(atoms)) >= spacing:
        spacing = atom / math.ceil(atom / spacing)
    return min(spacing, 32.0)


def _part(pair: Pair, count: int, top: float, spacing: float) -> _Part:
    bins = math.ceil(top / spacing) + 2
    grid = np.arange(bins + 1) * spacing
    losses = connect_dots(pair, grid)
    on_grid = pair.exact and pair.atom is not None and abs(pair.atom / spacing - round(pair.atom / spacing)) < 1e-9
    # Mass that left its cell (towards infinity, or up to the lowest bin): only the lower bound cares.
    last = np.array([grid[-2], _FAR])
    ends = pair.forward(last), (pair.forward if pair.backward is None else pair.backward)(last)
    moved = sum(float(end[0] - end[1]) for end in ends) / -math.expm1(-spacing)
    return _Part(low=-bins, probs=losses.probs, infinite=losses.infinite, moved=moved, count=count, chord=not on_grid)


class Total:
    """All events of a budget: Gaussians in closed form, pairs by FFT, then replaced noise and cut batches.

    Replaced noise (proof in grid.py) costs `e^a delta(eps - a - b) + beta + e^(eps - b) beta'`; we take beta and
    e^eps beta' = `_SHARE` of delta each. A cut batch costs `(1 + e^eps) p` for each draw; because the true delta falls
    with epsilon, the bound at any smaller epsilon holds too, and the best one is taken.
    """

    def __init__(self, rules: Sequence[tuple[Rule, int]], *, max_bins: int = 2**18) -> None:
        self._rules, self._max_bins = rules, max_bins
        self._upper = _Core(rules, max_bins=max_bins)
        self._overflow = math.fsum(count * one.overflow for one, count in rules)

    @cached_property
    def _lower(self) -> "_Core":
        """Composed when it is asked for: a calibration never does."""
        if all(one.lower is None for one, _ in self._rules):
            return self._upper
        return _Core([(one.lower or one, count) for one, count in self._rules], max_bins=self._max_bins)

    def delta(self, epsilon: float) -> float:
        """Upper bound of delta at `epsilon` >= 0."""
        value = self._ideal(epsilon)
        if self._overflow == 0.0:
            return value
        # Beyond -ln p the charge for cut batches is 1, a plateau on which a search would lose its way.
        best, low, high = self._with_overflow(epsilon, value), 0.0, min(epsilon, -math.log(self._overflow))
        if self._overflow * math.exp(min(epsilon, 700.0)) < 1e-3 * value:
            return best
        for _ in range(32):
            third = (high - low) / 3.0
            left, right = (self._with_overflow(x, self._ideal(x)) for x in (low + third, high - third))
            low, high = (low, high - third) if left < right else (low + third, high)
            best = min(best, left, right)
        return best

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon found with `delta(epsilon) <= delta`, to 1e-10; inf if none."""
        if self._upper.infinite > delta:
            return math.inf
        start = self._upper.rough_epsilon(delta) * (1.0 + 1e-3) + 1e-6
        return gaussian.solve(self.delta, delta, start=start, tolerance=self._upper.tolerance)[1]

    def epsilon_lower(self, delta: float) -> float:
        """An epsilon that the lower rules certainly cost."""
        if self._lower.infinite > delta and self._lower.sure > delta * (1.0 + MARGIN):
            return _FAR
        start = self._lower.rough_epsilon(delta) * (1.0 + 1e-3) + 1e-6
        return gaussian.solve(self._delta_lower, delta, start=start, tolerance=self._lower.tolerance)[0]

    def _with_overflow(self, epsilon: float, ideal: float) -> float:
        return min(1.0, ideal + (1.0 + math.exp(min(epsilon, 700.0))) * self._overflow)

    def _ideal(self, epsilon: float) -> float:
        core = self._upper
        value = core.delta(epsilon)
        if not core.closenesses or value >= 1.0:
            return value
        beta = _SHARE * max(value, 1e-20) if core.exceptional else 0.0
        log_beta = math.log(beta) if beta else -math.inf
        a, b = core.log_factors(log_beta, log_beta - epsilon)
        if not a <= 600.0:
            return 1.0
        return min(1.0, math.exp(a) * core.delta(epsilon - a - b) + 2.0 * beta)

    def _delta_lower(self, epsilon: float) -> float:
        core = self._lower
        cut = (1.0 + math.exp(min(epsilon, 700.0))) * self._overflow
        if not core.closenesses:
            return core.delta_lower(epsilon) - cut
        # The same inequality with the roles of the two noises exchanged, solved for the true delta.
        beta = _SHARE * max(core.delta(epsilon), 1e-20) if core.exceptional else 0.0
        log_beta = math.log(beta) if beta else -math.inf
        a, b = core.log_factors(log_beta - epsilon - 1.0, log_beta)
        if not b <= 1.0:
            return 0.0
        return math.exp(-b) * (core.delta_lower(epsilon + a + b) - 2.0 * beta) - cut


class _Core:
    """Gaussians and pairs composed, without the corrections of `Total`."""

    def __init__(self, rules: Sequence[tuple[Rule, int]], *, max_bins: int) -> None:
        self._mu = math.sqrt(math.fsum(count * one.mu * one.mu for one, count in rules))
        pairs = [(one.pair, count) for one, count in rules if one.pair is not None]
        if pairs and self._mu > 0.0:
            mu = self._mu
            pairs.append((Pair(forward=lambda epsilon: gaussian.delta(mu, epsilon)), 1))
        self.closenesses = [(one.closeness, count) for one, count in rules if one.closeness is not None]
        # A single run needs no composition: its profile is the answer.
        self._single = pairs[0][0] if sum(count for _, count in pairs) == 1 else None
        self._ways = directions(pairs, max_bins=max_bins) if pairs and self._single is None else []
        self._margin = gaussian.MARGIN if self._single is None else MARGIN
        self.tolerance = 1e-10 if self._ways else 1e-13

    @property
    def infinite(self) -> float:
        """Upper bound of the probability of an infinite loss."""
        if self._single is not None:
            return self._run(_FAR)
        return max((way.infinite for way in self._ways), default=0.0)

    @property
    def sure(self) -> float:
        """Lower bound of the same."""
        if self._single is not None:
            return self._run(_FAR)
        return max((way.delta_lower(_FAR) for way in self._ways), default=0.0)

    @property
    def exceptional(self) -> bool:
        return any(close.exceptional for close, _ in self.closenesses)

    def log_factors(self, log_beta: float, log_beta_back: float) -> tuple[float, float]:
        share = math.log(len(self.closenesses))
        factors = [close.log_factors(runs, log_beta - share, log_beta_back - share) for close, runs in self.closenesses]
        return math.fsum(a for a, _ in factors), math.fsum(b for _, b in factors)

    def delta(self, epsilon: float) -> float:
        if epsilon < 0.0:
            return min(1.0, self.delta(0.0) - math.expm1(epsilon))
        if not self._ways:
            return min(1.0, self._run(epsilon) * (1.0 + self._margin))
        return max(way.delta(epsilon) for way in self._ways)

    def delta_lower(self, epsilon: float) -> float:
        if not self._ways:
            return self._run(epsilon) * (1.0 - self._margin)
        return max(way.delta_lower(epsilon) for way in self._ways)

    def rough_epsilon(self, delta: float) -> float:
        if self._single is not None:
            return reach(self._single) / 2.0
        if not self._ways:
            return self._mu**2 / 2.0 + 6.0 * self._mu
        return max(way.rough_epsilon(delta) for way in self._ways)

    def _run(self, epsilon: float) -> float:
        """The profile where nothing needs an FFT: one Gaussian, or one run of one pair."""
        point = np.array([epsilon])
        if self._single is None:
            # Beyond, epsilon is millions and squares overflow.
            if not self._mu <= 1e4:
                return 1.0
            return float(gaussian.delta(self._mu, point)[0])
        profiles = (self._single.forward, self._single.backward)
        return max(float(profile(point)[0]) for profile in profiles if profile is not None)
