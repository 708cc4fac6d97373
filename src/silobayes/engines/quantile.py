"""Perturbing methods whose clip norms come through the door: one visit for a private quantile, then the method itself.

What is released first is in `protocols.clip_norms`. All later prices are in units of the chosen norms, so the whole
study is priced and charged before the first row is looked at, whatever will be chosen.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.defaults import Settings
from silobayes.engines.linreg import Sum, Sums
from silobayes.engines.methods import AbstractMethod, Call, PerturbedMethod, RunState
from silobayes.models.base import GaussianEta
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Budget
from silobayes.protocols import clip_norms, dp_pvi, pvi
from silobayes.protocols.schedule import Visit, visits_per_client


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileMethod(AbstractMethod):
    """Visit 0 asks all silos for the norms of their shards' first changes, every other visit is one of `then`.

    The state of the clients is that of `then` and the chosen norms, which are public. Norms are those of `then.ball`;
    times `per_silo` they are in units of `protocol.clip_norm`.

    Guarantees:
        - a client pays for its counts once and for each later visit
        - the price does not depend on the norms that are chosen
        - q is where it starts until the norms are chosen
    """

    first: Sum
    then: PerturbedMethod
    quantile: float
    per_silo: float

    def init_clients(self) -> dict[str, Any]:
        """See `AbstractMethod`; until norms are chosen they are those of the rule."""
        return {"norms": np.array(self.then.ball.clip_norms), "factors": self.then.init_clients()}

    def init_eta(self) -> GaussianEta:
        """See `AbstractMethod`."""
        return self.then.init_eta()

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        if num_visits == 0:
            return ()
        counts = empty_counts(self.then.ball)
        return (
            self.first.mechanism.event(counts, self.then.relation),
            *self.then.events(client, num_visits - 1),
        )

    def client_step(self, clients: Any, call: Call, doors: Sequence[Door]) -> tuple[Any, pvi.Upload]:
        """See `AbstractMethod`."""
        if call.index == 0:
            nothing = jax.tree.map(np.zeros_like, call.down.eta_q)
            return clients | {"norms": self._choose(call, doors)}, pvi.Upload(d_eta=nothing)
        factors, total = self._clipped_to(clients["norms"]).client_step(clients["factors"], call, doors)
        return clients | {"factors": factors}, total

    def usable(self, eta: GaussianEta, state: RunState, weights: np.ndarray) -> GaussianEta:
        """See `AbstractMethod`; the first visit puts no noise into q."""
        return self._clipped_to(state.clients["norms"]).usable(eta, state, weights[1:])

    def released(self, state: RunState) -> dict[str, Any]:
        """See `AbstractMethod`."""
        return {"clip_norms": (self.per_silo * state.clients["norms"]).tolist()} if state.step > 0 else {}

    def _choose(self, call: Call, doors: Sequence[Door]) -> np.ndarray:
        grids = _grids(self.then.ball)
        parts, owners = self.then.first_changes(call)
        bounded = [
            clip_norms.bounded_counts([part[owners == m] for part in parts], grids, self.then.ball.unit)
            for m in range(len(call.at))
        ]
        released = self.first.release_blocks(doors, bounded, call.index)
        norms = [
            clip_norms.quantile_norm(counts, grid, self.quantile) for counts, grid in zip(released, grids, strict=True)
        ]
        num_visits = float(np.mean(visits_per_client(self.then.visits, self.num_clients)))
        path = {"damping": self.damping, "num_visits": num_visits}
        return np.array([clip_norms.norm_per_visit(norm, **path) for norm in norms])

    def _clipped_to(self, norms: np.ndarray) -> PerturbedMethod:
        ball = dataclasses.replace(self.then.ball, clip_norms=tuple(norms.tolist()))
        return dataclasses.replace(self.then, ball=ball)


def build(
    common: dict[str, Any],
    settings: Settings,
    budget: Budget,
    sums: Sums,
    least_noise: Callable[..., float],
    then_beside: Callable[[tuple[AbstractEvent, ...]], PerturbedMethod],
) -> QuantileMethod:
    """The counts get a share of epsilon, the method all that is left of the budget beside them.

    Args:
        common: Fields of any method; its visits are those of `then`.
        settings: With a quantile.
        budget: Of each silo.
        sums: Over all silos.
        least_noise: Calibrates (`engines.planning`).
        then_beside: The method that the budget allows besides given events.
    """
    assert settings.clip_quantile is not None
    num_clients = common["num_clients"]
    shards = settings.shards_of(num_clients)
    counts = empty_counts(dp_pvi.Ball(clip_norms=(1.0, 1.0), unit=budget.unit))
    share = dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon)
    noise = least_noise(lambda std: sums.mechanism(std).event(counts, budget.relation), share)
    first = Sum(noise_multiplier=noise, aggregator=sums.of_shares(counts, noise, num_terms=max(shards), num_sums=1))
    error = clip_norms.noise_of_share(first.noise_std(1.0, num_clients), sum(shards))
    lowest = min(settings.clip_quantile, 1.0 - settings.clip_quantile)
    if not 2 * error < lowest:
        fix = "Pass norms, or spend more on them: protocol.first_share."
        expected = f"norms: a quantile of {sum(shards)} shards would be lost in its noise"
        raise InvalidInput("protocol.clip_norm", expected, "quantile", fix)
    then = then_beside((first.mechanism.event(counts, budget.relation),))
    everybody = Visit(clients=tuple(range(num_clients)))
    return QuantileMethod(
        **{**common, "visits": (everybody, *then.visits)},
        visits_before=1,
        aggregator=then.aggregator,
        first=first,
        then=then,
        quantile=settings.clip_quantile,
        per_silo=sum(shards) / num_clients if then.averages_shards else 1.0,
    )


def empty_counts(ball: dp_pvi.Ball) -> Bounded:
    """The counts of a silo without shards: enough to say what they cost."""
    nothing = np.zeros((0, 1))
    return clip_norms.bounded_counts([nothing, nothing], _grids(ball), ball.unit)


def _grids(ball: dp_pvi.Ball) -> list[np.ndarray]:
    return [clip_norms.norm_grid(middle) for middle in ball.clip_norms]
