"""How often intervals hold the truth, from many posteriors of which the truth is known.

Where the truth is drawn from the prior, an exact posterior puts it anywhere with equal probability: its position (the
probability below it) is uniform, so a central interval of probability L covers it with frequency L, and its ranks fill
a flat histogram (simulation-based calibration: Talts et al. 2018, section 4). Where the truth is one point, the same
frequencies are those of repeated studies.

Guarantees:
    Exact posteriors cover as often as they claim.
    Standard errors count repetitions, not parameters: those of one repetition are not independent.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from silobayes.studies.method import Intervals

LEVELS = (0.5, 0.8, 0.95)
# What counts as honest at 95 %: closer than this, or than so many standard errors.
TOLERANCE, ERRORS = 0.02, 3.0
# Where so many standard errors are more than this, nothing can be said.
_WIDEST = 0.05
_CLIPPED = 0.01
_ALMOST_PRIOR = 0.9


class Verdict(StrEnum):
    """What the coverage at 95 % says."""

    HONEST = "honest"
    TOO_NARROW = "too narrow"
    TOO_WIDE = "too wide"
    UNCLEAR = "unclear"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A frequency with its Monte-Carlo standard error."""

    value: float
    error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where truths lie in posteriors: arrays of (repetitions, parameters).

    Attributes:
        positions: The posterior probability of less than the truth.
        stddevs: Posterior standard deviations.
        errors: Posterior mean minus truth.
    """

    positions: np.ndarray = field(repr=False)
    stddevs: np.ndarray = field(repr=False)
    errors: np.ndarray = field(repr=False)

    def covered(self, level: float) -> np.ndarray:
        """Whether the central interval of this probability holds the truth."""
        return np.abs(self.positions - 0.5) <= level / 2

    def coverage(self, level: float) -> Share:
        """Over all parameters; never surer than if honest intervals of independent parameters had been counted."""
        each = self.covered(level).mean(axis=1)
        least = level * (1 - level) / self.positions.shape[1]
        variance = max(float(each.var(ddof=1)) if len(each) > 1 else 1.0, least)
        return Share(value=float(each.mean()), error=math.sqrt(variance / len(each)))

    def coverage_of_each(self, level: float) -> list[Share]:
        """Of each parameter; the error is that of a count with two more hits and misses (Agresti and Coull 1998)."""
        covered = self.covered(level)
        number = len(covered)
        shares = []
        for hits in covered.sum(axis=0):
            p = (hits + 2) / (number + 4)
            shares.append(Share(value=float(hits / number), error=math.sqrt(p * (1 - p) / (number + 4))))
        return shares

    def ranks(self, bins: int) -> np.ndarray:
        """(parameters, bins) how many truths fell into each of `bins` equal parts of the posterior."""
        return np.stack([np.bincount(own, minlength=bins) for own in self._parts(bins).T])

    def ranks_error(self, bins: int) -> float:
        """Of a bin of all parameters together; repetitions are independent, parameters of one need not be."""
        of_each = np.stack([np.bincount(own, minlength=bins) for own in self._parts(bins)])
        return math.sqrt(len(of_each) * float(of_each.var(axis=0).mean()))

    def _parts(self, bins: int) -> np.ndarray:
        return np.minimum((self.positions * bins).astype(int), bins - 1)

    def to_json(self) -> dict[str, Any]:
        """Of all parameters together."""
        return {"coverage": {f"{level:g}": vars(self.coverage(level)) for level in LEVELS}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What a study would say of truths that are known.

    Attributes:
        study: Its name.
        study_hash: Of its canonical form.
        method: `kind/privatise`.
        is_private: Whether the study is.
        intervals: What the method says of its intervals.
        is_mean_field: Whether posteriors ignore how parameters depend on each other.
        names: Of the parameters.
        places: Of the study's posteriors.
        exact: Of the posteriors of the same rows without privacy, where they are cheap.
        prior_stddev: Of each parameter, or None where the prior is not Gaussian.
        truths: (repetitions, parameters).
        asked: How many repetitions were asked for.
        failures: Why repetitions ended without a posterior.
        warned: The share of posteriors that came with warnings.
        clipped: The share of drawn numbers that were moved into their declared range.
        dealt_evenly: In how many repetitions classes could not be dealt as [silos] says.
        facts: What else was chosen: sizes, seed, point, correlation; JSON-able.
        notes: What a reader should know.
    """

    study: str
    study_hash: str
    method: str
    is_private: bool
    intervals: Intervals
    is_mean_field: bool
    names: tuple[str, ...]
    places: Places
    exact: Places | None
    prior_stddev: float | None
    truths: np.ndarray = field(repr=False)
    asked: int
    failures: tuple[str, ...]
    warned: float
    clipped: float
    dealt_evenly: int
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Calibration({self.method}, {self.repetitions} repetitions)"

    @property
    def repetitions(self) -> int:
        """How many posteriors there are."""
        return len(self.places.positions)

    @property
    def num_bins(self) -> int:
        """Of the rank histograms."""
        return int(np.clip(self.repetitions // 20, 5, 20))

    @property
    def width_ratios(self) -> np.ndarray | None:
        """Of each parameter the median of its standard deviation over that without privacy."""
        return None if self.exact is None else np.median(self.places.stddevs / self.exact.stddevs, axis=0)

    @property
    def verdict(self) -> Verdict:
        """Honest where the coverage at 95 % is within .02 of it, or within three standard errors."""
        share = self.places.coverage(0.95)
        away, unsure = share.value - 0.95, ERRORS * share.error
        if abs(away) > max(TOLERANCE, unsure):
            return Verdict.TOO_WIDE if away > 0 else Verdict.TOO_NARROW
        return Verdict.HONEST if unsure <= _WIDEST else Verdict.UNCLEAR

    @property
    def sentence(self) -> str:
        """Whether the intervals can be believed, in one sentence."""
        share, verdict = self.places.coverage(0.95), self.verdict
        found = f"95 % intervals covered {100 * share.value:.1f} +- {100 * share.error:.1f} % of the truths: "
        if verdict is Verdict.UNCLEAR:
            return found + "too few repetitions to tell."
        if verdict is Verdict.HONEST:
            return found + "honest."
        if verdict is Verdict.TOO_WIDE:
            return found + "wider than they need to be."
        return found + ": ".join(["too narrow", *filter(None, ["; ".join(self._reasons)])]) + "."

    @property
    def _reasons(self) -> list[str]:
        """What is known to make intervals too narrow here."""
        reasons = []
        if self.is_private and self.intervals is not Intervals.HONEST:
            part = "" if self.intervals is Intervals.NO else "all of "
            reasons.append(f"they do not include {part}the privacy noise")
        if self.is_mean_field:
            reasons.append("they take parameters for independent")
        if self.clipped > _CLIPPED:
            reasons.append("numbers outside their declared range were moved into it")
        return reasons

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else a reader should know before they believe a number."""
        remarks = list(self.notes)
        if (made := self.repetitions + len(self.failures)) < self.asked:
            remarks.append(f"Stopped after {made} of {self.asked} repetitions.")
        if self.failures:
            number = len(self.failures)
            remarks.append(f"{number} of {self.asked} repetitions ended without a posterior, first: {self.failures[0]}")
        if self.clipped > _CLIPPED:
            remarks.append(
                f"{100 * self.clipped:.1f} % of the drawn numbers were outside their declared range and moved into it: "
                "either the range is tight, or the prior (or the point) expects more than it allows."
            )
        if self.dealt_evenly:
            remarks.append(
                f"In {self.dealt_evenly} repetitions the classes were too uneven to be dealt as [silos] says: rows "
                "were dealt evenly there."
            )
        if self.warned:
            remarks.append(f"{100 * self.warned:.0f} % of the posteriors came with warnings.")
        if self.exact is not None and not abs(self.exact.coverage(0.95).value - 0.95) <= max(
            TOLERANCE, ERRORS * self.exact.coverage(0.95).error
        ):
            remarks.append(
                f"Without privacy 95 % intervals covered {100 * self.exact.coverage(0.95).value:.1f} %: it is not only "
                f"the method.{' The prior may pull away from this point.' if self.facts.get('at') else ''}"
            )
        if self.prior_stddev is not None:
            kept = np.median(self.places.stddevs, axis=0) / self.prior_stddev
            if (number := int((kept > _ALMOST_PRIOR).sum())) > 0:
                remarks.append(
                    f"{number} of {len(self.names)} parameters stay about as wide as the prior: this design can tell "
                    "next to nothing about them."
                )
        return tuple(remarks)

    def to_json(self) -> dict[str, Any]:
        """One object for machines."""
        each = {level: self.places.coverage_of_each(level) for level in LEVELS}
        exact = None if self.exact is None else {level: self.exact.coverage_of_each(level) for level in LEVELS}
        ratios, ranks = self.width_ratios, self.places.ranks(self.num_bins)
        medians = np.median(self.places.stddevs, axis=0)
        rmse = np.sqrt(np.mean(self.places.errors**2, axis=0))
        parameters = []
        for k, name in enumerate(self.names):
            entry: dict[str, Any] = {
                "name": name,
                "coverage": {f"{level:g}": vars(each[level][k]) for level in LEVELS},
                "sd": float(medians[k]),
                "rmse": float(rmse[k]),
                "ranks": ranks[k].tolist(),
            }
            if exact is not None and ratios is not None:
                entry["without_privacy"] = {f"{level:g}": vars(exact[level][k]) for level in LEVELS}
                entry["width_ratio"] = float(ratios[k])
            parameters.append(entry)
        return {
            "study": self.study,
            "study_hash": self.study_hash,
            "method": self.method,
            "intervals": self.intervals.value,
            "repetitions": self.repetitions,
            "asked": self.asked,
            **self.facts,
            "verdict": self.verdict.value,
            "sentence": self.sentence,
            "remarks": list(self.remarks),
            **self.places.to_json(),
            "without_privacy": None if self.exact is None else self.exact.to_json(),
            "width_ratio": None if ratios is None else float(np.median(ratios)),
            "warned": self.warned,
            "clipped": self.clipped,
            "failed": len(self.failures),
            "ranks": ranks.sum(axis=0).tolist(),
            "parameters": parameters,
        }
