"""What no plan can be made for is refused before anything is priced."""

from silobayes.core.errors import InvalidInput
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans.situation import Situation
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.protocols.schedule import Schedule
from silobayes.studies.study import AggregationKind


def check(situation: Situation) -> None:
    """Refuse silos, units and sums that do not fit the method."""
    method, budget = situation.method, situation.budget
    if not situation.sizes:
        raise InvalidInput("silos", "at least one silo", 0, "Pass the silos of the study.")
    if len({own.num_features for own in situation.sizes}) != 1:
        raise InvalidInput("silos", "equal numbers of features", "different ones", "Encode all by the same study.")
    if bool(method.units) != (budget is not None):
        fix = "Mode none has no budget; every private method has one."
        raise InvalidInput("protocol.privatise", "a budget and a private method, or neither", method.privatise, fix)
    if situation.aggregation.kind is not AggregationKind.NONE:
        _check_sums(situation)
    if budget is not None:
        _check_unit(situation, budget)


def _check_unit(situation: Situation, budget: Budget) -> None:
    method = situation.method
    if budget.unit is not Unit.PERSON and any(own.has_persons for own in situation.sizes):
        fix = 'Set privacy.unit = "person", or leave persons out: whole persons would be dealt and priced as rows.'
        raise InvalidInput("silos.persons", f"none with privacy.unit = {budget.unit.value}", "persons", fix)
    if budget.unit not in method.units:
        allowed = " or ".join(unit.value for unit in method.units)
        fix = "`silobayes methods` says whom each method can protect."
        raise InvalidInput("privacy.unit", f"{allowed} with {method.privatise}", budget.unit.value, fix)
    if budget.unit is Unit.CLIENT and situation.aggregation.kind is AggregationKind.NONE:
        fix = "A whole silo hides only among others: choose an aggregation."
        raise InvalidInput("privacy.unit", "row or person with aggregation.kind = none", budget.unit.value, fix)
    if budget.unit is Unit.PERSON:
        if not all(own.has_persons for own in situation.sizes):
            raise InvalidInput("data.unit", "the person of each row", "nothing", "Name the column of the person's id.")
        if method.person_slots and situation.rows_per_person is None:
            fix = "Declare a public bound on the rows of one person."
            raise InvalidInput("data.rows_per_person", f"a number with {method.privatise}", "nothing", fix)


def _check_sums(situation: Situation) -> None:
    """A secure sum needs several silos at a time, and noise that is a sum of shares."""
    schedule = getattr(situation.settings, "schedule", Schedule.SYNCHRONOUS)
    if schedule not in (Schedule.SYNCHRONOUS, Schedule.SAMPLED):
        fix = "Only silos that answer together can hide in a sum; use synchronous."
        raise InvalidInput("protocol.schedule", "synchronous or sampled with a sum", schedule.value, fix)
    situation.aggregation.num_shares(situation.sums.together)  # refuses too few


def known_noise(situation: Situation) -> LinearRegression:
    """The model, where a method needs a linear regression with known noise."""
    if not isinstance(situation.model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use another method."
        key = "protocol.privatise" if situation.method.kind == "pvi" else "protocol.kind"
        expected = f"a linear regression with known noise for {situation.method.name}"
        raise InvalidInput(key, expected, "another model", fix)
    return situation.model


def gaussian_prior(situation: Situation) -> None:
    """Refuse other priors."""
    if not situation.model.prior_is_gaussian:
        fix = "Use protocol.kind = pvi, where such a prior is a factor of its own."
        raise InvalidInput("model.kind", f"a Gaussian prior with {situation.method.kind}", "another one", fix)
