"""A finished run, written by hand: two silos with real ledgers, a posterior, a trace and the papers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from silobayes import __version__
from silobayes.families import MeanFieldGaussian
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.posteriors import Posterior
from silobayes.privacy.events import GaussianEvent, Sampling, Scheme, to_json
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit
from silobayes.runs import claims
from silobayes.runs.directory import digests
from silobayes.study import Study

NAMES = ("age", "lactate", "intercept")
RUN_ID = "0123456789abcdef"
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
            "protocol": {"rounds": 3, "steps": 60},
        }
    )


STUDY = study()


def account_of(meant: Study = STUDY, *, is_private: bool = True) -> str:
    return claims.account_name(meant.study.name, meant.hash, RUN_ID, is_private=is_private)


def posterior(
    mean: float = 0.0, stddev: float = 0.2, study: Study = STUDY, provenance: Mapping[str, Any] | None = None
) -> Posterior:
    family = MeanFieldGaussian(event_shape=(3,))
    eta = family.from_standard(mean=mean + jnp.array([0.5, -1.0, 2.0]), stddev=jnp.full(3, stddev))
    return Posterior(
        family=family,
        eta=eta,
        names=NAMES,
        model=LogisticRegression(num_features=3),
        provenance={"study_hash": study.hash} if provenance is None else provenance,
    )


def write_run(
    directory: Path,
    *,
    event: GaussianEvent = EVENT,
    comparisons: bool = True,
    fixed_noise: bool = False,
    account: str | None = None,
) -> Path:
    meant = study()
    name_of_account = account_of(is_private=not fixed_noise) if account is None else account
    (directory / "ledgers").mkdir(parents=True)
    silos = []
    for name in meant.description.silo_names:
        budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
        own = Ledger.create(directory / "ledgers" / f"{name}.ledger", budget).account(
            name_of_account, epsilon=1.0, delta=1e-5
        )
        own.charge(event)
        spent = own.spent()
        silos.append(
            {"name": name, "ledger": f"ledgers/{name}.ledger", "epsilon": spent.epsilon, "events": [to_json(event)]}
        )
    certificate = {
        "study": meant.study.name,
        "study_hash": meant.hash,
        "is_private": not fixed_noise,
        "stamp": claims.FIXED_NOISE if fixed_noise else None,
        "versions": {"silobayes": __version__, "started_with": __version__},
        "mode": "dp",
        "account": name_of_account,
        "epsilon": max(silo["epsilon"] for silo in silos),
        "delta": 1e-5,
        "relation": "substitute",
        "unit": "row",
        "method": "dp_optimisation",
        "intervals": "no",
        "sampler": "poisson",
        "noise": "float32 Gaussian inside a compiled loop",
        "aggregation": {"kind": "none", "colluding": 0},
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
    facts = {
        "run_id": RUN_ID,
        "silos": [{"name": silo["name"], "rows": 500} for silo in silos],
        "settings": {"privatise": "dp_optimisation", "rounds": 3, "steps": 60},
        "releases": [0, 60, 120, 180],
        "version": __version__,
        "ledgers": {silo["name"]: silo["ledger"] for silo in silos},
        "noise": claims.FROM_SEED if fixed_noise else claims.FROM_SYSTEM,
        "study_hash": meant.hash,
        "charged": True,
    }
    posterior().save(directory)
    write_json(directory / "study.json", meant.to_dict())
    write_json(directory / "run.json", facts)
    write_json(directory / "certificate.json", certificate)
    write_json(directory / "metrics.json", metrics)
    (directory / "trace.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    seal(directory)
    if comparisons:
        for label, shift in (("not_private", 0.01), ("north", 0.1), ("south", -0.1)):
            posterior(shift, 0.1).save(directory / "comparisons" / label)
    return directory


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def change_json(path: Path, **changes: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


def seal(directory: Path) -> None:
    """Let everything that is in no ledger agree with the certificate, as the engine does, or a careful forger."""
    path, posterior_path = directory / "certificate.json", directory / "posterior.json"
    certificate = {key: value for key, value in json.loads(path.read_text()).items() if key != "files"}
    change_json(posterior_path, provenance=certificate)
    write_json(path, {**certificate, "files": digests(directory)})


def edit_certificate(directory: Path, **changes: object) -> None:
    change_json(directory / "certificate.json", **changes)
    seal(directory)


def edit_facts(directory: Path, **changes: object) -> None:
    change_json(directory / "run.json", **changes)
    seal(directory)


def claim(directory: Path, epsilon: float) -> None:
    """Let the certificate claim `epsilon` for every silo."""
    path = directory / "certificate.json"
    silos = [{**silo, "epsilon": epsilon} for silo in json.loads(path.read_text())["silos"]]
    edit_certificate(directory, silos=silos, epsilon=epsilon)


def flip_bit(path: Path, offset: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(offset * len(raw))] ^= 1
    path.write_bytes(bytes(raw))
