"""What a method cannot do is refused before anything is priced."""

from silobayes.core.errors import InvalidInput
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans.situation import Situation
from silobayes.privacy.events import Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.protocols.schedule import Schedule
from silobayes.study import PERTURBING, AggregationKind, Privatise, ProtocolKind


def check(situation: Situation) -> None:
    """Refuse what no plan can be made for."""
    settings, budget, model = situation.settings, situation.budget, situation.model
    if not situation.sizes:
        raise InvalidInput("silos", "at least one silo", 0, "Pass the silos of the study.")
    if len({own.num_features for own in situation.sizes}) != 1:
        raise InvalidInput("silos", "equal numbers of features", "different ones", "Encode all by the same study.")
    if (settings.privatise is Privatise.NONE) != (budget is None):
        fix = "Mode none has no budget; every private method has one."
        raise InvalidInput("protocol.privatise", "a budget and a private method, or neither", settings.privatise, fix)
    if settings.kind in (ProtocolKind.BCM, ProtocolKind.GLOBAL_VI):
        if settings.privatise not in (Privatise.NONE, Privatise.DP_OPTIMISATION):
            fix = "Use dp_optimisation, or protocol.kind = pvi."
            raise InvalidInput(
                "protocol.privatise", f"dp_optimisation with {settings.kind.value}", settings.privatise, fix
            )
        if not model.prior_is_gaussian:
            fix = "Use protocol.kind = pvi, where such a prior is a factor of its own."
            raise InvalidInput("model.kind", f"a Gaussian prior with {settings.kind.value}", "another one", fix)
    if settings.kind is ProtocolKind.LINREG:
        _check_linreg(situation)
    from_statistics = (Privatise.SUFFICIENT_STATISTICS, Privatise.HYBRID)
    if settings.privatise in from_statistics and not isinstance(model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use dp_optimisation."
        raise InvalidInput("protocol.privatise", "a linear regression with known noise", settings.privatise.value, fix)
    if settings.privatise is Privatise.HYBRID:
        _check_hybrid(situation)
    if settings.aggregation.kind is not AggregationKind.NONE:
        _check_sums(situation)
    if budget is not None:
        _check_unit(situation, budget)


def _check_unit(situation: Situation, budget: Budget) -> None:
    settings = situation.settings
    if budget.unit is not Unit.PERSON and any(own.has_persons for own in situation.sizes):
        fix = 'Set privacy.unit = "person", or leave persons out: whole persons would be dealt and priced as rows.'
        raise InvalidInput("silos.persons", f"none with privacy.unit = {budget.unit.value}", "persons", fix)
    if budget.unit is Unit.CLIENT:
        if settings.privatise is not Privatise.PARAMETER_PERTURBATION:
            fix = "A silo's whole change is one term: use parameter_perturbation."
            raise InvalidInput("privacy.unit", f"row with {settings.privatise.value}", budget.unit.value, fix)
        if settings.aggregation.kind is AggregationKind.NONE:
            fix = "A whole silo hides only among others: choose an aggregation."
            raise InvalidInput("privacy.unit", "row or person with aggregation.kind = none", budget.unit.value, fix)
    if budget.unit is Unit.PERSON:
        if settings.privatise not in (Privatise.DP_OPTIMISATION, *PERTURBING):
            fix = "Use dp_optimisation, which samples and clips whole persons, or local_averaging, which deals them."
            raise InvalidInput("privacy.unit", f"row with {settings.privatise.value}", budget.unit.value, fix)
        if not all(own.has_persons for own in situation.sizes):
            raise InvalidInput("data.unit", "the person of each row", "nothing", "Name the column of the person's id.")
        if settings.privatise is Privatise.DP_OPTIMISATION and settings.rows_per_person is None:
            fix = "Declare a public bound on the rows of one person."
            raise InvalidInput("data.rows_per_person", "a number with dp_optimisation", "nothing", fix)


def _check_linreg(situation: Situation) -> None:
    """Without privacy it is one exact round of PVI."""
    if not isinstance(situation.model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use another protocol."
        raise InvalidInput("protocol.kind", "a linear regression with known noise for linreg", "another model", fix)
    known = (Privatise.NONE, Privatise.SUFFICIENT_STATISTICS, Privatise.INPUT_PERTURBATION)
    if situation.settings.privatise not in known:
        fix = "Use sufficient_statistics or input_perturbation, or protocol.kind = pvi."
        got = situation.settings.privatise.value
        raise InvalidInput("protocol.privatise", "a method of linreg", got, fix)


def _check_hybrid(situation: Situation) -> None:
    """The start makes one public factor per silo of all silos' own releases."""
    settings = situation.settings
    if settings.aggregation.kind is not AggregationKind.NONE:
        fix = "With a sum over silos nobody could start from a silo's own statistics; use sufficient_statistics."
        raise InvalidInput("aggregation.kind", "none with hybrid", settings.aggregation.kind.value, fix)
    if settings.schedule is not Schedule.SYNCHRONOUS:
        fix = "All silos release their statistics before the first round."
        raise InvalidInput("protocol.schedule", "synchronous with hybrid", settings.schedule.value, fix)
    if settings.rounds < 2:
        fix = "The first round is that of the statistics; use sufficient_statistics to stop there."
        raise InvalidInput("protocol.rounds", "at least 2 with hybrid", settings.rounds, fix)


def _check_sums(situation: Situation) -> None:
    """A secure sum needs several silos at a time, and noise that is a sum of shares."""
    settings = situation.settings
    if settings.schedule not in (Schedule.SYNCHRONOUS, Schedule.SAMPLED):
        fix = "Only silos that answer together can hide in a sum; use synchronous."
        raise InvalidInput("protocol.schedule", "synchronous or sampled with a sum", settings.schedule.value, fix)
    settings.aggregation.num_shares(settings.clients_per_round or situation.num_silos)  # refuses too few
    if settings.kind is ProtocolKind.GLOBAL_VI and situation.budget is None:
        fix = "Without privacy global VI is a loop over all rows; use aggregation.kind = none, or pvi."
        raise InvalidInput("aggregation.kind", "none", settings.aggregation.kind.value, fix)
    if settings.kind is ProtocolKind.GLOBAL_VI and settings.sampler is not Scheme.POISSON:
        fix = "Silos of a sum need one common rate; use poisson."
        raise InvalidInput("protocol.sampler", "poisson with a sum", settings.sampler.value, fix)
