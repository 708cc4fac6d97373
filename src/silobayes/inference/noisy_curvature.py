"""What a noisy curvature says: shrunk towards a public guess, told by products, positive (UNCERTAINTY, "Server").

A curvature J was released with noise of a known law, independent in each entry of its packed triangle. Three steps:

1. `shrink`: entries of J minus a guess are normal with variance tau^2 spread^2, tau^2 by moments over all entries; each
   is pulled back by as much as the noise explains. The guess is the public one, T0, with the directions in which J
   stands out of the noise (`_standing_out`): where columns go together, T0 is wrong in one direction by much and in all
   others by the same.
2. `condition`: products J u were released too, far more exactly along u than J itself. J is conditioned on them, as on
   linear measurements of normal entries.
3. `positive`: eigenvalues relative to T0 are positive; each one's law given the noise is a normal, cut off at zero. A
   coefficient's variance is no linear function of it: the eigenvalue kept is the one whose variance is the average over
   that law, so that a direction that noise hides is wide and not merely weak. Known null directions stay null.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy import special

# Of the entries' spread: how far J may be from the guess where products know better than its own noise lets see.
_SLACK = 0.2
# Of a typical variance: what keeps matrices invertible where there is next to no noise.
NOTHING = 1e-12
_ITERATIONS = 20
_LEAST_TAU, _LARGEST_TAU = 1e-4, 4.0
# Relative to the guess: eigenvalues below do not count, of the guess itself or of J.
_NULL = 1e-9
_FLOORS = (0.0005, 0.02)
# Beyond the edge of the noise, and the least eigenvalue of a guess.
_CLEARLY, _LEAST_VALUE = 1.1, 0.02
# Quantiles that stand for the law of an eigenvalue; beyond so many deviations from zero it is its centre.
_QUANTILES = (np.arange(100) + 0.5) / 100
_CERTAIN = 30.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Guess:
    """Public: T0, and how large entries of J - T0 may be, both for a curvature of trace 1."""

    matrix: np.ndarray = field(repr=False)
    spread: np.ndarray = field(repr=False)

    def of_trace(self, trace: float) -> "Guess":
        """The same for another trace."""
        return Guess(matrix=self.matrix * trace, spread=self.spread * trace)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curvature:
    """A curvature and the variance of each of its entries that noise leaves."""

    matrix: np.ndarray = field(repr=False)
    variance: np.ndarray = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """Released J u for columns u of `directions`; `variances` of the noise on each column of `values`."""

    directions: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)
    variances: np.ndarray = field(repr=False)

    def covariance(self, variance: np.ndarray) -> np.ndarray:
        """Of the products, one after the other, if entries of a symmetric matrix have such variances."""
        u, num = self.directions, self.directions.shape[1]
        dim = len(variance)
        beside = variance * (1.0 - np.eye(dim))
        whole = np.zeros((num, dim, num, dim))
        for a in range(num):
            for b in range(num):
                whole[a, :, b, :] = beside * np.outer(u[:, b], u[:, a]) + np.diag(variance @ (u[:, a] * u[:, b]))
            whole[a, :, a, :] += self.variances[a] * np.eye(dim)
        flat = whole.reshape(num * dim, num * dim)
        # Two products say the same in part: without noise they would leave nothing to divide by.
        return flat + NOTHING * float(np.mean(np.diag(flat))) * np.eye(num * dim)

    def told(self, variance: np.ndarray, along: np.ndarray) -> np.ndarray:
        """How much of the variance of a'Ja the products take away, for each column a of `along`."""
        u, diagonal = self.directions, np.diag(variance)
        parts = [
            2.0 * along * (variance @ (along * u[:, [j]])) - along**2 * (diagonal * u[:, j])[:, None]
            for j in range(u.shape[1])
        ]
        shared = np.concatenate(parts)
        return np.sum(shared * np.linalg.solve(self.covariance(variance), shared), axis=0)


def shrink(noisy: np.ndarray, packed_variance: float, guess: Guess) -> Curvature:
    """Entries pulled towards the guess; `packed_variance` is that of the noise on the packed triangle.

    A guess that has looked at J makes too little of what noise leaves, one that has not too much where it is wrong: the
    variance is their geometric mean.
    """
    public = _pulled(noisy, packed_variance, guess)
    better = _pulled(noisy, packed_variance, _standing_out(noisy, packed_variance, guess))
    return Curvature(matrix=better.matrix, variance=np.sqrt(public.variance * better.variance))


def _standing_out(noisy: np.ndarray, packed_variance: float, guess: Guess) -> Guess:
    """The guess with the directions that stand out of the noise, and what the trace leaves for all others.

    Eigenvalues of noise fill [-edge, edge] around a common value, `edge^2 = 2 d variance`. A direction that lifts one
    out of it by f has been lifted by sqrt(f^2 - edge^2) (spiked matrices).
    """
    into, out_of = _roots(guess.matrix)
    eigenvalues, rotation = np.linalg.eigh(into.T @ noisy @ into)
    back = out_of @ rotation
    traces = np.sum(back**2, axis=0)
    edge = np.sqrt(2.0 * packed_variance * len(eigenvalues)) * float(np.mean(np.sum(into**2, axis=0)))
    far = eigenvalues - np.median(eigenvalues)
    outside = np.abs(far) > _CLEARLY * edge
    lifted = np.median(eigenvalues) + np.sign(far) * np.sqrt(np.maximum(far**2 - edge**2, 0.0))
    values = np.where(outside, np.maximum(lifted, _LEAST_VALUE), 0.0)
    rest = (np.trace(guess.matrix) - values @ traces) / max(float(traces[~outside].sum()), 1e-300)
    values[~outside] = max(rest, _LEAST_VALUE)
    return Guess(matrix=(back * values) @ back.T, spread=guess.spread)


def _roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W and its inverse's transpose, with W' matrix W = I on its range."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > _NULL * values.max()
    return vectors[:, kept] / np.sqrt(values[kept]), vectors[:, kept] * np.sqrt(values[kept])


def _pulled(noisy: np.ndarray, packed_variance: float, guess: Guess) -> Curvature:
    """Each entry, by as much as the noise explains."""
    dim = len(noisy)
    noise = np.where(np.eye(dim) > 0, packed_variance, packed_variance / 2)
    distance = noisy - guess.matrix
    upper = np.triu_indices(dim)
    square, spread, known = distance[upper] ** 2, guess.spread[upper] ** 2, noise[upper]
    tau = 0.1
    for _ in range(_ITERATIONS):
        weights = spread / (tau * spread + known) ** 2
        tau = float(np.sum(weights * (square - known)) / max(np.sum(weights * spread), 1e-300))
        tau = min(max(tau, _LEAST_TAU), _LARGEST_TAU)
    signal = tau * guess.spread**2
    keep = signal / (signal + noise)
    return Curvature(matrix=guess.matrix + keep * distance, variance=keep * noise)


def condition(curvature: Curvature, products: Products, guess: Guess) -> np.ndarray:
    """The curvature, told what its products with some directions are."""
    variance = curvature.variance + (_SLACK * guess.spread) ** 2
    missing = (products.values - curvature.matrix @ products.directions).T.ravel()
    solved = np.linalg.solve(products.covariance(variance), missing).reshape(products.directions.shape[::-1])
    change = solved.T @ products.directions.T
    change = change + change.T
    change[np.diag_indices(len(change))] /= 2
    return curvature.matrix + variance * change


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What decides how much an eigenvalue of J matters: the noise on scores, and the prior.

    A score has covariance `rows_share` J + `noise_variance` I; `prior_covariance` is that of the coefficients.
    """

    noise_variance: float
    rows_share: float
    prior_covariance: np.ndarray = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Positive:
    """A curvature without negative directions, and how many of them noise hides (their eigenvalue within 2 sd of 0)."""

    matrix: np.ndarray = field(repr=False)
    num_hidden: int


def positive(
    matrix: np.ndarray, variance: np.ndarray, guess: Guess, scores: Scores, products: Products | None
) -> Positive:
    """`matrix` with its eigenvalues relative to the guess made positive; `variance` is that of its entries."""
    into, out_of = _roots(guess.matrix)
    eigenvalues, rotation = np.linalg.eigh(into.T @ matrix @ into)
    along, back = into @ rotation, out_of @ rotation
    entries = variance * (2.0 - np.eye(len(variance)))
    spread = np.sum(along**2 * (entries @ along**2), axis=0)
    if products is not None:
        spread = spread - products.told(variance, along)
    stddev = np.sqrt(np.maximum(spread, 1e-18))
    floor = float(np.clip(0.2 * np.median(stddev), *_FLOORS))
    laws = _above_zero(eigenvalues, stddev, floor)
    noise = np.sum(along**2, axis=0) * scores.noise_variance
    prior = np.einsum("ik,ij,jk->k", back, scores.prior_covariance, back)
    chosen = _of_average_variance(laws, noise, prior, scores.rows_share)
    chosen = np.maximum(chosen, floor)
    return Positive(matrix=(back * chosen) @ back.T, num_hidden=int(np.sum(eigenvalues < 2.0 * stddev)))


def _above_zero(centre: np.ndarray, stddev: np.ndarray, floor: float) -> np.ndarray:
    """Quantiles of normals that are cut off at zero, a row for each."""
    below = special.ndtr(-centre / stddev)[:, None]
    probability = np.clip(below + (1.0 - below) * _QUANTILES, 1e-15, 1.0 - 1e-15)
    drawn = centre[:, None] + stddev[:, None] * special.ndtri(probability)
    return np.maximum(np.where((centre > _CERTAIN * stddev)[:, None], centre[:, None], drawn), floor)


def _of_average_variance(laws: np.ndarray, noise: np.ndarray, prior: np.ndarray, rows_share: float) -> np.ndarray:
    """The eigenvalue e whose variance, 1 / (e^2 / (rows_share e + noise) + 1 / prior), is the average over its law."""
    information = laws**2 / (rows_share * laws + noise[:, None])
    average = np.mean(1.0 / (information + 1.0 / prior[:, None]), axis=1)
    needed = np.maximum(1.0 / average - 1.0 / prior, 0.0)
    linear = needed * rows_share
    return (linear + np.sqrt(linear**2 + 4.0 * needed * noise)) / 2.0
