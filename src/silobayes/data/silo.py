"""One silo's rows as arrays, checked once."""

from dataclasses import dataclass, field

import numpy as np

from silobayes.core.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, eq=False)
class Silo:
    """Encoded rows of one silo; printing one shows its name and nothing of its rows.

    Attributes:
        name: Public name.
        x: float32 (rows, features).
        y: (rows,); float32 for real and count targets, int32 in 0..K-1 for classes.
        persons: int (rows,) saying which rows belong to one person, or None when the unit of privacy is not a person.

    Guarantees:
        A silo has rows, and all its numbers are finite.
        The text of a silo holds no rows.
    """

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    persons: np.ndarray | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        x, y = np.asarray(self.x), np.asarray(self.y)
        where = f"silo {self.name}"
        if x.ndim != 2 or 0 in x.shape or x.dtype.kind not in "fiub":
            raise InvalidInput(
                f"{where}.x", "a matrix of numbers with at least one row", _shape(x), "Pass one row per unit, encoded."
            )
        if y.shape != x.shape[:1] or y.dtype.kind not in "fiub":
            raise InvalidInput(
                f"{where}.y", f"{x.shape[0]} numbers, one per row", _shape(y), "Pass labels 0..K-1, counts or reals."
            )
        x, y = x.astype(np.float32, copy=False), y.astype(np.float32 if y.dtype.kind == "f" else np.int32, copy=False)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise InvalidInput(where, "finite numbers", "NaN or infinity", "Clean the rows before they come here.")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)
        if self.persons is not None:
            persons = np.asarray(self.persons)
            if persons.shape != y.shape or persons.dtype.kind not in "iu":
                raise InvalidInput(
                    f"{where}.persons", f"{len(y)} integers", _shape(persons), "Pass the number of each row's person."
                )
            object.__setattr__(self, "persons", persons)

    @property
    def num_rows(self) -> int:
        """How many rows; public only if the study declares it."""
        return len(self.y)

    @property
    def num_persons(self) -> int:
        """How many persons; public only if the study declares it."""
        assert self.persons is not None, "persons of a study whose unit is a person"
        return len(np.unique(self.persons))

    @property
    def num_features(self) -> int:
        """Columns of `x`, the intercept included."""
        return self.x.shape[1]

    def take(self, name: str, rows: np.ndarray) -> "Silo":
        """The chosen rows as a silo of their own."""
        persons = None if self.persons is None else self.persons[rows]
        return Silo(name=name, x=self.x[rows], y=self.y[rows], persons=persons)

    def first_rows(self, rows_per_person: int) -> "Silo":
        """The same with at most so many rows of each person, the first ones.

        Guarantees:
            Which rows of a person stay depends on that person's rows only.
        """
        assert self.persons is not None, "persons of a study whose unit is a person"
        _, numbers = places_of_rows(self.persons)
        return self.take(self.name, np.flatnonzero(numbers < rows_per_person))


def places_of_rows(persons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row the place of its person, by first appearance, and its number among that person's rows.

    Whoever takes somebody's first row takes their place, and all others keep theirs: ranks of ids would move them.

    Guarantees:
        Places do not depend on what ids are.
    """
    _, first, codes, counts = np.unique(persons, return_index=True, return_inverse=True, return_counts=True)
    by_appearance = np.argsort(first)
    place_of_code = np.empty_like(by_appearance)
    place_of_code[by_appearance] = np.arange(len(first))
    places = place_of_code[codes]
    ends = np.cumsum(counts[by_appearance])
    order = np.argsort(places, kind="stable")
    numbers = np.empty_like(places)
    numbers[order] = np.arange(len(persons)) - (ends - counts[by_appearance])[places[order]]
    return places, numbers


def concatenate(name: str, silos: "list[Silo]") -> Silo:
    """All rows in one silo; persons are renumbered, so that equal numbers of two silos stay two persons."""
    persons, first = [], 0
    for silo in silos:
        if silo.persons is not None:
            known, codes = np.unique(silo.persons, return_inverse=True)
            persons.append(codes + first)
            first += len(known)
    return Silo(
        name=name,
        x=np.concatenate([silo.x for silo in silos]),
        y=np.concatenate([silo.y for silo in silos]),
        persons=np.concatenate(persons) if persons else None,
    )


def _shape(array: np.ndarray) -> str:
    """What an error may say of an array: never a number in it."""
    return f"{array.dtype} of shape {array.shape}"
