"""What the engine writes is what `verify` derives: honest runs of every method, sum, unit and schedule pass."""

import json

import numpy as np
import pytest

import silobayes
from silobayes.data.silo import Silo
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.study import Study
from tests.engines.cases import make_silos, make_study

SUM = {"aggregation": {"kind": "trusted", "colluding": 1}}
FEW = {"rounds": 2, "steps": 3}
CLASSIFICATIONS = {
    "dp_optimisation": {"privatise": "dp_optimisation", **FEW},
    "steps by the rule": {"rounds": 1, "sample_rate": 0.3},
    "batches of a fixed size": {"privatise": "dp_optimisation", "sampler": "without_replacement", **FEW},
    "streaming": {"kind": "streaming_vb", "steps": 3},
    "bcm": {"kind": "bcm", "steps": 3},
    "global_vi": {"kind": "global_vi", **FEW},
    "global_vi, summed": {"kind": "global_vi", **FEW, **SUM},
    "private messages, summed": {"privatise": "dp_optimisation", **FEW, **SUM},
    "local_averaging": {"privatise": "local_averaging", "shards": 3, **FEW},
    "parameter_perturbation of silos": {"privatise": "parameter_perturbation", "unit": "client", **FEW, **SUM},
    "virtual_clients, masks": {
        "privatise": "virtual_clients",
        "shards": 3,
        "aggregation": {"kind": "pairwise_masks", "colluding": 1},
        **FEW,
    },
    "quantile": {"privatise": "virtual_clients", "shards": 40, "clip_norm": "quantile", "epsilon": 20.0, **FEW},
    "sampled": {"privatise": "dp_optimisation", "schedule": "sampled", "clients_per_round": 1, **FEW},
    "sequential": {"privatise": "virtual_clients", "shards": 3, "schedule": "sequential", **FEW},
}
REGRESSIONS = {
    "sufficient_statistics": {"privatise": "sufficient_statistics"},
    "sufficient_statistics, summed": {"privatise": "sufficient_statistics", "aggregation": SUM["aggregation"]},
    "hybrid": {"privatise": "hybrid", **FEW},
    "linreg": {"kind": "linreg"},
    "linreg, summed": {"kind": "linreg", "aggregation": SUM["aggregation"]},
    "input_perturbation": {"kind": "linreg", "privatise": "input_perturbation"},
}


def regression(aggregation=None, **protocol) -> tuple[Study, list[Silo]]:
    rng = np.random.default_rng(0)
    names = [f"x{k}" for k in range(3)]
    study = Study.from_dict(
        {
            "study": {"name": "small"},
            "data": {
                "target": "y",
                "target_bounds": [-1.0, 1.0],
                "bounds": {name: [-1.0, 1.0] for name in names},
                "public": ["rows"],
            },
            "model": {"kind": "linear_regression", "options": {"noise_stddev": 0.5}},
            "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
            "protocol": protocol,
            "aggregation": aggregation or {},
        }
    )
    silos = [
        Silo(
            name=f"silo-{k}",
            x=np.column_stack([rng.uniform(-0.5, 0.5, (60, 3)), np.ones(60)]).astype(np.float32),
            y=rng.uniform(-1, 1, 60).astype(np.float32),
        )
        for k in range(4)
    ]
    return study, silos


def case(name: str) -> tuple[Study, list[Silo]]:
    if name in REGRESSIONS:
        return regression(**REGRESSIONS[name])
    return make_study(**CLASSIFICATIONS[name]), make_silos((60, 70, 80, 90))


# Their events are of the kinds of others here.
SLOW = {
    "batches of a fixed size",
    "streaming",
    "bcm",
    "global_vi",
    "local_averaging",
    "virtual_clients, masks",
    "sequential",
    "sufficient_statistics",
    "sufficient_statistics, summed",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in [*CLASSIFICATIONS, *REGRESSIONS]],
)
def test_an_honest_run_of_every_method_passes(name, tmp_path):
    study, silos = case(name)
    silobayes.fit(study, silos, out=tmp_path / "run")
    found = verify(read_run(tmp_path / "run"))
    assert [check for check in found.checks if not check.passed] == []
    assert found.to_json()["is_private"] is True
    for silo in found.prices:
        (releases,) = [check for check in found.checks if check.name == f"{silo.silo}: releases"]
        released, _, paid, _ = releases.detail.split()
        assert released == paid  # derived from the study and from the ledger


def test_a_run_with_fixed_noise_cannot_be_relabelled(tmp_path):
    study, silos = case("dp_optimisation")
    silobayes.fit(study, silos, out=tmp_path / "run", noise_seed=1)
    found = verify(read_run(tmp_path / "run"))
    assert found.passed
    assert found.to_json()["is_private"] is False
    path = tmp_path / "run" / "certificate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_private": True, "stamp": None}))
    found = verify(read_run(tmp_path / "run"))
    assert {"is private", "posterior"} <= {check.name for check in found.checks if not check.passed}
    assert found.to_json()["is_private"] is False
