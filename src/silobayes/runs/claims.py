"""What a certificate says in words, as it follows from the study and from what was charged.

Whoever writes a certificate and whoever checks one derive its words here. The name of a run's account is in the
ledger's hash chain, so it says what a certificate could otherwise hide: which study was run, and whether its noise was
noise.

Guarantees:
    The account of a run with fixed noise is never that of a private one.
    Accounts of different runs or studies have different names.
"""

from collections.abc import Iterable

from silobayes.privacy.events import AbstractEvent, DiscreteGaussianEvent, GaussianEvent, SkellamEvent
from silobayes.studies.method import Intervals

ACCOUNTANT = "pld"
FROM_SYSTEM, FROM_SEED = "operating system", "fixed seed"
"""Where the noise of a run comes from, as its directory says."""
NO_PRIVACY = "NOT PRIVATE: the study has no privacy"
FIXED_NOISE = "NOT PRIVATE: the noise comes from a fixed seed"
INTERVALS_PAGE = "docs/honest-intervals.md"
"""Says what the word on intervals means."""
_MARK = "NOT PRIVATE"
_INTERVALS = {
    Intervals.HONEST: "they include the privacy noise",
    Intervals.PARTLY: "they include a part of the privacy noise only, and cover less than they claim",
    Intervals.NO: "they do not include the privacy noise, and cover less than they claim",
}
_NOISE: dict[type[AbstractEvent], str] = {
    DiscreteGaussianEvent: "discrete Gaussian on a grid",
    SkellamEvent: "Skellam on a grid, in shares of the silos",
    GaussianEvent: "float32 Gaussian inside a compiled loop",
}


def account_name(study: str, study_hash: str, run_id: str, *, is_private: bool) -> str:
    """The account of a run in every ledger that pays for it; a ledger takes names of up to 200 characters."""
    name = f"{study[:140]} {study_hash[:16]} {run_id}"
    return name if is_private else f"{name} {_MARK}"


def earlier_account_name(study: str, run_id: str) -> str:
    """The same in runs of earlier versions, whatever their noise was."""
    return f"{study[:150]} {run_id}"


def noise_in_words(events: Iterable[AbstractEvent]) -> str:
    """The kinds of noise that `events` paid for."""
    kinds = {type(event) for event in events}
    return ", and ".join(sorted(_NOISE.get(kind, kind.mechanism) for kind in kinds))


def intervals_in_words(intervals: Intervals) -> str:
    """What those of a private posterior include, in a line."""
    return f"Intervals: {intervals.value}: {_INTERVALS[intervals]}. See {INTERVALS_PAGE}."


def sampler_of(events: Iterable[AbstractEvent]) -> str | None:
    """How batches were drawn, None where there were none."""
    samplings = [getattr(event, "sampling", None) for event in events]
    schemes = {sampling.scheme.value for sampling in samplings if sampling is not None}
    return ", and ".join(sorted(schemes)) or None
