"""Settings of a run, and the rules that fill in what a study leaves out; they look at public facts only.

They started as hand-made choices and were then checked on simulated studies: `experiments/defaults` multiplies
constants of DP optimisation, of the perturbing methods, of committees and of global VI by 1/4, 1/2, 2 and 4, one at a
time, and shows what that loses on held-out rows. Its README says on how many tables each was scanned, what was changed
(the steps of committees of networks, the damping of perturbing methods), and how the rules do on two real tables: on
the one that has many categories without declared shares, committees and local averaging without a sum fail. Before
that, some choices followed a look at the Adult table (experiments/adult): categories are centred and not scaled, global
VI takes longer steps inside a sum, and the path of perturbing methods is as long as it is. Take them as a start, not as
an optimum.

- Without privacy a full Gaussian converges in a few rounds whatever the correlations. A mean-field one is a Jacobi
  iteration: with k non-zero features a row, `x x' <= k diag(x^2)`, so it is stable below a damping of 2 / k.
  Networks are mean-field: after the hundred noisy steps of a visit both families are still nearly as narrow as their
  start; a mean-field q widens over the visits, a full one shrank to nothing (curved rows in four silos, dampings .2 to
  1: rmse about 7 instead of .3). With a thousand steps it does not, so these are the default of a full one, with a
  damping of .1: with .2 and .4 it ran away in some runs, because noise of large precisions spills over to small ones.
  Where local optima are found by noisy steps, their errors add up over silos: damping times silos is at most 8, and
  rounds grow in proportion (networks and Gaussians with unknown covariance, 3,000 rows: 8 did well with 40 to 200
  silos, 16 and more ran away). One visit takes 2,000 steps and global VI 100 rounds of 100: after a fourth of that
  widths were twice to ten times too large (linear regression with unknown noise, 30,000 rows). Where a round visits
  some silos only, there are more rounds, so that each has its turn.
- DP optimisation: while noise dominates, the price depends on `sample_rate * sqrt(steps) / noise` alone, so any rate
  gives the same noise on the average gradient, and a small one is quick. With label-free clipping the clip norm scales
  signal and noise alike once it binds for most rows; a fifth of a row's typical norm does. (Ordinary clipping does
  better where noise is large, but it biases, and does worse where noise is small.) Adam in noise is a random walk of
  known length: noise alone moves each coefficient of q by about `damping * step_size * sqrt(rounds * steps * silos)`.
  Steps are of one size and as long as that walk may be: three tenths, in units of coefficients, or half as much more
  where features are smaller than one because no spread or shares are declared. Longer walks add noise, shorter ones
  shrink coefficients more than they need to. A committee averages walks, so its silos may walk farther, but not those
  of networks: an average of weights is no average of networks.
- For persons the clip norm is that of rows: it binds for nearly everybody, so persons weigh alike, whatever the number
  of their rows. (Simulated ICUs, three and a half rows a patient: in proportion to the rows it did worse.)
- Perturbing methods pay per visit, so they are visited rarely. While clipping binds, a shard's factor travels
  `rounds * damping * clip_norm` in all, and the noise of the answer is proportional to just that: the path is what
  matters, not how it is cut into rounds. The larger a shard, the more of its factor is the chance of its own rows, so
  shards are single rows as long as their factors fit in memory. Too short a path shrinks coefficients, too long a one
  adds noise; where all shards of a silo share a factor, clipping also pulls the mean over rows towards their median,
  and a longer path is worth its noise. The quadratic part gets half the norm of the linear one. Mean-field steps of all
  shards at once are a Jacobi iteration here too: columns that no declared typical value or shares centre go together
  with the intercept, and the more there are, the smaller the damping and the more rounds there must be. Networks
  learn their means only: precisions of the weights stay near those of the start, so that a visit is a step of gradient
  ascent whose length is damping times rows over that precision. (Their constants: training rows of Adult, seed 0, that
  were held out; no simulated study.)
- q is averaged over the last half of the visits (engines.methods): public post-processing that removes noise.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput, require_count, require_number
from silobayes.data.encoding import Encoding, Numeric
from silobayes.data.silo import Silo
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.mlp import AbstractMLP
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.privacy.events import Scheme
from silobayes.privacy.relation import Unit
from silobayes.protocols.bcm import Committee
from silobayes.inference.projection import Bounds
from silobayes.protocols.schedule import Schedule
from silobayes.study import (
    LARGEST_FIRST_SHARE,
    LARGEST_RELEASES,
    ONLY_OPTIMISATION,
    PERTURBING,
    QUANTILE,
    AggregationKind,
    AggregationSection,
    Clipping,
    Mode,
    ModelKind,
    PosteriorKind,
    Privatise,
    ProtocolKind,
    Study,
)

# Of a row's typical norm.
_CLIP_SHARE = 0.2
# How far noise alone may move a coefficient of q in a whole study: where all columns have a declared spread or shares,
# and where none has; and the longest step of Adam.
_WALK, _WALK_UNSCALED = 0.3, 0.45
_LONGEST_STEP = 0.05
# Without privacy, of Adam where there is no second visit.
_STEPS_OF_ONE_VISIT = 2000
# Damping times silos at the most where local optima are noisy.
_DAMPED_SILOS = 8.0
# Without privacy, up to this many parameters get a full covariance.
_LARGEST_FULL = 120
# How far a shard's factor can travel in all rounds, in units of sqrt(its rows) * typical norm: where every shard has
# its own, and where all shards of a silo share one.
_TRAVEL, _SHARED_TRAVEL = 0.45, 0.8
# Damping times rounds; and damping times the features of a row that go together with its intercept.
_DAMPED_ROUNDS, _STABLE = 3.2, 1.5
# Of epsilon, for the counts of norms alone where clip norms are a quantile.
_NORMS_SHARE = 0.1
# All factors of shards together: what a machine holds and a checkpoint writes.
_MOST_NUMBERS = 24_000_000
# Networks with perturbing methods: the clip norm of a shard's gradient, in units of sqrt(its rows) * typical norm; that
# of its precisions, over the former; and the step along the average gradient of a row.
_NETWORK_CLIP, _NETWORK_QUADRATIC, _NETWORK_STEP = 0.15, 0.1, 1.25
# How many persons there are is not public; shards that nobody is dealt to do no harm.
_ROWS_PER_PERSON = 4


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
        step_size: Of Adam. Without privacy it falls to zero along a cosine within a visit, with global VI within the
            study; private visits keep it.
        clip_norm: Of a row's or person's gradient (dp_optimisation) or of a shard's scaled change (perturbing methods;
            or two: of its linear and of its quadratic part).
        clip_quantile: Only with perturbing methods: clip norms follow from this quantile of the shards' first changes,
            within a grid around `clip_norm`. None: they are `clip_norm`.
        sample_rate: Expected share of the rows, or of the persons, in one batch.
        shards: Per silo; or one number for each.
        clipping: How a row's gradient is clipped.
        sampler: How batches are drawn.
        posterior: Which family.
        scales: Public sizes of the linear and the quadratic part of a change; changes are clipped in these units.
        clients_per_round: Only with schedule = sampled.
        committee: Only with kind = bcm: which prior a silo uses.
        first_share: Only with hybrid, linreg and a quantile: the share of epsilon that would pay for the first part
            alone (hybrid: the statistics; linreg: the marginal standard deviations; quantile: the counts of norms).
        projection: Only with linreg: whether rows are projected onto thresholds within their bounds.
        bounds: Only with linreg: what a row can hold.
        x_bound: Only with sufficient_statistics and hybrid: norm to which a row's features are pulled back.
        y_bound: The same of a row's target.
        aggregation: How the messages of a visit are added up.
        rows_per_person: Only where the unit is a person: a public bound on the rows of one.
    """

    kind: ProtocolKind = ProtocolKind.PVI
    schedule: Schedule = Schedule.SYNCHRONOUS
    privatise: Privatise
    rounds: int
    damping: float
    steps: int
    step_size: float
    clip_norm: float | tuple[float, float] = 1.0
    clip_quantile: float | None = None
    sample_rate: float = 1.0
    shards: int | tuple[int, ...] = 1
    clipping: Clipping = Clipping.LABEL_FREE
    sampler: Scheme = Scheme.POISSON
    posterior: PosteriorKind = PosteriorKind.MEAN_FIELD
    scales: tuple[float, float] = (1.0, 1.0)
    clients_per_round: int | None = None
    committee: Committee = Committee.SAME
    first_share: float = 0.5
    projection: bool = True
    bounds: Bounds | None = None
    x_bound: float = 1.0
    y_bound: float = 1.0
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    rows_per_person: int | None = None

    def __post_init__(self) -> None:
        for key in ("rounds", "steps"):
            require_count(f"protocol.{key}", getattr(self, key), at_least=1, fix="Correct or remove the key.")
        if not self.rounds * self.steps <= LARGEST_RELEASES:
            expected, fix = f"rounds x steps <= {LARGEST_RELEASES}", "Take fewer rounds or steps."
            raise InvalidInput("protocol.rounds", expected, f"{self.rounds} x {self.steps}", fix)
        for shards in set(self.shards_of(1)):
            require_count("protocol.shards", shards, at_least=1, fix="Correct or remove the key.")
        for key, highest in (("damping", 1.0), ("sample_rate", 1.0), ("first_share", LARGEST_FIRST_SHARE)):
            require_number(f"protocol.{key}", getattr(self, key), above=0.0, at_most=highest, fix="Correct the key.")
        for key in ("step_size", "x_bound", "y_bound"):
            require_number(f"protocol.{key}", getattr(self, key), above=0.0, fix="Correct or remove the key.")
        for clip_norm in self.clip_norms:
            require_number("protocol.clip_norm", clip_norm, above=0.0, fix="Correct or remove the key.")
        if len(self.clip_norms) > 1 and self.privatise not in PERTURBING:
            fix = "Only the perturbing methods clip parts of a change; give one number."
            raise InvalidInput("protocol.clip_norm", "one number", list(self.clip_norms), fix)
        if self.clip_quantile is not None:
            below_one = math.nextafter(1.0, 0.0)
            key, fix = "protocol.clip_quantile", "Correct or remove the key."
            require_number(key, self.clip_quantile, above=0.0, at_most=below_one, fix=fix)
            if len(self.clip_norms) != 2 or self.scales != (1.0, 1.0):
                fix = "A quantile is chosen for each part; give the two norms that it is looked for around."
                raise InvalidInput("protocol.clip_norm", "two norms without scales", list(self.clip_norms), fix)
        if self.shards != 1 and self.privatise is Privatise.PARAMETER_PERTURBATION:
            fix = "Parameter perturbation has one shard; use local_averaging or virtual_clients."
            raise InvalidInput("protocol.shards", "1", self.shards, fix)

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """One norm, or that of each part."""
        return self.clip_norm if isinstance(self.clip_norm, tuple) else (self.clip_norm,)

    def shards_of(self, num_silos: int) -> tuple[int, ...]:
        """The number of each silo."""
        return self.shards if isinstance(self.shards, tuple) else (self.shards,) * num_silos


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """All that the rules may look at besides the study: the model and the silos' declared sizes.

    `score` is the typical size of a row's derivative with respect to its linear predictor, `start_precision` that of a
    model's weights where q does not start at the prior. `solves_exactly`: local optima need no draws.
    """

    silo_rows: tuple[int, ...]
    num_parameters: int
    score: float = 1.0
    start_precision: float | None = None
    solves_exactly: bool = True

    @classmethod
    def of(cls, model: AbstractModel, silos: Sequence[Silo], silo_rows: Sequence[int] | None = None) -> "PublicFacts":
        """From the model and the silos' declared sizes: by default the numbers of rows."""
        score, start_precision = 1.0, None
        if isinstance(model, LinearRegression):
            score = 1.0 / model.noise_stddev
        elif isinstance(model, PoissonRegression):
            score = math.sqrt(model.max_count)
        elif isinstance(model, AbstractMLP):
            score = math.sqrt(model.hidden[-1]) / 2  # half of the hidden units pass a row's features on
            start_precision = model.start_stddev**-2
        return cls(
            silo_rows=tuple(silo.num_rows for silo in silos) if silo_rows is None else tuple(silo_rows),
            num_parameters=model.dim,
            score=score,
            start_precision=start_precision,
            solves_exactly=isinstance(model, AbstractGLM),
        )


def privatise_of(study: Study) -> Privatise:
    """What is clipped and noised: as the study says, otherwise by whom it protects."""
    if study.protocol.privatise is not None:
        return study.protocol.privatise
    if study.privacy.mode is Mode.NONE:
        return Privatise.NONE
    if study.protocol.kind is ProtocolKind.LINREG:
        return Privatise.SUFFICIENT_STATISTICS
    assert study.privacy.unit is not None, "mode dp has a unit"
    # Batches of persons need public facts that dealing persons to shards does not.
    optimises = study.can_sample_persons or study.protocol.kind in ONLY_OPTIMISATION
    return {
        Unit.ROW: Privatise.DP_OPTIMISATION,
        Unit.PERSON: Privatise.DP_OPTIMISATION if optimises else Privatise.LOCAL_AVERAGING,
        Unit.CLIENT: Privatise.PARAMETER_PERTURBATION,
    }[study.privacy.unit]


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
    if protocol.clip_norm == QUANTILE:
        del chosen["clip_norm"]  # the rule's norms are the middle of the grid
        rules |= {"clip_quantile": 0.5, "first_share": _NORMS_SHARE}
    is_noisy_and_open = privatise is Privatise.NONE and not facts.solves_exactly
    if protocol.kind is ProtocolKind.STREAMING_VB:
        steps = _STEPS_OF_ONE_VISIT if is_noisy_and_open else 500
        rules |= {"schedule": Schedule.SEQUENTIAL, "rounds": 1, "damping": 1.0, "steps": steps}
        chosen["kind"] = ProtocolKind.PVI
    elif protocol.kind is ProtocolKind.BCM:
        rules |= {"rounds": 1, "damping": 1.0, "steps": _STEPS_OF_ONE_VISIT if is_noisy_and_open else 400}
    elif protocol.kind is ProtocolKind.GLOBAL_VI:
        rules |= {"damping": 1.0}
    elif protocol.kind is ProtocolKind.LINREG:
        rules |= _linreg_rules(study, privatise)
    settings = Settings(
        **{**rules, **chosen}, aggregation=study.aggregation, rows_per_person=study.data.rows_per_person
    )
    if protocol.step_size is None and privatise in (Privatise.DP_OPTIMISATION, Privatise.HYBRID):
        settings = dataclasses.replace(settings, step_size=_noisy_step_size(study, facts, settings))
    return settings


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
    "clip_quantile",
    "scales",
    "sample_rate",
    "shards",
    "clipping",
    "sampler",
    "posterior",
    "first_share",
    "projection",
)


def _common_rules(study: Study, facts: PublicFacts) -> dict[str, Any]:
    """What every method starts from; a single silo needs neither rounds nor damping."""
    many = len(facts.silo_rows) > 1
    low, high = study.data.target_bounds or (0.0, 1.0)
    return {
        "rounds": 20 if many else 1,
        "damping": min(0.4, 2.0 / (study.encoding.typical_row_norm**2 + 1)) if many else 1.0,
        "steps": 100 if many else 500,
        "step_size": _LONGEST_STEP,
        "x_bound": study.encoding.max_row_norm,
        "y_bound": max(abs(low), abs(high)),
    }


def _method_rules(study: Study, facts: PublicFacts, privatise: Privatise) -> dict[str, Any]:
    if privatise is Privatise.NONE:
        return _open_rules(study, facts)
    if privatise in (Privatise.SUFFICIENT_STATISTICS, Privatise.INPUT_PERTURBATION):
        return {"rounds": 1, "damping": 1.0, "steps": 1}
    if privatise in (Privatise.DP_OPTIMISATION, Privatise.HYBRID):
        clip_norm = _CLIP_SHARE * facts.score * study.encoding.typical_row_norm
        return {"rounds": 20, "steps": 20, "damping": 0.2, "clip_norm": clip_norm, "sample_rate": 0.1}
    shards = (1,) * len(facts.silo_rows)
    if privatise in (Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS):
        least = _ROWS_PER_PERSON if study.privacy.unit is Unit.PERSON else 1
        per_shard = max(least, math.ceil(sum(facts.silo_rows) * 2 * facts.num_parameters / _MOST_NUMBERS))
        shards = tuple(max(1, rows // per_shard) for rows in facts.silo_rows)
    size = math.sqrt(sum(facts.silo_rows) / sum(shards)) * study.encoding.typical_row_norm * facts.score
    if facts.start_precision is not None:
        rounds, damping = 20, min(0.4, _NETWORK_STEP * facts.start_precision / sum(facts.silo_rows))
        linear = _NETWORK_CLIP * size
        quadratic = _NETWORK_QUADRATIC * linear
    else:
        damping = min(0.4, _STABLE / (1 + _num_uncentred(study)))
        rounds = math.ceil(_DAMPED_ROUNDS / damping)
        is_shared = privatise is not Privatise.VIRTUAL_CLIENTS and study.aggregation.kind is AggregationKind.NONE
        linear = (_SHARED_TRAVEL if is_shared else _TRAVEL) * size / (damping * rounds)
        quadratic = 0.5 * facts.score * linear
    # Of local averaging a shard's change stands for that of the whole silo.
    stands_for = 1.0 if privatise is Privatise.VIRTUAL_CLIENTS else sum(shards) / len(shards)
    return {
        "rounds": rounds,
        "steps": 60,
        "damping": damping,
        "shards": shards if len(set(shards)) > 1 else shards[0],
        "clip_norm": (stands_for * linear, stands_for * quadratic),
    }


def _open_rules(study: Study, facts: PublicFacts) -> dict[str, Any]:
    """Without privacy."""
    common = _common_rules(study, facts)
    rules = {key: common[key] for key in ("rounds", "damping")}
    is_network, num_silos, posterior = facts.start_precision is not None, len(facts.silo_rows), study.protocol.posterior
    if is_network and posterior is PosteriorKind.FULL:
        rules |= {"steps": 1000} | ({"rounds": 40, "damping": 0.1} if num_silos > 1 else {})
    elif not is_network and facts.num_parameters <= _LARGEST_FULL and posterior is not PosteriorKind.MEAN_FIELD:
        rules |= {"posterior": PosteriorKind.FULL} | ({"rounds": 10, "damping": 0.5} if num_silos > 1 else {})
    if num_silos == 1 and not facts.solves_exactly:
        rules["steps"] = _STEPS_OF_ONE_VISIT
    if study.protocol.kind is ProtocolKind.GLOBAL_VI:
        rules["rounds"] = 100
    if study.protocol.kind is not ProtocolKind.PVI:
        return rules
    together = _visited_together(study, num_silos)
    if not facts.solves_exactly and together * rules["damping"] > _DAMPED_SILOS:
        path = rules["rounds"] * rules["damping"]
        rules["damping"] = _DAMPED_SILOS / together
        rules["rounds"] = math.ceil(path / rules["damping"])
    if study.protocol.schedule is Schedule.SAMPLED:
        rules["rounds"] = math.ceil(rules["rounds"] * num_silos / together)
    return rules


def _visited_together(study: Study, num_silos: int) -> int:
    """How many silos answer to the same q."""
    schedule = study.protocol.schedule
    if schedule is Schedule.SAMPLED and study.protocol.clients_per_round is not None:
        return study.protocol.clients_per_round
    return 1 if schedule in (Schedule.SEQUENTIAL, Schedule.ASYNCHRONOUS) else num_silos


def _num_uncentred(study: Study) -> int:
    """Columns of which no public fact says where their features have their mean."""
    typical = study.data.typical or {}
    return sum(
        column.name not in typical if isinstance(column, Numeric) else column.shares is None
        for column in study.encoding.columns
    )


def _noisy_step_size(study: Study, facts: PublicFacts, settings: Settings) -> float:
    """Steps of Adam with which noise alone moves the mean of q by so much in the whole study."""
    num_silos, columns = len(facts.silo_rows), study.encoding.columns
    scaled = [(column.spread if isinstance(column, Numeric) else column.shares) is not None for column in columns]
    walk = _WALK_UNSCALED + (_WALK - _WALK_UNSCALED) * sum(scaled) / len(scaled)
    if settings.kind is ProtocolKind.GLOBAL_VI:
        # One walk, on the sum over silos; in a secure sum the noise is that of one silo.
        walkers = 1.0 if settings.aggregation.kind is AggregationKind.NONE else 1.0 / num_silos
    elif settings.kind is ProtocolKind.BCM:
        # The average of the silos' walks; an average of networks' weights is no average of networks.
        walkers = 1.0 if study.model.kind is ModelKind.MLP else 1.0 / num_silos
    else:
        walkers = settings.damping**2 * (settings.clients_per_round or num_silos)  # the sum of their damped walks
    return min(_LONGEST_STEP, walk / math.sqrt(walkers * settings.rounds * settings.steps))


def _linreg_rules(study: Study, privatise: Privatise) -> dict[str, Any]:
    """One visit for each sum; without privacy one exact round. The share is the paper's (004 I)."""
    projects = privatise is Privatise.SUFFICIENT_STATISTICS and study.protocol.projection is not False
    low, high = study.data.target_bounds or (0.0, 1.0)
    return {
        "rounds": 2 if projects else 1,
        "damping": 1.0,
        "steps": 1,
        "posterior": PosteriorKind.FULL,
        "first_share": 0.3,
        "bounds": _row_bounds(study.encoding, max(abs(low), abs(high))),
    }


def _row_bounds(encoding: Encoding, target: float) -> Bounds:
    """What the encoding lets a row hold."""
    features, projected, others_square = [], [], 0.0
    for column in encoding.columns:
        if isinstance(column, Numeric):
            features.append(math.sqrt(column.max_square))
            projected.append(True)
            continue
        hot = column.encode(np.arange(len(column.categories))).astype(np.float64)
        largest = np.abs(hot).max(axis=0)
        features += largest.tolist()
        projected += [False] * len(largest)
        others_square += float(np.max(np.sum((hot / largest) ** 2, axis=1)))
    if encoding.intercept:
        features.append(1.0)
        projected.append(False)
        others_square += 1.0
    return Bounds(features=tuple(features), target=target, projected=tuple(projected), others_square=others_square)
