"""What every method ends with (DESIGN 3): named, with its provenance, without a row.

Draws, summaries and predictions are those of the kind of posterior: a Gaussian over parameters, topics, chains.
"""

import abc
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pandas as pd


class AbstractPosterior(abc.ABC):
    """An answer that can be summarised, kept and traced back.

    Attributes:
        names: Of what is summarised.
        provenance: JSON-able facts about where it came from: study hash, certificate.
    """

    names: tuple[str, ...]
    provenance: Mapping[str, Any]

    @abc.abstractmethod
    def summary(self, level: float = 0.95) -> pd.DataFrame:
        """Mean, sd and the central interval of probability `level`, a row per name."""

    @abc.abstractmethod
    def with_provenance(self, provenance: Mapping[str, Any]) -> Self:
        """The same with these facts about where it came from."""

    @abc.abstractmethod
    def with_units(self, feature_units: Sequence[float]) -> Self:
        """The same, knowing how far one unit of a column moves each feature; where that means nothing, the same."""

    @abc.abstractmethod
    def to_arviz(self) -> Any:
        """Draws for ArviZ."""

    @abc.abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all."""
