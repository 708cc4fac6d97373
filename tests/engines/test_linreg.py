"""Linear regression with projection through the engine: the gate, prices, closed forms, all sums, studies, refusals."""

import dataclasses
import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.loop import make_visit
from silobayes.engines.parties import LocalParties
from silobayes.inference.projection import Bounds
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.plans.rules import Limits, PublicFacts, settings_of
from silobayes.privacy.accounting import price
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.linreg import ProjectionServer
from silobayes.study import AggregationKind, AggregationSection, PosteriorKind, Study
from silobayes.testing import FreeAccount, PrivacyViolation, check_method, neighbours
from tests.engines.harness import Privatise, ProtocolKind, Run, Settings, plan_for

DIM, MAX_ROWS = 3, 24
MODEL = LinearRegression(num_features=DIM, noise_stddev=0.3, prior_stddev=2.0)
BOUNDS = Bounds(features=(1.5, 1.0, 1.0), target=2.0, projected=(True, True, False), others_square=1.0)
PROJECTED = Settings(
    kind=ProtocolKind.LINREG,
    privatise=Privatise.SUFFICIENT_STATISTICS,
    rounds=2,
    damping=1.0,
    steps=1,
    step_size=0.1,
    posterior=PosteriorKind.FULL,
    first_share=0.3,
    bounds=BOUNDS,
)
PLAIN = dataclasses.replace(PROJECTED, rounds=1, projection=False)
INPUT = dataclasses.replace(PLAIN, privatise=Privatise.INPUT_PERTURBATION)


def over(kind: AggregationKind, settings: Settings = PROJECTED) -> Settings:
    return dataclasses.replace(settings, aggregation=AggregationSection(kind=kind))


SETTINGS = {
    "projection": PROJECTED,
    "no projection": PLAIN,
    "input_perturbation": INPUT,
    "projection, mean field": dataclasses.replace(PROJECTED, posterior=PosteriorKind.MEAN_FIELD),
    "projection, trusted": over(AggregationKind.TRUSTED),
    "projection, secret_sharing": over(AggregationKind.SECRET_SHARING),
    "projection, pairwise_masks": over(AggregationKind.PAIRWISE_MASKS),
    "no projection, secret_sharing": over(AggregationKind.SECRET_SHARING, PLAIN),
}


def budget_of(relation: Relation = Relation.SUBSTITUTE, epsilon: float = 5.0) -> Budget:
    return Budget(epsilon=epsilon, delta=1e-5, relation=relation, unit=Unit.ROW)


def rows_of(rng, num_rows: int, size: float = 1.0):
    x = size * rng.normal(size=(num_rows, DIM))
    x[:, 2] = 1.0
    return {"x": x, "y": x @ np.array([0.6, -0.4, 0.2]) + 0.3 * rng.normal(size=num_rows)}


def silo_of(rows, name: str = "a") -> SimpleNamespace:
    """Hostile rows, which a `Silo` would refuse, must be harmless here too."""
    return SimpleNamespace(name=name, x=rows["x"], y=rows["y"], persons=None, num_rows=len(rows["y"]), num_features=DIM)


def doors_of(count: int, seed: int = 0, relation: Relation = Relation.SUBSTITUTE) -> list[Door]:
    return [
        Door(FreeAccount(relation, Unit.ROW), FreshDraws(Entropy.not_private(seed * 100 + m))) for m in range(count)
    ]


@cache
def others():
    return rows_of(np.random.default_rng(9), 20)


@cache
def finished(name: str) -> Run:
    """A run over three silos with the same noise for all kinds of sums."""
    silos, settings = [silo_of(others())] * 3, SETTINGS[name]
    # Rows that publish themselves are counted by everybody; of others a bound may be all that is public.
    max_rows = None if settings.privatise == Privatise.INPUT_PERTURBATION else [MAX_ROWS] * 3
    return Run(MODEL, silos, settings, budget_of(), doors=doors_of(3, seed=5), max_rows=max_rows).finish()


def make_rows(rng):
    return rows_of(rng, MAX_ROWS - int(rng.integers(4)), size=10.0 ** rng.uniform(-1, 1))


def test_thresholds_from_rows_are_caught():
    """Standard deviations that go around the door change the box, and with it everything."""
    plan = finished("projection").plan

    def method(rows, door):
        bounds = dataclasses.replace(BOUNDS, target=float(np.nanstd(np.clip(rows["y"], -9, 9)) + 0.1))
        silos: tuple[Any, ...] = plan.silos
        server: Any = dataclasses.replace(plan.server, bounds=bounds)
        roles = tuple(dataclasses.replace(silo, bounds=bounds) for silo in silos)
        wrong = dataclasses.replace(plan, silos=roles, server=server)
        tables: list[Any] = [silo_of(rows), silo_of(others()), silo_of(others())]
        parties = LocalParties(wrong, tables, lambda silo, visit: door, PROJECTED.aggregation)
        state = server.init()
        for visit in wrong.visits:
            state = make_visit(wrong, parties, state, visit)
        return server.posterior(state).eta

    with pytest.raises(PrivacyViolation):
        check_method(method, neighbours(np.random.default_rng(1), make_rows, Relation.SUBSTITUTE, 40))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_two_sums_cost_the_budget_and_the_first_its_share(name):
    plan = finished(name).plan
    known = {"relation": Relation.SUBSTITUTE, "delta": 1e-5}
    events = plan.events(0)
    assert 4.999 < price(events, **known).epsilon <= 5.0
    assert plan.events(0, 0) == ()
    if len(events) == 2:
        assert plan.events(0, 1) == events[:1]
        assert 0.3 * 4.999 < price(events[:1], **known).epsilon <= 0.3 * 5.0


def test_what_is_paid_is_what_is_charged():
    for name in SETTINGS:
        done = finished(name)
        for door, events in zip(done.doors, done.plan.total_events, strict=True):
            assert tuple(door.account.charged) == events, name


@pytest.mark.parametrize(
    ("settings", "epsilon"),
    [(PROJECTED, 2e4), (PLAIN, 2e4), (over(AggregationKind.SECRET_SHARING), 2e4), (INPUT, 1e8)],
)
def test_with_a_huge_budget_it_is_the_exact_posterior(settings, epsilon):
    """Features within two standard deviations, so that the widest projections touch none of them."""
    rng = np.random.default_rng(3)
    silos = []
    for m in range(3):
        x = rng.uniform(-0.9, 0.9, size=(2000, DIM))
        x[:, 2] = 1.0
        y = x @ np.array([0.6, -0.4, 0.2]) + 0.3 * rng.uniform(-1.7, 1.7, size=2000)
        silos.append(Silo(name=str(m), x=x, y=y))
    mean, covariance = Run(MODEL, silos, settings, budget_of(epsilon=epsilon), doors=doors_of(3)).finish().standard
    x, y = (np.concatenate([getattr(silo, key) for silo in silos]).astype(float) for key in ("x", "y"))
    exact = np.linalg.inv(x.T @ x / 0.3**2 + np.eye(DIM) / 2.0**2)
    np.testing.assert_allclose(mean, exact @ x.T @ y / 0.3**2, atol=0.2 * np.sqrt(exact.max()))
    np.testing.assert_allclose(covariance, exact, rtol=0.05, atol=0.05 * exact.max())


def test_every_sum_gives_the_same_answer_with_the_same_noise():
    first, *rest = (finished(f"projection, {kind}").state for kind in ("trusted", "secret_sharing", "pairwise_masks"))
    for other in rest:
        np.testing.assert_array_equal(first.eta_q.linear, other.eta_q.linear)
        np.testing.assert_array_equal(first.box, other.box)


def test_a_sum_over_silos_has_the_noise_of_one_and_single_silos_have_that_of_all():
    """Ten silos: with shares one of ten noises too many (M - 1 of M), without them ten of one."""
    silos = [silo_of(rows_of(np.random.default_rng(m), 20), str(m)) for m in range(10)]
    noise = []
    for kind in (AggregationKind.NONE, AggregationKind.TRUSTED):
        server = plan_for(MODEL, silos, over(kind, PLAIN), budget_of()).server
        assert isinstance(server, ProjectionServer)
        noise += server.moments.noise_of(range(10))
        assert server.moments_noise == noise[-1]
    assert noise[0] / noise[1] == pytest.approx(3.0, rel=0.01)


STUDY = {
    "study": {"name": "rings", "seed": 0},
    "data": {
        "target": "rings",
        "target_bounds": [-2.0, 2.0],
        "bounds": {"length": [0.0, 1.0], "weight": [0.0, 4.0], "sex": ["F", "I", "M"]},
        "coding": "one_hot",
        "public": ["rows"],
    },
    "model": {"kind": "linear_regression", "options": {"noise_stddev": 0.3}},
    "privacy": {"epsilon": 5.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
    "protocol": {"kind": "linreg"},
}


def changed(**sections) -> dict:
    return {key: {**STUDY.get(key, {}), **sections.get(key, {})} for key in {*STUDY, *sections}}


def frames(num_silos: int = 3, num_rows: int = 400) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(4)
    tables = {}
    for m in range(num_silos):
        frame = pd.DataFrame({"length": rng.uniform(size=num_rows), "weight": rng.uniform(0, 4, size=num_rows)})
        frame["sex"] = rng.choice(["F", "I", "M"], size=num_rows)
        signal = 0.8 * (2 * frame["length"] - 1) + 0.5 * (frame["sex"] == "I") - 0.2
        frame["rings"] = np.clip(signal + 0.3 * rng.normal(size=num_rows), -2, 2)
        tables[f"site-{m}"] = frame
    return tables


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"protocol": {"projection": False}},
        {"protocol": {"first_share": 0.5}, "aggregation": {"kind": "secret_sharing"}},
        {"protocol": {"privatise": "input_perturbation"}, "privacy": {"epsilon": 100.0}},
    ],
)
def test_a_study_runs_and_charges_its_budget(sections, tmp_path):
    study = Study.from_dict(changed(**sections))
    posterior = silobayes.fit(study, frames(), out=tmp_path / "run", noise_seed=1)
    names = dict(zip(posterior.names, posterior.mean, strict=True))
    assert abs(names["length"] - 0.8) < 5 * posterior.stddev[0] + 0.3
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["epsilon"] <= study.privacy.epsilon
    assert certificate["epsilon"] > 0.999 * study.privacy.epsilon


def test_a_study_without_privacy_is_exact(tmp_path):
    tables = {key: value for key, value in STUDY.items() if key != "privacy"} | {"privacy": {"mode": "none"}}
    study = Study.from_dict(tables)
    posterior = silobayes.fit(study, frames(), out=tmp_path / "run")
    frame = pd.concat(frames().values())
    x, y = study.encoding.encode_features(frame).astype(float), frame["rings"].to_numpy()
    exact = np.linalg.inv(x.T @ x / 0.3**2 + np.eye(x.shape[1]))
    np.testing.assert_allclose(posterior.mean, exact @ x.T @ y / 0.3**2, atol=1e-4)


def test_bounds_of_a_study_are_those_of_its_encoding():
    study = Study.from_dict(changed())
    settings = settings_of(study, PublicFacts(silo_rows=(10,), num_parameters=6))
    bounds = Limits.of(study).bounds
    assert bounds == Bounds(
        features=(1.0,) * 6, target=2.0, projected=(True, True, False, False, False, False), others_square=2.0
    )
    assert (settings.rounds, settings.first_share, settings.projection) == (2, 0.3, True)
    x = study.encoding.encode_features(next(iter(frames().values())))
    assert np.all(np.abs(x) <= np.array(bounds.features))
    assert np.max(np.sum(np.square(x[:, 2:]), axis=1)) <= bounds.others_square


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"kind": "gaussian"}, "data": {"target": None}}, "protocol.kind"),
        ({"protocol": {"privatise": "dp_optimisation"}}, "protocol.privatise"),
        ({"protocol": {"rounds": 3}}, "protocol.rounds"),
        ({"protocol": {"schedule": "sequential"}}, "protocol.schedule"),
        ({"protocol": {"projection": "yes"}}, "protocol.projection"),
        ({"protocol": {"kind": "pvi", "projection": True}}, "protocol.projection"),
        ({"protocol": {"privatise": "input_perturbation", "projection": False}}, "protocol.projection"),
        ({"protocol": {"projection": False, "first_share": 0.3}}, "protocol.first_share"),
        ({"protocol": {"first_share": 1.0}}, "protocol.first_share"),
        ({"protocol": {"kind": "pvi", "privatise": "input_perturbation"}}, "protocol.privatise"),
        (
            {"protocol": {"privatise": "input_perturbation"}, "aggregation": {"kind": "trusted"}},
            "aggregation.kind",
        ),
        (
            {"protocol": {"privatise": "input_perturbation"}, "privacy": {"relation": "add_remove"}},
            "privacy.relation",
        ),
        ({"privacy": {"unit": "client"}, "aggregation": {"kind": "trusted"}}, "privacy.unit"),
    ],
)
def test_what_cannot_run_is_refused_by_name(sections, key, tmp_path):
    tables = changed(**sections)
    tables["data"] = {name: value for name, value in tables["data"].items() if value is not None}
    if tables["model"]["kind"] == "gaussian":
        del tables["data"]["target_bounds"]
        tables["data"]["features"] = ["length", "weight", "sex"]
    with pytest.raises(InvalidInput) as refusal:
        silobayes.fit(Study.from_dict(tables), frames(), out=tmp_path / "run")
    assert refusal.value.key == key


def test_unknown_noise_and_other_models_are_refused(tmp_path):
    tables = changed()
    tables["model"] = {"kind": "linear_regression"}
    with pytest.raises(InvalidInput) as refusal:
        silobayes.fit(Study.from_dict(tables), frames(), out=tmp_path / "run")
    assert refusal.value.key == "protocol.kind"
    silos = [silo_of(rows_of(np.random.default_rng(0), 9))]
    with pytest.raises(InvalidInput) as refusal:
        plan_for(LogisticRegression(num_features=DIM), silos, PROJECTED, budget_of())
    assert refusal.value.key == "protocol.kind"


def test_settings_without_bounds_are_refused():
    silos = [silo_of(rows_of(np.random.default_rng(0), 9))]
    for bounds in (None, dataclasses.replace(BOUNDS, features=(1.0,))):
        with pytest.raises(InvalidInput) as refusal:
            plan_for(MODEL, silos, dataclasses.replace(PROJECTED, bounds=bounds), budget_of())
        assert refusal.value.key == "limits.bounds"


def test_a_run_that_stopped_between_the_sums_goes_on_with_its_thresholds(tmp_path):
    study = Study.from_dict(changed(aggregation={"kind": "secret_sharing"}))
    whole = silobayes.fit(study, frames(), out=tmp_path / "whole", noise_seed=1)

    def stop(progress):
        if progress.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        silobayes.fit(study, frames(), out=tmp_path / "parts", noise_seed=1, progress=stop)
    parts = silobayes.fit(study, frames(), out=tmp_path / "parts", noise_seed=1)
    np.testing.assert_array_equal(parts.mean, whole.mean)
