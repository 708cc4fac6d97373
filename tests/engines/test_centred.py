"""Regressions from centred scores as their user sees them: fitted, stopped, resumed, verified, refused and audited."""

import dataclasses
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.engines.fitting import build_model, read_inputs
from silobayes.engines.local import _prepare
from silobayes.inference.centred_sums import Centre, round_sum
from silobayes.plans.rules import Limits
from silobayes.plans.situation import Situation, Sizes
from silobayes.privacy.accounting import price
from silobayes.privacy.door import FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Ledger
from silobayes.privacy.relation import Relation
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.study import Study
from silobayes.testing import audit
from tests.engines.centred_cases import BY_NAME, COUNTS, SCORES
from tests.oracle.cases import KNOWN_NOISE, NOISE_SEED, TRUSTED, Case, covariance_of


class Stop(Exception):
    """The run was killed."""


def stop_after(step: int):
    def progress(now):
        if now.step == step:
            raise Stop

    return progress


def fit(case: Case, out, **options: Any):
    return silobayes.fit(case.study, case.silos, out=out, **({"noise_seed": NOISE_SEED} | options))


def charges(out) -> dict[str, int]:
    return {path.stem: len(Ledger.open(path).entries()) for path in sorted((out / "ledgers").glob("*.ledger"))}


SLOW = {"centred, negative binomial", "centred, linear", "centred, trusted", "centred, sharing, add_remove", "centred"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BY_NAME]
)
def test_every_run_ends_with_a_proper_posterior_and_is_verified(name, tmp_path):
    """Real noise; each silo pays for its rounds and no more than it may."""
    case = BY_NAME[name]
    posterior = fit(case, tmp_path / "run", noise_seed=None)
    covariance = covariance_of(posterior)
    assert np.isfinite(posterior.mean).all()
    assert np.linalg.eigvalsh(covariance)[0] > 0.0
    assert (np.sqrt(np.diag(covariance)) <= 1.0 + 1e-5).all()  # the prior's
    found = verify(read_run(tmp_path / "run"))
    assert [check for check in found.checks if not check.passed] == []
    assert found.to_json()["is_private"] is True
    assert all(silo.epsilon <= 8.0 for silo in found.prices)
    assert max(silo.epsilon for silo in found.prices) >= 7.9  # the budget is used
    trace = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    for silo, number in charges(tmp_path / "run").items():
        assert number == sum(
            silo in line["visited"] for line in trace
        )  # a round has a noise, and so a charge, of its own


@pytest.mark.parametrize(
    "name",
    ["centred, masks, sampled", pytest.param("centred, person", marks=pytest.mark.slow)],
)
def test_a_killed_run_of_centred_rounds_ends_where_an_uninterrupted_one_does(name, tmp_path):
    """Under fixed noise: after the first and after the third round; paid once."""
    case = BY_NAME[name]
    whole = fit(case, tmp_path / "whole")
    for step in (1, 3):
        out = tmp_path / f"stopped-{step}"
        with pytest.raises(Stop):
            fit(case, out, progress=stop_after(step))
        resumed = fit(case, out)
        np.testing.assert_array_equal(resumed.mean, whole.mean)
        np.testing.assert_array_equal(covariance_of(resumed), covariance_of(whole))
        assert (out / "trace.jsonl").read_text() == (tmp_path / "whole" / "trace.jsonl").read_text()
        assert charges(out) == charges(tmp_path / "whole")


def test_a_certificate_of_centred_rounds_that_was_tampered_with_fails(tmp_path):
    case, out = BY_NAME["centred, poisson"], tmp_path / "run"
    fit(case, out, noise_seed=None)
    path = out / "certificate.json"
    honest = json.loads(path.read_text())
    assert verify(read_run(out)).passed
    (first, *others) = honest["silos"]
    (event, *events) = first["events"]
    number = next(key for key, value in event.items() if isinstance(value, float))
    for tampered in (
        {**honest, "silos": [{**first, "epsilon": 0.5 * first["epsilon"]}, *others]},
        {**honest, "silos": [{**first, "events": [{**event, number: 2.0 * event[number]}, *events]}, *others]},
        {**honest, "silos": [{**first, "events": events}, *others]},
        {**honest, "silos": others},
        {**honest, "is_private": False},
    ):
        path.write_text(json.dumps(tampered))
        assert not verify(read_run(out)).passed
    path.write_text(json.dumps(honest))
    assert verify(read_run(out)).passed


def test_rounds_grow_and_together_keep_the_budget():
    """Each round has its own noise, the last the least; all of them price to the budget, those of one silo together."""
    for name in ("centred", "centred, sampled", "centred, masks, person"):
        case = BY_NAME[name]
        _, budget, plan = _prepare(read_inputs(case.study, case.silos, model=None))
        noise = [plan.silos[visit.part].query.noise_of(visit.silos)[0] for visit in plan.visits]
        assert (np.diff(noise) < 0.0).all() or case.protocol.get("schedule") == "sampled"
        prices = [price(events, relation=budget.relation, delta=budget.delta).epsilon for events in plan.total_events]
        assert 0.99 * budget.epsilon <= max(prices) <= budget.epsilon


BAD = {
    "negative binomial without concentration": (
        Case(name="x", protocol=SCORES, model={"kind": "negative_binomial_regression"}),
        "concentration",
    ),
    "sequential": (Case(name="x", protocol={**SCORES, "schedule": "sequential"}), "protocol.schedule"),
    "asynchronous": (Case(name="x", protocol={**SCORES, "schedule": "asynchronous"}), "protocol.schedule"),
    "sampled without a number": (Case(name="x", protocol={**SCORES, "schedule": "sampled"}), "clients_per_round"),
    "unit client": (Case(name="x", protocol=SCORES, unit="client", aggregation=TRUSTED), "privacy.unit"),
    "a network": (Case(name="x", protocol=SCORES, model={"kind": "mlp", "options": {"hidden": [2]}}), "protocol.kind"),
    "no rounds": (Case(name="x", protocol={**SCORES, "rounds": 0}), "protocol.rounds"),
    "too many rounds": (Case(name="x", protocol={**SCORES, "rounds": 10**9}), "protocol.rounds"),
    "typical_count of zero": (
        Case(name="x", protocol=SCORES, model={"kind": "poisson_regression", "options": {"typical_count": 0}}),
        "typical_count",
    ),
    "negative typical_count": (
        Case(name="x", protocol=SCORES, model={**COUNTS, "options": {"concentration": 2.0, "typical_count": -1.0}}),
        "typical_count",
    ),
    "typical_count of another model": (
        Case(name="x", protocol=SCORES, model={**KNOWN_NOISE, "options": {"noise_stddev": 1.0, "typical_count": 1.0}}),
        "typical_count",
    ),
    **{
        f"key {key}": (Case(name="x", protocol={**SCORES, key: value}), f"protocol.{key}")
        for key, value in {
            "damping": 0.5,
            "clip_norm": 1.0,
            "steps": 3,
            "step_size": 0.1,
            "sample_rate": 0.5,
            "shards": 3,
            "posterior": "full",
            "clipping": "ordinary",
            "first_share": 0.5,
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_centred_cannot_do_is_refused_by_name_before_anything_is_spent(name, tmp_path):
    case, key = BAD[name]
    with pytest.raises(InvalidInput) as refused:
        silobayes.fit(case.study, case.silos, out=tmp_path / "run")
    assert key in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_persons_without_a_bound_on_their_rows_are_refused(tmp_path):
    tables = BY_NAME["centred, person"].study.to_dict()
    tables["data"] = {key: value for key, value in tables["data"].items() if key != "rows_per_person"}
    with pytest.raises(InvalidInput, match="rows_per_person"):
        silobayes.fit(Study.from_dict(tables), BY_NAME["centred, person"].silos, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_coefficients_than_its_curvature_can_have_are_refused(tmp_path):
    names = [f"x{k}" for k in range(140)]
    study = Study.from_dict(
        {
            "study": {"name": "wide"},
            "data": {
                "target": "y",
                "classes": [0, 1, 2],
                "bounds": {name: [-1, 1] for name in names},
                "public": ["rows"],
            },
            "model": {"kind": "softmax_regression"},
            "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
            "protocol": SCORES,
        }
    )
    rows = pd.DataFrame(np.zeros((10, 140)), columns=names).assign(y=np.arange(10) % 3)
    with pytest.raises(InvalidInput, match="400 coefficients"):
        silobayes.fit(study, {"a": rows, "b": rows}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_study_without_moments_is_refused():
    """A plan whose limits say nothing of the features, as one that is made by hand may."""
    study = BY_NAME["centred"].study
    model = build_model(study, 3)
    sizes = (Sizes(rows=20, persons=None, has_persons=False, num_features=3),)
    situation = Situation.of(study, model, ("a", "b", "c"), sizes)
    for moments in (None, np.eye(2)):
        limits = Limits(x=1.0, y=1.0, bounds=None, moments=moments)
        with pytest.raises(InvalidInput, match=r"limits\.moments"):
            situation.method.plan(dataclasses.replace(situation, limits=limits))


RUNS, ALPHA = 200_000, 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("relation", list(Relation))
def test_an_audit_of_centred_rounds_stays_below_the_claim_and_close_to_it(relation):
    """A row and its opposite through a whole plan, each round's noise as the silo draws it: 200,000 runs a side.

    What an attacker who knows all other rows makes of all rounds is one number: the noisy sums along the change, each
    by what its noise lets it say. False alarms: 1e-6.
    """
    rounds = {**SCORES, "rounds": 3}
    case = dataclasses.replace(BY_NAME["centred"], epsilon=1.0, relation=relation.value, protocol=rounds)
    _, budget, plan = _prepare(read_inputs(case.study, case.silos, model=None))
    frame, draws, scores = plan.server.frame, FreshDraws(Entropy.not_private(7)), np.zeros((2, RUNS))
    centre = Centre(mean=np.zeros(3), covariance=np.zeros((3, 3)))  # where a label says as much as it may
    rows = [scale * np.array([[1.0, 0.5, 1.0]]) for scale in np.geomspace(0.1, 10, 40)]
    length = max(farthest(frame, centre, relation, row) for row in rows)
    for visit in plan.visits:
        query = plan.silos[visit.part].query
        layout, mechanism = query.layouts[0], query.mechanisms[0]
        assert length <= layout.sensitivity(relation)
        wide = dataclasses.replace(layout, total=np.zeros(2 * RUNS, dtype=np.int64))
        noise = mechanism.noise(draws.entropy, wide).astype(float).reshape(2, RUNS) * layout.grid
        scores += length / mechanism.noise_multiplier**2 * (noise + np.array([[length], [0.0]]))
    claimed = price(plan.total_events[0], relation=relation, delta=budget.delta).epsilon
    found = audit(scores[0], scores[1], delta=budget.delta, alpha=ALPHA)
    assert max(found.epsilon, found.gaussian_epsilon) <= claimed <= budget.epsilon
    assert found.gaussian_epsilon >= 0.7 * claimed


def farthest(frame, centre, relation, x) -> float:
    """How far the joint sum moves where a row has the other label, or is gone."""
    one, other = (
        round_sum(x[:rows], np.full(rows, label), centre, frame, relation, capacity=12)
        for rows, label in ((1, 0.0), (1, 1.0) if relation is Relation.SUBSTITUTE else (0, 0.0))
    )
    return float(np.linalg.norm((one.total - other.total) * one.grid))
