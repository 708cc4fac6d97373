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
from typing import Any, Protocol, TypeVar

from silobayes.core.errors import InvalidInput, require_count, require_member, require_number
from silobayes.data.description import (
    Coding,
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
from silobayes.privacy.accounting import DELTA_FLOOR
from silobayes.privacy.ledger import Budget
from silobayes.privacy.ledger_file import canonical_json
from silobayes.privacy.relation import Relation, Unit
from silobayes.studies.method import Method, MethodKeys, Methods, method_of, registered

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


class AggregationKind(StrEnum):
    """How the messages of a visit are added up."""

    NONE = "none"
    TRUSTED = "trusted"
    SECRET_SHARING = "secret_sharing"
    PAIRWISE_MASKS = "pairwise_masks"


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
# Their coefficients are read one by one, so that categories are compared with one of them.
_REGRESSIONS = (
    ModelKind.LOGISTIC_REGRESSION,
    ModelKind.SOFTMAX_REGRESSION,
    ModelKind.LINEAR_REGRESSION,
    ModelKind.POISSON_REGRESSION,
    ModelKind.NEGATIVE_BINOMIAL_REGRESSION,
)


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


class Sized(Protocol):
    """A silo, of which only its sizes are looked at."""

    @property
    def num_rows(self) -> int:
        """How many rows."""
        ...

    @property
    def num_persons(self) -> int:
        """How many persons."""
        ...


@dataclass(frozen=True, kw_only=True)
class Study:
    """All sections, each valid, and valid together."""

    study: StudySection
    data: DataSection
    silos: SilosSection
    model: ModelSection
    privacy: PrivacySection
    protocol: MethodKeys
    aggregation: AggregationSection
    method: Method = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        # Features are written out, so that the canonical form does not depend on the order of a table.
        intercept, description = self._intercept(), self.description
        default = Coding.REFERENCE if self.model.kind in _REGRESSIONS and intercept else Coding.ONE_HOT
        coding, reference = description.coding(default)
        written_out = {
            "features": description.features,
            "intercept": intercept,
            "coding": coding,
            "reference": reference,
        }
        object.__setattr__(self, "data", dataclasses.replace(self.data, **written_out))
        self._check_target()
        self._check_names()
        self._check_privacy()
        for check in self.method.checks:
            check(self)

    @classmethod
    def from_toml(cls, source: Path | str, methods: Methods | None = None) -> "Study":
        """From a file, or from a text of more than one line."""
        text = source
        if isinstance(source, Path) or "\n" not in source:
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                fix = "`silobayes init DIR` writes one."
                raise InvalidInput("study", "a readable study file", str(source), fix) from None
        try:
            return cls.from_dict(tomllib.loads(str(text)), methods)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInput("study", "a TOML file", str(error), "Correct that line.") from None

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], methods: Methods | None = None) -> "Study":
        """From the tables of a study file; `methods` are those that [protocol] may name, by default all."""
        if not isinstance(tables, Mapping):
            raise InvalidInput("study", "the tables of a study file", type(tables).__name__, "Pass a dict of sections.")
        for name in tables:
            if name not in (*_SECTIONS, "protocol"):
                known = ", ".join((*_SECTIONS, "protocol"))
                raise InvalidInput(str(name), f"a section: {known}", name, "Remove or rename it.")
        for name in ("study", "data", "model", "privacy"):
            if name not in tables:
                raise InvalidInput(name, f"a section [{name}]", "nothing", "`silobayes init DIR` shows all sections.")
        sections: dict[str, Any] = {
            name: build_section(kind, name, tables.get(name, {})) for name, kind in _SECTIONS.items()
        }
        table = tables.get("protocol", {})
        if not isinstance(table, Mapping):
            raise InvalidInput("protocol", "a table [protocol]", table, "Write it as a section of the study file.")
        unit = sections["privacy"].unit if sections["privacy"].mode is Mode.DP else None
        can_sample_persons = _can_sample_persons(sections["data"])
        method = method_of(
            table, sections["model"], unit, can_sample_persons, registered() if methods is None else methods
        )
        known = [own.name for own in dataclasses.fields(method.keys)]
        for name in table:
            if name not in known:
                fix = "Remove it, or choose another method."
                raise InvalidInput(f"protocol.{name}", f"a key of {method.name}: {', '.join(known)}", name, fix)
        return cls(
            **sections, protocol=build_section(method.keys, "protocol", {"kind": method.kind, **table}), method=method
        )

    def to_dict(self) -> dict[str, Any]:
        """The canonical form: JSON-able, defaults written out, keys without a value left out."""
        return {name: section_to_dict(getattr(self, name)) for name in (*_SECTIONS, "protocol")}

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
        return _can_sample_persons(self.data)

    @property
    def budget(self) -> Budget | None:
        """Of each silo; None without privacy."""
        privacy = self.privacy
        if privacy.mode is Mode.NONE:
            return None
        assert privacy.epsilon and privacy.delta and privacy.relation and privacy.unit  # noqa: PT018 (mode dp has all)
        return Budget(epsilon=privacy.epsilon, delta=privacy.delta, relation=privacy.relation, unit=privacy.unit)

    @property
    def tells_rows(self) -> bool:
        """Whether the silos' numbers of rows are public; otherwise it is persons and the bound on the rows of one."""
        return self.privacy.mode is Mode.NONE or Public.ROWS in self.data.public

    def public_rows(self, silo: "Sized") -> int:
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

    def _check_names(self) -> None:
        names = self.encoding.feature_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            fix = "Rename a column or a category: coefficients are told apart by these names."
            raise InvalidInput("data.features", "features with different names", twice, fix)

    def _check_privacy(self) -> None:
        privacy, data = self.privacy, self.data
        if (privacy.unit is Unit.PERSON) != (data.unit is not None):
            expected = "the column of the person's id with privacy.unit = person, and only there"
            fix = "Name or remove the column, or change privacy.unit."
            raise InvalidInput("data.unit", expected, "nothing" if data.unit is None else data.unit, fix)
        if privacy.mode is Mode.NONE:
            return
        needed = []
        if privacy.unit is not Unit.PERSON or not self.can_sample_persons:
            needed.append((Public.ROWS, "the number of rows of each silo is used"))
        if privacy.unit is Unit.PERSON and self.method.person_slots:
            if data.rows_per_person is None:
                fix = "Declare a public bound on the rows of one person, or use a method that deals persons to shards."
                expected = f"a number with {self.method.privatise} for persons"
                raise InvalidInput("data.rows_per_person", expected, "nothing", fix)
            needed.append((Public.PERSONS, "batches are drawn from the persons of each silo"))
        if data.test is not None:
            needed.append((Public.TEST, "metrics on test rows are printed without noise"))
        for fact, why in needed:
            if fact not in data.public:
                got, fix = [word.value for word in data.public], f"Declare it if everyone may know it: {why}."
                raise InvalidInput("data.public", f'a list with "{fact.value}"', got, fix)


def _can_sample_persons(data: DataSection) -> bool:
    return data.rows_per_person is not None and Public.PERSONS in data.public


_SECTIONS = {
    "study": StudySection,
    "data": DataSection,
    "silos": SilosSection,
    "model": ModelSection,
    "privacy": PrivacySection,
    "aggregation": AggregationSection,
}


def _choose(section: object, where: str, key: str, members: type[Choice], fix: str) -> None:
    value = getattr(section, key)
    if value is not None:
        object.__setattr__(section, key, require_member(f"{where}.{key}", value, members, fix))


def _number(section: object, where: str, key: str, highest: float, fix: str) -> None:
    value = getattr(section, key)
    if value is not None:
        number = require_number(f"{where}.{key}", value, above=0.0, at_most=highest, fix=fix)
        object.__setattr__(section, key, number)


def _free(key: str, value: Any) -> Any:
    """A copy of `value` if JSON can hold it; otherwise `InvalidInput`."""
    if isinstance(value, Mapping):
        return {str(name): _free(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_free(key, entry) for entry in value]
    if not isinstance(value, (str, bool, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidInput(key, "texts, finite numbers, truth values, lists or tables", value, "Correct the value.")
    return value
