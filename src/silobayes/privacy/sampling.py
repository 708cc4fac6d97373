"""Samplers: who is in a batch. The sampler writes the event, so the price cannot disagree with what ran.

A sampler works on *slots*: `max_rows` is a public number, a silo fills the first slots with its rows and the rest
stay empty. So nothing a sampler does depends on the rows or on how many there are. Where the unit is a person, slots
are persons': all rows of a person are in a batch, or none is.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from scipy import stats

from silobayes.core.errors import InvalidInput, require_count, require_number
from silobayes.privacy.events import Sampling, Scheme

# A padded batch is this unlikely to overflow in one draw; the price adds (1 + e^epsilon) times this per draw to delta.
_OVERFLOW = 1e-20
# A loop is padded to what all its batches fit except this often; then it is padded to the capacity (and compiled anew).
_UNUSUAL = 1e-4


@lru_cache(maxsize=256)
def _size_exceeded(max_rows: int, sample_rate: float, probability: float) -> int:
    """The smallest size that a Poisson batch exceeds with at most this probability."""
    # By bisection on the tail itself: SciPy's inverse gives up long before 1e-20.
    fits = range(max_rows + 1)
    return bisect_left(fits, True, key=lambda size: float(stats.binom.sf(size, max_rows, sample_rate)) <= probability)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Slots of one draw and the law they were drawn from; a slot at or above a silo's row count is empty."""

    indices: np.ndarray = field(repr=False)
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class PoissonSampler:
    """Each slot is in the batch with probability `sample_rate`, independently, afresh at each draw.

    Batches are padded to `capacity`, so that compiled loops see one shape; a draw that does not fit is cut, and the
    probability of that is charged to delta.

    Guarantees:
        - a batch is whole up to its capacity and cut there
        - what is charged is the chance that a batch is cut
    """

    sample_rate: float
    max_rows: int

    def __post_init__(self) -> None:
        require_number("sample_rate", self.sample_rate, above=0.0, at_most=1.0, fix="Pass batch size / rows.")
        require_count("max_rows", self.max_rows, at_least=1, fix="Pass the public bound on the rows of a silo.")

    @cached_property
    def capacity(self) -> int:
        """The smallest padded size whose overflow probability is at most 1e-20."""
        return _size_exceeded(self.max_rows, self.sample_rate, _OVERFLOW)

    def usual_size(self, num_draws: int) -> int:
        """A size that all of `num_draws` batches fit, but for once in ten thousand times: shorter than `capacity`."""
        return min(self.capacity, _size_exceeded(self.max_rows, self.sample_rate, _UNUSUAL / num_draws))

    @cached_property
    def sampling(self) -> Sampling:
        """The law of one draw."""
        overflow = float(stats.binom.sf(self.capacity, self.max_rows, self.sample_rate)) * (1.0 + 1e-6)
        return Sampling(scheme=Scheme.POISSON, rate=self.sample_rate, overflow=overflow)


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler:
    """A uniform subset of `batch_size` slots, afresh at each draw (priced for substitution only)."""

    batch_size: int
    max_rows: int

    def __post_init__(self) -> None:
        require_count("max_rows", self.max_rows, at_least=1, fix="Pass the number of rows.")
        require_count("batch_size", self.batch_size, at_least=1, fix="Pass the rows of one batch.")
        if self.batch_size > self.max_rows:
            raise InvalidInput("batch_size", f"at most {self.max_rows} rows", self.batch_size, "Pass a smaller batch.")

    @property
    def capacity(self) -> int:
        """The size of every batch."""
        return self.batch_size

    def usual_size(self, num_draws: int) -> int:
        """The size of every batch."""
        return self.batch_size

    @property
    def sampling(self) -> Sampling:
        """The law of one draw."""
        return Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=self.batch_size / self.max_rows)


Sampler = PoissonSampler | FixedSizeSampler
