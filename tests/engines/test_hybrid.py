"""The hybrid: statistics once, then DP optimisation from there."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.local import Inputs, resume, run
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy import accounting
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import DiscreteGaussianEvent, GaussianEvent
from silobayes.privacy.ledger import Ledger
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.queries import Total
from silobayes.protocols import hybrid, pvi
from silobayes.protocols.schedule import Schedule
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.studies.models import build_model
from silobayes.study import AggregationSection, PosteriorKind, Study
from silobayes.testing.record_replay import FreeAccount
from tests.engines.harness import Privatise, Run, plan_for
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


START = 3  # visits: statistics, distances, factors


def doors_of(budget, num_silos):
    return [
        Door(FreeAccount(budget.relation, budget.unit), FreshDraws(Entropy.not_private(k))) for k in range(num_silos)
    ]


def started_without_noise(silos, settings) -> Run:
    """After the start, made of exact statistics of which the server knows that they are."""
    run = Run(REGRESSION, silos, settings, BUDGET, doors=[ExactDoor()] * len(silos))
    server: Any = run.plan.server
    exact = (GaussianMechanism(noise_multiplier=1e-9),) * len(silos)
    server = dataclasses.replace(server, statistics=dataclasses.replace(server.statistics, mechanisms=exact))
    run.plan = run.parties.plan = dataclasses.replace(run.plan, server=server)
    return run.step().step().step()


@pytest.mark.parametrize("first_share", [0.2, 0.5, 0.9])
def test_the_statistics_get_their_share_and_the_whole_keeps_the_budget(first_share):
    settings = dataclasses.replace(SETTINGS, first_share=first_share)
    known = {"relation": BUDGET.relation, "delta": BUDGET.delta}
    for total in plan_for(REGRESSION, regression_silos((30, 40)), settings, BUDGET).total_events:
        first, loops = total
        assert isinstance(first, DiscreteGaussianEvent)
        assert isinstance(loops, GaussianEvent)
        assert 0.999 * first_share < accounting.price([first], **known).epsilon <= first_share
        assert 0.999 < accounting.price(total, **known).epsilon <= 1.0


def test_a_silo_pays_for_its_statistics_once_and_for_each_later_round():
    doors = doors_of(BUDGET, 2)
    run = Run(REGRESSION, regression_silos((30, 40)), SETTINGS, BUDGET, doors=doors)
    counts = [[event.count for event in run.plan.events(1, visits)] for visits in range(START + 4)]
    assert counts == [[], [1], [1], [1], [1, 6], [1, 12], [1, 18]]
    for visits in range(1, START + 4):
        charged = run.step().doors[1].account.charged
        assert charged[0] == run.plan.events(1, visits)[0]
        assert sum(event.count for event in charged[1:]) == 6 * max(0, visits - START)


@pytest.mark.parametrize("settings", [SETTINGS, FULL])
def test_without_noise_the_start_is_the_exact_posterior_made_of_the_silos_own_factors(settings):
    silos = regression_silos((30, 50, 60))
    run = started_without_noise(silos, settings)
    eta_q = run.state.pvi.eta_q
    mean, covariance = exact_regression(silos)
    precision = np.linalg.inv(covariance)
    is_full = settings.posterior is PosteriorKind.FULL
    precision_q = precision if is_full else np.diag(precision)
    np.testing.assert_allclose(-2 * eta_q.quadratic, precision_q, rtol=1e-3, atol=0.2)
    np.testing.assert_allclose(eta_q.linear, precision_q @ mean if is_full else precision_q * mean, rtol=1e-3, atol=0.5)
    gram = silos[1].x.T @ silos[1].x / 0.5**2
    quadratic = -0.5 * gram if is_full else -0.5 * np.diag(gram)
    np.testing.assert_allclose(run.parties.states[1].eta_t.quadratic, quadratic, rtol=1e-3, atol=0.1)


def test_the_mean_field_start_is_where_partitioned_inference_stays():
    """A round of exact local optima moves nothing."""
    silos = regression_silos((30, 50, 60))
    start = started_without_noise(silos, SETTINGS)
    eta_q = start.state.pvi.eta_q
    exact: Any = Run(REGRESSION, silos, dataclasses.replace(PLAIN, rounds=4, damping=0.5))
    exact.state = exact.plan.server.init_at(eta_q)
    exact.parties.states = [pvi.SiloState(eta_t=own.eta_t) for own in start.parties.states]
    after = exact.step().state.eta_q
    np.testing.assert_allclose(after.linear, eta_q.linear, atol=2e-3 * np.abs(eta_q.linear).max())
    np.testing.assert_allclose(after.quadratic, eta_q.quadratic, rtol=1e-3)


@pytest.mark.parametrize("settings", [SETTINGS, FULL])
def test_with_a_huge_budget_it_is_the_exact_posterior(settings):
    silos = regression_silos((30, 50, 60))
    budget = dataclasses.replace(BUDGET, epsilon=1e6)
    settings = dataclasses.replace(settings, steps=40, step_size=0.005, sample_rate=1.0, clip_norm=40.0)
    mean, spread = Run(REGRESSION, silos, settings, budget, doors=doors_of(budget, 3)).finish().standard
    exact_mean, exact_covariance = exact_regression(silos)
    stddev = np.sqrt(np.diag(exact_covariance))
    assert np.max(np.abs(mean - exact_mean) / stddev) < 0.1
    if settings.posterior is PosteriorKind.FULL:
        np.testing.assert_allclose(np.sqrt(np.diag(spread)), stddev, rtol=0.1)
    else:
        np.testing.assert_allclose(spread, np.diag(np.linalg.inv(exact_covariance)) ** -0.5, rtol=0.1)


def test_eta_q_is_the_prior_plus_the_factors_after_every_visit():
    """In the start too: until the factors are made, q is the prior and every factor is 1."""
    run = Run(REGRESSION, regression_silos((30, 50)), FULL, BUDGET, doors=doors_of(BUDGET, 2))
    server: Any = run.plan.server
    for _ in run.plan.visits:
        state = run.step().state.pvi
        for part in ("linear", "quadratic"):
            factors = [getattr(own.eta_t, part) for own in run.parties.states]
            whole = getattr(server.then.eta_p, part) + np.sum(factors, axis=0)
            np.testing.assert_allclose(getattr(state.eta_q, part), whole, rtol=1e-9, atol=1e-9)


class Split:
    """The visits of distances and of factors, of silos whose releases say `values`, each with an error of `noise`."""

    def __init__(self, shares: np.ndarray) -> None:
        silos = [
            SimpleNamespace(name=str(k), x=np.zeros((size, 3)), y=np.zeros(size), persons=None)
            for k, size in enumerate((100 * shares).astype(int).tolist())
        ]
        self.plan = plan_for(LinearRegression(num_features=3, noise_stddev=0.5), silos, SETTINGS, BUDGET)
        self.server: Any = self.plan.server
        np.testing.assert_allclose(self.server.shares, shares)

    def at(self, values: np.ndarray, noise: float) -> Any:
        """The state before the distances, and the silos'."""
        zero = self.server.then.eta_p - self.server.then.eta_p
        believed = dataclasses.replace(zero, linear=values.sum(axis=0))
        start = hybrid.Start(mean=np.zeros(3), whole=zero, believed=believed, kept=np.zeros(2))
        state = hybrid.ServerState(pvi=self.server.then.init(), start=start, noise=np.array([noise, 0.0]))
        return state, [hybrid.SiloState(eta_t=zero, gram=np.zeros((3, 3)), cross=own) for own in values]

    def ask(self, part: int, state: Any, owns: Any) -> Any:
        """The total of a visit, and the silos' states after it."""
        visit = self.plan.visits[part]
        down = self.server.down(state, visit)
        seats = self.plan.seats
        replies = [
            self.plan.silos[part].reply(None, seat, own, down, None) for seat, own in zip(seats, owns, strict=True)
        ]
        total = Total(payload=np.sum([message.payload for _, message in replies], axis=0), members=visit.silos)
        return total, [own for own, _ in replies]

    def differences(self, values: np.ndarray, noise: float) -> np.ndarray:
        """How silos' factors differ from their share of the whole (which is nothing)."""
        state, owns = self.at(values, noise)
        total, owns = self.ask(hybrid.DISTANCES, state, owns)
        state = self.server.merge(state, self.plan.visits[hybrid.DISTANCES], total).state
        total, owns = self.ask(hybrid.FACTORS, state, owns)
        after = self.server.merge(state, self.plan.visits[hybrid.FACTORS], total).state
        found = np.stack([own.eta_t.linear for own in owns])
        np.testing.assert_allclose(after.pvi.eta_q.linear, found.sum(axis=0), atol=1e-12)
        return found

    def kept_of(self, squares: float, noise: float) -> float:
        """How much of differences with these squares the server keeps."""
        state, _ = self.at(np.zeros((4, 3)), noise)
        visit = self.plan.visits[hybrid.DISTANCES]
        total = Total(payload=np.array([squares, 0.0]), members=visit.silos)
        return self.server.merge(state, visit, total).state.start.kept[0]

    def squares(self, values: np.ndarray) -> float:
        """What silos answer to the visit of distances."""
        total, _ = self.ask(hybrid.DISTANCES, *self.at(values, 0.0))
        assert total.payload[1] == 0.0
        return total.payload[0]


def test_differences_add_up_to_zero_and_vanish_where_noise_explains_them():
    """Statistical: mean squares over 2,000 draws, standard error 1.1 %; 8 % is seven of them, false alarm 1e-12."""
    rng = np.random.default_rng(0)
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    split = Split(shares)
    signal = shares[:, None] * np.array([10.0, -4.0, 3.0])
    np.testing.assert_allclose(split.differences(signal, 0.0), 0.0, atol=1e-12)
    other = rng.normal(size=(4, 3))
    np.testing.assert_allclose(split.differences(other, 0.0), other - shares[:, None] * other.sum(axis=0))
    kept = split.differences(other, 0.5)
    np.testing.assert_allclose(kept.sum(axis=0), 0.0, atol=1e-12)
    assert 0.0 < np.abs(kept).max() < np.abs(split.differences(other, 0.0)).max()
    assert not split.differences(signal + 1e-3 * other, 100.0).any()
    # The noise of the differences is what is taken off: without shrinking, mean squares agree; 2/3 and 3/2 do not.
    draws = rng.normal(size=(2000, 4, 3))
    seen = split.squares(np.swapaxes(signal + draws, 0, 1)) / len(draws)
    expected = 3.0 * (4 - 2 + 4 * np.sum(shares**2))
    assert seen == pytest.approx(expected, rel=0.08)
    # Each error has a squared norm of 3, so the server keeps nothing of as much, and half of twice as much.
    assert split.kept_of(expected, noise=3.0) == pytest.approx(0.0, abs=1e-12)
    assert split.kept_of(2 * expected, noise=3.0) == pytest.approx(0.5)


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
        plan_for(REGRESSION, regression_silos((30, 40, 50)), dataclasses.replace(SETTINGS, **change), BUDGET)
    assert caught.value.key == key


def test_a_hybrid_needs_linear_regression():
    with pytest.raises(InvalidInput) as caught:
        plan_for(LOGISTIC, regression_silos((30, 40)), SETTINGS, BUDGET)
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
    """After the statistics, within the rest of the start, and after the first round."""
    inputs = make_inputs()
    whole = run(inputs, tmp_path / "whole")
    for step in (1, 2, 4):
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
    assert [check for check in verify(read_run(tmp_path / "whole")).checks if not check.passed] == []
