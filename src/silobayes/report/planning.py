"""What a study will do and cost, before any row is read: from the study file and the number of rows alone.

A plan needs public sizes only, so settings and noise are those of a real run. The expected widths come from rows made
up within the public bounds (`made_up_rows`), by UNCERTAINTY F6 and F1 at theta = 0:
with per-row weights w of label-free clipping, curvature c and feature vector x,

    J = n E[w c x x'],  F = n E[w^2 c x x'],  Omega = F + (sum over silos of (std / rate)^2 / steps) I + batch noise
    covariance = (J Omega^-1 J + prior precision)^-1

They tell an order of magnitude: real columns go together, labels are rarely even, and a posterior that ignores its
noise reports less.

Guarantees:
    No cell of a table is looked at; a table is at most counted.
    The planned noise is that of the run.
    The planned price is within the budget.
    Without noise the expected widths are those of the posterior without privacy; a smaller epsilon never narrows them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from silobayes.data.encoding import Encoding
from silobayes.data.synthetic import synthetic_table
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.plans import plan_of
from silobayes.plans.aggregation import communications
from silobayes.plans.situation import Situation, Sizes
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractEvent, AbstractGaussianLikeEvent, SkellamEvent, to_json
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Unit
from silobayes.report.choice import choice
from silobayes.report.explain import clients_per_round, sends_shares, what_leaves
from silobayes.studies.models import build_model
from silobayes.studies.sizes import check_rows, counts_persons, samples_persons, silo_units
from silobayes.study import Study

_MADE_UP_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class SiloPlan:
    """What one silo will pay in total; `events` is empty and `epsilon` None where nothing private is released.

    `persons` is the number that the plan is for, where it decides something; otherwise None.
    """

    name: str
    rows: int
    persons: int | None
    events: tuple[AbstractEvent, ...]
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Width:
    """Expected posterior standard deviation of one coefficient, and what share of its variance privacy makes."""

    name: str
    not_private: float
    private: float
    privacy_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study, worked out."""

    study: Study
    settings: Any
    silos: tuple[SiloPlan, ...]
    num_parameters: int
    num_messages: int
    widths: tuple[Width, ...] | None

    def to_json(self) -> dict[str, Any]:
        """One object for `--json`."""
        settings = dataclasses.asdict(self.settings)
        return {
            "study": self.study.study.name,
            "study_hash": self.study.hash,
            "method": self.study.method.name,
            "intervals": self.study.method.intervals.value if self.study.budget is not None else None,
            "choice": choice(self.study),
            "settings": {key: _plain(value) for key, value in settings.items()},
            "silos": [
                {
                    "name": silo.name,
                    "rows": silo.rows,
                    "persons": silo.persons,
                    "events": [to_json(event) for event in silo.events],
                    "epsilon": silo.epsilon,
                }
                for silo in self.silos
            ],
            "parameters": self.num_parameters,
            "messages": self.num_messages,
            "expected_sd": None if self.widths is None else [dataclasses.asdict(width) for width in self.widths],
            "leaves_a_site": what_leaves(self.study),
            "num_shares": self.num_shares,
        }

    @property
    def num_shares(self) -> int | None:
        """The shares of so many silos are the noise that is priced; None where each silo has a noise of its own."""
        if not sends_shares(self.study):
            return None
        return self.study.aggregation.num_shares(clients_per_round(self.study) or len(self.silos))


def _plain(value: Any) -> Any:
    """A setting for machines; those of a section by key, without what is left out."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    return getattr(value, "value", value)


def plan(study: Study, rows: Sequence[int], persons: Sequence[int] | None = None) -> Plan:
    """The plan for silos of so many rows, in the order of the study's silos.

    `persons` matters where batches are drawn from persons or numbers of rows are not public; by default they are as few
    as can have so many rows.
    """
    names = check_rows(study, rows)
    encoding = study.encoding
    features = encoding.feature_names
    model = build_model(study, len(features))
    numbers = silo_units(study, rows, persons)
    sizes = tuple(_sizes(study, count, people) for count, people in zip(rows, numbers, strict=True))
    situation = Situation.of(study, model, model.parameter_names(features), sizes)
    made, settings, budget = plan_of(situation), situation.settings, situation.budget
    events = made.total_events

    return Plan(
        study=study,
        settings=settings,
        silos=tuple(
            SiloPlan(
                name=name,
                rows=count,
                persons=people if counts_persons(study) else None,
                events=own,
                epsilon=_epsilon(own, budget),
            )
            for name, count, people, own in zip(names, rows, numbers, events, strict=True)
        ),
        num_parameters=model.dim,
        num_messages=communications(made, getattr(settings, "rounds", 1), study.aggregation)["messages"],
        widths=_told_widths(made.expected(made_up_rows(encoding)), situation.names)
        if made.expected is not None
        else expected_widths(
            study,
            model,
            settings,
            rows,
            events,
            rows_per_unit=sum(rows) / sum(numbers) if samples_persons(study) else 1.0,
        ),
    )


def _sizes(study: Study, rows: int, persons: int) -> Sizes:
    protects_persons = study.privacy.unit is Unit.PERSON
    if not study.tells_rows:
        assert study.data.rows_per_person is not None, "checked when the study was built"
        rows = persons * study.data.rows_per_person
    return Sizes(
        rows=rows,
        persons=persons if protects_persons else None,
        has_persons=protects_persons,
        num_features=len(study.encoding.feature_names),
    )


def _epsilon(events: tuple[AbstractEvent, ...], budget: Budget | None) -> float | None:
    if not events or budget is None:
        return None
    return accounting.price(events, relation=budget.relation, delta=budget.delta).epsilon


def expected_widths(
    study: Study,
    model: AbstractModel,
    settings: Any,
    rows: Sequence[int],
    events: Sequence[tuple[AbstractEvent, ...]],
    *,
    rows_per_unit: float = 1.0,
) -> tuple[Width, ...] | None:
    """Expected standard deviations; known for generalised linear models by (DP) optimisation, else None.

    Of persons all are taken to have the average number of rows, `rows_per_unit`: a clip norm is shared by so many.
    """
    if not isinstance(model, AbstractGLM) or not study.method.expects_widths:
        return None
    encoding = study.encoding
    x = made_up_rows(encoding)
    zero = jnp.zeros(len(x))
    curvature = -np.asarray(model.expected_derivatives(zero, zero, zero + 1)[1], float)
    prior = np.eye(model.dim) / model.prior_stddev**2
    total = float(sum(rows))

    def information(weights: np.ndarray) -> np.ndarray:
        return total / len(x) * (x * (weights * curvature)[:, None]).T @ x

    exact = np.linalg.inv(information(np.ones(len(x))) + prior)
    if not study.method.units:
        return _widths(model, encoding, exact, exact)
    norms = rows_per_unit * np.linalg.norm(x, axis=1) * np.asarray(model.score_bound(zero), float)
    clip_norm = settings.clip_norm
    weights = np.where(np.isfinite(norms), np.minimum(1.0, clip_norm / np.maximum(norms, 1e-12)), 1.0)
    score, spread = information(weights), information(weights**2)
    omega = spread.copy()
    for count, own in zip(rows, events, strict=True):
        for event in own:
            assert isinstance(event, AbstractGaussianLikeEvent)
            rate = 1.0 if event.sampling is None else event.sampling.rate
            noise = (event.std / rate) ** 2 / event.count
            if isinstance(event, SkellamEvent):  # of a sum, in which each silo's share is a part
                noise /= study.aggregation.num_shares(len(rows))
            omega += noise * np.eye(model.dim) + (1 / rate - 1) / event.count * count / total * spread
    noisy = np.linalg.inv(score @ np.linalg.solve(omega, score) + prior)
    return _widths(model, encoding, exact, noisy)


def _told_widths(expected: Any, names: Sequence[str]) -> tuple[Width, ...]:
    """What the method itself says."""
    sds = [np.sqrt(np.diag(covariance)).tolist() for covariance in (expected.not_private, expected.private)]
    columns = zip(names, *sds, expected.privacy_share.tolist(), strict=True)
    return tuple(Width(name=name, not_private=a, private=b, privacy_share=share) for name, a, b, share in columns)


def made_up_rows(encoding: Encoding) -> np.ndarray:
    """Rows as the study describes them (`data.synthetic`), encoded."""
    table = synthetic_table(encoding, _MADE_UP_ROWS, np.random.default_rng(0))
    return encoding.encode_features(table).astype(np.float64)


def _widths(model: AbstractGLM, encoding: Encoding, exact: np.ndarray, noisy: np.ndarray) -> tuple[Width, ...]:
    sds = [np.sqrt(np.diag(covariance)).tolist() for covariance in (exact, noisy)]
    names = model.parameter_names(encoding.feature_names)
    return tuple(Width(name=name, not_private=a, private=b) for name, a, b in zip(names, *sds, strict=True))
