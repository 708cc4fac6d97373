"""Where a change of natural parameters is clipped (000 section 3.2): as a whole or part by part, in public units."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.models.base import GaussianFamily
from silobayes.privacy.clipping import Bounded, clip_blocks, general, pack_symmetric, unpack_symmetric
from silobayes.privacy.relation import Unit
from silobayes.protocols.etas import Eta, to_host


@dataclass(frozen=True, kw_only=True)
class Ball:
    """Where a shard's change is clipped.

    Attributes:
        clip_norms: One norm for the whole change, or two: of its linear and of its quadratic part.
        scales: Public positive numbers (linear part, quadratic part): the change is divided by them before it is
            clipped, and the release multiplied, so that both parts have comparable sizes.
        center: A public point, 0 by default: changes are clipped and noised as functions of `theta - center`, so that
            what happens to the quadratic part leaves a mean at this point where it is (UNCERTAINTY F1, t).
        unit: row, person (whose rows must all be in one shard) or client (whose change is a single term).
    """

    clip_norms: tuple[float, ...]
    scales: tuple[float, float] = (1.0, 1.0)
    center: np.ndarray | None = None
    unit: Unit = Unit.ROW

    def __post_init__(self) -> None:
        if len(self.clip_norms) not in (1, 2):
            fix = "Pass (C,) or (C_linear, C_quadratic)."
            raise InvalidInput("clip_norms", "one or two norms", self.clip_norms, fix)
        for key, values in (("clip_norms", self.clip_norms), ("scales", self.scales)):
            if not all(0.0 < value < np.inf for value in values):
                raise InvalidInput(key, "finite numbers > 0", values, "Pass public positive numbers.")

    def flatten(self, change: Eta) -> list[np.ndarray]:
        """A stack of changes as matrices, one per block."""
        linear, quadratic = np.asarray(change.linear, np.float64), np.asarray(change.quadratic, np.float64)
        linear = linear + self._slope_at_center(quadratic, linear.ndim)
        if quadratic.ndim == linear.ndim + 1:
            quadratic = pack_symmetric((quadratic + np.swapaxes(quadratic, -1, -2)) / 2)
        parts = [linear / self.scales[0], quadratic / self.scales[1]]
        return parts if len(self.clip_norms) == 2 else [np.concatenate(parts, axis=-1)]

    def unflatten(self, blocks: Sequence[np.ndarray], like: Eta) -> Eta:
        """Inverse of `flatten`, for the same leading axes."""
        dim = like.linear.shape[-1]
        joint = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=-1)
        linear, quadratic = joint[..., :dim] * self.scales[0], joint[..., dim:] * self.scales[1]
        if np.ndim(like.quadratic) == np.ndim(like.linear) + 1:
            quadratic = unpack_symmetric(quadratic)
        linear = linear - self._slope_at_center(quadratic, linear.ndim)
        return jax.tree.unflatten(jax.tree.structure(like), [linear, quadratic])

    def _slope_at_center(self, quadratic: np.ndarray, num_axes: int) -> np.ndarray | float:
        """The derivative at the center of the quadratic part alone; `num_axes` are those of the linear part."""
        if self.center is None:
            return 0.0
        return 2 * (quadratic @ self.center if quadratic.ndim > num_axes else quadratic * self.center)

    def bounded_sum(self, change: Eta) -> Bounded:
        """The sum over shards of their clipped changes, ready for the door."""
        terms = [general(block) for block in self.flatten(change)]
        return clip_blocks(terms, self.clip_norms, unit=self.unit, sharded=True)

    def clip_each(self, change: Eta) -> Eta:
        """Each shard's clipped change by itself, without noise: it must not leave the client.

        Guarantees:
            - a shard's clipped change depends on its own change only
        """
        clipped = []
        tiny = np.finfo(float).tiny
        for block, clip_norm in zip(self.flatten(change), self.clip_norms, strict=True):
            with np.errstate(all="ignore"):  # a warning about overflow would tell of somebody's rows
                largest = np.abs(block).max(axis=-1, keepdims=True)
                finite = np.isfinite(largest)  # not where a number of the row is not
                values = np.where(finite, block, 0.0)
                largest = np.where(finite, np.maximum(largest, tiny), tiny)
                shape = values / largest
                norms = np.maximum(largest * np.sqrt((shape * shape).sum(axis=-1, keepdims=True)), tiny)
                clipped.append(values * np.minimum(1.0, clip_norm / norms))
        return self.unflatten(clipped, change)


def no_change(ball: Ball, family: GaussianFamily) -> Bounded:
    """What a silo without shards would release: enough to say what a release costs."""
    return ball.bounded_sum(jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape)), to_host(family.zeros())))
