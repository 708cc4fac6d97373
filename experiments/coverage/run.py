"""`python -m experiments.coverage.run [--part K/N]`: cells that results.jsonl does not have yet.

Seeds follow from the name of a cell and the number of a repetition; none was looked at when constants were chosen.
"""

import argparse
import hashlib
import json
import time
import warnings
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.coverage.designs import CELLS, Cell, silos_of, study_of, truth_of
from silobayes.engines.rehearsal import Rehearsal
from silobayes.inference.centred_sums import Centre, curvatures
from silobayes.protocols.centred import CentredServer
from silobayes.studies.models import build_model

RESULTS = Path(__file__).parent / "results.jsonl"
LEVELS = (0.5, 0.8, 0.95)


def measure(cell: Cell) -> dict[str, object]:
    """Coverage of each level, widths beside those without privacy and beside the information bound, and warnings."""
    study = study_of(cell)
    model = build_model(study, len(study.encoding.feature_names))
    rows = (cell.rows // cell.silos,) * cell.silos
    persons = None if cell.persons is None else (cell.persons // cell.silos,) * cell.silos
    rehearsal = Rehearsal.of(study, model, rows, persons)
    covered, beside_open, beside_bound, errors, priors, warned = [], [], [], [], [], []
    started = time.process_time()
    for repetition in range(cell.repetitions):
        digest = hashlib.sha256(f"coverage/{cell.name}/{repetition}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        truth = truth_of(cell, model, rng)
        silos = silos_of(cell, study.encoding, model, truth, rng)
        posterior = rehearsal.run(silos, f"{cell.name}/{repetition}")
        z = np.abs(posterior.mean - truth) / posterior.stddev
        covered.append([float(np.mean(z <= stats.norm.ppf(0.5 + level / 2))) for level in LEVELS])
        errors.append(float(np.sqrt(np.mean(z**2))))
        warned.append(bool(posterior.warnings))
        if posterior.prior_share is not None:
            priors.append(float(np.mean(posterior.prior_share > 0.5)))
        exact = rehearsal.without_privacy(silos)
        if exact is not None:
            beside_open.append(float(np.median(posterior.stddev / exact.stddev)))
        if isinstance(rehearsal.plan.server, CentredServer) and cell.persons is None:
            beside_bound.append(float(np.median(posterior.stddev / _bound(rehearsal, silos, truth))))
    levels = np.array(covered)
    return {
        "cell": cell.name,
        "repetitions": cell.repetitions,
        "coverage": levels.mean(axis=0).tolist(),
        "error": (levels.std(axis=0) / np.sqrt(len(levels))).tolist(),
        "z": float(np.sqrt(np.mean(np.square(errors)))),
        "beside_open": float(np.median(beside_open)) if beside_open else None,
        "beside_bound": float(np.median(beside_bound)) if beside_bound else None,
        "warned": float(np.mean(warned)),
        "mostly_prior": float(np.mean(priors)) if priors else None,
        "cpu_s": (time.process_time() - started) / cell.repetitions,
    }


def _bound(rehearsal: Rehearsal, silos: list, truth: np.ndarray) -> np.ndarray:
    """Standard deviations if all of the budget had been spent on the score, once, at the truth."""
    plan, frame = rehearsal.plan, rehearsal.plan.server.frame  # type: ignore[attr-defined]
    everybody = range(len(silos))
    precision = sum(role.query.noise_of(everybody)[0] ** -2.0 for role in plan.silos)
    noise = frame.shares["score"] / precision
    x = np.concatenate([silo.x for silo in silos]).astype(np.float64)
    centre = Centre(mean=truth / frame.units, covariance=np.zeros((frame.dim, frame.dim)))
    _, weighted, rows = curvatures(x, centre, frame)
    gain = np.linalg.solve(rows + noise * np.eye(frame.dim), weighted)
    return frame.units * np.sqrt(np.diag(np.linalg.inv(weighted @ gain + np.diag(frame.prior_precision))))


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="which cells: K/N for each N-th, from K on")
    part, parts = map(int, parser.parse_args().part.split("/"))
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    for name in list(CELLS)[part::parts]:
        known = {json.loads(line)["cell"] for line in RESULTS.read_text().splitlines()} if RESULTS.exists() else set()
        if name not in known:
            line = json.dumps(measure(CELLS[name]))
            with RESULTS.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
