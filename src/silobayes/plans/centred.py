"""Regressions from centred scores (UNCERTAINTY): honest intervals, and what leads for these models."""

import dataclasses
import math
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference import centred
from silobayes.inference.centred import Expected
from silobayes.inference.centred_sums import Centre, Frame, round_sum
from silobayes.models.base import AbstractGaussianPriorModel
from silobayes.plans import pvi
from silobayes.plans.calibration import least_noise
from silobayes.plans.keys import PosteriorKind, VisitKeys, check_schedule, only_models
from silobayes.plans.rules import PublicFacts, open_rules, rounds_of_all
from silobayes.plans.situation import Situation
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.queries import PrivateSum
from silobayes.privacy.relation import Unit
from silobayes.protocols.centred import CentredServer, CentredSilo
from silobayes.protocols.roles import Plan, Seat
from silobayes.protocols.schedule import Schedule, Visit
from silobayes.studies.method import Intervals, Method
from silobayes.studies.study import ModelKind, Study

# Each round has so much more of the budget than the one before: the last ones are at the answer.
_GROWTH = 1.3
_ROUNDS, _MOST_ROUNDS = 15, 60
# Its curvature has half as many numbers as the square of that.
_LARGEST_DIM = 400
_MODELS = (
    ModelKind.LOGISTIC_REGRESSION,
    ModelKind.SOFTMAX_REGRESSION,
    ModelKind.POISSON_REGRESSION,
    ModelKind.NEGATIVE_BINOMIAL_REGRESSION,
    ModelKind.LINEAR_REGRESSION,
)


def plan(situation: Situation) -> Plan:
    """One joint sum a round."""
    frame = _frame(situation)
    seats = _seats(situation)
    made = _rounds(situation)
    queries = _queries(situation, frame, seats, made)
    start = np.zeros(frame.dim)
    if situation.limits.intercept is not None:
        start[situation.limits.intercept] = frame.score.typical_predictor
    return Plan(
        visits=made,
        seats=seats,
        silos=tuple(CentredSilo(query=query, frame=frame, unit=situation.paid.unit) for query in queries),
        server=CentredServer(
            model=situation.model,
            names=situation.names,
            frame=frame,
            start=start,
            queries=queries,
            rows=situation.rows,
            units=tuple(seat.size for seat in seats),
            first_noise=max(situation.limits.y, 1e-6) / 2 if frame.score.finds_noise else 1.0,
        ),
        numbers=len(queries[0].layouts[0].total),
        expected=None if frame.score.finds_noise else lambda x: _expected(x, situation, frame, queries, made, start),
    )


def _frame(situation: Situation) -> Frame:
    model, moments = situation.model, situation.limits.moments
    score = model.centred_score
    if score is None or not isinstance(model, AbstractGaussianPriorModel):
        fix = "Of negative_binomial_regression set model.options.concentration; or use another method."
        raise InvalidInput("protocol.kind", "a regression with a known concentration for centred", "another model", fix)
    if moments is None or len(moments) != situation.sizes[0].num_features:
        fix = "Pass the moments of all features, as a study's encoding has them."
        raise InvalidInput("limits.moments", f"moments of {situation.sizes[0].num_features} features", "others", fix)
    if len(moments) * score.outputs > _LARGEST_DIM:
        fix = 'Use protocol.kind = "global_vi", or fewer features.'
        raise InvalidInput("data.features", f"at most {_LARGEST_DIM} coefficients with centred", model.dim, fix)
    units, _ = situation.unit_layouts()
    return Frame.of(
        moments,
        score,
        prior_stddev=model.prior_stddev,
        intercept=situation.limits.intercept,
        rows_per_unit=max(1.0, sum(situation.rows) / sum(units)),
    )


def _seats(situation: Situation) -> tuple[Seat, ...]:
    units, layouts = situation.unit_layouts()
    return tuple(Seat(index=m, size=units[m], layout=layouts[m]) for m in range(situation.num_silos))


def _rounds(situation: Situation) -> tuple[Visit, ...]:
    """Each is a part of its own, with its own noise."""
    return tuple(dataclasses.replace(visit, number=r, part=r) for r, visit in enumerate(situation.visits))


def _queries(
    situation: Situation, frame: Frame, seats: tuple[Seat, ...], made: tuple[Visit, ...]
) -> tuple[PrivateSum, ...]:
    """The least noise with which all rounds together keep every silo's budget."""
    budget, sums = situation.paid, situation.sums
    growth = _GROWTH ** np.arange(1, len(made) + 1)
    shares = growth / growth.sum()
    empty = _empty_sums(situation, frame, seats)
    visited = [
        sum(share for share, visit in zip(shares, made, strict=True) if m in visit.silos) for m in range(len(seats))
    ]
    busiest = int(np.argmax(visited))
    # The larger of several bounds on rows has the larger room for rounding.
    widest = max(empty, key=lambda own: own.norm)
    paid = [share for share, visit in zip(shares, made, strict=True) if busiest in visit.silos]
    noise = least_noise(
        lambda std: tuple(sums.mechanism(std / math.sqrt(share)).event(widest, budget.relation) for share in paid),
        budget,
    )
    return tuple(
        sums.private(
            empty,
            [noise / math.sqrt(share)] * len(seats),
            budget,
            num_terms=max(seat.layout.num_slots for seat in seats),
            num_sums=len(made),  # of all rounds together: none of them may wrap around
        )
        for share in shares
    )


def _empty_sums(situation: Situation, frame: Frame, seats: tuple[Seat, ...]) -> list[Bounded]:
    """What silos without rows would answer."""
    x, y, centre = np.zeros((0, len(frame.stretch))), np.zeros(0), _prior(frame, np.zeros(frame.dim))
    common: dict[str, Any] = {"unit": situation.paid.unit}
    if situation.by_person:
        common["persons"] = np.zeros(0, int)
    known: dict[int, Bounded] = {}
    for slots in {seat.layout.num_slots for seat in seats}:
        known[slots] = round_sum(x, y, centre, frame, situation.paid.relation, capacity=slots, **common)
    return [known[seat.layout.num_slots] for seat in seats]


def _prior(frame: Frame, start: np.ndarray) -> Centre:
    return Centre(mean=start / frame.units, covariance=np.diag(1.0 / frame.prior_precision))


def _expected(
    x: np.ndarray,
    situation: Situation,
    frame: Frame,
    queries: tuple[PrivateSum, ...],
    made: tuple[Visit, ...],
    start: np.ndarray,
) -> Expected:
    """What a study of rows like `x` may expect, by the noise on the scores of the last half of its rounds."""
    rows, stddevs = sum(situation.rows), []
    for visit, query in zip(made, queries, strict=True):
        whole = rows / sum(situation.rows[m] for m in visit.silos)
        stddevs.append(whole * query.noise_of(visit.silos)[0])
    weights = centred.weights_of_rounds(np.array(stddevs)[:, None])
    noise = float(weights**2 @ np.array(stddevs[-len(weights) :]) ** 2)
    return centred.expected(x, start, frame, num_rows=rows, noise_variance=noise)


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    """Silos that are visited now and then are visited as often as others in all, as far as that pays."""
    rounds = _ROUNDS
    if keys.schedule is Schedule.SAMPLED and keys.clients_per_round is not None:
        rounds = min(_MOST_ROUNDS, math.ceil(rounds * len(facts.silo_rows) / keys.clients_per_round))
    return {"rounds": rounds}


def _open_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    rules = open_rules(study, facts, keys) | {"posterior": PosteriorKind.FULL}
    return rounds_of_all(facts, keys, rules)


def _only_together(study: Study) -> None:
    keys: Any = study.protocol
    if keys.schedule not in (None, Schedule.SYNCHRONOUS, Schedule.SAMPLED):
        expected = "synchronous or sampled with centred"
        raise InvalidInput("protocol.schedule", expected, keys.schedule.value, "Correct or remove the key.")


def _leads(model: Any, unit: Unit, can_sample_persons: bool) -> bool:
    """For all that it can do."""
    knows = model.kind is not ModelKind.NEGATIVE_BINOMIAL_REGRESSION or "concentration" in model.options
    if model.kind not in _MODELS or not knows:
        return False
    return unit is Unit.ROW or (unit is Unit.PERSON and can_sample_persons)


_CHECKS = (check_schedule, _only_together, only_models(*_MODELS))
METHODS = (
    Method(
        kind="centred",
        privatise="none",
        keys=pvi.StepKeys,
        plan=pvi.plan,
        rules=_open_rules,
        checks=_CHECKS,
        summary="the exact regression without privacy",
        releases="exact results",
        models="regressions",
        units=(),
        leaves=lambda study: "exact results computed from its rows. Nothing protects them.",
        expects_widths=True,
    ),
    Method(
        kind="centred",
        privatise="scores",
        keys=VisitKeys,
        plan=plan,
        rules=_rules,
        checks=_CHECKS,
        summary="regression from a few noisy sums of centred scores and curvatures",
        releases="sums of scores and of their slopes, once a round",
        models="regressions; negative binomial ones of known concentration",
        units=(Unit.ROW, Unit.PERSON),
        leaves=lambda study: "in each round, sums of weighted scores of its rows and of their slopes, with {noise}.",
        leads=_leads,
        person_slots=True,
        shares=True,
        intervals=Intervals.HONEST,
        expects_widths=True,
    ),
)
