"""What the posterior of a run says of new rows, from the run directory alone: its study encodes them.

Guarantees:
    Rows are encoded as those of the run were, and refused for the same reasons.
    Probabilities of a row add up to one.
    The interval is that of the row's mean (of each probability), not of its target.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from silobayes.core.errors import InvalidInput
from silobayes.data.tables import read_table
from silobayes.posteriors import Posterior
from silobayes.report.run_files import RunFiles
from silobayes.study import Study

SILO = "new rows"


def predict(run: RunFiles, posterior: Posterior, path: Path, level: float) -> pd.DataFrame:
    """For each row of the table at `path`: its mean, or its class and the probability of each; with intervals."""
    study = Study.from_dict(run.study)
    model = posterior.model
    if model is None or model.target == "none":
        got = study.model.kind.value
        fix = "In Python: Posterior.load(DIR, model=...).predict(x)." if model is None else "It explains no target."
        raise InvalidInput("model", "a model of the catalogue that explains a target", got, fix)
    if not path.is_file():
        raise InvalidInput("--at", "a file", str(path), "Pass a table with the columns of data.features.")
    x = study.encoding.encode_features(read_table(path, "--at"))
    lower, upper = posterior.predict_interval(x, level)
    if model.target not in ("binary", "classes"):
        return pd.DataFrame({"mean": posterior.predict(x), "lower": lower, "upper": upper}).astype(float)
    probabilities, classes = posterior.predict_proba(x), study.data.classes
    assert classes is not None, "a model of classes has classes"
    columns: dict[str, np.ndarray] = {"class": np.array([str(name) for name in classes])[probabilities.argmax(axis=1)]}
    for k, name in enumerate(classes):
        columns[f"probability of {name}"] = probabilities[:, k].astype(float)
        columns[f"lower of {name}"], columns[f"upper of {name}"] = lower[:, k].astype(float), upper[:, k].astype(float)
    return pd.DataFrame(columns)
