"""What a study says about its rows before anyone reads one: the sections [data] and [silos] (DESIGN 8).

Everything here is public. Ranges, categories and classes are declared by people, never learned from rows, because a
range or a vocabulary learned from rows is a release (SPEC 0).

Guarantees:
    An unknown key is refused by its dotted name.
    A value that is not acceptable is refused by its dotted name.
    A section rebuilt from its own values is equal.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from silobayes.core.errors import InvalidInput, require_count, require_member, require_number
from silobayes.data.columns import Categorical, Category, Column, Numeric
from silobayes.data.encoding import ClassTarget, CountTarget, Encoding, Outside, RealTarget
from silobayes.data.terms import one_spelling, parse_terms

Bounds = tuple[float, float] | tuple[Category, ...]
Section = TypeVar("Section")


class Public(StrEnum):
    """What a study declares public about its rows."""

    ROWS = "rows"
    PERSONS = "persons"
    TEST = "test"
    BOUNDS = "bounds"
    CATEGORIES = "categories"
    CLASSES = "classes"


class Coding(StrEnum):
    """How a column of categories becomes features."""

    REFERENCE = "reference"
    ONE_HOT = "one_hot"


class SplitScheme(StrEnum):
    """How the rows of one table are dealt to silos."""

    EVEN = "even"
    RHO_KAPPA = "rho_kappa"
    LABEL_SKEW = "label_skew"
    COLUMN = "column"


class TargetKind(StrEnum):
    """What the target is; a model says which it can explain."""

    REAL = "real"
    COUNT = "count"
    CLASSES = "classes"
    NONE = "none"


def build_section(cls: Callable[..., Section], where: str, table: object) -> Section:
    """The dataclass `cls` from one table of a study file; unknown and missing keys are refused by their dotted name."""
    if not isinstance(table, Mapping):
        raise InvalidInput(where, f"a table [{where}]", table, "Write it as a section of the study file.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise InvalidInput(
                f"{where}.{key}", f"a key of [{where}]: {', '.join(fields)}", key, "Remove or rename it."
            )
    for key, field in fields.items():
        if key not in table and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidInput(f"{where}.{key}", "a value", "nothing", f"Add the key to [{where}].")
    return cls(**table)


def section_to_dict(section: Any) -> dict[str, Any]:
    """The JSON-able form of a section: keys without a value are left out."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {key: _plain(value) for key, value in values.items() if value is not None}


def require_text(key: str, value: object, fix: str) -> str:
    """`value` if it is a text that is not empty; otherwise `InvalidInput`."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(key, "a text", value, fix)
    return str(value)


def require_flag(key: str, value: object, fix: str) -> bool:
    """`value` if it is true or false; otherwise `InvalidInput`."""
    if not isinstance(value, bool):
        raise InvalidInput(key, "true or false", value, fix)
    return value


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """[data]: where the rows are and what is publicly known of their columns.

    Attributes:
        source: One table, to be dealt to silos by [silos].
        files: Silo name -> table, when each silo has its own (a list of paths takes the names from the files).
            Without `source` and `files` the rows are handed over in Python.
        target: The column to explain; None for models of the features alone.
        features: The columns to explain it with; by default those of `bounds`, except the column of [silos].
        bounds: Column -> (low, high), or the tuple of its categories.
        typical: Column -> a public typical value of a numeric feature, which becomes zero; by default the middle of its
            range.
        spread: Column -> a public typical distance of a numeric feature from `typical`, which becomes 1; by default the
            farther end of its range does.
        shares: Column -> the public share of each category of a categorical feature, in the order of its categories (a
            table of category = share is put into that order); they are subtracted from its features.
        coding: `reference`: a feature for each category but one, with which the others are compared; `one_hot`: one for
            each. By default `reference` for regressions with an intercept, otherwise `one_hot`.
        reference: Column -> the category that the others are compared with; by default the first. Only with `coding`
            reference.
        terms: Products of feature columns, `age:ward`, and powers of numeric ones, `age^2`: further features.
        classes: The classes of a class target, in the order of their labels 0..K-1.
        target_bounds: (low, high) of a real or count target.
        unit: The column that says whose row it is; needed for, and only for, privacy.unit = "person".
        rows_per_person: A public bound on the rows of one person at one silo; only with `unit`. A person with more is
            refused, or with `outside = "clip"` only the person's first rows count.
        ignore: Columns that the tables hold and the study does not use.
        public: What is declared public.
        outside: What happens to a number outside its bounds, and to rows of a person beyond `rows_per_person`.
        intercept: Whether a column of ones is appended; by default it is, where there is something to explain.
        test: A share of the rows, or the path of a table.
    """

    source: str | None = None
    files: dict[str, str] | None = None
    target: str | None = None
    features: tuple[str, ...] | None = None
    bounds: dict[str, Bounds]
    typical: dict[str, float] | None = None
    spread: dict[str, float] | None = None
    shares: dict[str, tuple[float, ...]] | None = None
    coding: Coding | None = None
    reference: dict[str, Category] | None = None
    terms: tuple[str, ...] | None = None
    classes: tuple[Category, ...] | None = None
    target_bounds: tuple[float, float] | None = None
    unit: str | None = None
    rows_per_person: int | None = None
    ignore: tuple[str, ...] = ()
    public: tuple[Public, ...] = ()
    outside: Outside = Outside.REFUSE
    intercept: bool | None = None
    test: float | str | None = None

    def __post_init__(self) -> None:
        put = _putter(self)
        for key in ("source", "target", "unit"):
            if getattr(self, key) is not None:
                put(key, require_text(f"data.{key}", getattr(self, key), "Name a file or column."))
        put("files", _files(self.files))
        if self.source is not None and self.files is not None:
            raise InvalidInput("data.files", "either source or files", "both", "Remove one of them.")
        if not isinstance(self.bounds, Mapping) or not self.bounds:
            fix = "Declare a public range [low, high] or the categories of each feature."
            raise InvalidInput("data.bounds", "a table of columns", self.bounds, fix)
        put("bounds", {str(column): _bounds(f"data.bounds.{column}", given) for column, given in self.bounds.items()})
        if self.typical is not None:
            put("typical", _typical(self.typical, self.bounds))
        if self.spread is not None:
            put("spread", _spread(self.spread, self.bounds, self.typical or {}))
        if self.shares is not None:
            put("shares", _shares(self.shares, self.bounds))
        if self.coding is not None:
            put("coding", require_member("data.coding", self.coding, Coding, "Say how categories become features."))
        if self.reference is not None:
            put("reference", _reference(self.reference, self.bounds))
            if self.coding is Coding.ONE_HOT:
                fix = "Each category has a feature of its own; remove the key, or data.coding."
                raise InvalidInput("data.reference", "no value with coding = one_hot", self.reference, fix)
        if self.terms is not None:
            # None as nothing, so that equal studies have equal hashes.
            put("terms", tuple(one_spelling(text) for text in _texts("data.terms", self.terms)) or None)
        if self.rows_per_person is not None:
            fix = "Pass a public bound on the rows of one person."
            require_count("data.rows_per_person", self.rows_per_person, at_least=1, fix=fix)
            if self.unit is None:
                fix = "Name the column of the person's id, or remove the key."
                raise InvalidInput("data.rows_per_person", "no value without data.unit", self.rows_per_person, fix)
        put("ignore", _texts("data.ignore", self.ignore))
        if self.features is not None:
            put("features", _texts("data.features", self.features))
            if not self.features:
                raise InvalidInput("data.features", "at least one column", [], "Name the columns to use.")
        if self.classes is not None:
            put("classes", _categories("data.classes", self.classes))
        if self.target_bounds is not None:
            put("target_bounds", _range("data.target_bounds", self.target_bounds))
        public = _texts("data.public", self.public)
        fix = "Name what everyone may know of the rows."
        put("public", tuple(require_member("data.public", word, Public, fix) for word in public))
        put("outside", require_member("data.outside", self.outside, Outside, "Say what happens outside the bounds."))
        if self.intercept is not None:
            require_flag("data.intercept", self.intercept, "Say whether a column of ones is appended.")
        put("test", _test(self.test))
        self._check_target()

    def _check_target(self) -> None:
        if self.classes is not None and self.target_bounds is not None:
            raise InvalidInput("data.target_bounds", "either classes or target_bounds", "both", "Remove one of them.")
        described = self.classes is not None or self.target_bounds is not None
        if self.target is None and described:
            raise InvalidInput("data.target", "the column they describe", "nothing", "Name the target column.")
        if self.target is not None and not described:
            fix = "List the classes of a class target, or give [low, high] as target_bounds of a real or count target."
            raise InvalidInput("data.target", "classes or target_bounds that describe it", self.target, fix)


@dataclass(frozen=True, kw_only=True)
class SilosSection:
    """[silos]: how one table is dealt to silos.

    Attributes:
        count: How many silos; follows from `data.files` or from the categories of `column` where there are such.
        scheme: even | rho_kappa | label_skew | column (`splits.py`).
        rho: rho_kappa: how much sizes differ, in [0, 1). label_skew: share of a silo's own class, in [0, 1].
        kappa: rho_kappa: how much the small silos' majority share differs, at most 1.
        column: The column that names the silo; its categories are listed in data.bounds.
    """

    count: int | None = None
    scheme: SplitScheme = SplitScheme.EVEN
    rho: float | None = None
    kappa: float | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        put = _putter(self)
        if self.count is not None:
            put("count", require_count("silos.count", self.count, at_least=1, fix="Pass the number of silos."))
        put("scheme", require_member("silos.scheme", self.scheme, SplitScheme, "Say how rows are dealt to silos."))
        uses = {
            SplitScheme.RHO_KAPPA: {"rho", "kappa"},
            SplitScheme.LABEL_SKEW: {"rho"},
            SplitScheme.COLUMN: {"column"},
        }
        for key in ("rho", "kappa", "column"):
            used, given = key in uses.get(self.scheme, ()), getattr(self, key) is not None
            if used != given:
                expected, fix = ("a value", "Add it.") if used else ("no value", "Remove it or change the scheme.")
                got = getattr(self, key) if given else "nothing"
                raise InvalidInput(f"silos.{key}", f"{expected} with scheme {self.scheme.value}", got, fix)
        if self.rho is not None:
            highest = 1.0 if self.scheme is SplitScheme.LABEL_SKEW else math.nextafter(1.0, 0.0)
            closing = "1]" if highest == 1.0 else "1)"
            put("rho", _number_in("silos.rho", self.rho, 0.0, highest, f"a number in [0, {closing}"))
        if self.kappa is not None:
            put("kappa", _number_in("silos.kappa", self.kappa, -math.inf, 1.0, "a number <= 1"))
        if self.column is not None:
            put("column", require_text("silos.column", self.column, "Name the column that holds the silo."))
        if self.scheme is SplitScheme.RHO_KAPPA and self.rho and self.count is not None and self.count % 2:
            raise InvalidInput("silos.count", "an even number with rho > 0", self.count, "Half of the silos are small.")


@dataclass(frozen=True, kw_only=True)
class Description:
    """[data] and [silos] together, checked against each other; resolved once, when a study is built.

    Guarantees:
        Each column has one role and each used column has its bounds.
        The encoding is the same whatever the rows are.
    """

    data: DataSection
    silos: SilosSection

    def __post_init__(self) -> None:
        data, silos = self.data, self.silos
        roles: dict[str, str] = {}
        named = [("data.target", [data.target]), ("data.unit", [data.unit]), ("data.ignore", data.ignore)]
        for key, columns in [("data.features", self.features), *named]:
            for column in columns:
                if column in roles:
                    raise InvalidInput(key, "columns with one role each", column, f"It is already in {roles[column]}.")
                if column is not None:
                    roles[column] = key
        if silos.column is not None and roles.get(silos.column, "data.features") != "data.features":
            fix = f"It is already in {roles[silos.column]}."
            raise InvalidInput("silos.column", "a feature or a column of its own", silos.column, fix)
        for column in self.features:
            if column not in data.bounds:
                fix = "Declare its public range [low, high] or list its categories."
                raise InvalidInput(f"data.bounds.{column}", "a public range or categories", "nothing", fix)
        for column in data.bounds:
            if column not in self.features and column != silos.column:
                fix = "Use it as a feature or remove it; the target has target_bounds or classes."
                raise InvalidInput(f"data.bounds.{column}", "a column of features or of [silos]", column, fix)
        parse_terms(data.terms or (), self._columns())
        self._check_count()

    def _check_count(self) -> None:
        data, silos = self.data, self.silos
        if silos.column is not None and not self._is_categorical(silos.column):
            fix = "List the silos as its categories."
            raise InvalidInput(f"data.bounds.{silos.column}", "the names of the silos", "no categories", fix)
        if data.files is not None and silos.scheme is not SplitScheme.EVEN:
            raise InvalidInput("silos.scheme", "no scheme with data.files", silos.scheme.value, "Remove it.")
        known = self._known_count()
        if known is None and silos.count is None and data.source is not None:
            raise InvalidInput("silos.count", "a number of silos", "nothing", "Add the key to [silos].")
        if known is not None and silos.count not in (None, known):
            raise InvalidInput("silos.count", f"{known}, as listed", silos.count, "Correct or remove it.")
        if silos.scheme in (SplitScheme.RHO_KAPPA, SplitScheme.LABEL_SKEW) and data.classes is None:
            raise InvalidInput(
                "silos.scheme", "even or column without classes", silos.scheme.value, "Change the split."
            )
        if data.unit is not None and silos.scheme in (SplitScheme.RHO_KAPPA, SplitScheme.LABEL_SKEW):
            fix = "Only even and column keep the rows of a person together."
            raise InvalidInput("silos.scheme", "even or column with data.unit", silos.scheme.value, fix)

    def _known_count(self) -> int | None:
        if self.data.files is not None:
            return len(self.data.files)
        return len(self.silo_names) if self.silos.column is not None else None

    def _is_categorical(self, column: str) -> bool:
        bounds = self.data.bounds.get(column)
        return bounds is not None and not is_range(bounds)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns that become features."""
        if self.data.features is not None:
            return self.data.features
        return tuple(column for column in self.data.bounds if column != self.silos.column)

    @property
    def silo_names(self) -> tuple[str, ...]:
        """The public names of the silos, in their order."""
        if self.data.files is not None:
            return tuple(self.data.files)
        if self.silos.column is not None:
            return tuple(str(category) for category in self.data.bounds[self.silos.column])
        count = self.silos.count or 0
        return tuple(f"silo-{k:0{len(str(max(count - 1, 10)))}d}" for k in range(count))

    def coding(self, default: Coding) -> tuple[Coding | None, dict[str, Category] | None]:
        """`data.coding` and `data.reference` written out; (None, None) where no feature has categories."""
        data = self.data
        categorical = [name for name in self.features if self._is_categorical(name)]
        for name in data.reference or {}:
            if name not in categorical:
                fix = "Name a column of data.features, or remove it."
                raise InvalidInput(f"data.reference.{name}", "a feature with categories", name, fix)
        coding = data.coding or (default if data.reference is None else Coding.REFERENCE)
        if not categorical:
            return None, None
        if coding is Coding.ONE_HOT:
            return coding, None
        return coding, {name: (data.reference or {}).get(name, data.bounds[name][0]) for name in categorical}

    def _columns(self) -> tuple[Column, ...]:
        data = self.data
        return tuple(
            Numeric(
                name=name,
                low=(low := float(bounds[0])),
                high=(high := float(bounds[1])),
                typical=(data.typical or {}).get(name, (low + high) / 2),
                spread=(data.spread or {}).get(name),
            )
            if is_range(bounds := data.bounds[name])
            else Categorical(
                name=name,
                categories=bounds,
                shares=(data.shares or {}).get(name),
                reference=(data.reference or {}).get(name),
            )
            for name in self.features
        )

    def encoding(self, target: TargetKind) -> Encoding:
        """The public encoding for a model that explains this kind of target."""
        data, columns = self.data, self._columns()
        described = None
        if target is not TargetKind.NONE:
            assert data.target is not None
            if target is TargetKind.CLASSES:
                assert data.classes is not None
                described = ClassTarget(name=data.target, classes=data.classes)
            else:
                assert data.target_bounds is not None
                low, high = data.target_bounds
                kind = RealTarget if target is TargetKind.REAL else CountTarget
                described = kind(name=data.target, low=low, high=high)
        unused = data.ignore if self.silos.column in (None, *self.features) else (*data.ignore, self.silos.column)
        return Encoding(
            columns=columns,
            target=described,
            person=data.unit,
            unused=tuple(str(name) for name in unused),
            outside=data.outside,
            intercept=data.intercept is not False,
            terms=parse_terms(data.terms or (), columns),
        )


def is_range(bounds: Sequence[object]) -> bool:
    """Two numbers are a range; anything else lists categories (two numeric categories are written as texts)."""
    return len(bounds) == 2 and all(_is_number(value) for value in bounds)


def _putter(section: object) -> Callable[[str, object], None]:
    return lambda key, value: object.__setattr__(section, key, value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number_in(key: str, value: object, low: float, high: float, expected: str) -> float:
    if not (_is_number(value) and math.isfinite(value) and low <= value <= high):  # type: ignore[operator, arg-type]
        raise InvalidInput(key, expected, value, "Correct the value.")
    return float(value)  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _texts(key: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)):
        raise InvalidInput(key, "a list of texts", values, "Write it in brackets.")
    texts = tuple(require_text(key, value, "List texts only.") for value in values)
    if len(set(texts)) < len(texts):
        raise InvalidInput(key, "each entry once", list(texts), "Remove the repetition.")
    return texts


def _files(files: object) -> dict[str, str] | None:
    if files is None:
        return None
    fix = "Give a table of silo = path, or a list of paths."
    if isinstance(files, (list, tuple)):
        paths = _texts("data.files", files)
        named = {path.replace("\\", "/").rsplit("/", 1)[-1].split(".", 1)[0]: path for path in paths}
        if len(named) < len(paths):
            raise InvalidInput("data.files", "files with different names", list(paths), "Give a table of silo = path.")
        files = named
    if not isinstance(files, Mapping) or not files:
        raise InvalidInput("data.files", "the table of each silo", files, fix)
    return {str(silo): require_text(f"data.files.{silo}", path, fix) for silo, path in files.items()}


def _range(key: str, given: object) -> tuple[float, float]:
    fix = "Write [low, high] with low < high."
    if not isinstance(given, (list, tuple)) or not is_range(given):
        raise InvalidInput(key, "a range [low, high]", given, fix)
    low, high = float(given[0]), float(given[1])
    # Narrower than this, float32 cannot tell its ends apart.
    if not (math.isfinite(high - low) and high - low > 1e-6 * max(abs(low), abs(high))):
        raise InvalidInput(key, "finite low < high, not closer than 1e-6 of their size", [low, high], fix)
    return low, high


def _categories(key: str, given: object) -> tuple[Category, ...]:
    fix = "List at least two different texts or numbers."
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise InvalidInput(key, "a list of at least two", given, fix)
    texts = all(isinstance(value, str) and value for value in given)
    numbers = all(_is_number(value) and math.isfinite(value) for value in given)
    if not (texts or numbers) or len(set(given)) < len(given):
        raise InvalidInput(key, "different texts, or different numbers", list(given), fix)
    # One spelling for 1 and 1.0, so that equal studies have equal hashes.
    return tuple(int(value) if numbers and value == int(value) else value for value in given)


def _typical(given: object, bounds: Mapping[str, Bounds]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise InvalidInput("data.typical", "a table of columns", given, "Write column = number.")
    for column, value in given.items():
        allowed = bounds.get(column, ())
        if not is_range(allowed):
            fix = "Only a numeric feature has a typical value; declare its range in data.bounds."
            raise InvalidInput(f"data.typical.{column}", "a column with a range", column, fix)
        low, high = float(allowed[0]), float(allowed[1])
        _number_in(f"data.typical.{column}", value, low, high, f"a number in [{low:g}, {high:g}]")
    return {str(column): float(value) for column, value in given.items()}


def _spread(given: object, bounds: Mapping[str, Bounds], typical: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise InvalidInput("data.spread", "a table of columns", given, "Write column = number.")
    for column, value in given.items():
        allowed = bounds.get(column, ())
        if not is_range(allowed):
            fix = "Only a numeric feature has a spread; declare its range in data.bounds."
            raise InvalidInput(f"data.spread.{column}", "a column with a range", column, fix)
        low, high = float(allowed[0]), float(allowed[1])
        middle = typical.get(column, (low + high) / 2)
        reach = max(high - middle, middle - low)
        # No value is farther than the reach, and float32 has no digits for a range of a million spreads.
        expected = f"a number in [{1e-6 * reach:g}, {reach:g}], the range seen from its typical value"
        _number_in(f"data.spread.{column}", value, 1e-6 * reach, reach, expected)
    return {str(column): float(value) for column, value in given.items()}


def _shares(given: object, bounds: Mapping[str, Bounds]) -> dict[str, tuple[float, ...]]:
    if not isinstance(given, Mapping):
        raise InvalidInput("data.shares", "a table of columns", given, "Write column = [a share for each category].")
    ordered = {}
    for column, values in given.items():
        key, categories = f"data.shares.{column}", bounds.get(column, ())
        if not categories or is_range(categories):
            fix = "Only a feature with categories has shares; list them in data.bounds."
            raise InvalidInput(key, "a column with categories", column, fix)
        names = [str(category) for category in categories]
        fix = "Give one share for each category of data.bounds."
        if isinstance(values, Mapping):
            if {str(name) for name in values} != set(names):
                raise InvalidInput(key, f"a share of each of {', '.join(names)}", sorted(map(str, values)), fix)
            by_name = {str(name): share for name, share in values.items()}
            values = [by_name[name] for name in names]
        if not isinstance(values, (list, tuple)) or len(values) != len(names):
            raise InvalidInput(key, f"{len(names)} shares", values, fix)
        expected = "shares in [1e-6, 1) that add up to 1, within .01"
        shares = tuple(_number_in(key, share, 1e-6, math.nextafter(1.0, 0.0), expected) for share in values)
        if not abs(math.fsum(shares) - 1.0) <= 0.01:
            raise InvalidInput(key, expected, math.fsum(shares), fix)
        ordered[str(column)] = shares
    return ordered


def _reference(given: object, bounds: Mapping[str, Bounds]) -> dict[str, Category]:
    if not isinstance(given, Mapping):
        raise InvalidInput("data.reference", "a table of columns", given, "Write column = category.")
    for column, category in given.items():
        key, categories = f"data.reference.{column}", bounds.get(column, ())
        if not categories or is_range(categories):
            fix = "Only a feature with categories has a reference; list them in data.bounds."
            raise InvalidInput(key, "a column with categories", column, fix)
        if isinstance(category, bool) or category not in categories:
            fix = "Choose one of the categories of data.bounds, written as there."
            raise InvalidInput(key, f"one of {', '.join(map(str, categories))}", category, fix)
    # As it is listed: 1 and 1.0 are the same category.
    return {str(column): next(c for c in bounds[column] if c == category) for column, category in given.items()}


def _bounds(key: str, given: object) -> Bounds:
    if isinstance(given, (list, tuple)) and is_range(given):
        return _range(key, given)
    return _categories(key, given)


def _test(test: object) -> float | str | None:
    if test is None or (isinstance(test, str) and test.strip()):
        return test
    fix = "Pass the share of the rows to hold out, or the path of a table."
    return require_number("data.test", test, above=0.0, at_most=math.nextafter(1.0, 0.0), fix=fix)
