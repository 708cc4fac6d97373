"""Where the public tables of the experiments are; nothing of them is in this repository."""

import os
from pathlib import Path

import pandas as pd


def folder() -> Path:
    """The folder of the tables: SILOBAYES_DATA, or `shared/data` beside the repository."""
    return Path(os.environ.get("SILOBAYES_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def path_of(name: str) -> Path:
    """The file `name` in that folder, or a message that says what to do."""
    path = folder() / name
    if not path.exists():
        raise SystemExit(f"Expected {name} in {folder()}. Set SILOBAYES_DATA to the folder of the experiments' tables.")
    return path


def table(name: str) -> pd.DataFrame:
    """A table of that folder."""
    return pd.read_csv(path_of(name))
