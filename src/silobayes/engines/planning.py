"""From public settings to a method with its noise: everything is checked and priced before anything is spent."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.core.hashing import stable_hashes
from silobayes.data.silo import Silo
from silobayes.defaults import Settings
from silobayes.engines.baselines import BCMMethod, GlobalVIMethod, StatisticsMethod
from silobayes.engines.buckets import Buckets
from silobayes.engines.methods import AbstractMethod, PerturbedMethod, PVIMethod, round_event
from silobayes.engines.solvers import LocalSolver
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.noisy_statistics import noise_multiplier_for
from silobayes.models.base import AbstractModel, GaussianFamily
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.accounting import calibrate
from silobayes.privacy.events import AbstractEvent, Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.relation import Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler, Sampler
from silobayes.protocols import bcm, dp_pvi, pvi
from silobayes.protocols.schedule import Visit, visits, visits_per_client
from silobayes.study import PosteriorKind, Privatise, ProtocolKind

Key = TypeVar("Key")
_PERTURBED = (Privatise.PARAMETER_PERTURBATION, Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS)


def family_of(model: AbstractModel, posterior: PosteriorKind) -> GaussianFamily:
    """The family of the posterior over the model's parameters."""
    if posterior is PosteriorKind.FULL:
        return FullGaussian(dimension=model.dim)
    return MeanFieldGaussian(event_shape=(model.dim,))


def build_method(
    model: AbstractModel,
    silos: Sequence[Silo],
    settings: Settings,
    budget: Budget | None,
    seed: int,
    *,
    max_rows: Sequence[int] | None = None,
) -> AbstractMethod:
    """The method, with the least noise that keeps `budget` (None: not private).

    Args:
        model: The model.
        silos: Rows; only their public sizes decide anything here.
        settings: Public.
        budget: Of each silo.
        seed: Of model randomness, of the schedule and of dealing rows to shards.
        max_rows: Public bounds on the silos' rows; by default their numbers, which a study declares public.
    """
    _check(model, silos, settings, budget)
    slots = [silo.num_rows for silo in silos] if max_rows is None else list(max_rows)
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
        "solver": solver,
        "eta_p": eta_p,
        "damping": settings.damping,
        "seed": seed,
        "averages": budget is not None,
        "posterior_floor": solver.floor,
    }
    if settings.privatise in _PERTURBED:
        assert budget is not None
        return _perturbed(common, silos, settings, budget, slots)
    if settings.privatise is Privatise.SUFFICIENT_STATISTICS:
        assert budget is not None
        return _statistics(common, silos, settings, budget)
    buckets = Buckets([(silo.x, silo.y) for silo in silos], slots)
    plans = None if budget is None else _plans(solver, settings, budget, steps, buckets, slots)
    loop: dict[str, Any] = {"buckets": buckets, "plans": plans, "clipping": settings.clipping.value}
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
    if settings.privatise is Privatise.SUFFICIENT_STATISTICS and not isinstance(model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use dp_optimisation."
        raise InvalidInput("protocol.privatise", "a linear regression with known noise", settings.privatise.value, fix)
    if settings.privatise is Privatise.HYBRID:
        fix = "Use sufficient_statistics or dp_optimisation."
        raise InvalidInput("protocol.privatise", "a method of this version", settings.privatise.value, fix)
    if budget is None:
        return
    if budget.unit is Unit.CLIENT:
        fix = "A whole silo is protected only inside a secure sum, which this version lacks; use row or person."
        raise InvalidInput("privacy.unit", "row or person", budget.unit.value, fix)
    if budget.unit is Unit.PERSON:
        if settings.privatise not in _PERTURBED:
            fix = "Use local_averaging or virtual_clients: they deal whole persons to shards."
            raise InvalidInput("privacy.unit", f"row with {settings.privatise.value}", budget.unit.value, fix)
        if any(silo.persons is None for silo in silos):
            raise InvalidInput("data.unit", "the person of each row", "nothing", "Name the column of the person's id.")


def _perturbed(
    common: dict[str, Any], silos: Sequence[Silo], settings: Settings, budget: Budget, slots: Sequence[int]
) -> PerturbedMethod:
    ball = dp_pvi.Ball(clip_norms=(settings.clip_norm,), scales=settings.scales, unit=budget.unit)
    counts = visits_per_client(common["visits"], len(silos))
    family = common["solver"].family

    def event_of(count: int) -> Callable[[float], AbstractEvent]:
        return lambda noise: round_event(ball, family, budget.relation, noise, count)

    noise = _noise_multipliers([max(count, 1) for count in counts], event_of, budget)
    is_virtual = settings.privatise is Privatise.VIRTUAL_CLIENTS
    # A precision below its own noise says nothing, and a mean divided by it would run away: raise it to that noise.
    per_visit = 2 * settings.clip_norm * settings.scales[1] * settings.damping / (1 if is_virtual else settings.shards)
    noise_stddev = per_visit * np.sqrt(sum(count * one**2 for count, one in zip(counts, noise, strict=True)))
    return PerturbedMethod(
        **{**common, "posterior_floor": max(common["posterior_floor"], float(noise_stddev))},
        shards=shard_buckets(silos, settings.shards, slots, common["seed"]),
        num_shards=settings.shards,
        factor_per_shard=is_virtual,
        ball=ball,
        noise_multipliers=tuple(noise),
        relation=budget.relation,
    )


def _statistics(common: dict[str, Any], silos: Sequence[Silo], settings: Settings, budget: Budget) -> StatisticsMethod:
    dim, count = silos[0].num_features, len(common["visits"])
    if count != 1:
        fix = "Statistics are released once; more rounds would only cost."
        raise InvalidInput("protocol.rounds", "1 with sufficient_statistics", settings.rounds, fix)
    noise = noise_multiplier_for(
        dim, y_bound=settings.y_bound, relation=budget.relation, epsilon=budget.epsilon, delta=budget.delta
    )
    return StatisticsMethod(
        **{**common, "averages": False},
        rows=tuple((silo.x.astype(np.float64), silo.y.astype(np.float64)) for silo in silos),
        x_bound=settings.x_bound,
        y_bound=settings.y_bound,
        noise_multiplier=noise,
        relation=budget.relation,
    )


def shard_buckets(silos: Sequence[Silo], num_shards: int, slots: Sequence[int], seed: int) -> Buckets:
    """All shards of all silos, silo by silo."""
    parts, sizes = [], []
    for silo, max_rows in zip(silos, slots, strict=True):
        shard_of_slot = deal(silo, num_shards, max_rows, seed)
        shard_of_row = shard_of_slot[: len(silo.y)]
        for k in range(num_shards):
            parts.append((silo.x[shard_of_row == k], silo.y[shard_of_row == k]))
            sizes.append(max(1, int(np.sum(shard_of_slot == k))))
    return Buckets(parts, sizes)


def deal(silo: Silo, num_shards: int, max_rows: int, seed: int) -> np.ndarray:
    """The shard of each slot: dealt once, whatever the rows hold; a person's rows stay together.

    Persons are dealt by a public hash of their own number, so that who else is there changes nobody's shard.

    Guarantees:
        - the shard of a row depends on its slot or person only
        - a silo with fewer rows or persons than shards is refused
    """
    num_units = max_rows if silo.persons is None else len(np.unique(silo.persons))
    if num_units < num_shards:
        fix = "Use fewer shards, or merge small silos."
        raise InvalidInput("protocol.shards", f"at most the {num_units} units of silo {silo.name}", num_shards, fix)
    if silo.persons is not None:
        return np.array(stable_hashes(f"{seed}/{person}" for person in silo.persons.tolist())) % num_shards
    rng = np.random.default_rng([seed, num_shards])
    # Block by block, so that one slot more changes nobody else's shard.
    blocks = [rng.permutation(num_shards) for _ in range(0, num_units, num_shards)]
    return np.concatenate(blocks)[:num_units]


def _plans(
    solver: LocalSolver,
    settings: Settings,
    budget: Budget,
    steps: tuple[Visit, ...],
    buckets: Buckets,
    slots: Sequence[int],
) -> tuple[StepPlan, ...]:
    counts = visits_per_client(steps, len(slots))
    samplers = [_sampler(settings, int(buckets.slots[m]), slots[m]) for m in range(len(slots))]

    def event_of(key: tuple[Sampler, int]) -> Callable[[float], AbstractEvent]:
        def at(noise: float) -> AbstractEvent:
            plan = solver.plan(key[0], clip_norm=settings.clip_norm, noise_multiplier=noise)
            return dataclasses.replace(plan.event, count=solver.num_steps * key[1])

        return at

    keys = [(sampler, max(count, 1)) for sampler, count in zip(samplers, counts, strict=True)]
    noise = _noise_multipliers(keys, event_of, budget)
    return tuple(
        solver.plan(sampler, clip_norm=settings.clip_norm, noise_multiplier=multiplier)
        for sampler, multiplier in zip(samplers, noise, strict=True)
    )


def _sampler(settings: Settings, bucket_rows: int, rows: int) -> Sampler:
    """Poisson slots are those of the bucket, so that its silos share one shape and one price."""
    if settings.sampler is Scheme.POISSON:
        return PoissonSampler(sample_rate=settings.sample_rate, max_rows=bucket_rows)
    return FixedSizeSampler(batch_size=max(1, round(settings.sample_rate * rows)), max_rows=rows)


def _noise_multipliers(
    keys: Sequence[Key], event_of: Callable[[Key], Callable[[float], AbstractEvent]], budget: Budget
) -> list[float]:
    """The least noise of each key within the budget; equal keys are calibrated once."""
    known: dict[Key, float] = {}
    for key in keys:
        if key not in known:
            known[key] = _least_noise(event_of(key), budget)
    return [known[key] for key in keys]


def _least_noise(event_of: Callable[[float], AbstractEvent], budget: Budget) -> float:
    tried: dict[AbstractEvent, float] = {}

    def at(noise: float) -> AbstractEvent:
        event = event_of(noise)
        tried[event] = noise
        return event

    chosen = calibrate(at, relation=budget.relation, epsilon=budget.epsilon, delta=budget.delta)
    return tried[chosen]  # the number that was priced, not one recomputed from the event
