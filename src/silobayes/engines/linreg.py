"""Linear regression with projection, and by input perturbation, as engine methods (`protocols.linreg`)."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.defaults import Settings
from silobayes.engines.aggregation import Aggregator
from silobayes.engines.methods import AbstractMethod
from silobayes.families import FullGaussian
from silobayes.inference.noisy_statistics import GaussianPosterior
from silobayes.models.base import AbstractModel, GaussianEta
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.clipping import Bounded
from silobayes.privacy.door import Door
from silobayes.privacy.events import AbstractEvent
from silobayes.privacy.ledger import Budget
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism
from silobayes.privacy.relation import Relation
from silobayes.protocols import linreg, pvi
from silobayes.study import AggregationKind, Privatise

Rows = tuple[tuple[np.ndarray, np.ndarray], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sum:
    """One private sum over silos: its noise multiplier and who adds up (None: every silo has a noise of its own)."""

    noise_multiplier: float
    aggregator: Aggregator | None

    @property
    def mechanism(self) -> AbstractMechanism:
        """The noise of a release: each silo's own, or of the sum."""
        if self.aggregator is not None:
            return self.aggregator.mechanism(self.noise_multiplier)
        return GaussianMechanism(noise_multiplier=self.noise_multiplier)

    def noise_std(self, clip_norm: float, num_clients: int) -> float:
        """The standard deviation of the noise that the sum over silos contains."""
        num_shares = 1 if self.aggregator is None else self.aggregator.num_shares
        return self.noise_multiplier * clip_norm * float(np.sqrt(num_clients / num_shares))

    def release(self, doors: Sequence[Door], bounded: Sequence[Bounded], sum_index: int) -> np.ndarray:
        """The sum over silos with its noise, of one block."""
        (value,) = self.release_blocks(doors, bounded, sum_index)
        return value

    def release_blocks(self, doors: Sequence[Door], bounded: Sequence[Bounded], sum_index: int) -> list[np.ndarray]:
        """The sum over silos with its noise, block by block."""
        if self.aggregator is not None:
            return list(self.aggregator.release(doors, bounded, self.noise_multiplier, sum_index).blocks)
        releases = [door.release(self.mechanism, own) for door, own in zip(doors, bounded, strict=True)]
        return [np.sum(parts, axis=0) for parts in zip(*(one.blocks for one in releases), strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectedRegressionMethod(AbstractMethod):
    """With projection (`first` is not None): visit 0 asks for the marginal squares, visit 1 for the moments.

    The state of the clients is the box that rows are projected onto (the bounds, then the thresholds) and the bias that
    this causes; both are public.
    """

    rows: Rows
    num_rows: int
    bounds: linreg.Bounds
    first: Sum | None
    second: Sum
    relation: Relation

    def init_clients(self) -> dict[str, np.ndarray]:
        """See `AbstractMethod`."""
        return {"box": self.bounds.all, "bias": np.zeros(())}

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        squares, moments = empty_sums(self.bounds)
        asked = [(self.second, moments)] if self.first is None else [(self.first, squares), (self.second, moments)]
        return tuple(one.mechanism.event(empty, self.relation) for one, empty in asked[:num_visits])

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""
        if call.index == 0 and self.first is not None:
            no_change = jax.tree.map(np.zeros_like, call.down.eta_q)
            return self._project(doors), pvi.Upload(d_eta=no_change)
        box, bias = clients["box"], float(clients["bias"])
        bounded = [linreg.bounded_moments(x, y, box, self.bounds) for x, y in self.rows]
        released = self.second.release(doors, bounded, call.index)
        known = _known(self.solver.model)
        answer = linreg.posterior(released, self._second_noise, box, self.bounds, bias=bias, **known)
        return clients, pvi.Upload(d_eta=pvi.to_host(eta_of(self, answer)) - call.down.eta_q)

    def _project(self, doors: Sequence[Door]) -> dict[str, np.ndarray]:
        assert self.first is not None
        bounded = [linreg.bounded_squares(x, y, self.bounds) for x, y in self.rows]
        released = self.first.release(doors, bounded, 0)
        noise = self.first.noise_std(bounded[0].blocks[0].clip_norm, self.num_clients)
        stds = linreg.marginal_stds(released, noise, self.num_rows, self.bounds)
        prior_stddev = _known(self.solver.model)["prior_stddev"]
        projection = linreg.choose_projection(stds, noise, self._second_noise, self.num_rows, self.bounds, prior_stddev)
        return {"box": linreg.thresholds(stds, projection, self.bounds), "bias": np.array(projection.bias)}

    @property
    def _second_noise(self) -> float:
        return self.second.noise_std(self.bounds.moment_norm, self.num_clients)


@dataclass(frozen=True, kw_only=True, eq=False)
class InputPerturbationMethod(AbstractMethod):
    """The local model: every row is noised by itself, once, and everything else is arithmetic."""

    rows: Rows
    bounds: linreg.Bounds
    noise_multiplier: float
    relation: Relation

    def init_clients(self) -> tuple[()]:
        """See `AbstractMethod`."""
        return ()

    def events(self, client: int, num_visits: int) -> tuple[AbstractEvent, ...]:
        """See `AbstractMethod`."""
        own = linreg.bounded_rows(*self.rows[client], self.bounds)
        return (self._mechanism.event(own, self.relation),) * num_visits

    def client_step(self, clients, call, doors):
        """See `AbstractMethod`."""
        bounded = [linreg.bounded_rows(x, y, self.bounds) for x, y in self.rows]
        releases = [door.release(self._mechanism, own) for door, own in zip(doors, bounded, strict=True)]
        noised = np.concatenate([release.value for release in releases]).reshape(-1, len(self.bounds.all))
        (noise_std,) = releases[0].stddevs
        answer = linreg.perturbed_posterior(noised, noise_std, self.bounds, **_known(self.solver.model))
        return clients, pvi.Upload(d_eta=pvi.to_host(eta_of(self, answer)) - call.down.eta_q)

    @property
    def _mechanism(self) -> AbstractMechanism:
        return GaussianMechanism(noise_multiplier=self.noise_multiplier)


class Sums(Protocol):
    """What makes mechanisms and aggregators for a study (`engines.planning`)."""

    def mechanism(self, noise_multiplier: float) -> AbstractMechanism:
        """The noise of a release: each silo's own, or of the sum."""
        ...

    def of_shares(self, empty: Bounded, noise_multiplier: float, *, num_terms: int, num_sums: int) -> Aggregator | None:
        """For shares like `empty`."""
        ...


def check(model: AbstractModel, settings: Settings, budget: Budget | None) -> None:
    """Refuse what `protocol.kind = linreg` cannot run; without privacy it is one exact round of PVI."""
    if not isinstance(model, LinearRegression):
        fix = "Set model.options.noise_stddev, or use another protocol."
        raise InvalidInput("protocol.kind", "a linear regression with known noise for linreg", "another model", fix)
    if settings.privatise not in (Privatise.NONE, Privatise.SUFFICIENT_STATISTICS, Privatise.INPUT_PERTURBATION):
        fix = "Use sufficient_statistics or input_perturbation, or protocol.kind = pvi."
        raise InvalidInput("protocol.privatise", "a method of linreg", settings.privatise.value, fix)
    if budget is None:
        return
    if settings.bounds is None or len(settings.bounds.features) != model.num_features:
        fix = "Pass the bounds of all features, as a study's encoding has them."
        raise InvalidInput("settings.bounds", f"bounds of {model.num_features} features", "others", fix)
    rounds = 2 if settings.privatise is Privatise.SUFFICIENT_STATISTICS and settings.projection else 1
    if settings.rounds != rounds:
        raise InvalidInput("protocol.rounds", f"{rounds}: one for each sum", settings.rounds, "Remove the key.")
    if settings.privatise is Privatise.INPUT_PERTURBATION:
        if settings.aggregation.kind is not AggregationKind.NONE:
            fix = "Rows that are noised one by one need nobody to add them up."
            raise InvalidInput("aggregation.kind", "none", settings.aggregation.kind.value, fix)
        if budget.relation is not Relation.SUBSTITUTE:
            fix = "A row that publishes itself shows that it is there: only its values can be protected."
            raise InvalidInput("privacy.relation", "substitute", budget.relation.value, fix)


def build(
    common: dict[str, Any],
    silos: Sequence[Silo],
    settings: Settings,
    budget: Budget,
    slots: Sequence[int],
    sums: Sums,
    least_noise: Callable[..., float],
) -> AbstractMethod:
    """The method with the least noise that keeps the budget; `slots` are the silos' public numbers of rows."""
    bounds = settings.bounds
    assert bounds is not None
    known: dict[str, Any] = {
        **common,
        "averages": False,
        "rows": tuple((silo.x.astype(np.float64), silo.y.astype(np.float64)) for silo in silos),
        "bounds": bounds,
        "relation": budget.relation,
    }
    if settings.privatise is Privatise.INPUT_PERTURBATION:
        # The number of rows enters the price through the grid's rounding alone: take the largest silo's.
        x, y = max(known["rows"], key=lambda rows: len(rows[1]))
        largest = linreg.bounded_rows(x, y, bounds)
        noise = least_noise(lambda std: sums.mechanism(std).event(largest, budget.relation), budget)
        return InputPerturbationMethod(**known, noise_multiplier=noise)

    def calibrated(empty: Bounded, within: Budget, besides: tuple[AbstractEvent, ...]) -> Sum:
        noise = least_noise(lambda std: sums.mechanism(std).event(empty, budget.relation), within, besides=besides)
        return Sum(noise_multiplier=noise, aggregator=sums.of_shares(empty, noise, num_terms=max(slots), num_sums=1))

    squares, moments = empty_sums(bounds)
    first = None
    paid: tuple[AbstractEvent, ...] = ()
    if settings.projection:
        first = calibrated(squares, dataclasses.replace(budget, epsilon=settings.first_share * budget.epsilon), ())
        paid = (first.mechanism.event(squares, budget.relation),)
    second = calibrated(moments, budget, paid)
    return ProjectedRegressionMethod(
        **known, num_rows=sum(slots), first=first, second=second, aggregator=second.aggregator
    )


def empty_sums(bounds: linreg.Bounds) -> tuple[Bounded, Bounded]:
    """The two sums of a silo without rows: enough to say what they cost."""
    x, y = np.zeros((0, len(bounds.features))), np.zeros(0)
    return linreg.bounded_squares(x, y, bounds), linreg.bounded_moments(x, y, bounds.all, bounds)


def eta_of(method: AbstractMethod, answer: GaussianPosterior) -> GaussianEta:
    """An answer in the method's family."""
    full = FullGaussian(dimension=method.solver.model.dim)
    eta = full.from_standard(mean=jnp.asarray(answer.mean), covariance=jnp.asarray(answer.covariance))
    return eta if isinstance(method.solver.family, FullGaussian) else full.to_mean_field(eta)


def _known(model: AbstractModel) -> dict[str, float]:
    assert isinstance(model, LinearRegression)
    return {"residual_stddev": model.noise_stddev, "prior_stddev": model.prior_stddev}
