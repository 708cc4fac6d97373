"""A finished run, written by hand: two silos with real ledgers, a posterior, a trace and the papers."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from silobayes.families import MeanFieldGaussian
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.posterior import Posterior
from silobayes.privacy.events import GaussianEvent, Sampling, Scheme, to_json
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import Study

NAMES = ("age", "lactate", "intercept")
EVENT = GaussianEvent(clip_norm=1.0, std=8.0, sampling=Sampling(scheme=Scheme.POISSON, rate=0.05), count=200)


def study(**privacy: Any) -> Study:
    budget = {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"}
    return Study.from_dict(
        {
            "study": {"name": "mortality <b>&"},
            "data": {
                "files": {"north": "north.csv", "south": "south.csv"},
                "target": "died",
                "classes": ["no", "yes"],
                "bounds": {"age": [0, 100], "lactate": [0, 20]},
                "public": ["rows"],
            },
            "model": {"kind": "logistic_regression"},
            "privacy": privacy or budget,
        }
    )


STUDY = study()


def posterior(mean: float = 0.0, stddev: float = 0.2, study: Study = STUDY) -> Posterior:
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=mean + jnp.array([0.5, -1.0, 2.0]), stddev=jnp.full(3, stddev))
    provenance = {"study_hash": study.hash}
    return Posterior(
        family=family, eta=eta, names=NAMES, model=LogisticRegression(num_features=3), provenance=provenance
    )


def write_run(directory: Path, *, event: GaussianEvent = EVENT, comparisons: bool = True) -> Path:
    meant = study()
    (directory / "ledgers").mkdir(parents=True)
    silos = []
    for name in meant.description.silo_names:
        budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
        account = Ledger.create(directory / "ledgers" / f"{name}.ledger", budget).account(
            meant.hash, epsilon=1.0, delta=1e-5
        )
        account.charge(event)
        spent = account.spent()
        silos.append(
            {"name": name, "ledger": f"ledgers/{name}.ledger", "epsilon": spent.epsilon, "events": [to_json(event)]}
        )
    certificate = {
        "study_hash": meant.hash,
        "account": meant.hash,
        "is_private": True,
        "stamp": None,
        "epsilon": max(silo["epsilon"] for silo in silos),
        "delta": 1e-5,
        "relation": "substitute",
        "unit": "row",
        "sampler": "poisson",
        "accountant": "pld",
        "silos": silos,
    }
    eta = posterior().eta
    steps = [
        {
            "step": k,
            "visited": ["north", "south"],
            "eta": {"linear": (k / 3 * eta.linear).tolist(), "quadratic": eta.quadratic.tolist()},
        }
        for k in range(1, 4)
    ]
    metrics = {"metrics": {"accuracy": 0.875}, "communications": {"rounds": 3}, "timing": {"total_s": 1.5}}
    posterior().save(directory)
    write_json(directory / "study.json", meant.to_dict())
    write_json(directory / "run.json", {"settings": {"privatise": "dp_optimisation"}, "releases": [0, 60, 120, 180]})
    write_json(directory / "certificate.json", certificate)
    write_json(directory / "metrics.json", metrics)
    (directory / "trace.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if comparisons:
        for label, shift in (("not_private", 0.01), ("north", 0.1), ("south", -0.1)):
            posterior(shift, 0.1).save(directory / "comparisons" / label)
    return directory


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def change_json(path: Path, **changes: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def edit_certificate(directory: Path, **changes: object) -> None:
    change_json(directory / "certificate.json", **changes)


def claim(directory: Path, epsilon: float) -> None:
    """Let the certificate claim `epsilon` for every silo."""
    path = directory / "certificate.json"
    silos = [{**silo, "epsilon": epsilon} for silo in json.loads(path.read_text())["silos"]]
    change_json(path, silos=silos, epsilon=epsilon)


def flip_bit(path: Path, offset: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(offset * len(raw))] ^= 1
    path.write_bytes(bytes(raw))
