"""Columns of a table, and products of them, as features: what these may hold and typically hold, by declarations alone.

Numeric column with range [low, high] -> its distance from a public typical value (by default the middle of the range),
in units of a public spread if there is one, otherwise of the farther end of the range, which puts it in [-1, 1].

Column with listed categories -> a feature for each, 0 or 1, minus the public share of the category if there is one.
Beside an intercept one of them would say nothing new (they add up to one), so one category may be the reference, which
has no feature: coefficients of the others are differences from it.

Term -> the product of such features: numbers to a power, categories each by itself.

Guarantees:
    Moments are those of numbers that are normal and of categories with the declared shares.
    A term's features are the products of its columns' features.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Category = str | int | float
# Of a number whose spread nobody declared, in units of the farther end of its range.
_UNKNOWN_STDDEV = 1.0 / 3.0


@dataclass(frozen=True, kw_only=True)
class Numeric:
    """A column of numbers with its public range, the typical value, which becomes zero, and the spread around it.

    One spread from the typical value becomes 1; without a spread, the farther end of the range becomes 1 or -1.
    """

    name: str
    low: float
    high: float
    typical: float
    spread: float | None = None

    @property
    def reach(self) -> float:
        """From the typical value to the farther end of the range."""
        return max(self.high - self.typical, self.typical - self.low)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One feature of the column's name."""
        return (self.name,)

    @property
    def feature_units(self) -> tuple[float, ...]:
        """How far one unit of the column (a year, a mmHg) moves the feature."""
        return (1.0 / (self.reach if self.spread is None else self.spread),)

    @property
    def extremes(self) -> np.ndarray:
        """The feature at both ends of the range."""
        # Rounding is monotone, so no value between the ends is rounded beyond them.
        return self.encode(np.array([self.low, self.high]))

    def typical_square(self, power: int) -> float:
        """The mean square of that power of the feature if the spread is as declared; without one, its bound."""
        return 1.0 if self.spread is None else _normal_moment(2 * power, 1.0)

    def moments(self, highest: int) -> np.ndarray:
        """E[f^j f^k] for powers from 0 to `highest` of a feature f that is normal around zero."""
        stddev = _UNKNOWN_STDDEV if self.spread is None else 1.0
        powers = range(highest + 1)
        return np.array([[_normal_moment(j + k, stddev) for k in powers] for j in powers])

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Values within the range as a matrix of one feature."""
        scaled = (values - self.typical) / (self.reach if self.spread is None else self.spread)
        return scaled.astype(np.float32)[:, None]


@dataclass(frozen=True, kw_only=True)
class Categorical:
    """A column of categories, listed as texts or as numbers, perhaps with the public share of each.

    `reference` is the category that has no feature; None where each has one.
    """

    name: str
    categories: tuple[Category, ...]
    shares: tuple[float, ...] | None = None
    reference: Category | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One feature per category but the reference, in the order listed."""
        return tuple(f"{self.name}={self.categories[k]}" for k in self._kept)

    @property
    def feature_units(self) -> tuple[float, ...]:
        """A category is there or not."""
        return (1.0,) * len(self._kept)

    @property
    def extremes(self) -> np.ndarray:
        """The features of each category."""
        return self.encode(np.arange(len(self.categories)))

    def typical_square(self, power: int) -> float:
        """The mean squared norm of the features if the shares are as declared; without shares, its bound."""
        return 1.0 if self.shares is None else sum(self.shares[k] * (1.0 - self.shares[k]) for k in self._kept)

    def moments(self, highest: int) -> np.ndarray:
        """E[f_j f_k] of the features, f_0 being one; without shares all categories are equally frequent."""
        size = len(self.categories)
        shares = np.full(size, 1.0 / size) if self.shares is None else np.array(self.shares) / math.fsum(self.shares)
        rows = np.column_stack([np.ones(size), self._features()])
        return rows.T @ (shares[:, None] * rows)

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """Positions in the list, a feature for each but the reference; with shares, minus them, so of mean 0."""
        return self._features().astype(np.float32)[codes]

    def _features(self) -> np.ndarray:
        hot = np.eye(len(self.categories))
        if self.shares is not None:
            hot = hot - np.array(self.shares)
        return hot[:, self._kept]

    @property
    def _kept(self) -> list[int]:
        return [k for k, category in enumerate(self.categories) if category != self.reference]


Column = Numeric | Categorical


@dataclass(frozen=True, kw_only=True)
class Term:
    """A product of different columns, each to a power: `age`, `age^2`, `age:ward`.

    Categories have the power 1 and stand for each of their features; those of a later factor vary faster.
    """

    factors: tuple[tuple[Column, int], ...]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The factors' names, joined: `age^2:ward=b`."""
        names = [
            [name if power == 1 else f"{name}^{power}" for name in column.feature_names]
            for column, power in self.factors
        ]
        return tuple(":".join(parts) for parts in itertools.product(*names))

    @property
    def feature_units(self) -> tuple[float, ...]:
        """How far one unit of each column (of a power: one of its square, its cube) moves the features."""
        units = [[unit**power for unit in column.feature_units] for column, power in self.factors]
        return tuple(math.prod(parts) for parts in itertools.product(*units))

    @property
    def is_numeric(self) -> bool:
        """Whether it is one number, without categories."""
        return all(isinstance(column, Numeric) for column, _ in self.factors)

    @property
    def num_features(self) -> int:
        """How many features it has."""
        return math.prod(len(column.feature_names) for column, _ in self.factors)

    @property
    def extremes(self) -> np.ndarray:
        """The features at all ends of the ranges and for all categories: no row's features are larger."""
        parts = {column.name: column.extremes for column, _ in self.factors}
        rows = np.meshgrid(*(np.arange(len(part)) for part in parts.values()), indexing="ij")
        chosen = {name: part[at.ravel()] for (name, part), at in zip(parts.items(), rows, strict=True)}
        return self.encode(chosen)

    @property
    def max_square(self) -> float:
        """The largest squared norm of the features."""
        return float((self.extremes.astype(float) ** 2).sum(axis=1).max())

    @property
    def typical_square(self) -> float:
        """The mean squared norm of the features if columns are independent and as declared, at most the largest."""
        return min(math.prod(column.typical_square(power) for column, power in self.factors), self.max_square)

    def encode(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The products, from the encoded columns by name."""
        (first, power), *others = self.factors
        product = parts[first.name].astype(float) ** power
        for column, power in others:
            following = parts[column.name].astype(float) ** power
            product = (product[:, :, None] * following[:, None, :]).reshape(len(product), -1)
        return product.astype(np.float32)

    def places(self, columns: Sequence[Column]) -> np.ndarray:
        """(features, columns): which function of each column a feature is a product of, as `moments` counts them."""
        at = {column.name: k for k, column in enumerate(columns)}
        functions = [
            [power] if isinstance(column, Numeric) else range(1, len(column.feature_names) + 1)
            for column, power in self.factors
        ]
        places = np.zeros((self.num_features, len(columns)), int)
        for place, chosen in zip(places, itertools.product(*functions), strict=True):
            for (column, _), function in zip(self.factors, chosen, strict=True):
                place[at[column.name]] = function
        return places


def independent_moments(columns: Sequence[Column], places: np.ndarray) -> np.ndarray:
    """E[f f'] of features that are products of functions of independent columns, as `Term.places` has them."""
    moments = np.ones((len(places), len(places)))
    for column, functions in zip(columns, places.T, strict=True):
        moments *= column.moments(int(functions.max(initial=0)))[np.ix_(functions, functions)]
    return moments


def _normal_moment(power: int, stddev: float) -> float:
    """E[z^power] of a normal z around zero."""
    return 0.0 if power % 2 else stddev**power * math.prod(range(1, power, 2))
