"""The hybrid: statistics once, then DP optimisation from there."""

import dataclasses
import json

import numpy as np
import pytest
from silobayes.engines.hybrid import differences
from silobayes.engines.planning import build_method

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.fitting import build_model
from silobayes.engines.local import Inputs, resume, run
from silobayes.privacy import accounting
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import DiscreteGaussianEvent, GaussianEvent
from silobayes.privacy.ledger import Ledger
from silobayes.protocols.schedule import Schedule
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.study import AggregationSection, PosteriorKind, Privatise, Study
from silobayes.testing.record_replay import FreeAccount
from tests.engines.test_local import Stop, charges, same, stop_after
from tests.engines.test_methods import BUDGET, PLAIN, REGRESSION, ExactDoor, exact_regression, regression_silos
from tests.engines.test_methods import MODEL as LOGISTIC

SETTINGS = dataclasses.replace(
    PLAIN,
    privatise=Privatise.HYBRID,
    rounds=4,
    damping=0.5,
    steps=6,
    step_size=0.02,
    sample_rate=0.5,
    clip_norm=2.0,
    x_bound=6.0,
    y_bound=15.0,
)
FULL = dataclasses.replace(SETTINGS, posterior=PosteriorKind.FULL)


def doors_of(budget, num_clients):
    return [
        Door(FreeAccount(budget.relation, budget.unit), FreshDraws(Entropy.not_private(k))) for k in range(num_clients)
    ]


@pytest.mark.parametrize("first_share", [0.2, 0.5, 0.9])
def test_the_statistics_get_their_share_and_the_whole_keeps_the_budget(first_share):
    method = build_method(
        REGRESSION, regression_silos((30, 40)), dataclasses.replace(SETTINGS, first_share=first_share), BUDGET, 0
    )
    known = {"relation": BUDGET.relation, "delta": BUDGET.delta}
    for total in method.total_events():
        first, loops = total
        assert isinstance(first, DiscreteGaussianEvent)
        assert isinstance(loops, GaussianEvent)
        assert 0.999 * first_share < accounting.price([first], **known).epsilon <= first_share
        assert 0.999 < accounting.price(total, **known).epsilon <= 1.0


def test_a_client_pays_for_its_statistics_once_and_for_each_later_visit():
    method = build_method(REGRESSION, regression_silos((30, 40)), SETTINGS, BUDGET, 0)
    assert [[event.count for event in method.events(1, visits)] for visits in range(5)] == [
        [],
        [1],
        [1, 6],
        [1, 12],
        [1, 18],
    ]
    doors = doors_of(BUDGET, 2)
    state = method.init()
    for visits in range(1, 5):
        state = method.step(state, doors)
        charged = doors[1].account.charged
        assert charged[0] == method.events(1, visits)[0]
        assert sum(event.count for event in charged[1:]) == 6 * (visits - 1)


@pytest.mark.parametrize("settings", [SETTINGS, FULL])
def test_without_noise_the_start_is_the_exact_posterior_made_of_the_silos_own_factors(settings):
    silos = regression_silos((30, 50, 60))
    method = build_method(REGRESSION, silos, settings, BUDGET, 0)
    state = method.step(method.init(), [ExactDoor()] * 3)
    mean, covariance = exact_regression(silos)
    precision = np.linalg.inv(covariance)
    is_full = settings.posterior is PosteriorKind.FULL
    precision_q = precision if is_full else np.diag(precision)
    np.testing.assert_allclose(-2 * state.server.eta_q.quadratic, precision_q, rtol=1e-3, atol=0.2)
    np.testing.assert_allclose(
        state.server.eta_q.linear, precision_q @ mean if is_full else precision_q * mean, rtol=1e-3, atol=0.5
    )
    gram = silos[1].x.T @ silos[1].x / 0.5**2
    quadratic = -0.5 * gram if is_full else -0.5 * np.diag(gram)
    np.testing.assert_allclose(state.clients.eta_t.quadratic[1], quadratic, rtol=1e-3, atol=0.1)


def test_the_mean_field_start_is_where_partitioned_inference_stays():
    """A round of exact local optima moves nothing."""
    silos = regression_silos((30, 50, 60))
    start = build_method(REGRESSION, silos, SETTINGS, BUDGET, 0)
    state = start.step(start.init(), [ExactDoor()] * 3)
    exact = build_method(REGRESSION, silos, dataclasses.replace(PLAIN, rounds=4, damping=0.5), None, 0)
    after = exact.step(state, ())
    scale = np.abs(state.server.eta_q.linear).max()
    np.testing.assert_allclose(after.server.eta_q.linear, state.server.eta_q.linear, atol=2e-3 * scale)
    np.testing.assert_allclose(after.server.eta_q.quadratic, state.server.eta_q.quadratic, rtol=1e-3)


@pytest.mark.parametrize("settings", [SETTINGS, FULL])
def test_with_a_huge_budget_it_is_the_exact_posterior(settings):
    silos = regression_silos((30, 50, 60))
    budget = dataclasses.replace(BUDGET, epsilon=1e6)
    settings = dataclasses.replace(settings, steps=40, step_size=0.005, sample_rate=1.0, clip_norm=40.0)
    method = build_method(REGRESSION, silos, settings, budget, 0)
    doors, state = doors_of(budget, 3), method.init()
    while state.step < len(method.visits):
        state = method.step(state, doors)
    exact_mean, exact_covariance = exact_regression(silos)
    mean, spread = method.solver.family.to_standard(method.eta(state))
    stddev = np.sqrt(np.diag(exact_covariance))
    assert np.max(np.abs(mean - exact_mean) / stddev) < 0.1
    if settings.posterior is PosteriorKind.FULL:
        np.testing.assert_allclose(np.sqrt(np.diag(spread)), stddev, rtol=0.1)
    else:
        np.testing.assert_allclose(spread, np.diag(np.linalg.inv(exact_covariance)) ** -0.5, rtol=0.1)


def test_eta_q_is_the_prior_plus_the_factors_after_every_visit():
    method = build_method(REGRESSION, regression_silos((30, 50)), FULL, BUDGET, 0)
    doors, state = doors_of(BUDGET, 2), method.init()
    while state.step < len(method.visits):
        state = method.step(state, doors)
        for part in ("linear", "quadratic"):
            whole = getattr(method.eta_p, part) + getattr(state.clients.eta_t, part).sum(axis=0)
            np.testing.assert_allclose(getattr(state.server.eta_q, part), whole, rtol=1e-9, atol=1e-9)


def test_differences_add_up_to_zero_and_vanish_where_noise_explains_them():
    """Statistical: mean squares over 2,000 draws, standard error 1.1 %; 8 % is seven of them, false alarm 1e-12."""
    rng = np.random.default_rng(0)
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    signal = shares[:, None] * np.array([10.0, -4.0, 3.0])
    np.testing.assert_allclose(differences(signal, shares, 0.0), 0.0, atol=1e-12)
    other = rng.normal(size=(4, 3))
    np.testing.assert_allclose(differences(other, shares, 0.0), other - shares[:, None] * other.sum(axis=0))
    np.testing.assert_allclose(differences(other, shares, 0.5).sum(axis=0), 0.0, atol=1e-12)
    assert not differences(signal + 1e-3 * other, shares, 100.0).any()
    # The noise of the differences is what `by_noise` says: without shrinking, mean squares agree; 2/3 and 3/2 do not.
    draws = rng.normal(size=(2000, 4, 3))
    seen = np.mean([np.sum(differences(signal + one, shares, 0.0) ** 2) for one in draws])
    expected = 3.0 * (4 - 2 + 4 * np.sum(shares**2))
    assert seen == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("aggregation.kind", {"aggregation": AggregationSection(kind="trusted")}),
        ("protocol.schedule", {"schedule": Schedule.SEQUENTIAL}),
        ("protocol.rounds", {"rounds": 1}),
    ],
)
def test_what_a_hybrid_cannot_do_is_refused(key, change):
    with pytest.raises(InvalidInput) as caught:
        build_method(REGRESSION, regression_silos((30, 40, 50)), dataclasses.replace(SETTINGS, **change), BUDGET, 0)
    assert caught.value.key == key


def test_a_hybrid_needs_linear_regression():
    with pytest.raises(InvalidInput) as caught:
        build_method(LOGISTIC, regression_silos((30, 40)), SETTINGS, BUDGET, 0)
    assert caught.value.key == "protocol.privatise"


def make_inputs() -> Inputs:
    study = Study.from_dict(
        {
            "study": {"name": "hybrid"},
            "data": {
                "target": "y",
                "target_bounds": [-3, 3],
                "bounds": {"a": [-1, 1], "b": [-1, 1]},
                "public": ["rows"],
            },
            "model": {"kind": "linear_regression", "options": {"noise_stddev": 0.5}},
            "privacy": {"epsilon": 2.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
            "protocol": {"privatise": "hybrid", "rounds": 4, "steps": 8, "first_share": 0.4},
        }
    )
    rng = np.random.default_rng(0)
    silos = []
    for k, size in enumerate((60, 90)):
        x = np.column_stack([rng.uniform(-1, 1, size=(size, 2)), np.ones(size)])
        silos.append(Silo(name=f"s{k}", x=x, y=x @ np.array([1.0, -0.5, 0.2]) + 0.5 * rng.normal(size=size)))
    names = ("a", "b", "intercept")
    return Inputs(study=study, model=build_model(study, 3), silos=silos, test=None, names=names, noise_seed=3)


def test_a_run_that_is_resumed_after_the_statistics_charges_once(tmp_path):
    inputs = make_inputs()
    whole = run(inputs, tmp_path / "whole")
    for step in (1, 2):
        out = tmp_path / f"stopped-{step}"
        with pytest.raises(Stop):
            run(inputs, out, stop_after(step))
        assert same(resume(inputs, out), whole)
        assert charges(out) == [2, 2]
    certificate = json.loads((tmp_path / "whole" / "certificate.json").read_text())
    assert 1.99 < certificate["epsilon"] <= 2.0
    assert "discrete Gaussian" in certificate["noise"]
    assert "float32" in certificate["noise"]
    (ledger, _) = sorted((tmp_path / "whole" / "ledgers").glob("*.ledger"))
    assert [entry.event.count for entry in Ledger.open(ledger).entries()] == [1, 24]
    assert verify(read_run(tmp_path / "whole")).passed
