"""`silobayes.fit`: from a study to a posterior in one call."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from silobayes.core.errors import InvalidInput
from silobayes.data.encoding import Outside
from silobayes.data.silo import Silo
from silobayes.engines.local import Inputs, Progress, resume, run
from silobayes.models.base import AbstractModel
from silobayes.studies.models import build_model
from silobayes.study import Study, encode_silos, load_silos

Silos = Sequence[Silo] | Mapping[str, pd.DataFrame]
Place = str | os.PathLike[str]


def fit(
    study: Study | Place,
    silos: Silos | None = None,
    *,
    out: Place | None = None,
    model: AbstractModel | None = None,
    ledgers: Mapping[str, Path] | None = None,
    progress: Callable[[Progress], None] | None = None,
    noise_seed: int | None = None,
) -> Any:
    """Run a study on this machine; if `out` holds an unfinished run of the same study, go on with it.

    Args:
        study: A `Study` or the path of a study file.
        silos: Encoded silos, or silo name -> table; by default the tables that the study names, relative to its file.
        out: The run directory: ledgers, trace, posterior, certificate. A budget needs a place that stays, so the
            default is a new directory under `silobayes-runs` here.
        model: Instead of the one that the study describes (a NumPyro model, say).
        ledgers: Silo name -> ledger of the site's own; other silos get a new one in `out`.
        progress: Called after every step.
        noise_seed: For tests: noise that can be repeated protects nobody and is stamped NOT PRIVATE.
    """
    inputs = read_inputs(study, silos, model=model, ledgers=ledgers, noise_seed=noise_seed)
    directory = _new_place(inputs.study.study.name) if out is None else Path(out)
    start = resume if (directory / "run.json").exists() else run
    return start(inputs, directory, progress)


def _new_place(name: str) -> Path:
    words = "".join(letter if letter.isalnum() else "-" for letter in name)[:60]
    return Path("silobayes-runs") / f"{words}-{secrets.token_hex(4)}"


def read_inputs(
    study: Study | Place,
    silos: Silos | None,
    *,
    model: AbstractModel | None,
    ledgers: Mapping[str, Path] | None = None,
    noise_seed: int | None = None,
) -> Inputs:
    """Read and check everything; nothing is charged."""
    base_dir = Path() if isinstance(study, Study) else Path(study).parent
    study = study if isinstance(study, Study) else Study.from_toml(Path(study))
    if silos is not None:
        _check_kind(silos)
    if silos is None:
        listed, test, encoding = load_silos(study, base_dir)
    elif isinstance(silos, Mapping):
        listed, test, encoding = encode_silos(study, silos, base_dir)
    else:
        listed, test, encoding = list(silos), None, study.encoding
    listed = [_bounded_persons(study, silo) for silo in listed]
    features = encoding.feature_names
    if not listed or any(silo.num_features != len(features) for silo in listed):
        fix = "Encode all silos by study.encoding."
        raise InvalidInput("silos", f"silos of {len(features)} features", [s.num_features for s in listed], fix)
    model = build_model(study, len(features)) if model is None else model
    return Inputs(
        study=study,
        model=model,
        silos=listed,
        test=test,
        names=model.parameter_names(features),
        ledgers={} if ledgers is None else dict(ledgers),
        noise_seed=noise_seed,
    )


def _bounded_persons(study: Study, silo: Silo) -> Silo:
    """The silo with as many rows of each person as the study allows."""
    limit = study.data.rows_per_person
    if limit is None or silo.persons is None:
        return silo
    kept = silo.first_rows(limit)
    if kept.num_rows < silo.num_rows and study.data.outside is Outside.REFUSE:
        fix = 'Raise the bound, or set data.outside = "clip": then only the first rows of a person count.'
        raise InvalidInput("data.rows_per_person", f"at most {limit} rows of each person of {silo.name}", "more", fix)
    return kept


def _check_kind(silos: object) -> None:
    """Refuse what is neither encoded silos nor named tables, without quoting any of it."""
    if isinstance(silos, Mapping):
        is_right = all(isinstance(frame, pd.DataFrame) for frame in silos.values())
    else:
        is_right = isinstance(silos, (list, tuple)) and all(isinstance(silo, Silo) for silo in silos)
    if not is_right:
        expected = "a dict of silo name -> pandas.DataFrame, or a list of encoded silos"
        raise InvalidInput("silos", expected, type(silos).__name__, "E.g. {'site-a': frame_a, 'site-b': frame_b}.")
