"""Keys of [protocol] that several methods have, and checks of a whole study that several methods make."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from silobayes.core.errors import InvalidInput
from silobayes.privacy.events import Scheme
from silobayes.privacy.relation import Relation
from silobayes.protocols.schedule import Schedule
from silobayes.studies.keys import count, key, member, number, two_numbers
from silobayes.studies.method import MethodKeys
from silobayes.studies.study import ModelKind, Study

# Every round is kept on disk, and every release is a step of a loop: a typing error must not run for days.
LARGEST_ROUNDS = 10**6
LARGEST_RELEASES = 10**7
# Of epsilon: a first part must leave something for the rest.
LARGEST_FIRST_SHARE = 0.95
# The clip norm that a perturbing method chooses through the door.
QUANTILE = "quantile"
_WITHOUT_LABEL_BOUND = (ModelKind.GAUSSIAN, ModelKind.NUMPYRO)


class PosteriorKind(StrEnum):
    """The family of the posterior."""

    MEAN_FIELD = "mean_field"
    FULL = "full"


class Clipping(StrEnum):
    """How a row's gradient is clipped: by its worst case over the label (UNCERTAINTY F7), or as it is."""

    LABEL_FREE = "label_free"
    ORDINARY = "ordinary"


def _clip_norm_of_parts(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return two_numbers(name, value)
    if value == QUANTILE:
        return value
    if isinstance(value, str):
        fix = 'Pass a number, [linear part, quadratic part] or "quantile", or remove the key.'
        raise InvalidInput(name, "a norm", value, fix)
    return number()(name, value)


def _one_or_each(name: str, value: Any) -> Any:
    if isinstance(value, tuple):  # a rule's: one number for each silo
        return tuple(count()(name, entry) for entry in value)
    return count()(name, value)


_SHARE = number(LARGEST_FIRST_SHARE)
_BELOW_ONE = number(math.nextafter(1.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class VisitKeys(MethodKeys):
    """Of methods that visit silos more than once."""

    schedule: Schedule | None = key(
        member(Schedule), "synchronous | sequential | sampled | asynchronous", '"synchronous"'
    )
    clients_per_round: int | None = key(count(), 'silos a round, with schedule = "sampled" and only there', "5")
    rounds: int | None = key(count(LARGEST_ROUNDS), "how often each silo is visited", "20")


@dataclass(frozen=True, kw_only=True)
class RoundKeys(VisitKeys):
    """Of methods whose rounds change a posterior by and by."""

    damping: float | None = key(number(1.0), "of every change", "0.4")
    posterior: PosteriorKind | None = key(member(PosteriorKind), "mean_field | full", '"mean_field"')


@dataclass(frozen=True, kw_only=True)
class StepKeys(RoundKeys):
    """Of methods with local optimisations."""

    steps: int | None = key(count(LARGEST_RELEASES), "local steps a round", "10")
    step_size: float | None = key(number(), "of Adam", "0.02")


@dataclass(frozen=True, kw_only=True)
class BatchKeys(StepKeys):
    """Of methods that clip and noise gradients of batches."""

    clip_norm: float | None = key(number(), "of the gradient of a row or person", "1.0")
    sample_rate: float | None = key(number(1.0), "expected share of the rows, or persons, in a batch", "0.05")
    clipping: Clipping | None = key(member(Clipping), "label_free | ordinary", '"label_free"')
    sampler: Scheme | None = key(member(Scheme), "poisson | without_replacement", '"poisson"')


@dataclass(frozen=True, kw_only=True)
class ChangeKeys(StepKeys):
    """Of methods that clip and noise changes of natural parameters."""

    clip_norm: float | tuple[float, float] | str | None = key(
        _clip_norm_of_parts, 'of a change, [of its linear part, of its quadratic part], or "quantile"', "1.0"
    )
    clip_quantile: float | None = key(_BELOW_ONE, 'with clip_norm = "quantile": of the first changes', "0.5")
    scales: tuple[float, float] | None = key(
        two_numbers, "public sizes of both parts; clip_norm is in their units", "[1.0, 0.5]"
    )
    first_share: float | None = key(_SHARE, 'with clip_norm = "quantile": its share of epsilon', "0.1")

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """One norm, or that of each part."""
        return self.clip_norm if isinstance(self.clip_norm, tuple) else (self.clip_norm,)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class ShardKeys(ChangeKeys):
    """The same of fixed shards."""

    shards: int | tuple[int, ...] | None = key(_one_or_each, "of each silo", "10")


@dataclass(frozen=True, kw_only=True)
class HybridKeys(BatchKeys):
    """Of a start from statistics, then batches."""

    first_share: float | None = key(_SHARE, "of epsilon, for the statistics", "0.5")


def check_schedule(study: Study) -> None:
    """Subsets have a size, and nothing else has."""
    keys: Any = study.protocol
    if (keys.clients_per_round is not None) != (keys.schedule is Schedule.SAMPLED):
        expected = "a number with schedule = sampled, and only there"
        raise InvalidInput("protocol.clients_per_round", expected, keys.clients_per_round, "Add or remove the key.")


def only_schedule(schedule: Schedule) -> Callable[[Study], None]:
    """No other one."""

    def check(study: Study) -> None:
        keys: Any = study.protocol
        if keys.schedule not in (None, schedule):
            expected = f"{schedule.value} with {keys.kind}"
            raise InvalidInput("protocol.schedule", expected, keys.schedule.value, "Correct or remove the key.")

    return check


def one_round(study: Study) -> None:
    """A single one."""
    keys: Any = study.protocol
    if keys.rounds not in (None, 1):
        raise InvalidInput("protocol.rounds", f"1 with {keys.kind}", keys.rounds, "Correct or remove the key.")


def check_batches(study: Study) -> None:
    """Samplers and clipping that can be priced."""
    keys: Any = study.protocol
    if keys.sampler is Scheme.WITHOUT_REPLACEMENT and study.privacy.relation is Relation.ADD_REMOVE:
        fix = "Use poisson, or the relation substitute."
        raise InvalidInput("protocol.sampler", "poisson with add_remove", keys.sampler.value, fix)
    if keys.clipping is Clipping.LABEL_FREE and study.model.kind in _WITHOUT_LABEL_BOUND:
        fix = "Only regressions bound a row's gradient over its label."
        raise InvalidInput("protocol.clipping", f"ordinary for {study.model.kind.value}", keys.clipping.value, fix)


def check_changes(study: Study) -> None:
    """Norms, scales and quantiles that go together."""
    keys: Any = study.protocol
    if keys.clip_quantile is not None and keys.clip_norm != QUANTILE:
        expected, fix = "no value without clip_norm = quantile", "Remove the key, or set protocol.clip_norm."
        raise InvalidInput("protocol.clip_quantile", expected, keys.clip_quantile, fix)
    if keys.first_share is not None and keys.clip_norm != QUANTILE:
        expected = "no value without clip_norm = quantile"
        raise InvalidInput("protocol.first_share", expected, keys.first_share, "Remove the key.")
    if keys.scales is not None and keys.clip_norm == QUANTILE:
        fix = "The chosen norms are the sizes of the parts; remove the key."
        raise InvalidInput("protocol.scales", "no value with clip_norm = quantile", list(keys.scales), fix)
    if keys.scales is not None and keys.clip_norm is None:
        fix = "Add the key: its default is not in units of protocol.scales."
        raise InvalidInput("protocol.clip_norm", "a norm in units of scales", "nothing", fix)


def only_models(*kinds: ModelKind) -> Callable[[Study], None]:
    """No other models."""

    def check(study: Study) -> None:
        if study.model.kind not in kinds:
            fix = "`silobayes methods` says which methods there are for which models."
            got, key_of = study.method.privatise, "privatise" if study.method.kind == "pvi" else "kind"
            raise InvalidInput(f"protocol.{key_of}", f"another method for {study.model.kind.value}", got, fix)

    return check
