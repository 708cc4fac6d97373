"""Goodness-of-fit tests with one written false-alarm rate, and streams whose words are chosen by the test."""

from collections.abc import Iterable

import numpy as np
from scipy import stats

from silobayes.privacy.entropy import Entropy

FALSE_ALARM = 1e-6
"""The keys are fixed, so a right sampler passes for ever; this is the probability that it failed when first written."""


def chi_square(observed, expected) -> float:
    """P-value of the counts `observed` under the expected counts; cells below 10 expected are pooled with the next."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert abs(observed.sum() - expected.sum()) < 1e-6 * observed.sum()
    cells = []
    seen = awaited = 0.0
    for o, e in zip(observed, expected, strict=True):
        seen, awaited = seen + o, awaited + e
        if awaited >= 10:
            cells.append((seen, awaited))
            seen = awaited = 0.0
    if awaited:
        last = cells.pop()
        cells.append((last[0] + seen, last[1] + awaited))
    o, e = np.array(cells).T
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), len(cells) - 1))


def fits_pmf(draws, pmf) -> bool:
    """Whether integer draws fit `pmf`, an array over -k..k that holds all but a negligible part of the mass."""
    pmf = np.asarray(pmf, float) / np.sum(pmf)
    k = len(pmf) // 2
    inside = np.clip(draws, -k, k) + k
    return chi_square(np.bincount(inside, minlength=len(pmf)), pmf * draws.size) > FALSE_ALARM


def fits_uniform(draws, categories: int) -> bool:
    counts = np.bincount(np.asarray(draws).astype(np.int64), minlength=categories)
    return chi_square(counts, np.full(categories, np.asarray(draws).size / categories)) > FALSE_ALARM


def fits_cdf(draws, cdf) -> bool:
    return float(stats.kstest(np.asarray(draws, float), cdf).pvalue) > FALSE_ALARM


class ScriptedEntropy(Entropy):
    """A stream that yields the given 64-bit words first; uint64 and everything built on it."""

    def __init__(self, words: Iterable[int]) -> None:
        super().__init__(fixed_key=bytes(32))
        self.words = list(words)

    def uint64(self, size):
        fixed = np.zeros(size, dtype=np.uint64)
        flat = fixed.reshape(-1)
        head, self.words = self.words[: flat.size], self.words[flat.size :]
        flat[: len(head)] = np.array(head, dtype=np.uint64)
        if len(head) < flat.size:
            flat[len(head) :] = super().uint64(flat.size - len(head))
        return fixed
