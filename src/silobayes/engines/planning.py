"""From public settings to a method with its noise: everything is checked and priced before anything is spent."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.core.hashing import stable_hashes
from silobayes.data.silo import Silo
from silobayes.defaults import Settings
from silobayes.engines import linreg, quantile
from silobayes.engines.aggregation import Aggregator, aggregator, message_modulus, share_modulus
from silobayes.engines.baselines import (
    BCMMethod,
    GlobalVIMethod,
    StatisticsMethod,
    SummedGlobalVIMethod,
    loop_sum_of_nothing,
)
from silobayes.engines.buckets import Buckets
from silobayes.engines.hybrid import HybridMethod
from silobayes.engines.methods import AbstractMethod, PerturbedMethod, PVIMethod, no_change, repeated
from silobayes.engines.solvers import LocalSolver
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.noisy_statistics import bounded_statistics
from silobayes.models.base import AbstractModel, GaussianFamily
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.accounting import calibrate
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.events import AbstractEvent, Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism, SkellamMechanism
from silobayes.privacy.relation import Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler, Sampler
from silobayes.protocols import bcm, dp_pvi, pvi
from silobayes.protocols.schedule import Schedule, Visit, visits, visits_per_client
from silobayes.secure.fixed_point import Modulus
from silobayes.study import (
    PERTURBING,
    AggregationKind,
    AggregationSection,
    PosteriorKind,
    Privatise,
    ProtocolKind,
    Study,
)

Key = TypeVar("Key")

# Of a shard of persons: how many rows somebody is thought to have where no bound is declared, and the room above the
# mean, in standard deviations.
_ROWS_PER_PERSON, _WIDTH_DEVIATIONS = 8, 5.0


def family_of(model: AbstractModel, posterior: PosteriorKind) -> GaussianFamily:
    """The family of the posterior over the model's parameters."""
    if posterior is PosteriorKind.FULL:
        return FullGaussian(dimension=model.dim)
    return MeanFieldGaussian(event_shape=(model.dim,))


def public_sizes(study: Study, settings: Settings, silos: Sequence[Silo]) -> list[int]:
    """What is public of each silo's size: of its persons where batches are of persons, otherwise of its rows."""
    by_person = study.privacy.unit is Unit.PERSON and settings.privatise is Privatise.DP_OPTIMISATION
    return [silo.num_persons if by_person else study.public_rows(silo) for silo in silos]


def build_method(
    model: AbstractModel,
    silos: Sequence[Silo],
    settings: Settings,
    budget: Budget | None,
    seed: int,
    *,
    max_rows: Sequence[int] | None = None,
    study_hash: str = "0" * 64,
) -> AbstractMethod:
    """The method, with the least noise that keeps `budget` (None: not private).

    Args:
        model: The model.
        silos: Rows; only their public sizes decide anything here.
        settings: Public.
        budget: Of each silo.
        seed: Of model randomness, of the schedule and of dealing rows to shards.
        max_rows: Public bounds on the silos' rows, or on their persons where batches are of persons; by default their
            numbers, which a study declares public.
        study_hash: Names the study in secure sums.
    """
    _check(model, silos, settings, budget)
    by_person = budget is not None and budget.unit is Unit.PERSON and settings.privatise is Privatise.DP_OPTIMISATION
    if max_rows is None:
        max_rows = [silo.num_persons if by_person else silo.num_rows for silo in silos]
    slots = list(max_rows)
    family = family_of(model, settings.posterior)
    eta_p = pvi.to_host(model.prior_eta(family))
    solver = LocalSolver(
        model=model,
        family=family,
        floor=pvi.precision_floor(eta_p),
        num_steps=settings.steps,
        step_size=settings.step_size,
    )
    steps = visits(
        settings.schedule,
        num_clients=len(silos),
        num_rounds=settings.rounds,
        clients_per_round=settings.clients_per_round,
        seed=seed,
    )
    common: dict[str, Any] = {
        "visits": steps,
        "num_clients": len(silos),
        "solver": solver,
        "eta_p": eta_p,
        "damping": settings.damping,
        "seed": seed,
        "averages": budget is not None,
        "posterior_floor": solver.floor,
    }
    sums = _Sums(section=settings.aggregation, num_clients=len(steps[0].clients), study_hash=study_hash)
    if settings.kind is ProtocolKind.LINREG and budget is not None:
        return linreg.build(common, silos, settings, budget, slots, sums, _least_noise)
    if settings.privatise in PERTURBING:
        assert budget is not None

        def perturbed(besides: tuple[AbstractEvent, ...]) -> PerturbedMethod:
            return _perturbed(common, silos, settings, budget, slots, sums, besides=besides)

        if settings.clip_quantile is None:
            return perturbed(())
        everybody = dataclasses.replace(sums, num_clients=len(silos))
        return quantile.build(common, settings, budget, everybody, _least_noise, perturbed)
    if settings.privatise is Privatise.SUFFICIENT_STATISTICS:
        assert budget is not None
        return _statistics(common, silos, settings, budget, sums)
    buckets = _person_buckets(silos, settings, slots) if by_person else Buckets([(s.x, s.y) for s in silos], slots)
    if settings.kind is ProtocolKind.GLOBAL_VI and sums.is_used:
        assert budget is not None
        return _summed_global_vi(common, settings, budget, buckets, sums)
    if settings.privatise is Privatise.HYBRID:
        assert budget is not None
        return _hybrid(common, silos, settings, budget, buckets, slots, sums)
    plans = None if budget is None else _plans(solver, settings, budget, steps, buckets, slots)
    loop: dict[str, Any] = {"buckets": buckets, "plans": plans, "clipping": settings.clipping.value}
    common["aggregator"] = sums.of_messages()
    if settings.kind is ProtocolKind.BCM:
        share = bcm.prior_share(settings.committee, len(silos))
        # The floor of a cavity goes with the prior that it is made of.
        common["solver"] = dataclasses.replace(solver, floor=share * solver.floor)
        return BCMMethod(**common, **loop, share=share)
    if settings.kind is ProtocolKind.GLOBAL_VI:
        return GlobalVIMethod(**{**common, "averages": False, "exchanges_per_visit": settings.steps}, **loop)
    return PVIMethod(**common, **loop)


def _check(model: AbstractModel, silos: Sequence[Silo], settings: Settings, budget: Budget | None) -> None:
    if not silos:
        raise InvalidInput("silos", "at least one silo", 0, "Pass the silos of the study.")
    if len({silo.x.shape[1] for silo in silos}) != 1:
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
        linreg.check(model, settings, budget)
    from_statistics = (Privatise.SUFFICIENT_STATISTICS, Privatise.HYBRID)
    if settings.privatise in from_statistics and not isinstance(model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use dp_optimisation."
        raise InvalidInput("protocol.privatise", "a linear regression with known noise", settings.privatise.value, fix)
    if settings.privatise is Privatise.HYBRID:
        _check_hybrid(settings)
    if settings.aggregation.kind is not AggregationKind.NONE:
        _check_sums(settings, budget, len(silos))
    if budget is None:
        return
    if budget.unit is not Unit.PERSON and any(silo.persons is not None for silo in silos):
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
        if any(silo.persons is None for silo in silos):
            raise InvalidInput("data.unit", "the person of each row", "nothing", "Name the column of the person's id.")
        if settings.privatise is Privatise.DP_OPTIMISATION and settings.rows_per_person is None:
            fix = "Declare a public bound on the rows of one person."
            raise InvalidInput("data.rows_per_person", "a number with dp_optimisation", "nothing", fix)


def _check_hybrid(settings: Settings) -> None:
    """The start makes one public factor per silo of all silos' own releases."""
    if settings.aggregation.kind is not AggregationKind.NONE:
        fix = "With a sum over silos nobody could start from a silo's own statistics; use sufficient_statistics."
        raise InvalidInput("aggregation.kind", "none with hybrid", settings.aggregation.kind.value, fix)
    if settings.schedule is not Schedule.SYNCHRONOUS:
        fix = "All silos release their statistics before the first round."
        raise InvalidInput("protocol.schedule", "synchronous with hybrid", settings.schedule.value, fix)
    if settings.rounds < 2:
        fix = "The first round is that of the statistics; use sufficient_statistics to stop there."
        raise InvalidInput("protocol.rounds", "at least 2 with hybrid", settings.rounds, fix)


def _check_sums(settings: Settings, budget: Budget | None, num_clients: int) -> None:
    """A secure sum needs several silos at a time, and noise that is a sum of shares."""
    if settings.schedule not in (Schedule.SYNCHRONOUS, Schedule.SAMPLED):
        fix = "Only silos that answer together can hide in a sum; use synchronous."
        raise InvalidInput("protocol.schedule", "synchronous or sampled with a sum", settings.schedule.value, fix)
    settings.aggregation.num_shares(settings.clients_per_round or num_clients)  # refuses too few
    if settings.kind is ProtocolKind.GLOBAL_VI and budget is None:
        fix = "Without privacy global VI is a loop over all rows; use aggregation.kind = none, or pvi."
        raise InvalidInput("aggregation.kind", "none", settings.aggregation.kind.value, fix)
    if settings.kind is ProtocolKind.GLOBAL_VI and settings.sampler is not Scheme.POISSON:
        fix = "Silos of a sum need one common rate; use poisson."
        raise InvalidInput("protocol.sampler", "poisson with a sum", settings.sampler.value, fix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sums:
    """Makes aggregators for visits of `num_clients` silos; none with aggregation.kind = none."""

    section: AggregationSection
    num_clients: int
    study_hash: str

    @property
    def is_used(self) -> bool:
        return self.section.kind is not AggregationKind.NONE

    def mechanism(self, noise_multiplier: float) -> AbstractMechanism:
        """The noise of a release: each silo's own, or of the sum."""
        if not self.is_used:
            return GaussianMechanism(noise_multiplier=noise_multiplier)
        num_shares = self.section.num_shares(self.num_clients)
        return SkellamMechanism(noise_multiplier=noise_multiplier, num_shares=num_shares)

    def of_messages(self) -> Aggregator | None:
        """For messages that need no noise."""
        return self._aggregator(message_modulus(self.num_clients)) if self.is_used else None

    def of_shares(self, empty: Bounded, noise_multiplier: float, *, num_terms: int, num_sums: int) -> Aggregator | None:
        """For shares like `empty`, of up to `num_terms` terms a silo."""
        if not self.is_used:
            return None
        sizes = {"num_clients": self.num_clients, "num_terms": num_terms, "num_sums": num_sums}
        return self._aggregator(share_modulus(self.section, empty, noise_multiplier, **sizes))

    def _aggregator(self, modulus: Modulus) -> Aggregator:
        return aggregator(self.section, modulus, num_clients=self.num_clients, study_hash=self.study_hash)


def _perturbed(
    common: dict[str, Any],
    silos: Sequence[Silo],
    settings: Settings,
    budget: Budget,
    slots: Sequence[int],
    sums: _Sums,
    *,
    besides: tuple[AbstractEvent, ...] = (),
) -> PerturbedMethod:
    counts_of_shards = settings.shards_of(len(silos))
    averages_shards = settings.privatise is not Privatise.VIRTUAL_CLIENTS
    # Of a shard's own change, as in the paper; what is released is the average over a silo's shards.
    share = len(silos) / sum(counts_of_shards) if averages_shards else 1.0
    clip_norms = tuple(share * clip_norm for clip_norm in settings.clip_norms)
    ball = dp_pvi.Ball(clip_norms=clip_norms, scales=settings.scales, unit=budget.unit)
    counts = visits_per_client(common["visits"], len(silos))
    empty = no_change(ball, common["solver"].family)

    def event_of(count: int) -> Callable[[float], AbstractEvent]:
        return lambda noise: repeated(sums.mechanism(noise).event(empty, budget.relation), count)[0]

    # Shares of one sum have one noise: that of the silo that is visited most.
    priced = [max(counts)] * len(counts) if sums.is_used else [max(count, 1) for count in counts]
    noise = _noise_multipliers(priced, event_of, budget, besides=besides)
    return PerturbedMethod(
        **common,
        shards=shard_buckets(silos, counts_of_shards, slots, common["seed"], settings.rows_per_person),
        shards_per_client=counts_of_shards,
        averages_shards=averages_shards,
        ball=ball,
        noise_multipliers=tuple(noise),
        num_shares=sums.section.num_shares(sums.num_clients) if sums.is_used else 1,
        relation=budget.relation,
        aggregator=sums.of_shares(empty, noise[0], num_terms=max(counts_of_shards), num_sums=len(common["visits"])),
    )


def _summed_global_vi(
    common: dict[str, Any], settings: Settings, budget: Budget, buckets: Buckets, sums: _Sums
) -> SummedGlobalVIMethod:
    solver, num_sums = common["solver"], settings.steps * len(common["visits"])
    (clip_norm,) = settings.clip_norms
    samplers = tuple(PoissonSampler(sample_rate=settings.sample_rate, max_rows=int(rows)) for rows in buckets.slots)

    def empty(client: int) -> Bounded:
        return loop_sum_of_nothing(solver, clip_norm, samplers, client, budget.unit, buckets.rows_per_unit)

    def event_of(sampler: PoissonSampler) -> Callable[[float], AbstractEvent]:
        nothing = empty(samplers.index(sampler))
        return lambda noise: repeated(sums.mechanism(noise).event(nothing, budget.relation), num_sums)[0]

    noise = max(_noise_multipliers(samplers, event_of, budget))
    num_terms = max(sampler.capacity for sampler in samplers)
    return SummedGlobalVIMethod(
        **{**common, "averages": False, "exchanges_per_visit": settings.steps},
        buckets=buckets,
        samplers=samplers,
        clip_norm=clip_norm,
        noise_multiplier=noise,
        relation=budget.relation,
        unit=budget.unit,
        clipping=settings.clipping.value,
        aggregator=sums.of_shares(empty(0), noise, num_terms=num_terms, num_sums=num_sums),
    )


def _statistics(
    common: dict[str, Any], silos: Sequence[Silo], settings: Settings, budget: Budget, sums: _Sums
) -> StatisticsMethod:
    dim = silos[0].num_features
    if len(common["visits"]) != 1 and settings.privatise is not Privatise.HYBRID:
        fix = "Statistics are released once; more rounds would only cost."
        raise InvalidInput("protocol.rounds", "1 with sufficient_statistics", settings.rounds, fix)
    empty = bounded_statistics(np.zeros((0, dim)), np.zeros(0), y_bound=settings.y_bound)
    noise = _least_noise(lambda std: sums.mechanism(std).event(empty, budget.relation), budget)
    return StatisticsMethod(
        **{**common, "averages": False},
        rows=tuple((silo.x.astype(np.float64), silo.y.astype(np.float64)) for silo in silos),
        x_bound=settings.x_bound,
        y_bound=settings.y_bound,
        noise_multiplier=noise,
        relation=budget.relation,
        aggregator=sums.of_shares(empty, noise, num_terms=max(silo.num_rows for silo in silos), num_sums=1),
    )


def _hybrid(
    common: dict[str, Any],
    silos: Sequence[Silo],
    settings: Settings,
    budget: Budget,
    buckets: Buckets,
    slots: Sequence[int],
    sums: _Sums,
) -> HybridMethod:
    """The statistics get a share of epsilon, the loops all that is left of the budget beside them."""
    share = dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon)
    first = _statistics(common, silos, settings, share, sums)
    later = common["visits"][1:]
    plans = _plans(common["solver"], settings, budget, later, buckets, slots, besides=first.events(0, 1))
    then = PVIMethod(**common, buckets=buckets, plans=plans, clipping=settings.clipping.value)
    return HybridMethod(**common, first=first, then=then, sizes=tuple(slots))


def _person_buckets(silos: Sequence[Silo], settings: Settings, slots: Sequence[int]) -> Buckets:
    """Person by person, so that a batch takes all rows of a person or none."""
    assert settings.rows_per_person is not None
    persons = [silo.persons for silo in silos if silo.persons is not None]
    parts = [(silo.x, silo.y) for silo in silos]
    return Buckets(parts, slots, persons=persons, rows_per_unit=settings.rows_per_person)


def shard_buckets(
    silos: Sequence[Silo],
    counts: Sequence[int],
    slots: Sequence[int],
    seed: int,
    rows_per_person: int | None = None,
) -> Buckets:
    """All shards of all silos, silo by silo; `counts` are their numbers, `slots` the silos' public numbers of rows.

    Guarantees:
        - the shapes of all shards follow from public numbers
    """
    parts, sizes = [], []
    for silo, num_shards, max_rows in zip(silos, counts, slots, strict=True):
        shard_of_slot = deal(silo, num_shards, max_rows, seed)
        if silo.persons is None:
            widths = np.maximum(1, np.bincount(shard_of_slot, minlength=num_shards))
        else:
            widths = np.full(num_shards, width_of_shards(max_rows, num_shards, rows_per_person))
        shard_of_row = shard_of_slot[: len(silo.y)]
        order = np.argsort(shard_of_row, kind="stable")
        ends = np.cumsum(np.bincount(shard_of_row, minlength=num_shards))[:-1]
        # A shard's rows beyond its width are left out: which these are is the business of that shard alone.
        own_rows = [own[:width] for own, width in zip(np.split(order, ends), widths, strict=True)]
        parts += [(silo.x[own], silo.y[own]) for own in own_rows]
        sizes += widths.tolist()
    return Buckets(parts, sizes)


def width_of_shards(max_rows: int, num_shards: int, rows_per_person: int | None) -> int:
    """Slots of a shard of persons, from public numbers alone.

    How many rows a shard holds is somebody's secret: if shapes followed it, compiled code could round the sums of
    *other* shards differently. Persons fall into shards by chance, about as a Poisson number of them with up to
    `rows_per_person` rows each, so the width is that many standard deviations above the mean.
    """
    mean, rows = max_rows / num_shards, rows_per_person or _ROWS_PER_PERSON
    return max(1, min(max_rows, math.ceil(mean + rows + _WIDTH_DEVIATIONS * math.sqrt(mean * rows))))


def deal(silo: Silo, num_shards: int, max_rows: int, seed: int) -> np.ndarray:
    """The shard of each slot: dealt once, whatever the rows hold; a person's rows stay together.

    Persons are dealt by a public hash of their own number, so that who else is there changes nobody's shard; a shard
    may stay empty. How many persons there are is nowhere looked at.

    Guarantees:
        - the shard of a row depends on its slot or person only
        - a silo with fewer rows than shards is refused
    """
    if max_rows < num_shards:
        fix = "Use fewer shards, or merge small silos."
        raise InvalidInput("protocol.shards", f"at most the {max_rows} rows of silo {silo.name}", num_shards, fix)
    if silo.persons is not None:
        return np.array(stable_hashes(f"{seed}/{person}" for person in silo.persons.tolist())) % num_shards
    rng = np.random.default_rng([seed, num_shards])
    # Block by block, so that one slot more changes nobody else's shard.
    blocks = [rng.permutation(num_shards) for _ in range(0, max_rows, num_shards)]
    return np.concatenate(blocks)[:max_rows]


def _plans(
    solver: LocalSolver,
    settings: Settings,
    budget: Budget,
    steps: tuple[Visit, ...],
    buckets: Buckets,
    slots: Sequence[int],
    *,
    besides: tuple[AbstractEvent, ...] = (),
) -> tuple[StepPlan, ...]:
    (clip_norm,) = settings.clip_norms
    counts = visits_per_client(steps, len(slots))
    samplers = [_sampler(settings, int(buckets.slots[m]), slots[m]) for m in range(len(slots))]

    def event_of(key: tuple[Sampler, int]) -> Callable[[float], AbstractEvent]:
        def at(noise: float) -> AbstractEvent:
            plan = solver.plan(key[0], clip_norm=clip_norm, noise_multiplier=noise, unit=budget.unit)
            return dataclasses.replace(plan.event, count=solver.num_steps * key[1])

        return at

    keys = [(sampler, max(count, 1)) for sampler, count in zip(samplers, counts, strict=True)]
    noise = _noise_multipliers(keys, event_of, budget, besides=besides)
    return tuple(
        solver.plan(sampler, clip_norm=clip_norm, noise_multiplier=multiplier, unit=budget.unit)
        for sampler, multiplier in zip(samplers, noise, strict=True)
    )


def _sampler(settings: Settings, bucket_rows: int, rows: int) -> Sampler:
    """Poisson slots are those of the bucket, so that its silos share one shape and one price."""
    if settings.sampler is Scheme.POISSON:
        return PoissonSampler(sample_rate=settings.sample_rate, max_rows=bucket_rows)
    return FixedSizeSampler(batch_size=max(1, round(settings.sample_rate * rows)), max_rows=rows)


def _noise_multipliers(
    keys: Sequence[Key],
    event_of: Callable[[Key], Callable[[float], AbstractEvent]],
    budget: Budget,
    *,
    besides: tuple[AbstractEvent, ...] = (),
) -> list[float]:
    """The least noise of each key within the budget; equal keys are calibrated once."""
    known: dict[Key, float] = {}
    for key in keys:
        if key not in known:
            known[key] = _least_noise(event_of(key), budget, besides=besides)
    return [known[key] for key in keys]


def _least_noise(
    event_of: Callable[[float], AbstractEvent], budget: Budget, *, besides: tuple[AbstractEvent, ...] = ()
) -> float:
    tried: dict[AbstractEvent, float] = {}

    def at(noise: float) -> AbstractEvent:
        event = event_of(noise)
        tried[event] = noise
        return event

    chosen = calibrate(at, relation=budget.relation, epsilon=budget.epsilon, delta=budget.delta, besides=besides)
    return tried[chosen]  # the number that was priced, not one recomputed from the event
