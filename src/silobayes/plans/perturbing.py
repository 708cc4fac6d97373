"""Parameter perturbation, local averaging and virtual clients; with clip norms from a private quantile if asked."""

import dataclasses

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference.layouts import shard_slots
from silobayes.models.mlp import AbstractMLP
from silobayes.plans.calibration import Sums, least_noise, noise_multipliers
from silobayes.plans.situation import Situation
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.relation import Unit
from silobayes.protocols import clip_norms, perturbed, pvi
from silobayes.protocols.etas import to_host
from silobayes.protocols.roles import Plan, Seat
from silobayes.protocols.schedule import numbered, visits_per_silo
from silobayes.study import Privatise


def plan(situation: Situation) -> Plan:
    """One release of each visited silo's clipped changes a visit."""
    if situation.settings.clip_quantile is None:
        silo, server = _roles(situation, (), had_start=False)
        return Plan(
            visits=numbered(situation.visits),
            seats=_seats(situation),
            silos=(silo,),
            server=server,
            numbers=situation.numbers,
        )
    return _with_quantile(situation, situation.settings.clip_quantile)


def _seats(situation: Situation) -> tuple[Seat, ...]:
    settings, rows = situation.settings, situation.rows
    layouts = shard_slots(
        rows,
        settings.shards_of(situation.num_silos),
        situation.seed,
        by_person=situation.paid.unit is Unit.PERSON,
        rows_per_person=settings.rows_per_person,
    )
    return tuple(Seat(index=m, size=rows[m], layout=layouts[m]) for m in range(situation.num_silos))


def _roles(
    situation: Situation, besides: tuple[AbstractEvent, ...], *, had_start: bool
) -> tuple[perturbed.AbstractPerturbingSilo, perturbed.PerturbedServer]:
    settings, budget, sums = situation.settings, situation.paid, situation.sums
    shards = settings.shards_of(situation.num_silos)
    averages = settings.privatise is not Privatise.VIRTUAL_CLIENTS
    # Of a shard's own change, as in the paper; what is released is the average over a silo's shards.
    share = situation.num_silos / sum(shards) if averages else 1.0
    norms = tuple(share * clip_norm for clip_norm in settings.clip_norms)
    ball = perturbed.Ball(clip_norms=norms, scales=settings.scales, unit=budget.unit)
    empty = perturbed.no_change(ball, situation.family)
    counts = visits_per_silo(situation.visits, situation.num_silos)
    # Shares of one sum have one noise: that of the silo that is visited most.
    priced = [max(counts)] * len(counts) if sums.is_used else [max(count, 1) for count in counts]

    def event_of(count: int):  # noqa: ANN202 (a function of the noise)
        return lambda noise: pvi.repeated(sums.mechanism(noise).event(empty, budget.relation), count)

    noise = noise_multipliers(priced, event_of, budget, besides=besides)
    query = sums.private(
        [empty] * situation.num_silos, noise, budget, num_terms=max(shards), num_sums=len(situation.visits)
    )
    is_network = isinstance(situation.model, AbstractMLP)
    first = to_host(situation.start) - situation.eta_p if is_network else None
    factor_per_shard = sums.is_used or not averages
    kind = perturbed.ShardedSilo if factor_per_shard else perturbed.AveragingSilo
    silo = kind(
        solve=perturbed.RefitShards(local=situation.local, factor_per_shard=factor_per_shard),
        ball=ball,
        damping=settings.damping,
        averages=averages,
        first=first,
        total_shards=sum(shards),
        query=query,
    )
    num_shares = settings.aggregation.num_shares(sums.together) if sums.is_used else 1
    multipliers = np.array(noise)
    variances = [np.sum(multipliers[list(visit.silos)] ** 2) / num_shares for visit in situation.visits]
    server = perturbed.PerturbedServer(
        inner=situation.pvi_server(had_start=had_start),
        ball=ball,
        query=query,
        variances=np.array(variances),
        first=first,
        is_network=is_network,
    )
    return silo, server


def _with_quantile(situation: Situation, quantile: float) -> Plan:
    """The counts get a share of epsilon, the rounds all that is left of the budget beside them."""
    settings, budget = situation.settings, situation.paid
    sums = Sums(section=settings.aggregation, together=situation.num_silos)
    shards = settings.shards_of(situation.num_silos)
    counts = clip_norms.empty_counts(perturbed.Ball(clip_norms=(1.0, 1.0), unit=budget.unit))
    share = dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon)
    noise = least_noise(lambda std: sums.mechanism(std).event(counts, budget.relation), share)
    query = sums.private(
        [counts] * situation.num_silos, [noise] * situation.num_silos, budget, num_terms=max(shards), num_sums=1
    )
    error = clip_norms.noise_of_share(max(query.noise_of(range(situation.num_silos))), sum(shards))
    lowest = min(quantile, 1.0 - quantile)
    if not 2 * error < lowest:
        fix = "Pass norms, or spend more on them: protocol.first_share."
        expected = f"norms: a quantile of {sum(shards)} shards would be lost in its noise"
        raise InvalidInput("protocol.clip_norm", expected, "quantile", fix)
    silo, server = _roles(situation, (query.event(0),), had_start=True)
    return Plan(
        visits=numbered((situation.everybody,), situation.visits),
        seats=_seats(situation),
        silos=(clip_norms.CountingSilo(then=silo, solve=silo.solve, query=query), silo),
        server=clip_norms.QuantileServer(
            then=server,
            query=query,
            quantile=quantile,
            per_silo=sum(shards) / situation.num_silos if silo.averages else 1.0,
            visits_of_a_silo=float(np.mean(visits_per_silo(situation.visits, situation.num_silos))),
        ),
        numbers=situation.numbers,
    )
