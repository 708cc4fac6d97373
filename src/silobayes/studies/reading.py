"""From the tables that a study names to its silos."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from silobayes.data import loading
from silobayes.data.encoding import Encoding
from silobayes.data.silo import Silo
from silobayes.studies.study import Mode, Study


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
