"""DP-PVI by perturbing what a client sends (000 sections 3.2-3.4; 004 IV; SPEC 3).

Rows of a client are dealt once, independently of their values, into fixed shards. Each shard computes a change of the
natural parameters, clipped to `clip_norm`; their sum is released once a round. One changed row changes one shard, in
every round, so a round costs one Gaussian mechanism of sensitivity 2 C, whatever happened inside the shards. (Persons
are dealt by their id; substituting one for another can change two shards, 4 C. Under add_remove a row that is removed
leaves its slot empty: the others keep their shards. A client that loses all its rows still sends a change: 2 C too.)

- `local_averaging_step`: shards stand for the whole client (likelihood to the power of their number), the client's
  factor is the sum of its releases and so public.
- `shard_factors_step`: each shard has its own factor, updated with its own *noise-free* clipped change: virtual
  clients, and every method inside a secure sum, where a client's own message is not released. The public code puts
  noise into it, after which one changed row moves all shards and the proof is gone (SPEC 0).
- parameter perturbation is local averaging with one shard.

We differ from the paper in the grid noise (exact discrete Gaussian), in clipping the linear and the quadratic part to
norms of their own if asked (one joint mechanism, rescaled), and in optional public scales of the two parts. Silos of
different sizes have shards in proportion; with local averaging what is clipped is a shard's part of its client's
average change, `change / num_shards`, so that a row weighs the same in every silo. Where all silos have N shards that
is the paper's clipping with N times the norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.models.base import GaussianEta
from silobayes.privacy.clipping import Bounded, clip_blocks, general, pack_symmetric, unpack_symmetric
from silobayes.privacy.door import Door
from silobayes.privacy.mechanisms import GaussianMechanism, Release
from silobayes.privacy.relation import Unit
from silobayes.protocols.pvi import Broadcast, ClientState, Refit, Upload


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

    def flatten(self, change: GaussianEta) -> list[np.ndarray]:
        """A stack of changes as matrices, one per block."""
        linear, quadratic = np.asarray(change.linear, np.float64), np.asarray(change.quadratic, np.float64)
        linear = linear + self._slope_at_center(quadratic, linear.ndim)
        if quadratic.ndim == linear.ndim + 1:
            quadratic = pack_symmetric((quadratic + np.swapaxes(quadratic, -1, -2)) / 2)
        parts = [linear / self.scales[0], quadratic / self.scales[1]]
        return parts if len(self.clip_norms) == 2 else [np.concatenate(parts, axis=-1)]

    def unflatten(self, blocks: Sequence[np.ndarray], like: GaussianEta) -> GaussianEta:
        """Inverse of `flatten`, for the same leading axes."""
        dim = like.linear.shape[-1]
        joint = np.concatenate(blocks, axis=-1)
        linear, quadratic = joint[..., :dim] * self.scales[0], joint[..., dim:] * self.scales[1]
        if np.ndim(like.quadratic) == np.ndim(like.linear) + 1:
            quadratic = unpack_symmetric(quadratic)
        leaves = (linear - self._slope_at_center(quadratic, linear.ndim), quadratic)
        return eqx.tree_at(lambda eta: (eta.linear, eta.quadratic), like, leaves)

    def _slope_at_center(self, quadratic: np.ndarray, num_axes: int) -> np.ndarray | float:
        """The derivative at the center of the quadratic part alone; `num_axes` are those of the linear part."""
        if self.center is None:
            return 0.0
        return 2 * (quadratic @ self.center if quadratic.ndim > num_axes else quadratic * self.center)

    def bounded_sum(self, change: GaussianEta) -> Bounded:
        """The sum over shards of their clipped changes, ready for the door."""
        terms = [general(block) for block in self.flatten(change)]
        return clip_blocks(terms, self.clip_norms, unit=self.unit, sharded=True)

    def clip_each(self, change: GaussianEta) -> GaussianEta:
        """Each shard's clipped change by itself, without noise: it must not leave the client.

        Guarantees:
            - a shard's clipped change depends on its own change only
        """
        clipped = []
        tiny = np.finfo(float).tiny
        for block, clip_norm in zip(self.flatten(change), self.clip_norms, strict=True):
            with np.errstate(all="ignore"):  # a warning about overflow would tell of somebody's rows
                values = np.where(np.isfinite(block).all(axis=-1, keepdims=True), block, 0.0)
                largest = np.maximum(np.abs(values).max(axis=-1, keepdims=True), tiny)
                norms = np.maximum(largest * np.linalg.norm(values / largest, axis=-1, keepdims=True), tiny)
                clipped.append(values * np.minimum(1.0, clip_norm / norms))
        return self.unflatten(clipped, change)


def mechanism(noise_multiplier: float) -> GaussianMechanism:
    """Exact discrete Gaussian noise of standard deviation `noise_multiplier` times the clip norm."""
    return GaussianMechanism(noise_multiplier=noise_multiplier)


# The clients' clipped sums -> the blocks of their released total.
ReleaseTotal = Callable[[Sequence[Bounded]], Sequence[np.ndarray]]


def local_averaging_step(
    doors: Sequence[Door],
    clients: ClientState,
    down: Broadcast,
    refit: Refit,
    ball: Ball,
    noise_multipliers: Sequence[float],
    *,
    owners: np.ndarray,
    damping: float,
) -> tuple[ClientState, Upload]:
    """One visit of a stack of clients (000 section 3.3). `refit` tempers a shard by the number of its client's shards.

    Args:
        doors: One per client of the stack.
        clients: `eta_t` with a leading axis over clients.
        down: The broadcast they answer to.
        refit: Local inference of all their shards.
        ball: Where a shard's part of its client's average change is clipped.
        noise_multipliers: Noise of each client over its clip norm.
        owners: The client of each shard, in order.
        damping: Of every change.

    Guarantees:
        - one changed row moves each released sum by no more than is priced, in every round
        - without noise and clipping it reaches the exact posterior of a conjugate model for any number of shards
    """
    own = jax.tree.map(lambda leaf: leaf[owners], clients)  # all shards of a client share its factor
    change = shard_changes(own, down, refit, 1.0 / np.bincount(owners)[owners])
    released = release_each(doors, _bounded_sums(ball, change, owners), noise_multipliers)
    blocks = [np.stack(parts) for parts in zip(*(one.blocks for one in released), strict=True)]
    d_eta = damping * ball.unflatten(blocks, clients.eta_t)
    return ClientState(eta_t=clients.eta_t + d_eta), Upload(d_eta=d_eta)


def shard_factors_step(
    clients: ClientState,
    down: Broadcast,
    refit: Refit,
    ball: Ball,
    release: ReleaseTotal,
    *,
    owners: np.ndarray,
    weights: np.ndarray,
    damping: float,
) -> tuple[ClientState, Upload]:
    """One visit with a factor per shard: `eta_t` has a leading axis over shards and stays private.

    Virtual clients (000 section 3.4): weights 1. Local averaging inside a secure sum: weights 1 / (shards of the
    client) and a tempered `refit`; each shard stands for its client, so its factor moves by its own whole change
    (SPEC 3). Client level (001 Algorithm 3): one shard, a ball of unit client.

    Returns:
        The shards' new factors, and the *total* over clients: their own messages may be secret shares.

    Guarantees:
        - one changed row moves each released sum by no more than is priced, in every round
        - a shard's factor holds neither noise nor another shard's rows
    """
    change = shard_changes(clients, down, refit, weights)
    total = ball.unflatten(release(_bounded_sums(ball, change, owners)), down.eta_q)
    eta_t = clients.eta_t + times(damping / weights, ball.clip_each(change))  # of its own shard, noise-free
    return ClientState(eta_t=eta_t), Upload(d_eta=damping * total)


def shard_changes(shards: ClientState, down: Broadcast, refit: Refit, weights: np.ndarray) -> GaussianEta:
    """What each shard asks for, before it is clipped; `shards` holds the factor that each starts from."""
    return times(weights, refit(down.eta_q - shards.eta_t, down.eta_q) - shards.eta_t)


def release_each(
    doors: Sequence[Door], bounded: Sequence[Bounded], noise_multipliers: Sequence[float]
) -> list[Release]:
    """Each client's sum with a noise of its own."""
    return [
        door.release(mechanism(noise_multiplier), own)
        for door, own, noise_multiplier in zip(doors, bounded, noise_multipliers, strict=True)
    ]


def _bounded_sums(ball: Ball, change: GaussianEta, owners: np.ndarray) -> list[Bounded]:
    """The clipped sum of each client, in order."""
    ends = np.cumsum(np.bincount(owners))
    return [
        ball.bounded_sum(jax.tree.map(lambda leaf, own=slice(end - count, end): leaf[own], change))
        for count, end in zip(np.bincount(owners), ends, strict=True)
    ]


def times(factors: np.ndarray, eta: GaussianEta) -> GaussianEta:
    """Each shard times its own number."""
    return jax.tree.map(lambda leaf: factors.reshape(-1, *[1] * (leaf.ndim - 1)) * leaf, eta)
