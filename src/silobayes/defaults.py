"""Settings of a run, and the rules that fill in what a study leaves out; they look at public facts only.

They were chosen by hand on simulated intensive-care studies (`data.simulate.icu_study`, seeds 0, 1, 5, 6, ten silos, 19
parameters, epsilon 1, delta 1e-5, substitution), by their score on held-out rows of those same studies: no search over
a grid, and nothing else has been tuned. Take them as a start, not as an optimum.

- Without privacy a full Gaussian converges in a few rounds whatever the correlations. A mean-field one is a Jacobi
  iteration: with k non-zero features a row, `x x' <= k diag(x^2)`, so it is stable below a damping of 2 / k.
- DP optimisation: while noise dominates, the price depends on `sample_rate * sqrt(steps) / noise` alone, so a large
  rate costs nothing extra and adds little sampling noise. With label-free clipping the clip norm scales signal and
  noise alike once it binds for most rows; a fifth of the largest |x| does.
- Perturbing methods pay per visit, so they are visited rarely; the noise on an average over shards falls with their
  number, so there are many small shards. The clip norm is a share of the natural parameters that a silo's (or
  shard's) rows can add. At epsilon 1 and silos of this size they lose much against DP optimisation.
- q is averaged over the last half of the visits (engines.methods): public post-processing that removes noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from silobayes.core.errors import InvalidInput, require_count, require_number
from silobayes.data.silo import Silo
from silobayes.models.base import AbstractModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.privacy.events import Scheme
from silobayes.privacy.relation import Unit
from silobayes.protocols.bcm import Committee
from silobayes.protocols.schedule import Schedule
from silobayes.study import Clipping, Mode, PosteriorKind, Privatise, ProtocolKind, Study

# Of the bound of a row's norm.
_CLIP_SHARE = 0.2
# Without privacy, up to this many parameters get a full covariance.
_LARGEST_FULL = 120
# Of mean rows * squared norm bound: what one visit may change.
_CHANGE_SHARE = 0.004


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every public choice of a method, none left open.

    Attributes:
        kind: Which protocol.
        schedule: Who speaks when.
        privatise: What is clipped and noised.
        rounds: How often each silo is visited.
        damping: Of every change, in (0, 1].
        steps: Of Adam, in one visit.
        step_size: Of Adam; falls to zero along a cosine within a visit.
        clip_norm: Of a row's gradient (dp_optimisation) or of a shard's scaled change (perturbing methods).
        sample_rate: Expected share of the rows in one batch.
        shards: Per silo.
        clipping: How a row's gradient is clipped.
        sampler: How batches are drawn.
        posterior: Which family.
        scales: Public sizes of the linear and the quadratic part of a change; changes are clipped in these units.
        clients_per_round: Only with schedule = sampled.
        committee: Only with kind = bcm: which prior a silo uses.
        x_bound: Only with sufficient_statistics: norm to which a row's features are pulled back.
        y_bound: The same of a row's target.
    """

    kind: ProtocolKind = ProtocolKind.PVI
    schedule: Schedule = Schedule.SYNCHRONOUS
    privatise: Privatise
    rounds: int
    damping: float
    steps: int
    step_size: float
    clip_norm: float = 1.0
    sample_rate: float = 1.0
    shards: int = 1
    clipping: Clipping = Clipping.LABEL_FREE
    sampler: Scheme = Scheme.POISSON
    posterior: PosteriorKind = PosteriorKind.MEAN_FIELD
    scales: tuple[float, float] = (1.0, 1.0)
    clients_per_round: int | None = None
    committee: Committee = Committee.SAME
    x_bound: float = 1.0
    y_bound: float = 1.0

    def __post_init__(self) -> None:
        for key in ("rounds", "steps", "shards"):
            require_count(f"protocol.{key}", getattr(self, key), at_least=1, fix="Correct or remove the key.")
        for key, highest in (("damping", 1.0), ("sample_rate", 1.0)):
            require_number(f"protocol.{key}", getattr(self, key), above=0.0, at_most=highest, fix="Correct the key.")
        for key in ("step_size", "clip_norm", "x_bound", "y_bound"):
            require_number(f"protocol.{key}", getattr(self, key), above=0.0, fix="Correct or remove the key.")
        if self.shards > 1 and self.privatise is Privatise.PARAMETER_PERTURBATION:
            fix = "Parameter perturbation has one shard; use local_averaging or virtual_clients."
            raise InvalidInput("protocol.shards", "1", self.shards, fix)


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """All that the rules may look at besides the study: the model and the silos' declared sizes.

    `score` is the typical size of a row's derivative with respect to its linear predictor.
    """

    silo_rows: tuple[int, ...]
    num_parameters: int
    score: float = 1.0

    @classmethod
    def of(cls, model: AbstractModel, silos: Sequence[Silo]) -> "PublicFacts":
        """From the model and the silos' declared sizes."""
        score = 1.0
        if isinstance(model, LinearRegression):
            score = 1.0 / model.noise_stddev
        elif isinstance(model, PoissonRegression):
            score = math.sqrt(model.max_count)
        return cls(silo_rows=tuple(silo.num_rows for silo in silos), num_parameters=model.dim, score=score)


def privatise_of(study: Study) -> Privatise:
    """What is clipped and noised: as the study says, otherwise by whom it protects."""
    if study.protocol.privatise is not None:
        return study.protocol.privatise
    if study.privacy.mode is Mode.NONE:
        return Privatise.NONE
    # DP-SGD protects rows only.
    return Privatise.LOCAL_AVERAGING if study.privacy.unit is Unit.PERSON else Privatise.DP_OPTIMISATION


def resolve(study: Study, facts: PublicFacts) -> Settings:
    """The study's own choices, and the rules of this module for the rest.

    Guarantees:
        - what a study says is never overruled
        - the rules look at public facts only
    """
    protocol = study.protocol
    chosen: dict[str, Any] = {key: getattr(protocol, key) for key in _KEYS if getattr(protocol, key) is not None}
    privatise = chosen.setdefault("privatise", privatise_of(study))
    rules = {**_common_rules(study, facts), **_method_rules(study, facts, privatise)}
    if protocol.kind is ProtocolKind.STREAMING_VB:
        rules |= {"schedule": Schedule.SEQUENTIAL, "rounds": 1, "damping": 1.0, "steps": 500}
        chosen["kind"] = ProtocolKind.PVI
    elif protocol.kind is ProtocolKind.BCM:
        rules |= {"rounds": 1, "damping": 1.0, "steps": 400}
    elif protocol.kind is ProtocolKind.GLOBAL_VI:
        rules |= {"damping": 1.0}
    return Settings(**{**rules, **chosen})


_KEYS = (
    "kind",
    "schedule",
    "clients_per_round",
    "committee",
    "privatise",
    "rounds",
    "damping",
    "steps",
    "step_size",
    "clip_norm",
    "sample_rate",
    "shards",
    "clipping",
    "sampler",
    "posterior",
)


def _common_rules(study: Study, facts: PublicFacts) -> dict[str, Any]:
    """What every method starts from; a single silo needs neither rounds nor damping."""
    many = len(facts.silo_rows) > 1
    low, high = study.data.target_bounds or (0.0, 1.0)
    return {
        "rounds": 20 if many else 1,
        "damping": min(0.4, 2.0 / (_num_columns(study) + 1)) if many else 1.0,
        "steps": 100 if many else 500,
        "step_size": 0.05,
        "x_bound": math.sqrt(_num_columns(study)),
        "y_bound": max(abs(low), abs(high)),
    }


def _method_rules(study: Study, facts: PublicFacts, privatise: Privatise) -> dict[str, Any]:
    if privatise is Privatise.NONE:
        if facts.num_parameters > _LARGEST_FULL or study.protocol.posterior is PosteriorKind.MEAN_FIELD:
            return {}
        return {"posterior": PosteriorKind.FULL} | ({"rounds": 10, "damping": 0.5} if len(facts.silo_rows) > 1 else {})
    if privatise is Privatise.SUFFICIENT_STATISTICS:
        return {"rounds": 1, "damping": 1.0, "steps": 1}
    if privatise is Privatise.DP_OPTIMISATION:
        clip_norm = _CLIP_SHARE * facts.score * math.sqrt(_num_columns(study))
        return {"rounds": 20, "steps": 40, "damping": 0.2, "clip_norm": clip_norm, "sample_rate": 0.3}
    shards = 1
    if privatise in (Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS):
        shards = max(1, min(100, min(facts.silo_rows) // 4))
    mean_rows = sum(facts.silo_rows) / len(facts.silo_rows)
    size = _CHANGE_SHARE * mean_rows * facts.score**2 * _num_columns(study)
    clip_norm = size / shards if privatise is Privatise.VIRTUAL_CLIENTS else size
    return {"rounds": 10, "steps": 60, "damping": 0.2, "shards": shards, "clip_norm": clip_norm}


def _num_columns(study: Study) -> int:
    """Bound of a row's squared norm: a number in [-1, 1] or one hot category per column, and the intercept."""
    return len(study.description.features) + int(study.data.intercept)
