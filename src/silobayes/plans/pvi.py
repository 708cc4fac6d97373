"""Partitioned variational inference without privacy and by DP optimisation; committees and streaming are one visit."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from silobayes.inference.solvers import Refit, RefitPrivately
from silobayes.plans.checks import gaussian_prior
from silobayes.plans.keys import BatchKeys, StepKeys, check_batches, check_schedule, one_round, only_schedule
from silobayes.plans.rules import (
    STEPS_OF_ONE_VISIT,
    PublicFacts,
    common_rules,
    open_rules,
    optimisation_rules,
    rounds_of_all,
    with_noisy_steps,
)
from silobayes.plans.situation import Situation
from silobayes.privacy.events import GaussianEvent
from silobayes.privacy.relation import Unit
from silobayes.protocols import bcm, pvi
from silobayes.protocols.bcm import Committee
from silobayes.protocols.roles import Plan, Seat
from silobayes.protocols.schedule import Schedule, numbered
from silobayes.studies.keys import key, member
from silobayes.studies.method import Method
from silobayes.studies.study import ModelKind, Study


@dataclass(frozen=True, kw_only=True)
class CommitteeKeys(StepKeys):
    """Of committees without privacy."""

    committee: Committee | None = key(member(Committee), "each silo uses the whole prior (same) or a share", '"same"')


@dataclass(frozen=True, kw_only=True)
class PrivateCommitteeKeys(BatchKeys):
    """The same with DP optimisation."""

    committee: Committee | None = key(member(Committee), "each silo uses the whole prior (same) or a share", '"same"')


def plan(situation: Situation) -> Plan:
    """PVI without privacy."""
    return _rounds(situation, Refit(local=situation.local))


def plan_optimisation(situation: Situation) -> Plan:
    """PVI by DP optimisation."""
    return _rounds(situation, private_refit(situation))


def plan_committee(situation: Situation) -> Plan:
    """Every silo alone, once."""
    gaussian_prior(situation)
    share = bcm.prior_share(situation.settings.committee, situation.num_silos)
    refit = Refit(local=situation.local) if situation.budget is None else private_refit(situation)
    return _rounds(situation, bcm.Alone.against(refit, share))


def private_refit(situation: Situation) -> RefitPrivately:
    """Local inference by DP-SGD."""
    return RefitPrivately(
        local=situation.local,
        clip_norm=np.float32(situation.settings.clip_norm),  # type: ignore[arg-type]
        clipping=situation.settings.clipping.value,
        rows_per_unit=situation.rows_per_unit,
    )


def optimising_silo(
    situation: Situation, seats: tuple[Seat, ...], refit: RefitPrivately | bcm.Alone
) -> pvi.OptimisingSilo:
    """A silo with a private loop."""
    return pvi.OptimisingSilo(
        solve=refit,
        damping=situation.settings.damping,
        query=situation.sums.open(),
        loop=situation.loop_of(seats[0]),
    )


def _rounds(situation: Situation, refit: Any) -> Plan:
    if situation.budget is None:
        seats = situation.row_seats()
        silo = pvi.PVISilo(solve=refit, damping=situation.settings.damping, query=situation.sums.open())
    else:
        seats = situation.loop_seats(situation.visits)
        silo = optimising_silo(situation, seats, refit)
    return Plan(
        visits=numbered(situation.visits),
        seats=seats,
        silos=(silo,),
        server=situation.pvi_server(),
        numbers=situation.numbers,
    )


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return rounds_of_all(facts, keys, open_rules(study, facts, keys))


def _optimisation_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    rules = common_rules(study, facts) | optimisation_rules(study, facts)
    return with_noisy_steps(study, facts, keys, rules)


def _committee_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    steps = 400 if facts.solves_exactly else STEPS_OF_ONE_VISIT
    return open_rules(study, facts, keys) | {"rounds": 1, "damping": 1.0, "steps": steps, "committee": Committee.SAME}


def _private_committee_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    rules = common_rules(study, facts) | optimisation_rules(study, facts)
    rules |= {"rounds": 1, "damping": 1.0, "steps": 400, "committee": Committee.SAME}
    # The average of the silos' walks; an average of networks' weights is no average of networks.
    walkers = 1.0 if study.model.kind is ModelKind.MLP else 1.0 / len(facts.silo_rows)
    return with_noisy_steps(study, facts, keys, rules, walkers)


ONE_PASS: dict[str, Any] = {"schedule": Schedule.SEQUENTIAL, "rounds": 1, "damping": 1.0, "steps": 500}


def _streaming_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    steps = {} if facts.solves_exactly else {"steps": STEPS_OF_ONE_VISIT}
    return open_rules(study, facts, keys) | ONE_PASS | steps


def _private_streaming_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return with_noisy_steps(
        study, facts, keys, common_rules(study, facts) | optimisation_rules(study, facts) | ONE_PASS
    )


_OPEN: dict[str, Any] = {
    "privatise": "none",
    "releases": "exact results",
    "models": "every model",
    "units": (),
    "leaves": lambda study: "exact results computed from its rows. Nothing protects them.",
    "expects_widths": True,
}
OPTIMISATION: dict[str, Any] = {
    "privatise": "dp_optimisation",
    "releases": "a noisy sum of clipped gradients for each local step",
    "models": "every model",
    "units": (Unit.ROW, Unit.PERSON),
    "leaves": lambda study: (
        "the change of its part of the posterior, found by steps of which each saw the rows only through a sum of "
        "clipped gradients with noise."
    ),
    "loops": True,
    "person_slots": True,
    "noise": frozenset({GaussianEvent}),
    "expects_widths": True,
}


def _rows_or_sampled_persons(unit: Unit | None, can_sample_persons: bool) -> bool:
    """Batches of persons need public facts that dealing persons to shards does not."""
    return unit is Unit.ROW or (unit is Unit.PERSON and can_sample_persons)


_ONCE = (check_schedule, only_schedule(Schedule.SYNCHRONOUS), one_round)
_ONE_PASS = (check_schedule, only_schedule(Schedule.SEQUENTIAL), one_round)
METHODS = (
    Method(
        **_OPEN,
        kind="pvi",
        keys=StepKeys,
        plan=plan,
        rules=_rules,
        checks=(check_schedule,),
        summary="partitioned variational inference without privacy",
    ),
    Method(
        **OPTIMISATION,
        kind="pvi",
        keys=BatchKeys,
        plan=plan_optimisation,
        rules=_optimisation_rules,
        checks=(check_schedule, check_batches),
        default_for=_rows_or_sampled_persons,
        summary="partitioned variational inference, local optimisation by DP-SGD",
    ),
    Method(
        **_OPEN,
        kind="bcm",
        keys=CommitteeKeys,
        plan=plan_committee,
        rules=_committee_rules,
        checks=_ONCE,
        summary="Bayesian committee machine without privacy: every silo alone, once",
    ),
    Method(
        **OPTIMISATION,
        kind="bcm",
        keys=PrivateCommitteeKeys,
        plan=plan_committee,
        rules=_private_committee_rules,
        checks=(*_ONCE, check_batches),
        summary="Bayesian committee machine: every silo alone, once, by DP-SGD",
    ),
    Method(
        **_OPEN,
        kind="streaming_vb",
        keys=StepKeys,
        plan=plan,
        rules=_streaming_rules,
        checks=_ONE_PASS,
        summary="one undamped pass of pvi without privacy, silo after silo",
    ),
    Method(
        **OPTIMISATION,
        kind="streaming_vb",
        keys=BatchKeys,
        plan=plan_optimisation,
        rules=_private_streaming_rules,
        checks=(*_ONE_PASS, check_batches),
        default_for=_rows_or_sampled_persons,
        summary="one undamped pass of pvi, silo after silo, by DP-SGD",
    ),
)
