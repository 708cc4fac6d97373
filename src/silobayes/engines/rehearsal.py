"""A study as it would run, on rows that are made up: no directory, no ledger, no row of anybody, no budget.

Rows follow the study's declarations (`data.synthetic`) and the model's own likelihood at a known truth. What runs on
them is the plan of the study, with its prices and its noise, through the one loop and doors that let out only what the
plan has paid for; noise comes from seeds, so that a rehearsal can be repeated, and protects nobody: there is nobody.

Secure sums are replaced by a plain one: their totals are equal to the last bit, and so are the shares of noise in them.

Guarantees:
    A rehearsal releases what the study's plan pays for, and nothing else.
    The same seeds give the same rehearsal.
    A rehearsal is what `run` gives on the same rows and noise.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.data import splits
from silobayes.data.description import SplitScheme
from silobayes.data.encoding import CountTarget, Encoding, RealTarget, clip_target
from silobayes.data.silo import Silo
from silobayes.data.synthetic import person_of_rows, synthetic_table
from silobayes.engines import exact
from silobayes.engines.local import sizes_of
from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.inference.rows import Rows
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.plans import plan_of
from silobayes.plans.rules import Limits
from silobayes.plans.situation import Situation
from silobayes.posteriors import AbstractPosterior, Posterior
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.prepaid import Prepaid
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.roles import Plan
from silobayes.studies.sizes import check_rows, silo_units
from silobayes.study import AggregationKind, Study

_BY_LABELS = (SplitScheme.RHO_KAPPA, SplitScheme.LABEL_SKEW)


@dataclass(frozen=True, kw_only=True, eq=False)
class MadeUp:
    """Silos of made-up rows.

    Attributes:
        silos: In the order of the study.
        clipped: The share of drawn numbers that fell outside their declared range and were moved into it.
        dealt_evenly: Whether classes were too uneven to be dealt as [silos] says.
    """

    silos: list[Silo] = field(repr=False)
    clipped: float
    dealt_evenly: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Rehearsal:
    """A study that is ready to be run on made-up rows, again and again.

    Attributes:
        study: The study.
        model: Of the study.
        names: Of the model's parameters.
        rows: Of each silo.
        persons: Of each silo, where the unit is a person; otherwise None.
        correlation: Of every two numeric columns.
        plan: That of a run on silos of these sizes.
    """

    study: Study
    model: AbstractModel
    names: tuple[str, ...]
    rows: tuple[int, ...]
    persons: tuple[int, ...] | None
    correlation: float
    plan: Plan = field(repr=False)

    @classmethod
    def of(
        cls,
        study: Study,
        model: AbstractModel,
        rows: Sequence[int],
        persons: Sequence[int] | None,
        correlation: float = 0.0,
    ) -> "Rehearsal":
        """For silos of so many rows, and persons; everything that a run would refuse is refused."""
        silo_names, features = check_rows(study, rows), study.encoding.feature_names
        people = _persons(study, rows, persons)
        sized = [
            Silo(
                name=name,
                x=np.zeros((count, len(features)), np.float32),
                y=np.zeros(count, np.float32),
                persons=None if people is None else person_of_rows(count, people[k]),
            )
            for k, (name, count) in enumerate(zip(silo_names, rows, strict=True))
        ]
        names = model.parameter_names(features)
        situation = Situation.of(study, model, names, tuple(sizes_of(study, silo) for silo in sized))
        synthetic_table(study.encoding, 1, np.random.default_rng(0), correlation=correlation)  # refuses a bad one
        return cls(
            study=study,
            model=model,
            names=names,
            rows=tuple(rows),
            persons=people,
            correlation=correlation,
            plan=plan_of(situation),
        )

    def make_up(self, theta: np.ndarray, rng: np.random.Generator) -> MadeUp:
        """Silos whose rows are drawn at `theta`."""
        by_labels = self.study.silos.scheme in _BY_LABELS
        # With some to spare where labels decide who gets which, so that every silo has its size.
        num_rows = sum(self.rows) + (2 * len(self.rows) if by_labels else 0)
        encoding, names = self.study.encoding, check_rows(self.study, self.rows)
        table = synthetic_table(encoding, num_rows, rng, correlation=self.correlation)
        column = self.study.silos.column
        if column is not None and column in table.columns:
            table[column] = np.repeat(np.array(self.study.data.bounds[column]), self.rows)
        features = jnp.asarray(encoding.encode_features(table))
        key = jax.random.key(int(rng.integers(2**31)))
        drawn = _draw_rows(self.model, jnp.asarray(theta, jnp.float32), features, key)
        x, y, clipped = self._clip(encoding, *map(np.asarray, drawn))
        parts, dealt_evenly = np.split(np.arange(num_rows), np.cumsum(self.rows)[:-1]), False
        if by_labels:
            parts, dealt_evenly = self._deal(y, rng)
        silos = [
            Silo(
                name=name,
                x=x[part[:count]],
                y=y[part[:count]],
                persons=None if self.persons is None else person_of_rows(count, self.persons[k]),
            )
            for k, (name, part, count) in enumerate(zip(names, parts, self.rows, strict=True))
        ]
        return MadeUp(silos=silos, clipped=clipped, dealt_evenly=dealt_evenly)

    def run(self, silos: Sequence[Silo], seed: str) -> AbstractPosterior:
        """The posterior of the study on these silos, with the noise of this seed."""
        budget, plan, section = self.study.budget, self.plan, self.study.aggregation
        if section.kind is not AggregationKind.NONE:
            section = dataclasses.replace(section, kind=AggregationKind.TRUSTED, compute_nodes=None)
        accounts: list[Prepaid] = []
        if budget is not None:
            nobody = _Nobody(relation=budget.relation, unit=budget.unit)
            accounts = [Prepaid.of(nobody, events) for events in plan.total_events]

        def door(silo: int, visit: int) -> Door | None:
            if not accounts:
                return None
            digest = hashlib.sha256(f"{seed}/{silo}/{visit}".encode()).digest()
            return Door(accounts[silo], FreshDraws(Entropy.not_private(int.from_bytes(digest[:8], "big"))))

        parties = LocalParties(plan, silos, door, section)
        state = plan.server.init()
        for visit in plan.visits:
            state = make_visit(plan, parties, state, visit)
        return plan.server.posterior(state)

    def without_privacy(self, silos: Sequence[Silo]) -> Posterior | None:
        """The Gaussian posterior of all rows together, for models where it is cheap: generalised linear ones."""
        if not isinstance(self.model, AbstractGLM):
            return None
        x, y = (np.concatenate([getattr(silo, part) for silo in silos]) for part in "xy")
        return exact.without_privacy(self.model, self.names, Rows(x=x, y=y, present=np.ones(len(y), bool)))

    def _clip(self, encoding: Encoding, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """What the encoding can hold, and the share of numbers that was moved there."""
        target = encoding.target
        if target is None:
            bounds = Limits.of(self.study).bounds
            assert bounds is not None, "of every study"
            largest = np.array(bounds.features, np.float32)
            return np.clip(x, -largest, largest), y, float(np.mean(np.abs(x) > largest))
        if isinstance(target, (RealTarget, CountTarget)):
            outside = (y < target.low) | (y > target.high)
            return x, clip_target(target, y), float(np.mean(outside))
        return x, y, 0.0

    def _deal(self, y: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], bool]:
        """Rows of each silo by their labels; evenly where the classes cannot be dealt so."""
        silos, count = self.study.silos, len(self.rows)
        try:
            if silos.scheme is SplitScheme.LABEL_SKEW:
                parts = splits.label_skew(rng, y, count=count, rho=silos.rho or 0.0)
            else:
                parts = splits.rho_kappa(rng, y, count=count, rho=silos.rho or 0.0, kappa=silos.kappa or 0.0)
        except InvalidInput:
            return np.split(np.arange(len(y)), np.cumsum(self.rows)[:-1]), True
        if any(len(part) < size for part, size in zip(parts, self.rows, strict=True)):
            fix = "Pass the rows of all silos together: [silos] decides how many each gets."
            raise InvalidInput("rows", f"sizes of silos as {silos.scheme.value} deals them", list(self.rows), fix)
        return parts, False


@dataclass(frozen=True, kw_only=True)
class _Nobody:
    """An account behind which there is no ledger: a `Prepaid` before it counts what is taken."""

    relation: Relation
    unit: Unit

    def charge(self, event: AbstractEvent) -> None:
        """Nothing of anybody is released."""


def _persons(study: Study, rows: Sequence[int], persons: Sequence[int] | None) -> tuple[int, ...] | None:
    """Of each silo, where the unit is a person: as told, otherwise as few as the bound on the rows of one allows."""
    units = silo_units(study, rows, persons)
    if study.privacy.unit is not Unit.PERSON:
        return None
    if persons is None:
        return tuple(-(-count // (study.data.rows_per_person or 1)) for count in rows)
    return tuple(units)


@eqx.filter_jit
def _draw_rows(model: AbstractModel, theta: Array, x: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
    return model.draw_rows(theta, x, key)
