"""Linear regression with projection through the engine: the gate, prices, closed forms, all sums, studies, refusals."""

import dataclasses
import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from silobayes.defaults import PublicFacts, Settings, resolve
from silobayes.engines.linreg import ProjectedRegressionMethod
from silobayes.engines.planning import build_method

import silobayes
from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.privacy.accounting import price
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.linreg import Bounds
from silobayes.secure.sums import PlainSum
from silobayes.study import AggregationKind, AggregationSection, PosteriorKind, Privatise, ProtocolKind, Study
from silobayes.testing import FreeAccount, PrivacyViolation, check_method, neighbours

DIM, MAX_ROWS, PAIRS = 3, 24, 64
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


def run(method, doors):
    state, seen = method.init(), []
    while state.step < len(method.visits):
        state = method.step(state, doors)
        seen.append((state.server.eta_q, state.clients))
    return state, seen


def standard(method, state):
    return [np.asarray(part, float) for part in method.solver.family.to_standard(method.eta(state))]


def doors_of(count: int, seed: int = 0, relation: Relation = Relation.SUBSTITUTE) -> list[Door]:
    return [
        Door(FreeAccount(relation, Unit.ROW), FreshDraws(Entropy.not_private(seed * 100 + m))) for m in range(count)
    ]


@cache
def planned(name: str, relation: Relation):
    silos = [silo_of(rows_of(np.random.default_rng(9), 20))] * 3
    return build_method(MODEL, silos, SETTINGS[name], budget_of(relation), 0, max_rows=[MAX_ROWS] * 3)


def reusable(method):
    """With plain sums: a secure sum of one index runs once ever."""

    def plain(one):
        if one is None or one.aggregator is None:
            return one
        sums = PlainSum(num_clients=3, colluding=0)
        return dataclasses.replace(one, aggregator=dataclasses.replace(one.aggregator, sums=sums))

    if not isinstance(method, ProjectedRegressionMethod):
        return method
    return dataclasses.replace(method, first=plain(method.first), second=plain(method.second))


def method_of(name: str, relation: Relation):
    """The rows of the first of three silos change; what they know of the other two never does."""
    template, others = reusable(planned(name, relation)), rows_of(np.random.default_rng(9), 20)

    def method(rows, door):
        own = tuple((np.asarray(part["x"]), np.asarray(part["y"])) for part in (rows, others, others))
        state, seen = run(dataclasses.replace(template, rows=own), [door] * 3)
        return [seen, template.eta(state)]  # boxes are public, so they are compared too

    return method


def make_rows(rng):
    return rows_of(rng, MAX_ROWS - int(rng.integers(4)), size=10.0 ** rng.uniform(-1, 1))


def test_thresholds_from_rows_are_caught(monkeypatch):
    """Standard deviations that go around the door change the box, and with it everything."""
    template, others = planned("projection", Relation.SUBSTITUTE), rows_of(np.random.default_rng(9), 20)

    def method(rows, door):
        own = tuple((np.asarray(part["x"]), np.asarray(part["y"])) for part in (rows, others, others))
        bounds = dataclasses.replace(BOUNDS, target=float(np.nanstd(np.clip(rows["y"], -9, 9)) + 0.1))
        state, _ = run(dataclasses.replace(template, rows=own, bounds=bounds), [door] * 3)
        return template.eta(state)

    with pytest.raises(PrivacyViolation):
        check_method(method, neighbours(np.random.default_rng(1), make_rows, Relation.SUBSTITUTE, 40))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_two_sums_cost_the_budget_and_the_first_its_share(name):
    method = planned(name, Relation.SUBSTITUTE)
    known = {"relation": Relation.SUBSTITUTE, "delta": 1e-5}
    events = method.events(0, len(method.visits))
    assert 4.999 < price(events, **known).epsilon <= 5.0
    assert method.events(0, 0) == ()
    if len(events) == 2:
        assert method.events(0, 1) == events[:1]
        assert 0.3 * 4.999 < price(events[:1], **known).epsilon <= 0.3 * 5.0


def test_what_is_paid_is_what_is_charged():
    for name in SETTINGS:
        method, doors = reusable(planned(name, Relation.SUBSTITUTE)), doors_of(3)
        run(method, doors)
        for client, door in enumerate(doors):
            assert tuple(door.account.charged) == method.events(client, len(method.visits)), name


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
    method = build_method(MODEL, silos, settings, budget_of(epsilon=epsilon), 0)
    state, _ = run(method, doors_of(3))
    mean, covariance = standard(method, state)
    x, y = (np.concatenate([getattr(silo, key) for silo in silos]).astype(float) for key in ("x", "y"))
    exact = np.linalg.inv(x.T @ x / 0.3**2 + np.eye(DIM) / 2.0**2)
    np.testing.assert_allclose(mean, exact @ x.T @ y / 0.3**2, atol=0.2 * np.sqrt(exact.max()))
    np.testing.assert_allclose(covariance, exact, rtol=0.05, atol=0.05 * exact.max())


def test_every_sum_gives_the_same_answer_with_the_same_noise():
    names = [f"projection, {kind}" for kind in ("trusted", "secret_sharing", "pairwise_masks")]
    answers = []
    for name in names:
        method = planned.__wrapped__(name, Relation.SUBSTITUTE)
        answers.append(run(method, doors_of(3, seed=5))[0])
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0].server.eta_q.linear, other.server.eta_q.linear)
        np.testing.assert_array_equal(answers[0].clients["box"], other.clients["box"])


def test_a_sum_over_silos_has_the_noise_of_one_and_single_silos_have_that_of_all():
    """Ten silos: with shares one of ten noises too many (M - 1 of M), without them ten of one."""
    silos = [silo_of(rows_of(np.random.default_rng(m), 20), str(m)) for m in range(10)]
    alone, summed = (
        build_method(MODEL, silos, over(kind, PLAIN), budget_of(), 0)
        for kind in (AggregationKind.NONE, AggregationKind.TRUSTED)
    )
    noise = [method.second.noise_std(1.0, 10) for method in (alone, summed)]
    assert noise[0] / noise[1] == pytest.approx(3.0, rel=0.01)


STUDY = {
    "study": {"name": "rings", "seed": 0},
    "data": {
        "target": "rings",
        "target_bounds": [-2.0, 2.0],
        "bounds": {"length": [0.0, 1.0], "weight": [0.0, 4.0], "sex": ["F", "I", "M"]},
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
    settings = resolve(study, PublicFacts(silo_rows=(10,), num_parameters=6))
    assert settings.bounds == Bounds(
        features=(1.0,) * 6, target=2.0, projected=(True, True, False, False, False, False), others_square=2.0
    )
    assert (settings.rounds, settings.first_share, settings.projection) == (2, 0.3, True)
    x = study.encoding.encode_features(next(iter(frames().values())))
    assert np.all(np.abs(x) <= np.array(settings.bounds.features))
    assert np.max(np.sum(np.square(x[:, 2:]), axis=1)) <= settings.bounds.others_square


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
        build_method(LogisticRegression(num_features=DIM), silos, PROJECTED, budget_of(), 0)
    assert refusal.value.key == "protocol.kind"


def test_settings_without_bounds_are_refused():
    silos = [silo_of(rows_of(np.random.default_rng(0), 9))]
    for bounds in (None, dataclasses.replace(BOUNDS, features=(1.0,))):
        with pytest.raises(InvalidInput) as refusal:
            build_method(MODEL, silos, dataclasses.replace(PROJECTED, bounds=bounds), budget_of(), 0)
        assert refusal.value.key == "settings.bounds"


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
