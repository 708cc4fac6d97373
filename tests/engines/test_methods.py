"""Methods through the engine: closed forms, global VI, and independence of order."""

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo, concatenate
from silobayes.families import FullGaussian
from silobayes.inference.layouts import ShardSlots, deal_slots, group_sizes, shard_slots
from silobayes.inference.solvers import LocalOptimum
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP
from silobayes.models.numpyro_model import from_numpyro
from silobayes.plans.rules import PublicFacts, settings_of
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols import perturbed
from silobayes.protocols.bcm import Committee
from silobayes.protocols.schedule import Schedule
from silobayes.study import PosteriorKind
from silobayes.testing import FreeAccount
from tests.engines.cases import MODEL, make_silos, make_study
from tests.engines.harness import Privatise, ProtocolKind, Run, plan_for
from tests.engines.regression import DIM, NOISE, PLAIN, REGRESSION, exact_regression, regression_silos

BUDGET = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
OF_ONE_SHAPE = (80, 100, 120)  # silos that compile once
SHARDED = (Privatise.VIRTUAL_CLIENTS, Privatise.LOCAL_AVERAGING)


def answer(silos, *, model=MODEL, doors=(), budget=None, **settings) -> tuple[Any, Any]:
    """Mean and spread of the posterior at the end."""
    return Run(model, silos, dataclasses.replace(PLAIN, **settings), budget, doors=doors).finish().standard


@cache
def global_vi_of_three() -> tuple[Any, Any]:
    """What one silo with all rows of three finds."""
    return answer([concatenate("all", make_silos(OF_ONE_SHAPE))])


def open_doors(count: int) -> list[Door]:
    return [Door.open(FreeAccount(Relation.SUBSTITUTE, Unit.ROW)) for _ in range(count)]


@pytest.mark.parametrize("sizes", [(300,), (20, 300), (5, 6, 7, 40, 41, 90, 300)])
def test_linear_regression_is_exact_after_one_pass(sizes):
    silos = regression_silos(sizes)
    mean, covariance = answer(silos, model=REGRESSION, posterior=PosteriorKind.FULL)
    exact_mean, exact_covariance = exact_regression(silos)
    np.testing.assert_allclose(mean, exact_mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(covariance, exact_covariance, rtol=1e-5, atol=1e-5 * exact_covariance.max())


def test_mean_field_linear_regression_converges_to_the_exact_means():
    silos = regression_silos((30, 50, 60))
    mean, stddev = answer(silos, model=REGRESSION, rounds=60, damping=0.4)
    exact_mean, exact_covariance = exact_regression(silos)
    np.testing.assert_allclose(mean, exact_mean, atol=1e-5)
    np.testing.assert_allclose(stddev, np.diag(np.linalg.inv(exact_covariance)) ** -0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.SYNCHRONOUS,
        pytest.param(Schedule.SEQUENTIAL, marks=pytest.mark.slow),
        pytest.param(Schedule.ASYNCHRONOUS, marks=pytest.mark.slow),
    ],
)
def test_pvi_is_global_vi(schedule):
    """Logistic regression: mean within .02 sd, sd within 2 %."""
    silos = make_silos(OF_ONE_SHAPE)
    damping = 1.0 if schedule is Schedule.SEQUENTIAL else 0.4
    mean, stddev = answer(silos, rounds=25, damping=damping, schedule=schedule)
    global_mean, global_stddev = global_vi_of_three()
    assert np.max(np.abs(mean - global_mean) / global_stddev) < 0.02
    np.testing.assert_allclose(stddev, global_stddev, rtol=0.02)


def test_many_small_silos_with_columns_that_go_together_reach_global_vi():
    """Rounding once made a cavity improper, and each of the silos then answered for its projection: q ran away."""
    rng, silos = np.random.default_rng(0), []
    model = LogisticRegression(num_features=6)
    for k in range(40):
        x = rng.normal(size=(30, 6))
        x[:, 2] = rng.random(30) < 0.005
        x[:, 3] = 0.99 * x[:, 1] + 0.01 * x[:, 3]
        y = rng.random(30) < 1 / (1 + np.exp(-x @ np.linspace(-1, 1, 6)))
        silos.append(Silo(name=str(k), x=x, y=y.astype(int)))
    mean, covariance = answer(silos, model=model, rounds=12, damping=0.5, posterior=PosteriorKind.FULL)
    together = [concatenate("all", silos)]
    global_mean, global_covariance = answer(together, model=model, posterior=PosteriorKind.FULL)
    global_stddev = np.sqrt(np.diag(global_covariance))
    assert np.max(np.abs(mean - global_mean) / global_stddev) < 0.01
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), global_stddev, rtol=0.01)


class Huge(eqx.Module):
    """Finds a factor that is out of range, in place of local inference."""

    local: LocalOptimum
    is_private: bool = eqx.field(static=True)
    side_by_side: ClassVar[bool] = True

    def __call__(self, rows, own, down, drawn, key):
        found = jax.tree.map(lambda leaf: leaf + 1e31, self.local.family.zeros())
        return (found, None) if self.is_private else found


def with_huge_factors(run: Run) -> None:
    (silo,) = run.plan.silos
    solve = Huge(local=silo.solve.local, is_private=bool(run.doors))
    use_plan(run, dataclasses.replace(run.plan, silos=(dataclasses.replace(silo, solve=solve),)))


def use_plan(run: Run, plan) -> None:
    """Another plan from now on, in the state that the run is in."""
    run.plan = run.parties.plan = plan


def test_a_q_that_runs_away_is_refused_without_privacy():
    run = Run(MODEL, make_silos((20, 30)), dataclasses.replace(PLAIN, rounds=2))
    with_huge_factors(run)
    with pytest.raises(InvalidInput, match="ran away in visit 0"):
        run.finish()


def test_a_q_that_runs_away_loses_one_visit_and_not_what_was_paid():
    settings = dataclasses.replace(PLAIN, privatise=Privatise.DP_OPTIMISATION, rounds=3, sample_rate=0.2)
    run = Run(MODEL, make_silos((20, 30)), settings, BUDGET, doors=open_doors(2)).step()
    right, first, first_states = run.plan, run.state, run.parties.states
    with_huge_factors(run)
    second = run.step().state
    assert (second.num_visits, second.num_counted) == (2, 1)
    np.testing.assert_array_equal(second.eta_q.linear, first.eta_q.linear)
    jax.tree.map(np.testing.assert_array_equal, run.parties.states, first_states)
    use_plan(run, right)
    third = run.step().state
    assert np.any(third.eta_q.linear != first.eta_q.linear)


@pytest.mark.parametrize(("posterior", "farthest"), [("mean_field", 10.1), ("full", 12.0)])
def test_a_network_under_noise_alone_stays_finite(posterior, farthest):
    """One shard a silo and a tiny budget: means once grew from visit to visit until they overflowed."""
    silos = make_silos((40, 40, 40))
    model = BinaryMLP(num_features=silos[0].num_features, hidden=(4,))
    own = {} if posterior == "mean_field" else {"posterior": posterior, "rounds": 3, "steps": 5}
    study = make_study(privatise="parameter_perturbation", **own)  # the model is that of the facts
    settings = settings_of(study, PublicFacts.of(model, [silo.num_rows for silo in silos]))
    account = FreeAccount(Relation.SUBSTITUTE, Unit.ROW)
    doors = [Door(account, FreshDraws(Entropy.not_private(seed))) for seed in range(len(silos))]
    run = Run(model, silos, settings, dataclasses.replace(BUDGET, epsilon=0.02), doors=doors).finish()
    assert run.state.pvi.num_counted == run.step_number
    mean, _ = run.standard
    assert np.max(np.abs(mean)) <= farthest  # ten, and the rounding of a matrix that is mostly noise


def test_permuting_silos_changes_nothing():
    silos = make_silos(OF_ONE_SHAPE)
    settings = dataclasses.replace(PLAIN, rounds=3, damping=0.4)
    orders = (range(3), (2, 0, 1))
    first, second = (Run(MODEL, [silos[k] for k in order], settings).finish().state.eta_q for order in orders)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-4)


def prior_and_factors(run: Run, eta_p) -> list[np.ndarray]:
    """The product of the prior and all factors (of shards, where they have their own), by leaves."""
    total = jax.tree.leaves(eta_p)
    for state in run.parties.states:
        own = jax.tree.leaves(state.eta_t)
        total = [
            sum_so_far + (leaf if leaf.ndim == sum_so_far.ndim else leaf.sum(axis=0))
            for sum_so_far, leaf in zip(total, own, strict=True)
        ]
    return total


def test_eta_q_is_the_prior_plus_the_factors():
    run = Run(MODEL, make_silos(), dataclasses.replace(PLAIN, rounds=4, damping=0.3)).finish()
    total = prior_and_factors(run, run.plan.server.eta_p)
    for left, right in zip(jax.tree.leaves(run.state.eta_q), total, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


def test_a_silo_fills_most_of_its_slots():
    sizes = np.random.default_rng(0).integers(1, 5000, size=500)
    for group in group_sizes(sizes):
        assert sizes[group].min() >= 0.6 * sizes[group].max()


def shards_of_rows(silo: Silo, layout: ShardSlots) -> np.ndarray:
    """Where each row of a silo is laid out, by its only feature; -1 where it has no place."""
    numbered = dataclasses.replace(silo, x=np.arange(1.0, silo.num_rows + 1)[:, None])
    rows = layout.lay_out([numbered], [layout])
    shard, _ = np.nonzero(rows.present[0])
    found = np.full(silo.num_rows, -1)
    found[np.asarray(rows.x)[0, ..., 0][np.asarray(rows.present[0])].astype(int) - 1] = shard
    return found


def test_the_shard_of_a_unit_depends_on_its_number_only():
    (silo,) = make_silos((50,))
    few, many = deal_slots(7, 50, 3), deal_slots(7, 61, 3)
    assert np.array_equal(few, many[:50])
    assert np.ptp(np.bincount(many)) <= 1
    for max_rows in (50, 61):
        (layout,) = shard_slots([max_rows], [7], 3, by_person=False, rows_per_person=None)
        assert np.array_equal(shards_of_rows(silo, layout), few)


@pytest.mark.parametrize(
    ("privatise", "unit", "key"),
    [
        (Privatise.DP_OPTIMISATION, Unit.CLIENT, "privacy.unit"),
        (Privatise.VIRTUAL_CLIENTS, Unit.CLIENT, "privacy.unit"),
        (Privatise.DP_OPTIMISATION, Unit.PERSON, "data.unit"),
        (Privatise.VIRTUAL_CLIENTS, Unit.PERSON, "data.unit"),
    ],
)
def test_units_that_a_method_cannot_protect_are_refused(privatise, unit, key):
    budget = dataclasses.replace(BUDGET, unit=unit)
    with pytest.raises(InvalidInput) as caught:
        plan_for(MODEL, make_silos(), dataclasses.replace(PLAIN, privatise=privatise), budget)
    assert caught.value.key == key


@pytest.mark.parametrize("unit", [Unit.ROW, Unit.CLIENT])
@pytest.mark.parametrize("privatise", [Privatise.VIRTUAL_CLIENTS, Privatise.LOCAL_AVERAGING, Privatise.DP_OPTIMISATION])
def test_persons_are_refused_where_the_unit_is_not_person(privatise, unit):
    """Whole persons were dealt to shards and priced as rows: one substituted row moved two of them."""
    silos = [dataclasses.replace(silo, persons=np.arange(silo.num_rows) // 2) for silo in make_silos()]
    settings = dataclasses.replace(PLAIN, privatise=privatise, shards=4 if privatise in SHARDED else 1)
    with pytest.raises(InvalidInput) as caught:
        plan_for(MODEL, silos, settings, dataclasses.replace(BUDGET, unit=unit))
    assert caught.value.key == "silos.persons"


def test_fewer_rows_than_shards_are_refused():
    settings = dataclasses.replace(PLAIN, privatise=Privatise.VIRTUAL_CLIENTS, shards=81)
    with pytest.raises(InvalidInput) as caught:
        plan_for(MODEL, make_silos(), settings, BUDGET)
    assert caught.value.key == "protocol.shards"


def test_the_full_family_is_used_when_asked():
    posterior = Run(MODEL, make_silos(), dataclasses.replace(PLAIN, posterior=PosteriorKind.FULL)).finish().posterior
    assert isinstance(posterior.family, FullGaussian)
    assert posterior.family.is_proper(posterior.eta)


@pytest.mark.parametrize("committee", list(Committee))
def test_a_committee_multiplies_what_its_members_found(committee):
    """Linear regression: exact factors, so `same` counts the prior once and so does `split`."""
    silos = regression_silos((20, 30, 60))
    settings = {"kind": ProtocolKind.BCM, "posterior": PosteriorKind.FULL, "committee": committee}
    mean, covariance = answer(silos, model=REGRESSION, **settings)
    exact_mean, exact_covariance = exact_regression(silos)
    np.testing.assert_allclose(mean, exact_mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(covariance, exact_covariance, rtol=1e-5, atol=1e-5 * exact_covariance.max())


@pytest.mark.slow
def test_a_split_committee_of_logistic_regressions_uses_a_part_of_the_prior():
    """The members' own posteriors under prior^(1/3), multiplied."""
    silos = make_silos()
    settings = dataclasses.replace(PLAIN, kind=ProtocolKind.BCM, committee=Committee.SPLIT, steps=400)
    found = Run(MODEL, silos, settings).finish().state.eta_q
    wide = dataclasses.replace(MODEL, prior_stddev=MODEL.prior_stddev * 3**0.5)
    alone = dataclasses.replace(PLAIN, steps=400)
    members = [Run(wide, [silo], alone).finish().state.eta_q for silo in silos]
    for left, *rights in zip(jax.tree.leaves(found), *map(jax.tree.leaves, members), strict=True):
        np.testing.assert_allclose(left, np.sum(rights, axis=0), rtol=1e-4, atol=1e-3)


def test_global_vi_reaches_its_optimum_without_privacy():
    mean, stddev = answer(make_silos(OF_ONE_SHAPE), kind=ProtocolKind.GLOBAL_VI, rounds=3, steps=500)
    exact_mean, exact_stddev = global_vi_of_three()
    assert np.max(np.abs(mean - exact_mean) / exact_stddev) < 0.02
    np.testing.assert_allclose(stddev, exact_stddev, rtol=0.02)


class ExactDoor:
    """Lets the bounded sum out without noise: what a method does when privacy costs nothing."""

    def release(self, mechanism, bounded):
        return SimpleNamespace(blocks=bounded.decode(bounded.total))


def without_noise(query, num_silos: int):
    """The same query, of which the server knows that it has next to no noise."""
    return dataclasses.replace(query, mechanisms=(GaussianMechanism(noise_multiplier=1e-9),) * num_silos)


@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("privatise", [Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS])
def test_without_noise_and_clipping_shards_reach_the_exact_posterior_for_any_number_of_them(privatise, num_shards):
    """000 Theorem 7; the tolerance is that of the grid, 2^-17 of a ball that no change leaves."""
    silos = regression_silos((40, 60))
    settings = dataclasses.replace(
        PLAIN,
        privatise=privatise,
        shards=num_shards,
        rounds=40,
        damping=0.3,
        posterior=PosteriorKind.FULL,
        clip_norm=3e3,
    )
    run = Run(REGRESSION, silos, settings, BUDGET, doors=[ExactDoor(), ExactDoor()])
    server = run.plan.server
    server = dataclasses.replace(
        server,
        inner=dataclasses.replace(server.inner, averages=False),
        variances=np.full_like(server.variances, 2 * 1e-9**2),
    )
    use_plan(run, dataclasses.replace(run.plan, server=server))
    mean, covariance = run.finish().standard
    exact_mean, exact_covariance = exact_regression(silos)
    np.testing.assert_allclose(mean, exact_mean, atol=1e-3)
    np.testing.assert_allclose(covariance, exact_covariance, rtol=5e-3, atol=5e-3 * exact_covariance.max())


def test_statistics_without_noise_are_the_conjugate_posterior():
    rng = np.random.default_rng(3)
    x = rng.uniform(0, 1, size=(500, DIM))
    y = x @ np.array([0.3, -0.2, 0.1, 0.4]) + 0.05 * rng.normal(size=500)
    silos = [Silo(name="a", x=x[:200], y=y[:200]), Silo(name="b", x=x[200:], y=y[200:])]
    model = LinearRegression(num_features=DIM, noise_stddev=0.05)
    settings = dataclasses.replace(
        PLAIN, privatise=Privatise.SUFFICIENT_STATISTICS, x_bound=2.0, y_bound=1.0, posterior=PosteriorKind.FULL
    )
    run = Run(model, silos, settings, BUDGET, doors=[ExactDoor(), ExactDoor()])
    server = dataclasses.replace(run.plan.server, query=without_noise(run.plan.server.query, 2))
    use_plan(run, dataclasses.replace(run.plan, server=server))
    mean, covariance = run.finish().standard
    exact = np.linalg.inv(x.T @ x / 0.05**2 + np.eye(DIM))
    np.testing.assert_allclose(mean, exact @ x.T @ y / 0.05**2, atol=1e-3)
    np.testing.assert_allclose(covariance, exact, rtol=0.02, atol=0.02 * exact.max())


@pytest.mark.slow
def test_a_prior_that_is_not_gaussian_is_a_factor_of_its_own():
    """A Laplace prior on linear regression: two silos reach what one silo does."""
    import numpyro
    import numpyro.distributions as dist

    def shrunk(x, y=None):
        theta = numpyro.sample("theta", dist.Laplace(0.0, 0.3).expand([DIM]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ theta, NOISE), obs=y)

    (silo,) = regression_silos((60,))
    model = from_numpyro(shrunk, silo.x[0], silo.y[0])
    assert not model.prior_is_gaussian
    halves = [silo.take("a", np.arange(30)), silo.take("b", np.arange(30, 60))]
    settings = dataclasses.replace(PLAIN, rounds=20, damping=0.4, steps=150)
    answers = []
    for silos in ([silo], halves):
        run = Run(model, silos, settings).finish()
        factors = prior_and_factors(run, run.state.prior)
        for left, right in zip(jax.tree.leaves(run.state.eta_q), factors, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)
        answers.append(run.standard)
    assert np.max(np.abs(answers[0].mean - answers[1].mean) / answers[0].stddev) < 0.25
    np.testing.assert_allclose(answers[0].stddev, answers[1].stddev, rtol=0.15)


@pytest.mark.parametrize("weights", [np.ones(6), np.array([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])])
def test_the_answer_of_a_perturbing_method_knows_the_noise_of_its_releases(monkeypatch, weights):
    """Released noise, summed by hand over silos and visits, has the standard deviations that the posterior is told."""
    settings = dataclasses.replace(
        PLAIN, privatise=Privatise.LOCAL_AVERAGING, shards=4, rounds=6, damping=0.5, clip_norm=(2.0, 0.5)
    )
    plan = plan_for(MODEL, make_silos(), settings, BUDGET)
    told = {}
    monkeypatch.setattr(perturbed, "noise_aware", lambda eta, eta_p, **stds: told.update(stds) or eta)
    plan.server.usable(plan.server.inner.eta_p, plan.server.init(), weights)
    draws = np.random.default_rng(0).normal(size=(20_000, len(make_silos()), 6))
    # A silo's average over 4 shards, each clipped to the norm, times the damping.
    size = np.std((0.5 / 4 * plan.silos[0].query.mechanisms[0].noise_multiplier * draws * weights).sum(axis=(1, 2)))
    assert told["linear_std"] == pytest.approx(2.0 * size, rel=0.03)
    assert told["quadratic_std"] == pytest.approx(0.5 * size, rel=0.03)


def test_shards_are_in_proportion_and_a_row_weighs_the_same_in_every_silo():
    """With local averaging a small silo's shards are clipped as those of a large one."""
    silos = [concatenate("large", make_silos()), make_silos()[0]]
    settings = dataclasses.replace(PLAIN, privatise=Privatise.LOCAL_AVERAGING, shards=(12, 4), clip_norm=8.0)
    plan = plan_for(MODEL, silos, settings, BUDGET)
    assert [seat.layout.num_shards for seat in plan.seats] == [12, 4]
    # The norm of a shard's own change over the mean number of shards, wherever it is looked up.
    norms = plan.silos[0].ball.clip_norms, plan.server.ball.clip_norms, tuple(plan.server.init().norms)
    assert norms == ((1.0,),) * 3


def test_who_else_is_there_changes_nobodys_shard():
    """Persons dealt by order of appearance would all move when one of them is replaced."""
    ids = np.random.default_rng(0).integers(2**62, size=40)
    rows = np.repeat(ids, 3)
    silo = Silo(name="a", x=np.zeros((120, 1)), y=np.zeros(120), persons=rows)
    replaced = np.where(rows == ids[0], 7, rows)  # the first person is somebody else
    other = Silo(name="a", x=np.zeros((120, 1)), y=np.zeros(120), persons=replaced)
    (layout,) = shard_slots([120], [5], 3, by_person=True, rows_per_person=3)
    shards, shards_after = shards_of_rows(silo, layout), shards_of_rows(other, layout)
    assert np.array_equal(shards[3:], shards_after[3:])
    assert all(len(set(shards[rows == person])) == 1 for person in ids)
    assert set(shards) == set(range(5))


@pytest.mark.parametrize("rows_per_person", [None, 3])
def test_the_shapes_of_all_shards_follow_from_public_numbers(rows_per_person):
    """A person with many rows, another id, or nobody at all: other shards keep their shapes, and so their rounding."""

    def shapes(persons):
        silo = Silo(name="a", x=np.zeros((len(persons), 1)), y=np.zeros(len(persons)), persons=persons)
        other = Silo(name="b", x=np.zeros((60, 1)), y=np.zeros(60), persons=np.arange(60))
        layouts = shard_slots([60, 60], [6, 12], 0, by_person=True, rows_per_person=rows_per_person)
        laid_out = [own.lay_out([one], [own]) for one, own in zip((silo, other), layouts, strict=True)]
        return [(own.shape, rows.x.shape) for own, rows in zip(layouts, laid_out, strict=True)]

    usual = shapes(np.arange(60) // 2)
    assert shapes(np.zeros(60, dtype=int)) == usual
    assert shapes(np.where(np.arange(60) < 50, 7, np.arange(60))) == usual
    assert shapes(np.arange(11)) == usual


def test_shards_of_persons_have_room_for_nearly_all_rows():
    """Persons of one to eight rows, dealt by chance: fewer than one row in a thousand is left out."""
    rng = np.random.default_rng(0)
    persons = np.repeat(np.arange(4000), rng.integers(1, 9, size=4000))
    silo = Silo(name="a", x=np.zeros((len(persons), 1)), y=np.zeros(len(persons)), persons=persons)
    for num_shards in (10, 300, len(persons) // 4, len(persons)):
        (layout,) = shard_slots([len(persons)], [num_shards], 0, by_person=True, rows_per_person=None)
        kept = int(layout.lay_out([silo], [layout]).present.sum())
        assert kept >= 0.999 * len(persons)


NETWORK = BinaryMLP(num_features=3, hidden=(8,))


@pytest.mark.parametrize("privatise", [Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS])
def test_a_networks_first_factors_make_q_its_start(privatise):
    silos = make_exclusive_or((30, 60))
    settings = dataclasses.replace(PLAIN, privatise=privatise, clip_norm=(1.0, 0.1), shards=(3, 6))
    run = Run(NETWORK, silos, settings, BUDGET)
    eta_q, inner = run.state.pvi.eta_q, run.plan.server.inner
    for left, right in zip(prior_and_factors(run, inner.eta_p), jax.tree.leaves(eta_q), strict=True):
        np.testing.assert_allclose(left, right)
    start = NETWORK.start_eta(inner.local.family, jax.random.key(0))
    np.testing.assert_allclose(eta_q.linear, start.linear, rtol=1e-6)
    np.testing.assert_allclose(eta_q.quadratic, start.quadratic, rtol=1e-6)


@pytest.mark.parametrize("privatise", [Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS])
def test_perturbed_networks_learn_what_no_line_separates(privatise):
    """Exclusive or, with a budget so large that noise is no matter: 60 visits are steps of gradient ascent."""
    silos = make_exclusive_or((300, 300))
    norms = {Privatise.VIRTUAL_CLIENTS: (2.0, 0.05), Privatise.LOCAL_AVERAGING: (600.0, 15.0)}[privatise]
    protocol = {"rounds": 60, "damping": 0.4, "shards": 300, "clip_norm": norms}
    budget = dataclasses.replace(BUDGET, epsilon=500.0)
    mean, _ = answer(silos, model=NETWORK, doors=open_doors(2), budget=budget, privatise=privatise, **protocol)
    whole = concatenate("all", silos)
    right = (NETWORK.predict(mean, whole.x)[:, 1] > 0.5) == whole.y
    assert right.mean() > 0.95


def make_exclusive_or(sizes) -> list[Silo]:
    rng = np.random.default_rng(8)
    silos = []
    for k, size in enumerate(sizes):
        x = np.concatenate([rng.choice([-1.0, 1.0], size=(size, 2)), np.ones((size, 1))], axis=1)
        silos.append(Silo(name=str(k), x=x, y=(x[:, 0] * x[:, 1] > 0).astype(np.int32)))
    return silos
