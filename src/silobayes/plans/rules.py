"""The rules that fill in what a study leaves out, as far as several methods share them; they look at public facts only.

Settings are the keys of a method with all of them filled in.

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
  Its steps are shorter: while means are far from their optimum, gradients are mostly noise, and each step multiplies
  the factor of the covariance by a random matrix whose norm is the step size times the square root of the dimension.
  Products of such matrices spread: with .05 in 41 dimensions, where that is .3, two of six local optima from one q had
  precisions of 4e6 and 2e11 instead of 2e5, beyond what float32 finds back from, and q followed for good; with .02 and
  less none had, and precisions of local optima agreed within a factor of two in every direction.
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
- q is averaged over the last half of the visits (protocols.pvi): public post-processing that removes noise.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Column, Numeric
from silobayes.data.encoding import Encoding
from silobayes.inference.projection import Bounds
from silobayes.models.base import AbstractGLM, AbstractModel
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.mlp import AbstractMLP
from silobayes.models.poisson_regression import PoissonRegression
from silobayes.plans.keys import LARGEST_RELEASES, QUANTILE, Clipping, PosteriorKind
from silobayes.privacy.events import Scheme
from silobayes.protocols.schedule import Schedule
from silobayes.studies.study import AggregationKind, Study

# Of a row's typical norm.
_CLIP_SHARE = 0.2
# How far noise alone may move a coefficient of q in a whole study: where all columns have a declared spread or shares,
# and where none has; and the longest step of Adam.
_WALK, _WALK_UNSCALED = 0.3, 0.45
_LONGEST_STEP = 0.05
# The longest step of a full covariance, times the square root of its dimension.
_FULL_STEP = 0.06
# Without privacy, of Adam where there is no second visit.
STEPS_OF_ONE_VISIT = 2000
# Damping times silos at the most where local optima are noisy.
_DAMPED_SILOS = 8.0
# Without privacy, up to this many parameters get a full covariance.
_LARGEST_FULL = 120


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
    def of(cls, model: AbstractModel, silo_rows: Sequence[int]) -> "PublicFacts":
        """From the model and the silos' declared sizes."""
        score, start_precision = 1.0, None
        if isinstance(model, LinearRegression):
            score = 1.0 / model.noise_stddev
        elif isinstance(model, PoissonRegression):
            score = math.sqrt(model.max_count)
        elif isinstance(model, AbstractMLP):
            score = math.sqrt(model.hidden[-1]) / 2  # half of the hidden units pass a row's features on
            start_precision = model.start_stddev**-2
        return cls(
            silo_rows=tuple(silo_rows),
            num_parameters=model.dim,
            score=score,
            start_precision=start_precision,
            solves_exactly=isinstance(model, AbstractGLM),
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the encoding of a study lets a row hold: the norm of its features, its target, and each of its features.

    `moments` is a public guess of E[x x'], `intercept` the column of ones.
    """

    x: float
    y: float
    bounds: Bounds | None
    moments: np.ndarray | None = dataclasses.field(default=None, repr=False)
    intercept: int | None = None

    @classmethod
    def of(cls, study: Study) -> "Limits":
        """From what the study declares."""
        low, high = study.data.target_bounds or (0.0, 1.0)
        target, encoding = max(abs(low), abs(high)), study.encoding
        return cls(
            x=encoding.max_row_norm,
            y=target,
            bounds=_row_bounds(encoding, target),
            moments=encoding.typical_moments,
            intercept=len(encoding.feature_names) - 1 if encoding.intercept else None,
        )


def settings_of(study: Study, facts: PublicFacts) -> Any:
    """The study's own choices, and the rules for the rest: its [protocol] with every key filled in.

    Guarantees:
        - what a study says is never overruled
        - the rules look at public facts only
    """
    keys: Any = study.protocol
    rules = {**_ALWAYS, **study.method.rules(study, facts, keys)}
    open_keys = [name for name in rules if hasattr(keys, name) and getattr(keys, name) in (None, QUANTILE)]
    settings = dataclasses.replace(keys, privatise=study.method.privatise, **{name: rules[name] for name in open_keys})
    rounds, steps = getattr(settings, "rounds", 1), getattr(settings, "steps", 1)
    if not rounds * steps <= LARGEST_RELEASES:
        expected, fix = f"rounds x steps <= {LARGEST_RELEASES}", "Take fewer rounds or steps."
        raise InvalidInput("protocol.rounds", expected, f"{rounds} x {steps}", fix)
    return settings


_ALWAYS: dict[str, Any] = {
    "schedule": Schedule.SYNCHRONOUS,
    "posterior": PosteriorKind.MEAN_FIELD,
    "clipping": Clipping.LABEL_FREE,
    "sampler": Scheme.POISSON,
    "scales": (1.0, 1.0),
}


def common_rules(study: Study, facts: PublicFacts) -> dict[str, Any]:
    """What every method starts from; a single silo needs neither rounds nor damping."""
    many = len(facts.silo_rows) > 1
    return {
        "rounds": 20 if many else 1,
        "damping": min(0.4, 2.0 / (study.encoding.typical_row_norm**2 + 1)) if many else 1.0,
        "steps": 100 if many else 500,
        "step_size": _LONGEST_STEP,
    }


def open_rules(study: Study, facts: PublicFacts, keys: Any) -> dict[str, Any]:
    """Without privacy."""
    common = common_rules(study, facts)
    rules = dict(common)
    is_network, num_silos, posterior = facts.start_precision is not None, len(facts.silo_rows), keys.posterior
    if is_network and posterior is PosteriorKind.FULL:
        rules |= {"steps": 1000} | ({"rounds": 40, "damping": 0.1} if num_silos > 1 else {})
        rules["step_size"] = min(_LONGEST_STEP, _FULL_STEP / math.sqrt(facts.num_parameters))
    elif not is_network and facts.num_parameters <= _LARGEST_FULL and posterior is not PosteriorKind.MEAN_FIELD:
        rules |= {"posterior": PosteriorKind.FULL} | ({"rounds": 10, "damping": 0.5} if num_silos > 1 else {})
    if num_silos == 1 and not facts.solves_exactly:
        rules["steps"] = STEPS_OF_ONE_VISIT
    return rules


def rounds_of_all(facts: PublicFacts, keys: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """Damping and rounds where silos answer to the same q, without privacy."""
    num_silos = len(facts.silo_rows)
    together = _visited_together(keys, num_silos)
    if not facts.solves_exactly and together * rules["damping"] > _DAMPED_SILOS:
        path = rules["rounds"] * rules["damping"]
        rules["damping"] = _DAMPED_SILOS / together
        rules["rounds"] = math.ceil(path / rules["damping"])
    if keys.schedule is Schedule.SAMPLED:
        rules["rounds"] = math.ceil(rules["rounds"] * num_silos / together)
    return rules


def _visited_together(keys: Any, num_silos: int) -> int:
    """How many silos answer to the same q."""
    schedule = keys.schedule
    if schedule is Schedule.SAMPLED and keys.clients_per_round is not None:
        return keys.clients_per_round
    return 1 if schedule in (Schedule.SEQUENTIAL, Schedule.ASYNCHRONOUS) else num_silos


def optimisation_rules(study: Study, facts: PublicFacts) -> dict[str, Any]:
    """DP optimisation."""
    clip_norm = _CLIP_SHARE * facts.score * study.encoding.typical_row_norm
    return {"rounds": 20, "steps": 20, "damping": 0.2, "clip_norm": clip_norm, "sample_rate": 0.1}


def with_noisy_steps(
    study: Study, facts: PublicFacts, keys: Any, rules: dict[str, Any], walkers: float | None = None
) -> dict[str, Any]:
    """The same with steps of Adam with which noise alone moves the mean of q by so much in the whole study.

    `walkers` is how many walks of full length their sum is: by default those of damped silos.
    """
    chosen = {name: getattr(keys, name) if getattr(keys, name) is not None else rules[name] for name in _PATH}
    columns = study.encoding.columns
    scaled = [(column.spread if isinstance(column, Numeric) else column.shares) is not None for column in columns]
    walk = _WALK_UNSCALED + (_WALK - _WALK_UNSCALED) * sum(scaled) / len(scaled)
    if walkers is None:
        walkers = chosen["damping"] ** 2 * (keys.clients_per_round or len(facts.silo_rows))  # the sum of damped walks
    step_size = min(_LONGEST_STEP, walk / math.sqrt(walkers * chosen["rounds"] * chosen["steps"]))
    return rules | {"step_size": step_size}


_PATH = ("rounds", "steps", "damping")


def num_uncentred(study: Study) -> int:
    """Columns, and products of them, of which no public fact says where their features have their mean."""
    typical = study.data.typical or {}

    def is_centred(column: Column, power: int) -> bool:
        return (column.name in typical and power % 2 == 1) if isinstance(column, Numeric) else column.shares is not None

    return sum(not any(is_centred(*factor) for factor in term.factors) for term in study.encoding.all_terms)


def _row_bounds(encoding: Encoding, target: float) -> Bounds:
    """What the encoding lets a row hold."""
    features, projected, others_square = [], [], 0.0
    for term in encoding.all_terms:
        extremes = term.extremes.astype(np.float64)
        largest = np.abs(extremes).max(axis=0)
        features += largest.tolist()
        projected += [term.is_numeric] * len(largest)
        if not term.is_numeric:
            others_square += float(np.max(np.sum((extremes / largest) ** 2, axis=1)))
    if encoding.intercept:
        features.append(1.0)
        projected.append(False)
        others_square += 1.0
    return Bounds(features=tuple(features), target=target, projected=tuple(projected), others_square=others_square)


def is_summed(study: Study) -> bool:
    """Whether answers are added up before anybody sees them."""
    return study.aggregation.kind is not AggregationKind.NONE
