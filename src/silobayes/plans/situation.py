"""What a plan is made from, and the pieces that most plans share. Nothing here has seen a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.coordinates import num_coordinates
from silobayes.inference.layouts import AbstractLayout, PersonSlots, person_slots, row_slots
from silobayes.inference.solvers import LocalOptimum
from silobayes.models.base import AbstractModel, GaussianEta, GaussianFamily
from silobayes.plans.calibration import Sums, least_noise, noise_multipliers
from silobayes.plans.keys import PosteriorKind
from silobayes.plans.rules import Limits, PublicFacts, settings_of
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.events import AbstractEvent, Scheme
from silobayes.privacy.ledger import Budget
from silobayes.privacy.loops import StepPlan
from silobayes.privacy.queries import PrivateSum
from silobayes.privacy.relation import Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler, Sampler
from silobayes.protocols import pvi
from silobayes.protocols.etas import flatten_eta, precision_floor, to_host
from silobayes.protocols.roles import Seat
from silobayes.protocols.schedule import Schedule, Visit, visits, visits_per_silo
from silobayes.studies.method import Method
from silobayes.studies.study import AggregationSection, Study


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is public of a silo: numbers of rows, of persons where these are protected, and of features."""

    rows: int
    persons: int | None = None
    has_persons: bool = False
    num_features: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Situation:
    """All that a plan may look at.

    Attributes:
        method: What is planned.
        settings: Its keys, all of them filled in.
        model: Of the study.
        names: Of the model's parameters.
        sizes: Of the silos.
        limits: What a row can hold.
        aggregation: How answers are added up.
        rows_per_person: A public bound on the rows of one person, or None.
        budget: Of each silo; None: not private.
        seed: Of model randomness, of the schedule and of dealing rows to shards.
    """

    method: Method
    settings: Any
    model: AbstractModel
    names: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    limits: Limits
    aggregation: AggregationSection
    rows_per_person: int | None
    budget: Budget | None
    seed: int

    @classmethod
    def of(cls, study: Study, model: AbstractModel, names: tuple[str, ...], sizes: tuple[Sizes, ...]) -> "Situation":
        """Of a study, with the rules' values for all that it leaves out."""
        facts = PublicFacts.of(model, [own.rows for own in sizes])
        return cls(
            method=study.method,
            settings=settings_of(study, facts),
            model=model,
            names=names,
            sizes=sizes,
            limits=Limits.of(study),
            aggregation=study.aggregation,
            rows_per_person=study.data.rows_per_person,
            budget=study.budget,
            seed=study.study.seed,
        )

    @property
    def num_silos(self) -> int:
        """How many silos there are."""
        return len(self.sizes)

    @property
    def shards(self) -> tuple[int, ...]:
        """Of each silo; 1 where a method has no such key."""
        shards = getattr(self.settings, "shards", None) or 1
        return shards if isinstance(shards, tuple) else (shards,) * self.num_silos

    @property
    def rows(self) -> tuple[int, ...]:
        """The silos' public numbers of rows."""
        return tuple(own.rows for own in self.sizes)

    @property
    def paid(self) -> Budget:
        """The budget of a private study."""
        assert self.budget is not None, "a private method has a budget"
        return self.budget

    @cached_property
    def family(self) -> GaussianFamily:
        """Of the posterior."""
        if getattr(self.settings, "posterior", None) is PosteriorKind.FULL:
            return FullGaussian(dimension=self.model.dim)
        return MeanFieldGaussian(event_shape=(self.model.dim,))

    @cached_property
    def eta_p(self) -> GaussianEta:
        """The (stand-in for the) prior."""
        return to_host(self.model.prior_eta(self.family))

    @cached_property
    def local(self) -> LocalOptimum:
        """The settings of local optimisations."""
        return LocalOptimum(
            model=self.model,
            family=self.family,
            floor=precision_floor(self.eta_p),
            num_steps=getattr(self.settings, "steps", 1),
            step_size=np.float32(getattr(self.settings, "step_size", 1.0)),  # type: ignore[arg-type]
        )

    @cached_property
    def start(self) -> GaussianEta:
        """Where a first optimisation starts."""
        return self.model.start_eta(self.family, jax.random.key(self.seed))

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Of all rounds."""
        return visits(
            getattr(self.settings, "schedule", Schedule.SYNCHRONOUS),
            num_silos=self.num_silos,
            num_rounds=getattr(self.settings, "rounds", 1),
            silos_per_round=getattr(self.settings, "clients_per_round", None),
            seed=self.seed,
        )

    @cached_property
    def sums(self) -> Sums:
        """Over the silos of a visit of a round."""
        return Sums(section=self.aggregation, together=len(self.visits[0].silos))

    @property
    def everybody(self) -> Visit:
        """One visit of all silos."""
        return Visit(silos=tuple(range(self.num_silos)))

    @property
    def numbers(self) -> int:
        """Of the natural parameters."""
        return len(flatten_eta(self.eta_p))

    def sum_once(
        self, empty: Bounded, budget: Budget | None = None, besides: tuple[AbstractEvent, ...] = ()
    ) -> PrivateSum:
        """A sum over all silos of one answer like `empty` each, with the least noise; by default for all of epsilon."""
        budget, everybody = budget or self.paid, self.num_silos
        noise = least_noise(lambda std: self.sums.mechanism(std).event(empty, budget.relation), budget, besides=besides)
        return self.sums.private([empty] * everybody, [noise] * everybody, budget, num_terms=max(self.rows), num_sums=1)

    @property
    def by_person(self) -> bool:
        """Whether batches are of persons."""
        return self.budget is not None and self.budget.unit is Unit.PERSON

    @property
    def rows_per_unit(self) -> int:
        """Slots of one unit of a batch."""
        return (self.rows_per_person or 1) if self.by_person else 1

    def row_seats(self) -> tuple[Seat, ...]:
        """A slot for every row."""
        layouts = row_slots(self.rows)
        return tuple(Seat(index=m, size=self.rows[m], layout=layouts[m]) for m in range(self.num_silos))

    def unit_layouts(self) -> tuple[tuple[int, ...], Sequence[AbstractLayout]]:
        """Public numbers of units (rows, or persons) and their slots."""
        if not self.by_person:
            return self.rows, row_slots(self.rows)
        numbers = tuple(own.persons or own.rows for own in self.sizes)
        assert self.rows_per_person is not None
        return numbers, person_slots(numbers, self.rows_per_person)

    def loop(self, sampler: Sampler, noise_multiplier: float) -> StepPlan:
        """One visit's loop."""
        return StepPlan(
            sampler=sampler,
            num_steps=self.settings.steps,
            clip_norm=self.settings.clip_norm,
            noise_multiplier=noise_multiplier,
            dimension=num_coordinates(self.family),
            unit=self.paid.unit,
        )

    def loop_of(self, seat: Seat) -> StepPlan:
        """The loop of a silo with such a seat."""
        assert seat.sampler is not None
        assert seat.noise_multiplier is not None
        return self.loop(seat.sampler, seat.noise_multiplier)

    def loop_seats(self, made: tuple[Visit, ...], besides: tuple[AbstractEvent, ...] = ()) -> tuple[Seat, ...]:
        """Slots, samplers and the least noise of loops in so many visits."""
        units, layouts = self.unit_layouts()
        samplers = [self.sampler(own, layout) for own, layout in zip(units, layouts, strict=True)]
        counts = [max(count, 1) for count in visits_per_silo(made, self.num_silos)]

        def event_of(key: tuple[Sampler, int]) -> Any:
            return lambda noise: pvi.repeated(self.loop(key[0], noise).event, key[1])

        keys = list(zip(samplers, counts, strict=True))
        noise = noise_multipliers(keys, event_of, self.paid, besides=besides)
        return tuple(
            Seat(index=m, size=units[m], layout=layouts[m], sampler=samplers[m], noise_multiplier=noise[m])
            for m in range(self.num_silos)
        )

    def sampler(self, units: int, layout: AbstractLayout) -> Sampler:
        """Poisson slots are those of the group, so that its silos share one shape and one price."""
        if self.settings.sampler is Scheme.POISSON:
            width = layout.persons if isinstance(layout, PersonSlots) else layout.shape[0]
            return PoissonSampler(sample_rate=self.settings.sample_rate, max_rows=width)
        return FixedSizeSampler(batch_size=max(1, round(self.settings.sample_rate * units)), max_rows=units)

    def pvi_server(self, **changes: Any) -> pvi.PVIServer:
        """The server of rounds of PVI."""
        fields: dict[str, Any] = {
            "local": self.local,
            "query": self.sums.open(),
            "names": self.names,
            "eta_p": self.eta_p,
            "first_start": self.start,
            "damping": getattr(self.settings, "damping", 1.0),
            "seed": self.seed,
            "num_visits": len(self.visits),
            "averages": self.budget is not None,
            "is_private": self.budget is not None,
        }
        return pvi.PVIServer(**{**fields, **changes})
