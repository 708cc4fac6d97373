"""A study: one validated value from one TOML file (DESIGN 8), the only thing a run is configured by.

Everything a guarantee depends on is said here and nothing is guessed: relation and unit have no defaults. A key of
[protocol] that is left out follows the default rule of its method.

Guarantees:
    An unknown section or key is refused by its dotted name.
    A value that is not acceptable is refused by its dotted name.
    A study rebuilt from its canonical form is equal and has the same hash.
    Any change of meaning changes the hash; spelling, order and comments do not.
    Privacy cannot be switched off by half: mode and privatise agree.
"""

import dataclasses
import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from silobayes.core.errors import InvalidInput, require_count, require_member, require_number
from silobayes.data import loading
from silobayes.data.description import (
    DataSection,
    Description,
    Public,
    SilosSection,
    TargetKind,
    build_section,
    require_text,
    section_to_dict,
)
from silobayes.data.encoding import Encoding
from silobayes.data.silo import Silo
from silobayes.privacy.accounting import DELTA_FLOOR
from silobayes.privacy.events import Scheme
from silobayes.privacy.ledger_file import canonical_json
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.bcm import Committee
from silobayes.protocols.schedule import Schedule

Choice = TypeVar("Choice", bound=StrEnum)


class ModelKind(StrEnum):
    """The models of the catalogue."""

    LOGISTIC_REGRESSION = "logistic_regression"
    LINEAR_REGRESSION = "linear_regression"
    SOFTMAX_REGRESSION = "softmax_regression"
    POISSON_REGRESSION = "poisson_regression"
    NEGATIVE_BINOMIAL_REGRESSION = "negative_binomial_regression"
    MLP = "mlp"
    GAUSSIAN = "gaussian"
    NUMPYRO = "numpyro"


class Mode(StrEnum):
    """Whether the run is private at all."""

    DP = "dp"
    NONE = "none"


class ProtocolKind(StrEnum):
    """How silos and server reach one posterior."""

    PVI = "pvi"
    BCM = "bcm"
    GLOBAL_VI = "global_vi"
    STREAMING_VB = "streaming_vb"
    LINREG = "linreg"


class Privatise(StrEnum):
    """Which quantity of a silo is clipped and noised (SPEC 3)."""

    NONE = "none"
    DP_OPTIMISATION = "dp_optimisation"
    PARAMETER_PERTURBATION = "parameter_perturbation"
    LOCAL_AVERAGING = "local_averaging"
    VIRTUAL_CLIENTS = "virtual_clients"
    SUFFICIENT_STATISTICS = "sufficient_statistics"
    HYBRID = "hybrid"
    INPUT_PERTURBATION = "input_perturbation"


class AggregationKind(StrEnum):
    """How the messages of a visit are added up."""

    NONE = "none"
    TRUSTED = "trusted"
    SECRET_SHARING = "secret_sharing"
    PAIRWISE_MASKS = "pairwise_masks"


class Clipping(StrEnum):
    """How a row's gradient is clipped: by its worst case over the label (UNCERTAINTY F7), or as it is."""

    LABEL_FREE = "label_free"
    ORDINARY = "ordinary"


class PosteriorKind(StrEnum):
    """The family of the posterior."""

    MEAN_FIELD = "mean_field"
    FULL = "full"


# What a model explains; a model of several kinds takes what [data] describes.
_TARGETS = {
    ModelKind.LOGISTIC_REGRESSION: (TargetKind.CLASSES,),
    ModelKind.SOFTMAX_REGRESSION: (TargetKind.CLASSES,),
    ModelKind.LINEAR_REGRESSION: (TargetKind.REAL,),
    ModelKind.POISSON_REGRESSION: (TargetKind.COUNT,),
    ModelKind.NEGATIVE_BINOMIAL_REGRESSION: (TargetKind.COUNT,),
    ModelKind.MLP: (TargetKind.CLASSES, TargetKind.REAL),
    ModelKind.GAUSSIAN: (TargetKind.NONE,),
    ModelKind.NUMPYRO: (TargetKind.CLASSES, TargetKind.REAL, TargetKind.NONE),
}
_CONJUGATE = (ModelKind.LINEAR_REGRESSION, ModelKind.GAUSSIAN)
_WITHOUT_LABEL_BOUND = (ModelKind.GAUSSIAN, ModelKind.NUMPYRO)
_SHARDED = (Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS)
# Methods that clip and noise a change of natural parameters.
PERTURBING = (Privatise.PARAMETER_PERTURBATION, *_SHARDED)
# The clip norm that a perturbing method chooses through the door.
QUANTILE = "quantile"
# Protocols whose only private method is DP optimisation.
ONLY_OPTIMISATION = (ProtocolKind.BCM, ProtocolKind.GLOBAL_VI)
# Methods whose posterior includes the privacy noise.
NOISE_AWARE = (Privatise.SUFFICIENT_STATISTICS, Privatise.INPUT_PERTURBATION)
# Every round is written to disk, and every release is a step of a loop: a typing error must not run for days.
LARGEST_ROUNDS = 10**6
LARGEST_RELEASES = 10**7
# Of epsilon: the start of a hybrid must leave something for the rest.
LARGEST_FIRST_SHARE = 0.95
_ONLY_SCHEDULE = {
    ProtocolKind.BCM: Schedule.SYNCHRONOUS,
    ProtocolKind.GLOBAL_VI: Schedule.SYNCHRONOUS,
    ProtocolKind.STREAMING_VB: Schedule.SEQUENTIAL,
    ProtocolKind.LINREG: Schedule.SYNCHRONOUS,
}
_ONE_ROUND = (ProtocolKind.BCM, ProtocolKind.STREAMING_VB)


@dataclass(frozen=True, kw_only=True)
class StudySection:
    """[study]: `seed` fixes splits and model randomness, never the privacy noise."""

    name: str
    seed: int = 0

    def __post_init__(self) -> None:
        require_text("study.name", self.name, "Name the study.")
        fix = "Pass a whole number of at most 63 bits."
        require_count("study.seed", self.seed, at_least=0, at_most=2**63 - 1, fix=fix)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """[model]: `options` are checked by the model itself, when it is built."""

    kind: ModelKind
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _choose(self, "model", "kind", ModelKind, "Choose a model.")
        if not isinstance(self.options, Mapping):
            raise InvalidInput("model.options", "a table", self.options, "Write it as [model.options].")
        object.__setattr__(self, "options", _free("model.options", self.options))


@dataclass(frozen=True, kw_only=True)
class PrivacySection:
    """[privacy]: the budget of each silo and what it protects. All but `mode` are needed in mode dp."""

    mode: Mode = Mode.DP
    epsilon: float | None = None
    delta: float | None = None
    relation: Relation | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        _choose(self, "privacy", "mode", Mode, "Say whether the run is private.")
        _choose(self, "privacy", "relation", Relation, "Say which data sets are neighbours: the factor is up to 2.")
        _choose(self, "privacy", "unit", Unit, "Say whom the budget protects.")
        _number(self, "privacy", "epsilon", math.inf, "Pass the epsilon that each silo may spend on this study.")
        _number(self, "privacy", "delta", math.nextafter(1.0, 0.0), "Pass a probability well below 1 / rows.")
        if self.delta is not None and self.delta < DELTA_FLOOR:
            fix = "A smaller delta is below what double precision can certify."
            raise InvalidInput("privacy.delta", f"a number in [{DELTA_FLOOR:g}, 1)", self.delta, fix)
        for key in ("epsilon", "delta", "relation", "unit"):
            if self.mode is Mode.DP and getattr(self, key) is None:
                fix = "Add the key to [privacy]; it has no default."
                raise InvalidInput(f"privacy.{key}", "a value in mode dp", "nothing", fix)


@dataclass(frozen=True, kw_only=True)
class ProtocolSection:
    """[protocol]: None means that the method's default rule decides, from public facts alone.

    `clip_norm` may be two numbers for a perturbing method: of the linear and of the quadratic part of a change; or
    "quantile": they are chosen from the shards' first changes, through the door.
    """

    kind: ProtocolKind = ProtocolKind.PVI
    schedule: Schedule | None = None
    privatise: Privatise | None = None
    rounds: int | None = None
    damping: float | None = None
    steps: int | None = None
    step_size: float | None = None
    clip_norm: float | tuple[float, float] | str | None = None
    clip_quantile: float | None = None
    scales: tuple[float, float] | None = None
    sample_rate: float | None = None
    shards: int | None = None
    clipping: Clipping | None = None
    sampler: Scheme | None = None
    posterior: PosteriorKind | None = None
    clients_per_round: int | None = None
    committee: Committee | None = None
    first_share: float | None = None
    projection: bool | None = None

    def __post_init__(self) -> None:
        _choose(self, "protocol", "kind", ProtocolKind, "Choose a protocol.")
        _choose(self, "protocol", "schedule", Schedule, "Say who speaks when, or remove the key.")
        _choose(self, "protocol", "privatise", Privatise, "Say what is noised, or remove the key.")
        _choose(self, "protocol", "clipping", Clipping, "Say how rows are clipped, or remove the key.")
        _choose(self, "protocol", "sampler", Scheme, "Say how batches are drawn, or remove the key.")
        _choose(self, "protocol", "posterior", PosteriorKind, "Say which family, or remove the key.")
        _choose(self, "protocol", "committee", Committee, "Say which prior a silo uses, or remove the key.")
        for key in ("rounds", "steps", "shards", "clients_per_round"):
            if getattr(self, key) is not None:
                highest = {"rounds": LARGEST_ROUNDS, "steps": LARGEST_RELEASES}.get(key, math.inf)
                fix = "Correct or remove the key."
                require_count(f"protocol.{key}", getattr(self, key), at_least=1, at_most=highest, fix=fix)
        highest_values = {"damping": 1.0, "sample_rate": 1.0, "step_size": math.inf, "first_share": LARGEST_FIRST_SHARE}
        for key, highest in highest_values.items():
            _number(self, "protocol", key, highest, "Correct or remove the key.")
        _number(self, "protocol", "clip_quantile", math.nextafter(1.0, 0.0), "Correct or remove the key.")
        if isinstance(self.clip_norm, (list, tuple)):
            _two_numbers(self, "clip_norm")
        elif self.clip_norm != QUANTILE:
            _number(self, "protocol", "clip_norm", math.inf, 'Pass a number or "quantile", or remove the key.')
        if self.clip_quantile is not None and self.clip_norm != QUANTILE:
            expected, fix = "no value without clip_norm = quantile", "Remove the key, or set protocol.clip_norm."
            raise InvalidInput("protocol.clip_quantile", expected, self.clip_quantile, fix)
        if self.scales is not None:
            _two_numbers(self, "scales")
            if self.clip_norm == QUANTILE:
                fix = "The chosen norms are the sizes of the parts; remove the key."
                raise InvalidInput("protocol.scales", "no value with clip_norm = quantile", list(self.scales), fix)
            if self.clip_norm is None:
                fix = "Add the key: its default is not in units of protocol.scales."
                raise InvalidInput("protocol.clip_norm", "a norm in units of scales", "nothing", fix)
        only = _ONLY_SCHEDULE.get(self.kind)
        if only is not None and self.schedule is not None and self.schedule is not only:
            expected = f"{only.value} with {self.kind.value}"
            raise InvalidInput("protocol.schedule", expected, self.schedule.value, "Correct or remove the key.")
        if self.kind in _ONE_ROUND and self.rounds not in (None, 1):
            raise InvalidInput(
                "protocol.rounds", f"1 with {self.kind.value}", self.rounds, "Correct or remove the key."
            )
        if (self.clients_per_round is not None) != (self.schedule is Schedule.SAMPLED):
            expected = "a number with schedule = sampled, and only there"
            raise InvalidInput("protocol.clients_per_round", expected, self.clients_per_round, "Add or remove the key.")
        if self.committee is not None and self.kind is not ProtocolKind.BCM:
            raise InvalidInput("protocol.committee", "no value without bcm", self.committee.value, "Remove the key.")
        self._check_linreg()
        projects = self._projects and self.projection is not False
        two_parts = self.privatise is Privatise.HYBRID or projects or self.clip_norm == QUANTILE
        if self.first_share is not None and not two_parts:
            expected = "no value without hybrid, clip_norm = quantile, or linreg with projection"
            raise InvalidInput("protocol.first_share", expected, self.first_share, "Remove the key.")
        if self.shards is not None and self.privatise not in (None, *_SHARDED):
            expected = "no value without local_averaging or virtual_clients"
            raise InvalidInput("protocol.shards", expected, self.shards, "Remove the key.")

    @property
    def _projects(self) -> bool:
        return self.kind is ProtocolKind.LINREG and self.privatise in (None, Privatise.SUFFICIENT_STATISTICS)

    def _check_linreg(self) -> None:
        if self.projection is not None:
            if not isinstance(self.projection, bool):
                raise InvalidInput(
                    "protocol.projection", "true or false", self.projection, "Correct or remove the key."
                )
            if not self._projects:
                expected = "no value without linreg from sums"
                raise InvalidInput("protocol.projection", expected, self.projection, "Remove the key.")
        if self.privatise is Privatise.INPUT_PERTURBATION and self.kind is not ProtocolKind.LINREG:
            fix = "Use protocol.kind = linreg."
            raise InvalidInput("protocol.privatise", "input_perturbation only with linreg", self.kind.value, fix)


@dataclass(frozen=True, kw_only=True)
class AggregationSection:
    """[aggregation]: how the server gets the sum of what silos send.

    Attributes:
        kind: `none`: each silo's messages are private by a noise of its own. Otherwise only the sum over the visited
            silos is, by noise that each draws a share of: with `trusted` an aggregator sees the shares and is trusted
            to publish their sum only; with `secret_sharing` and `pairwise_masks` nobody sees them.
        colluding: How many silos may pool what they know, or drop out, without weakening the guarantee; 0 by default.
        compute_nodes: How many add up secret shares, 3 by default; all but one of them may collude.
    """

    kind: AggregationKind = AggregationKind.NONE
    colluding: int | None = None
    compute_nodes: int | None = None

    def __post_init__(self) -> None:
        _choose(self, "aggregation", "kind", AggregationKind, "Say who sees what, or remove the key.")
        if self.colluding is not None:
            require_count("aggregation.colluding", self.colluding, at_least=0, fix="Pass how many silos may collude.")
        if self.compute_nodes is not None:
            if self.kind is not AggregationKind.SECRET_SHARING:
                fix = "Only secret shares go to compute nodes; remove the key."
                raise InvalidInput("aggregation.compute_nodes", "no value", self.compute_nodes, fix)
            require_count("aggregation.compute_nodes", self.compute_nodes, at_least=2, fix="Two nodes are the least.")
        if self.kind is AggregationKind.NONE and self.colluding is not None:
            fix = "Without a sum over silos each is protected by its own noise; remove the key."
            raise InvalidInput("aggregation.colluding", "no value with kind = none", self.colluding, fix)

    def num_shares(self, num_clients: int) -> int:
        """Of so many silos the noise alone protects: all but the colluding ones and one that knows its own share.

        004 I, Theorem 1: of M silos, T collude or drop out, and one more may subtract its own share.
        """
        num_shares = num_clients - self.num_colluding - 1
        if num_shares < 1:
            fix = "A secure sum needs two silos more than collude."
            raise InvalidInput("aggregation.colluding", f"at most {num_clients - 2}", self.num_colluding, fix)
        if self.kind is AggregationKind.PAIRWISE_MASKS and not 2 * self.num_colluding < num_clients:
            fix = "As many silos could pool their shares of a mask; use secret_sharing."
            expected = f"less than half of {num_clients} silos with pairwise_masks"
            raise InvalidInput("aggregation.colluding", expected, self.num_colluding, fix)
        return num_shares

    @property
    def num_colluding(self) -> int:
        """T."""
        return self.colluding or 0


@dataclass(frozen=True, kw_only=True)
class Study:
    """All sections, each valid, and valid together."""

    study: StudySection
    data: DataSection
    silos: SilosSection
    model: ModelSection
    privacy: PrivacySection
    protocol: ProtocolSection
    aggregation: AggregationSection

    def __post_init__(self) -> None:
        # Features are written out, so that the canonical form does not depend on the order of a table.
        written_out = {"features": self.description.features, "intercept": self._intercept()}
        object.__setattr__(self, "data", dataclasses.replace(self.data, **written_out))
        self._check_target()
        self._check_privacy()
        self._check_method()

    @classmethod
    def from_toml(cls, source: Path | str) -> "Study":
        """From a file, or from a text of more than one line."""
        text = source
        if isinstance(source, Path) or "\n" not in source:
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                fix = "`silobayes init DIR` writes one."
                raise InvalidInput("study", "a readable study file", str(source), fix) from None
        try:
            return cls.from_dict(tomllib.loads(str(text)))
        except tomllib.TOMLDecodeError as error:
            raise InvalidInput("study", "a TOML file", str(error), "Correct that line.") from None

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> "Study":
        """From the tables of a study file."""
        if not isinstance(tables, Mapping):
            raise InvalidInput("study", "the tables of a study file", type(tables).__name__, "Pass a dict of sections.")
        for name in tables:
            if name not in _SECTIONS:
                raise InvalidInput(str(name), f"a section: {', '.join(_SECTIONS)}", name, "Remove or rename it.")
        for name in ("study", "data", "model", "privacy"):
            if name not in tables:
                raise InvalidInput(name, f"a section [{name}]", "nothing", "`silobayes init DIR` shows all sections.")
        return cls(**{name: build_section(kind, name, tables.get(name, {})) for name, kind in _SECTIONS.items()})

    def to_dict(self) -> dict[str, Any]:
        """The canonical form: JSON-able, defaults written out, keys without a value left out."""
        return {name: section_to_dict(getattr(self, name)) for name in _SECTIONS}

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    @property
    def description(self) -> Description:
        """What is public about the rows."""
        return Description(data=self.data, silos=self.silos)

    @property
    def can_sample_persons(self) -> bool:
        """Whether all is declared that batches of persons need."""
        return self.data.rows_per_person is not None and Public.PERSONS in self.data.public

    @property
    def tells_rows(self) -> bool:
        """Whether the silos' numbers of rows are public; otherwise it is persons and the bound on the rows of one."""
        return self.privacy.mode is Mode.NONE or Public.ROWS in self.data.public

    def public_rows(self, silo: Silo) -> int:
        """The rows that a silo is planned for: their number if it is public, otherwise as many as its persons may have.

        Guarantees:
            Of rows that are not public nothing is looked at but the number of persons.
        """
        if self.tells_rows:
            return silo.num_rows
        assert self.data.rows_per_person is not None, "checked when the study was built"
        return silo.num_persons * self.data.rows_per_person

    @property
    def target_kind(self) -> TargetKind:
        """What the model explains."""
        possible = _TARGETS[self.model.kind]
        if len(possible) == 1:
            return possible[0]
        if self.data.classes is not None:
            return TargetKind.CLASSES
        return TargetKind.REAL if self.data.target is not None else TargetKind.NONE

    @property
    def encoding(self) -> Encoding:
        """The public encoding of rows."""
        return self.description.encoding(self.target_kind)

    def _intercept(self) -> bool:
        """Whether there is one; a Gaussian of all columns has no use for a column that does not vary."""
        is_gaussian = self.model.kind is ModelKind.GAUSSIAN
        if self.data.intercept and is_gaussian:
            fix = "A column of ones has no variance; remove the key."
            raise InvalidInput("data.intercept", "no intercept for gaussian", True, fix)
        return not is_gaussian if self.data.intercept is None else self.data.intercept

    def _check_target(self) -> None:
        kind, data, target = self.model.kind.value, self.data, self.target_kind
        if target not in _TARGETS[self.model.kind] or (target is not TargetKind.NONE and data.target is None):
            fix = "Name the column to explain."
            raise InvalidInput("data.target", f"a target for {kind}", "nothing", fix)
        if target is TargetKind.NONE and data.target is not None:
            raise InvalidInput("data.target", f"no target for {kind}", data.target, "Make it a feature or ignore it.")
        if target is TargetKind.CLASSES and data.classes is None:
            raise InvalidInput("data.classes", f"the classes for {kind}", "nothing", "List the classes.")
        if target in (TargetKind.REAL, TargetKind.COUNT) and data.target_bounds is None:
            raise InvalidInput("data.target_bounds", f"a range for {kind}", "nothing", "Declare [low, high].")
        if target is TargetKind.COUNT and data.target_bounds is not None and data.target_bounds[0] < 0:
            raise InvalidInput(
                "data.target_bounds", "low >= 0 for counts", list(data.target_bounds), "Counts start at 0."
            )
        if self.model.kind is ModelKind.LOGISTIC_REGRESSION and len(data.classes or ()) != 2:
            fix = "Use softmax_regression for more classes."
            raise InvalidInput("data.classes", f"two classes for {kind}", list(data.classes or ()), fix)

    def _check_privacy(self) -> None:
        privacy, data = self.privacy, self.data
        if (privacy.unit is Unit.PERSON) != (data.unit is not None):
            expected = "the column of the person's id with privacy.unit = person, and only there"
            fix = "Name or remove the column, or change privacy.unit."
            raise InvalidInput("data.unit", expected, "nothing" if data.unit is None else data.unit, fix)
        if privacy.mode is Mode.NONE:
            if self.protocol.privatise not in (None, Privatise.NONE):
                got, fix = self.protocol.privatise.value, "Remove it or set privacy.mode = dp."
                raise InvalidInput("protocol.privatise", "none with privacy.mode = none", got, fix)
            return
        if self.protocol.privatise is Privatise.NONE:
            fix = "Choose what is noised, or set privacy.mode = none."
            raise InvalidInput("protocol.privatise", "a private method with privacy.mode = dp", "none", fix)
        needed = []
        if privacy.unit is not Unit.PERSON or not self.can_sample_persons:
            needed.append((Public.ROWS, "the number of rows of each silo is used"))
        only_optimises = self.protocol.kind in ONLY_OPTIMISATION and self.protocol.privatise is None
        optimises = self.protocol.privatise is Privatise.DP_OPTIMISATION or only_optimises
        if privacy.unit is Unit.PERSON and optimises:
            if data.rows_per_person is None:
                fix = "Declare a public bound on the rows of one person, or use local_averaging."
                raise InvalidInput("data.rows_per_person", "a number with dp_optimisation for persons", "nothing", fix)
            needed.append((Public.PERSONS, "batches are drawn from the persons of each silo"))
        if data.test is not None:
            needed.append((Public.TEST, "metrics on test rows are printed without noise"))
        for fact, why in needed:
            if fact not in data.public:
                got, fix = [word.value for word in data.public], f"Declare it if everyone may know it: {why}."
                raise InvalidInput("data.public", f'a list with "{fact.value}"', got, fix)

    def _check_method(self) -> None:
        protocol, kind = self.protocol, self.model.kind
        if protocol.sampler is Scheme.WITHOUT_REPLACEMENT and self.privacy.relation is Relation.ADD_REMOVE:
            fix = "Use poisson, or the relation substitute."
            raise InvalidInput("protocol.sampler", "poisson with add_remove", protocol.sampler.value, fix)
        if protocol.kind is ProtocolKind.LINREG and kind is not ModelKind.LINEAR_REGRESSION:
            fix = "Use another protocol, or model linear_regression."
            raise InvalidInput("protocol.kind", f"another protocol for {kind.value}", protocol.kind.value, fix)
        conjugate_only = (Privatise.SUFFICIENT_STATISTICS, Privatise.HYBRID)
        if protocol.privatise is not None and protocol.privatise in conjugate_only and kind not in _CONJUGATE:
            got, fix = protocol.privatise.value, "Use dp_optimisation."
            raise InvalidInput("protocol.privatise", f"another method for {kind.value}", got, fix)
        perturbs = protocol.privatise in PERTURBING or (
            protocol.privatise is None
            and self.privacy.mode is Mode.DP
            and self.privacy.unit is Unit.PERSON
            and not self.can_sample_persons
        )
        if protocol.clip_norm == QUANTILE and not perturbs:
            expected = "a number without parameter_perturbation, local_averaging or virtual_clients"
            raise InvalidInput("protocol.clip_norm", expected, QUANTILE, "Give a number, or set protocol.privatise.")
        for key in ("clip_norm", "scales"):
            if isinstance(getattr(protocol, key), tuple) and not perturbs:
                expected = "parts only with parameter_perturbation, local_averaging or virtual_clients"
                fix = "Give one number, or set protocol.privatise." if key == "clip_norm" else "Remove the key."
                raise InvalidInput(f"protocol.{key}", expected, list(getattr(protocol, key)), fix)
        if protocol.clipping is Clipping.LABEL_FREE and kind in _WITHOUT_LABEL_BOUND:
            fix = "Only regressions bound a row's gradient over its label."
            raise InvalidInput("protocol.clipping", f"ordinary for {kind.value}", protocol.clipping.value, fix)


_SECTIONS = {
    "study": StudySection,
    "data": DataSection,
    "silos": SilosSection,
    "model": ModelSection,
    "privacy": PrivacySection,
    "protocol": ProtocolSection,
    "aggregation": AggregationSection,
}


def load_silos(study: Study, base_dir: Path) -> tuple[list[Silo], Silo | None, Encoding]:
    """(silos, test rows if the study has some, encoding) from the tables that the study names under `base_dir`."""
    encoding = study.encoding
    silos, test = loading.load(study.description, encoding, study.study.seed, base_dir)
    _check_silos(study, encoding, silos)
    return silos, test, encoding


def encode_silos(
    study: Study, frames: Mapping[str, pd.DataFrame], base_dir: Path = Path()
) -> tuple[list[Silo], Silo | None, Encoding]:
    """The same from frames in memory, silo name -> frame; [silos] and the paths of [data] but `test` are not used."""
    encoding = study.encoding
    silos, test = loading.from_frames(study.description, encoding, study.study.seed, frames, base_dir)
    _check_silos(study, encoding, silos)
    return silos, test, encoding


def _check_silos(study: Study, encoding: Encoding, silos: list[Silo]) -> None:
    if study.privacy.mode is Mode.NONE:
        loading.check_classes(encoding, silos)
    shards = study.protocol.shards
    for silo in silos:
        if shards is not None and study.public_rows(silo) < shards:
            fix = "Take fewer shards, or leave the silo out."
            raise InvalidInput("protocol.shards", f"at most the rows of {silo.name}", shards, fix)


def _choose(section: object, where: str, key: str, members: type[Choice], fix: str) -> None:
    value = getattr(section, key)
    if value is not None:
        object.__setattr__(section, key, require_member(f"{where}.{key}", value, members, fix))


def _number(section: object, where: str, key: str, highest: float, fix: str) -> None:
    value = getattr(section, key)
    if value is not None:
        number = require_number(f"{where}.{key}", value, above=0.0, at_most=highest, fix=fix)
        object.__setattr__(section, key, number)


def _two_numbers(section: ProtocolSection, key: str) -> None:
    value, fix = getattr(section, key), "Write [linear part, quadratic part]."
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InvalidInput(f"protocol.{key}", "two numbers", value, fix)
    pair = tuple(require_number(f"protocol.{key}", number, above=0.0, fix=fix) for number in value)
    object.__setattr__(section, key, pair)


def _free(key: str, value: Any) -> Any:
    """A copy of `value` if JSON can hold it; otherwise `InvalidInput`."""
    if isinstance(value, Mapping):
        return {str(name): _free(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_free(key, entry) for entry in value]
    if not isinstance(value, (str, bool, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidInput(key, "texts, finite numbers, truth values, lists or tables", value, "Correct the value.")
    return value
