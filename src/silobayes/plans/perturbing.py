"""Parameter perturbation, local averaging and virtual clients; with clip norms from a private quantile if asked."""

import dataclasses
import math
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference.layouts import shard_slots
from silobayes.inference.solvers import RefitShards
from silobayes.models.mlp import AbstractMLP
from silobayes.plans.calibration import Sums, least_noise, noise_multipliers
from silobayes.plans.keys import (
    QUANTILE,
    ChangeKeys,
    ShardKeys,
    check_changes,
    check_schedule,
    one_round,
    only_schedule,
)
from silobayes.plans.pvi import ONE_PASS
from silobayes.plans.rules import PublicFacts, common_rules, is_summed, num_uncentred
from silobayes.plans.situation import Situation
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.relation import Unit
from silobayes.protocols import clip_norms, perturbed, pvi
from silobayes.protocols.ball import Ball, no_change
from silobayes.protocols.etas import Eta, to_host
from silobayes.protocols.roles import Plan, Seat
from silobayes.protocols.schedule import Schedule, numbered, visits_per_silo
from silobayes.studies.method import Intervals, Method
from silobayes.studies.study import Study

# How far a shard's factor can travel in all rounds, in units of sqrt(its rows) * typical norm: where every shard has
# its own, and where all shards of a silo share one.
_TRAVEL, _SHARED_TRAVEL = 0.45, 0.8
# Damping times rounds; and damping times the features of a row that go together with its intercept.
_DAMPED_ROUNDS, _STABLE = 3.2, 1.5
# Of epsilon, for the counts of norms alone where clip norms are a quantile.
_NORMS_SHARE = 0.1
# All factors of shards together: what a machine holds and a checkpoint writes.
_MOST_NUMBERS = 24_000_000
# Networks: the clip norm of a shard's gradient, in units of sqrt(its rows) * typical norm; that of its precisions, over
# the former; and the step along the average gradient of a row.
_NETWORK_CLIP, _NETWORK_QUADRATIC, _NETWORK_STEP = 0.15, 0.1, 1.25
# How many persons there are is not public; shards that nobody is dealt to do no harm.
_ROWS_PER_PERSON = 4
_VIRTUAL = "virtual_clients"


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
    rows = situation.rows
    layouts = shard_slots(
        rows,
        situation.shards,
        situation.seed,
        by_person=situation.paid.unit is Unit.PERSON,
        rows_per_person=situation.rows_per_person,
    )
    return tuple(Seat(index=m, size=rows[m], layout=layouts[m]) for m in range(situation.num_silos))


def _roles(
    situation: Situation, besides: tuple[AbstractEvent, ...], *, had_start: bool
) -> tuple[perturbed.AbstractPerturbingSilo, perturbed.PerturbedServer]:
    settings, budget, sums = situation.settings, situation.paid, situation.sums
    shards = situation.shards
    averages = settings.privatise != _VIRTUAL
    # Of a shard's own change, as in the paper; what is released is the average over a silo's shards.
    share = situation.num_silos / sum(shards) if averages else 1.0
    norms = tuple(share * clip_norm for clip_norm in settings.clip_norms)
    ball = Ball(clip_norms=norms, scales=settings.scales, unit=budget.unit)
    empty = no_change(ball, situation.family)
    counts = visits_per_silo(situation.visits, situation.num_silos)
    # Shares of one sum have one noise: that of the silo that is visited most.
    priced = [max(counts)] * len(counts) if sums.is_used else [max(count, 1) for count in counts]

    def event_of(count: int):
        return lambda noise: pvi.repeated(sums.mechanism(noise).event(empty, budget.relation), count)

    noise = noise_multipliers(priced, event_of, budget, besides=besides)
    query = sums.private(
        [empty] * situation.num_silos, noise, budget, num_terms=max(shards), num_sums=len(situation.visits)
    )
    is_network = isinstance(situation.model, AbstractMLP)
    start: Eta = to_host(situation.start)
    first = start - situation.eta_p if is_network else None
    factor_per_shard = sums.is_used or not averages
    kind = perturbed.ShardedSilo if factor_per_shard else perturbed.AveragingSilo
    silo = kind(
        solve=RefitShards(local=situation.local, factor_per_shard=factor_per_shard),
        ball=ball,
        damping=settings.damping,
        averages=averages,
        first=first,
        total_shards=sum(shards),
        query=query,
    )
    num_shares = situation.aggregation.num_shares(sums.together) if sums.is_used else 1
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
    if len(settings.clip_norms) != 2 or settings.scales != (1.0, 1.0):
        fix = "A quantile is chosen for each part; give the two norms that it is looked for around."
        raise InvalidInput("protocol.clip_norm", "two norms without scales", list(settings.clip_norms), fix)
    sums = Sums(section=situation.aggregation, together=situation.num_silos)
    shards = situation.shards
    counts = clip_norms.empty_counts(Ball(clip_norms=(1.0, 1.0), unit=budget.unit))
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


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    is_virtual = study.method.privatise == _VIRTUAL
    shards = (1,) * len(facts.silo_rows)
    if isinstance(keys, ShardKeys):
        least = _ROWS_PER_PERSON if study.privacy.unit is Unit.PERSON else 1
        per_shard = max(least, math.ceil(sum(facts.silo_rows) * 2 * facts.num_parameters / _MOST_NUMBERS))
        shards = tuple(max(1, rows // per_shard) for rows in facts.silo_rows)
    size = math.sqrt(sum(facts.silo_rows) / sum(shards)) * study.encoding.typical_row_norm * facts.score
    if facts.start_precision is not None:
        rounds, damping = 20, min(0.4, _NETWORK_STEP * facts.start_precision / sum(facts.silo_rows))
        linear = _NETWORK_CLIP * size
        quadratic = _NETWORK_QUADRATIC * linear
    else:
        damping = min(0.4, _STABLE / (1 + num_uncentred(study)))
        rounds = math.ceil(_DAMPED_ROUNDS / damping)
        is_shared = not is_virtual and not is_summed(study)
        linear = (_SHARED_TRAVEL if is_shared else _TRAVEL) * size / (damping * rounds)
        quadratic = 0.5 * facts.score * linear
    # Of local averaging a shard's change stands for that of the whole silo.
    stands_for = 1.0 if is_virtual else sum(shards) / len(shards)
    rules = common_rules(study, facts) | {
        "rounds": rounds,
        "steps": 60,
        "damping": damping,
        "shards": shards if len(set(shards)) > 1 else shards[0],
        # With a quantile these are the middle of the grid.
        "clip_norm": (stands_for * linear, stands_for * quadratic),
    }
    return rules | ({"clip_quantile": 0.5, "first_share": _NORMS_SHARE} if keys.clip_norm == QUANTILE else {})


def _streaming_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return _rules(study, facts, keys) | ONE_PASS


def _leaves(each: str) -> Any:
    def words(study: Study) -> str:
        if study.protocol.clip_norm != QUANTILE:  # type: ignore[attr-defined]
            return each
        return (
            "once, before the first round, counts of how large the changes are that its rows, in fixed random parts or "
            f"as a whole, ask for, on a public scale and with {{noise}}; then, in each round, {each}"
        )

    return words


_COMMON: dict[str, Any] = {
    "plan": plan,
    "models": "regressions and networks",
    "shares": True,
    # Not that correlated parameters share the noise (`inference.noisy_factors`).
    "intervals": Intervals.PARTLY,
}
_PERTURBATION: dict[str, Any] = _COMMON | {
    "privatise": "parameter_perturbation",
    "keys": ChangeKeys,
    "default_for": lambda unit, can_sample_persons: unit is Unit.CLIENT,
    "releases": "a silo's clipped change, once a visit",
    "units": (Unit.ROW, Unit.PERSON, Unit.CLIENT),
    "leaves": _leaves("the clipped change of its part of the posterior, with {noise}."),
}
_AVERAGING: dict[str, Any] = _COMMON | {
    "privatise": "local_averaging",
    "keys": ShardKeys,
    "default_for": lambda unit, can_sample_persons: unit is Unit.PERSON and not can_sample_persons,
    "releases": "the average of the clipped changes of fixed shards, once a visit",
    "units": (Unit.ROW, Unit.PERSON),
    "leaves": _leaves("the average, with {noise}, of the clipped changes that fixed random parts of its rows ask for."),
}
_SHARDS: dict[str, Any] = _COMMON | {
    "privatise": _VIRTUAL,
    "keys": ShardKeys,
    "releases": "the sum of the clipped changes of fixed shards with factors of their own, once a visit",
    "units": (Unit.ROW, Unit.PERSON),
    "leaves": _leaves("the sum, with {noise}, of the clipped changes that fixed random parts of its rows ask for."),
}
_PVI: dict[str, Any] = {"kind": "pvi", "rules": _rules, "checks": (check_schedule, check_changes)}
_STREAMING: dict[str, Any] = {
    "kind": "streaming_vb",
    "rules": _streaming_rules,
    "checks": (check_schedule, only_schedule(Schedule.SEQUENTIAL), one_round, check_changes),
}
_WAYS = (
    (_PERTURBATION, "one shard a silo"),
    (_AVERAGING, "shards that stand for their silo"),
    (_SHARDS, "shards as if they were silos"),
)
METHODS = tuple(
    Method(**way, **of, summary=f"{prefix}: perturbed changes of {words}")
    for of, prefix in ((_PVI, "partitioned variational inference"), (_STREAMING, "one pass of pvi"))
    for way, words in _WAYS
)
