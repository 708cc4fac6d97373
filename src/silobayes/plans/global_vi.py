"""Global variational inference, with and without a sum over silos."""

from functools import partial
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.inference.global_steps import ChunkGradients, ReleasedGradient, WholeGradient, no_gradient
from silobayes.plans.calibration import noise_multipliers
from silobayes.plans.checks import gaussian_prior
from silobayes.plans.keys import BatchKeys, StepKeys, check_batches, check_schedule, only_schedule
from silobayes.plans.pvi import OPTIMISATION
from silobayes.plans.rules import (
    PublicFacts,
    common_rules,
    is_summed,
    open_rules,
    optimisation_rules,
    with_noisy_steps,
)
from silobayes.plans.situation import Situation
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.events import Scheme
from silobayes.privacy.sampling import PoissonSampler, Sampler
from silobayes.protocols import global_vi, pvi
from silobayes.protocols.roles import Plan, Seat
from silobayes.protocols.schedule import Schedule, Visit, numbered
from silobayes.studies.method import Method
from silobayes.studies.study import Study


def plan(situation: Situation) -> Plan:
    """One step of the server's optimiser for each sum over silos."""
    gaussian_prior(situation)
    settings = situation.settings
    if situation.sums.is_used and situation.budget is None:
        fix = "Without privacy global VI is a loop over all rows; use aggregation.kind = none, or pvi."
        raise InvalidInput("aggregation.kind", "none", situation.aggregation.kind.value, fix)
    rounds = tuple(Visit(silos=visit.silos, steps=settings.steps) for visit in situation.visits)
    sample_rate = 1.0
    silo: global_vi.OpenSilo | global_vi.NoisySilo | global_vi.SharingSilo
    if situation.budget is None:
        seats = situation.row_seats()
        silo = global_vi.OpenSilo(solve=WholeGradient(model=situation.model), query=situation.sums.open())
    elif situation.sums.is_used:
        seats, silo = _sharing(situation)
        sample_rate = settings.sample_rate
    else:
        seats = situation.loop_seats(situation.visits)
        silo = global_vi.NoisySilo(
            solve=ReleasedGradient(**_clipped(situation)),
            query=situation.sums.open(),
            loop=situation.loop_of(seats[0]),
        )
    server = global_vi.GlobalVIServer(
        local=situation.local,
        query=silo.query,  # type: ignore[arg-type]
        sample_rate=sample_rate,
        names=situation.names,
        eta_p=situation.eta_p,
        first_start=situation.start,
        seed=situation.seed,
        num_visits=len(rounds),
        steps=settings.steps,
        is_private=situation.budget is not None,
    )
    return Plan(
        visits=numbered(rounds),
        seats=seats,
        silos=(silo,),
        server=server,
        numbers=situation.numbers,
        stretch=None if isinstance(silo, global_vi.SharingSilo) else partial(global_vi.stretch, server, silo),
    )


def _clipped(situation: Situation) -> dict[str, Any]:
    return {
        "model": situation.model,
        "clip_norm": np.float32(situation.settings.clip_norm),
        "clipping": situation.settings.clipping.value,
        "rows_per_unit": situation.rows_per_unit,
    }


def _sharing(situation: Situation) -> tuple[tuple[Seat, ...], global_vi.SharingSilo]:
    """All silos of a sum have the noise of the one that needs most."""
    budget, settings, rows_per_unit = situation.paid, situation.settings, situation.rows_per_unit
    num_sums = settings.steps * len(situation.visits)
    if settings.sampler is not Scheme.POISSON:
        fix = "Silos of a sum need one common rate; use poisson."
        raise InvalidInput("protocol.sampler", "poisson with a sum", settings.sampler.value, fix)
    clip_norm = settings.clip_norm
    units, layouts = situation.unit_layouts()
    samplers: list[PoissonSampler] = [
        situation.sampler(own, layout) for own, layout in zip(units, layouts, strict=True)
    ]  # type: ignore[misc]

    def empty(silo: int) -> Bounded:
        return no_gradient(situation.family, clip_norm, samplers, silo, rows_per_unit, budget.unit)

    def event_of(sampler: Sampler) -> Any:
        nothing = empty(samplers.index(sampler))  # type: ignore[arg-type]
        return lambda noise: pvi.repeated(situation.sums.mechanism(noise).event(nothing, budget.relation), num_sums)

    noise = max(noise_multipliers(samplers, event_of, budget))
    capacity = max(sampler.capacity for sampler in samplers)
    query = situation.sums.private(
        [empty(silo) for silo in range(len(samplers))],
        [noise] * len(samplers),
        budget,
        num_terms=capacity,
        num_sums=num_sums,
    )
    seats = tuple(
        Seat(index=m, size=units[m], layout=layouts[m], sampler=samplers[m]) for m in range(situation.num_silos)
    )
    gradient = ChunkGradients(**_clipped(situation))
    silo = global_vi.SharingSilo(
        solve=gradient,
        query=query,
        clip_norm=clip_norm,
        capacity=capacity,
        unit=budget.unit,
        num_steps=settings.steps,
    )
    return seats, silo


def _rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    return open_rules(study, facts, keys) | {"rounds": 100, "damping": 1.0}


def _private_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    rules = common_rules(study, facts) | optimisation_rules(study, facts) | {"damping": 1.0}
    # One walk, on the sum over silos; in a secure sum the noise is that of one silo.
    return with_noisy_steps(study, facts, keys, rules, 1.0 / len(facts.silo_rows) if is_summed(study) else 1.0)


def _leaves(study: Study) -> str:
    return "in each step of one common optimisation, a sum of clipped gradients of its rows with {noise}."


_TOGETHER = (check_schedule, only_schedule(Schedule.SYNCHRONOUS))
METHODS = (
    Method(
        kind="global_vi",
        privatise="none",
        keys=StepKeys,
        plan=plan,
        rules=_rules,
        checks=_TOGETHER,
        summary="one optimisation over all rows without privacy",
        releases="exact gradients",
        models="models with a Gaussian prior",
        units=(),
        leaves=lambda study: "exact results computed from its rows. Nothing protects them.",
        expects_widths=True,
    ),
    Method(
        **OPTIMISATION
        | {
            "kind": "global_vi",
            "keys": BatchKeys,
            "plan": plan,
            "rules": _private_rules,
            "checks": (*_TOGETHER, check_batches),
            "summary": "one optimisation over all rows, a noisy sum of gradients for each step",
            "models": "models with a Gaussian prior",
            "leaves": _leaves,
            "shares": True,
        }
    ),
)
