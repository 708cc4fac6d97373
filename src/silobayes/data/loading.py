"""From the tables a study names to silos: read, encode, hold out, deal; all of it before anything is spent.

Held-out rows are taken first and at random: from the one table, or from each silo's own. They are public: metrics on
them are printed without noise, which is why a study must declare `public = ["test"]`.

Guarantees:
    Same study, same seed, same silos.
    Held-out rows are in no silo.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from silobayes.core.errors import InvalidInput
from silobayes.data import splits
from silobayes.data.columns import Category
from silobayes.data.description import Description, SplitScheme
from silobayes.data.encoding import ClassTarget, Encoding, cells_of, codes_of
from silobayes.data.silo import Silo, concatenate
from silobayes.data.tables import read_table

TEST = "test"
# One stream per purpose, so that changing the share of test rows does not change how the rest is dealt.
_HOLD_OUT, _DEAL = 0, 1


def load(description: Description, encoding: Encoding, seed: int, base_dir: Path) -> tuple[list[Silo], Silo | None]:
    """The silos and the test rows of the tables that the study names, relative to `base_dir`."""
    data = description.data
    if data.files is not None:
        frames = {name: read_table(base_dir / path, f"data.files.{name}") for name, path in data.files.items()}
        return from_frames(description, encoding, seed, frames, base_dir)
    if data.source is None:
        fix = "Name a table, or hand the rows over in Python."
        raise InvalidInput("data.source", "a table, or data.files", "neither", fix)
    frame = read_table(base_dir / data.source, "data.source")
    table = _encode(encoding, frame, "data.source")
    test = _test_table(description, encoding, base_dir)
    if isinstance(data.test, float):
        train, held_out = splits.hold_out(_rng(seed, _HOLD_OUT), table.num_rows, share=data.test, persons=table.persons)
        test, table, frame = table.take(TEST, held_out), table.take("train", train), frame.iloc[train]
    parts = _deal(description, table, frame, _rng(seed, _DEAL))
    silos = [table.take(name, rows) for name, rows in zip(description.silo_names, parts, strict=True)]
    return silos, test


def from_frames(
    description: Description, encoding: Encoding, seed: int, frames: Mapping[str, pd.DataFrame], base_dir: Path
) -> tuple[list[Silo], Silo | None]:
    """The same from one frame per silo (silo name -> frame); each silo holds out its own share of test rows."""
    if not frames:
        raise InvalidInput("data.files", "at least one silo", "none", "Pass silo name -> frame.")
    silos = [_encode(encoding, frame, name) for name, frame in frames.items()]
    test = _test_table(description, encoding, base_dir)
    share = description.data.test
    if isinstance(share, float):
        held_out = []
        for k, silo in enumerate(silos):
            train, rows = splits.hold_out(_rng(seed, _HOLD_OUT, k), silo.num_rows, share=share, persons=silo.persons)
            held_out.append(silo.take(TEST, rows))
            silos[k] = silo.take(silo.name, train)
        test = concatenate(TEST, held_out)
    return silos, test


def _rng(seed: int, *stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def _encode(encoding: Encoding, frame: pd.DataFrame, name: str) -> Silo:
    x, y, persons = encoding.encode(frame, name)
    return Silo(name=name, x=x, y=y, persons=persons)


def _test_table(description: Description, encoding: Encoding, base_dir: Path) -> Silo | None:
    path = description.data.test
    return _encode(encoding, read_table(base_dir / path, "data.test"), TEST) if isinstance(path, str) else None


def _deal(description: Description, table: Silo, frame: pd.DataFrame, rng: np.random.Generator) -> splits.Parts:
    silos, count = description.silos, len(description.silo_names)
    match silos.scheme:
        case SplitScheme.EVEN:
            return splits.even(rng, table.num_rows, count=count, persons=table.persons)
        case SplitScheme.RHO_KAPPA:
            assert silos.rho is not None
            assert silos.kappa is not None
            return splits.rho_kappa(rng, table.y, count=count, rho=silos.rho, kappa=silos.kappa)
        case SplitScheme.LABEL_SKEW:
            assert silos.rho is not None
            return splits.label_skew(rng, table.y, count=count, rho=silos.rho)
        case SplitScheme.COLUMN:
            assert silos.column is not None
            codes = _silo_codes(frame, silos.column, description.data.bounds[silos.column])
            return splits.column(codes, count=count, persons=table.persons)


def _silo_codes(frame: pd.DataFrame, column: str, names: Sequence[Category]) -> np.ndarray:
    if column not in frame.columns:
        fix = "Correct the name in the study, or the table."
        raise InvalidInput("silos.column", f"column {column!r} in data.source", "a table without it", fix)
    codes = codes_of(cells_of(frame, column), names)
    if np.any(codes < 0):
        fix = "List all silos in its bounds."
        raise InvalidInput("silos.column", f"listed silos in column {column!r}", "another cell", fix)
    return codes


def check_classes(encoding: Encoding, silos: list[Silo]) -> None:
    """Refuse rows of a single class; a silo of a single class is fine.

    Only where nothing is private: whether a run starts would tell the class of one row to whoever knows all others.
    """
    if isinstance(encoding.target, ClassTarget) and len(np.unique(np.concatenate([silo.y for silo in silos]))) < 2:
        fix = "Check the target column; a single class has nothing to explain."
        raise InvalidInput("data.target", "rows of at least two classes", "rows of one class", fix)
