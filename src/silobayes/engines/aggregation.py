"""How the messages of several silos become one sum: in the clear, or by a secure sum that shows nothing but its total.

Two kinds of messages. A *share* is a clipped sum with a part of the noise (`Door.share`): only the total over silos is
private, so it must pass through an aggregator. A message that is private already (or of a run without privacy) is
rounded to a fixed public grid; its sum is then the same with every aggregator, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from silobayes.models.base import GaussianEta
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door, release_sum
from silobayes.privacy.mechanisms import Release, SkellamMechanism
from silobayes.protocols.pvi import Upload
from silobayes.secure.fixed_point import Modulus, from_grid, modulus_for, to_grid
from silobayes.secure.fixed_point import largest_count as largest_count_of
from silobayes.secure.sums import AbstractSum, PairwiseMaskSum, PlainSum, SecretSharingSum
from silobayes.study import AggregationKind, AggregationSection

# Natural parameters beyond the range are pulled back to it: at a standard deviation of 1e-5 they would be.
_MESSAGE_GRID = 2.0**-16
_LARGEST_MESSAGE = 2.0**34


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregator:
    """Sums over the silos of one visit.

    Attributes:
        sums: The sum itself.
        num_shares: Of so many silos the noise alone is enough: M - T - 1 of M visited silos when T collude or drop out.

    Guarantees:
        - the total is the same with every kind of sum
        - what the sum contains is what was priced
    """

    sums: AbstractSum
    num_shares: int

    def mechanism(self, noise_multiplier: float) -> SkellamMechanism:
        """Each silo's part of the noise."""
        return SkellamMechanism(noise_multiplier=noise_multiplier, num_shares=self.num_shares)

    def release(
        self, doors: Sequence[Door], bounded: Sequence[Bounded], noise_multiplier: float, sum_index: int
    ) -> Release:
        """The noisy sum of the silos' clipped sums."""
        mechanism = self.mechanism(noise_multiplier)
        return release_sum(doors, mechanism, bounded, lambda counts: self._total(counts, sum_index))

    def rounded(self, ups: Upload[GaussianEta]) -> Upload[GaussianEta]:
        """Messages as `add_up` adds them."""
        return jax.tree.map(lambda leaf: from_grid(_counts(leaf), grid=_MESSAGE_GRID), ups)

    def add_up(self, ups: Upload[GaussianEta], sum_index: int) -> Upload[GaussianEta]:
        """The sum of messages that need no noise."""
        leaves, shape = jax.tree.flatten(ups)
        rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
        total = from_grid(self._total(_counts(rows), sum_index), grid=_MESSAGE_GRID)
        parts = np.split(total, np.cumsum([leaf[0].size for leaf in leaves])[:-1])
        return jax.tree.unflatten(shape, [p.reshape(leaf.shape[1:]) for p, leaf in zip(parts, leaves, strict=True)])

    def _total(self, counts: Sequence[np.ndarray] | np.ndarray, sum_index: int) -> np.ndarray:
        return self.sums.total(dict(enumerate(counts)), sum_index=sum_index)


def _counts(values: np.ndarray) -> np.ndarray:
    return to_grid(values, grid=_MESSAGE_GRID, largest=_LARGEST_MESSAGE)


def message_modulus(num_clients: int) -> Modulus:
    """Large enough for any sum of `add_up`."""
    largest = largest_count_of(grid=_MESSAGE_GRID, largest=_LARGEST_MESSAGE)
    return modulus_for(num_clients=num_clients, largest_count=largest, noise_stddev=0.0, dimension=1, num_sums=1)


def share_modulus(
    section: AggregationSection,
    empty: Bounded,
    noise_multiplier: float,
    *,
    num_clients: int,
    num_terms: int,
    num_sums: int,
) -> Modulus:
    """Large enough for `num_sums` sums of shares like `empty`, with up to `num_terms` clipped terms in each silo."""
    num_shares = section.num_shares(num_clients)
    return modulus_for(
        num_clients=num_clients,
        largest_count=num_terms * int(np.ceil(empty.norm / empty.grid)),
        # Every silo adds a share, so that the sum contains more noise than was priced.
        noise_stddev=noise_multiplier / empty.grid * float(np.sqrt(num_clients / num_shares)),
        dimension=empty.total.size,
        num_sums=num_sums,
    )


def aggregator(section: AggregationSection, modulus: Modulus, *, num_clients: int, study_hash: str) -> Aggregator:
    """The aggregator that a study describes, for visits of `num_clients` silos."""
    common = {"num_clients": num_clients, "colluding": section.num_colluding}
    identity = bytes.fromhex(study_hash)
    if section.kind is AggregationKind.TRUSTED:
        sums: AbstractSum = PlainSum(**common)
    elif section.kind is AggregationKind.SECRET_SHARING:
        sums = SecretSharingSum(
            **common, modulus=modulus, compute_nodes=section.compute_nodes or 3, study_hash=identity
        )
    else:
        sums = PairwiseMaskSum(**common, modulus=modulus, study_hash=identity)
    return Aggregator(sums=sums, num_shares=section.num_shares(num_clients))
