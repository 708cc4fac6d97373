"""Global variational inference, with and without a sum over silos."""

from typing import Any

import numpy as np

from silobayes.plans.calibration import noise_multipliers
from silobayes.plans.situation import Situation
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.sampling import PoissonSampler, Sampler
from silobayes.protocols import global_vi, pvi
from silobayes.protocols.roles import AbstractSilo, Plan, Seat
from silobayes.protocols.schedule import Visit, numbered


def plan(situation: Situation) -> Plan:
    """One step of the server's optimiser for each sum over silos."""
    settings = situation.settings
    rounds = tuple(Visit(silos=visit.silos, steps=settings.steps) for visit in situation.visits)
    sample_rate = 1.0
    silo: AbstractSilo
    if situation.budget is None:
        seats = situation.row_seats()
        silo = global_vi.OpenSilo(solve=global_vi.WholeGradient(model=situation.model), query=situation.sums.open())
    elif situation.sums.is_used:
        seats, silo = _sharing(situation)
        sample_rate = settings.sample_rate
    else:
        seats = situation.loop_seats(situation.visits)
        silo = global_vi.NoisySilo(
            solve=global_vi.ReleasedGradient(**_clipped(situation)),
            query=situation.sums.open(),
            loop=situation.loop(seats[0].sampler, seats[0].noise_multiplier),  # type: ignore[arg-type]
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
        stretches=not situation.sums.is_used,
    )


def _clipped(situation: Situation) -> dict[str, Any]:
    (clip_norm,) = situation.settings.clip_norms
    return {
        "model": situation.model,
        "clip_norm": np.float32(clip_norm),
        "clipping": situation.settings.clipping.value,
        "rows_per_unit": situation.rows_per_unit,
    }


def _sharing(situation: Situation) -> tuple[tuple[Seat, ...], global_vi.SharingSilo]:
    """All silos of a sum have the noise of the one that needs most."""
    budget, settings, rows_per_unit = situation.paid, situation.settings, situation.rows_per_unit
    num_sums = settings.steps * len(situation.visits)
    (clip_norm,) = settings.clip_norms
    units, layouts = situation.unit_layouts()
    samplers: list[PoissonSampler] = [situation.sampler(own, layout) for own, layout in zip(units, layouts, strict=True)]  # type: ignore[misc]

    def empty(silo: int) -> Bounded:
        return global_vi.no_gradient(situation.family, clip_norm, samplers, silo, rows_per_unit, budget.unit)

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
    gradient = global_vi.ChunkGradients(**_clipped(situation))
    silo = global_vi.SharingSilo(
        solve=gradient,
        query=query,
        clip_norm=clip_norm,
        capacity=capacity,
        unit=budget.unit,
        num_steps=settings.steps,
    )
    return seats, silo
