"""Clip norms through the door: one visit for the norms, then the perturbing method in units of them."""

import dataclasses
import json

import numpy as np
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.engines.local import resume, run
from silobayes.plans.rules import PublicFacts, settings_of
from silobayes.privacy import accounting
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.queries import Message
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols import clip_norms
from silobayes.protocols.ball import no_change
from silobayes.protocols.clip_norms import QuantileServer
from silobayes.protocols.perturbed import AbstractPerturbingSilo
from silobayes.protocols.schedule import Schedule
from silobayes.report.build import write_report
from silobayes.report.run_files import read_run
from silobayes.report.verification import verify
from silobayes.study import AggregationKind, AggregationSection, PosteriorKind
from silobayes.testing import FreeAccount, PrivacyViolation
from tests.engines.cases import MODEL, make_silos, make_study
from tests.engines.gate import calibrated_once
from tests.engines.harness import Privatise, Run, Settings, plan_for
from tests.engines.regression import ExactDoor
from tests.engines.test_local import Stop, charges, make_inputs, same, stop_after
from tests.engines.test_record_replay import Case

__all__ = ["calibrated_once"]  # a fixture

# So few shards that only a large budget finds a quantile of their norms.
LARGE = Budget(epsilon=3000.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
SUM = AggregationSection(kind=AggregationKind.TRUSTED)
COMMON = {"damping": 0.5, "steps": 8, "step_size": 0.1, "clip_quantile": 0.5, "first_share": 0.5}
SETTINGS = {
    "virtual_clients": Settings(
        privatise=Privatise.VIRTUAL_CLIENTS, rounds=4, clip_norm=(0.3, 0.1), shards=4, **COMMON
    ),
    "local_averaging": Settings(
        privatise=Privatise.LOCAL_AVERAGING, rounds=4, clip_norm=(1.0, 0.3), shards=4, **COMMON
    ),
    "local_averaging, full": Settings(
        privatise=Privatise.LOCAL_AVERAGING,
        rounds=3,
        clip_norm=(1.0, 0.3),
        shards=4,
        posterior=PosteriorKind.FULL,
        **COMMON,
    ),
    "parameter_perturbation": Settings(
        privatise=Privatise.PARAMETER_PERTURBATION, rounds=3, clip_norm=(2.0, 1.0), **COMMON
    ),
    "local_averaging, network": Settings(
        privatise=Privatise.LOCAL_AVERAGING, rounds=3, clip_norm=(2.0, 0.5), shards=4, **COMMON
    ),
}
SETTINGS |= {
    f"{name}, summed": dataclasses.replace(settings, aggregation=SUM) for name, settings in list(SETTINGS.items())
}
METHODS = ["virtual_clients", "local_averaging", "parameter_perturbation"]


def build(name: str, silos, budget: Budget = LARGE, doors=(), **change) -> Run:
    run = Run(MODEL, silos, dataclasses.replace(SETTINGS[name], **change), budget, doors=doors)
    assert isinstance(run.plan.server, QuantileServer)
    return run


def rounds_of(run: Run) -> AbstractPerturbingSilo:
    """The silo's role once norms are chosen."""
    _, silo = run.plan.silos
    assert isinstance(silo, AbstractPerturbingSilo)
    return silo


def doors_of(budget: Budget, count: int) -> list[Door]:
    return [Door(FreeAccount(budget.relation, budget.unit), FreshDraws(Entropy.not_private(k))) for k in range(count)]


def with_persons(silos):
    return [dataclasses.replace(silo, persons=np.arange(silo.num_rows)) for silo in silos]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *((name, unit) for name in SETTINGS for unit in (Unit.ROW, Unit.PERSON)),
        ("parameter_perturbation, summed", Unit.CLIENT),
    ],
)
def test_the_counts_get_their_share_and_the_whole_keeps_the_budget(name, unit):
    budget = dataclasses.replace(LARGE, unit=unit)
    silos = with_persons(make_silos()) if unit is Unit.PERSON else make_silos()
    plan = build(name, silos, budget, first_share=0.3).plan
    known = {"relation": budget.relation, "delta": budget.delta}
    for total in plan.total_events:
        counts, changes = total
        assert changes.count == len(plan.visits) - 1
        assert 0.99 * 900 < accounting.price([counts], **known).epsilon <= 900
        assert 0.99 * 3000 < accounting.price(total, **known).epsilon <= 3000


def test_an_ordinary_budget_is_kept_too():
    """At epsilon 1, a tenth of it for the norms of 6,000 shards."""
    budget = dataclasses.replace(LARGE, epsilon=1.0)
    silos = make_silos((2000, 2000, 2000))
    for aggregation in (AggregationSection(), SUM):
        plan = build("virtual_clients", silos, budget, first_share=0.1, shards=2000, aggregation=aggregation).plan
        (counts, changes) = plan.total_events[0]
        known = {"relation": budget.relation, "delta": budget.delta}
        assert 0.099 < accounting.price([counts], **known).epsilon <= 0.1
        assert 0.99 < accounting.price([counts, changes], **known).epsilon <= 1.0
        own = {"clip_quantile": None, "shards": 2000, "aggregation": aggregation}
        alone = plan_for(MODEL, silos, dataclasses.replace(SETTINGS["virtual_clients"], **own), budget)
        (changes_alone,) = alone.total_events[0]
        assert changes_alone.std < changes.std < 1.02 * changes_alone.std  # what is left is nearly all


@pytest.mark.parametrize("name", [*METHODS, *(f"{name}, summed" for name in METHODS)])
def test_a_client_pays_for_its_counts_once_and_for_each_later_visit(name):
    doors = doors_of(LARGE, 3)
    run = build(name, make_silos(), doors=doors)
    assert run.plan.events(1, 0) == ()
    for visits in range(1, len(run.plan.visits) + 1):
        run.step()
        paid = run.plan.events(1, visits)
        charged = doors[1].account.charged
        assert charged[0] == paid[0]
        assert len(charged) == sum(event.count for event in paid) == visits
        assert all(dataclasses.replace(paid[1], count=1) == event for event in charged[1:])


def test_the_price_does_not_depend_on_the_norms_that_are_chosen():
    """What the door charges follows from what is written to it."""
    doors = doors_of(LARGE, 1)
    run = build("local_averaging", make_silos())
    silo, down = rounds_of(run), run.plan.server.down(run.state, run.plan.visits[1])
    for norms in ([1e-6, 3.0], [0.1, 1e5]):
        ball = silo.ball_at(dataclasses.replace(down, norms=np.array(norms)))
        assert ball.clip_norms == tuple(norms)
        silo.query.write(doors[0], 0, no_change(ball, silo.solve.local.family))
        assert doors[0].account.charged.pop() == silo.query.event(0)


def first_norms(silos) -> np.ndarray:
    """Norms of the two parts of each shard's share of the change at the prior, from the formula for one row a shard."""
    norms = []
    for silo in silos:
        variances = (silo.x.astype(float) ** 2 @ np.full(silo.x.shape[1], MODEL.prior_stddev**2)).astype(np.float32)
        score, bend = MODEL.expected_derivatives(np.zeros(silo.num_rows, np.float32), variances, silo.y)
        linear = np.abs(np.asarray(score)) * np.linalg.norm(silo.x, axis=1)
        quadratic = 0.5 * np.abs(np.asarray(bend)) * np.linalg.norm(silo.x**2, axis=1)
        norms.append(np.stack([linear, quadratic]))
    return np.concatenate(norms, axis=1)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("name", ["virtual_clients", "local_averaging"])
def test_without_noise_the_norms_are_the_quantile_of_the_first_changes_within_a_step(name, quantile):
    """Shards are single rows; a row's part of its silo's average is its own factor, however large the silo."""
    silos = make_silos((80, 80, 80))
    run = build(name, silos, doors=[ExactDoor()] * 3, clip_quantile=quantile, shards=80).step()
    exact = np.quantile(first_norms(silos), quantile, axis=1, method="inverted_cdf")
    ratio = run.state.norms * max(1.0, 0.5 * 4 / 2) / exact
    assert np.all(ratio >= 1.0 - 1e-4)
    assert np.all(ratio <= np.sqrt(2.0) + 1e-4)
    # In units of protocol.clip_norm, a norm of the whole silo's change where shards are averaged.
    unit = 80.0 if name == "local_averaging" else 1.0
    for told in (run.plan.server.info(run.state), run.plan.server.facts(run.state)):
        np.testing.assert_allclose(told["released"]["clip_norms"], unit * run.state.norms)


@pytest.mark.parametrize("name", [*METHODS, "virtual_clients, summed"])
def test_q_is_where_it_starts_until_the_norms_are_chosen_and_then_moves_within_them(name):
    run = build(name, make_silos((40, 40, 40)), doors=doors_of(LARGE, 3))
    silo, eta_p = rounds_of(run), run.plan.server.then.inner.eta_p
    assert tuple(run.state.norms) == silo.ball.clip_norms
    np.testing.assert_allclose(run.plan.server.per_silo * run.state.norms, SETTINGS[name].clip_norms)
    state = run.step().state
    assert np.array_equal(state.pvi.eta_q.linear, eta_p.linear)
    assert np.array_equal(state.pvi.eta_q.quadratic, eta_p.quadratic)
    norms = state.norms
    assert not np.array_equal(norms, silo.ball.clip_norms)
    assert silo.ball_at(run.plan.server.down(state, run.plan.visits[1])).clip_norms == tuple(norms.tolist())
    after = run.step().state
    assert np.array_equal(after.norms, norms)
    moved = after.pvi.eta_q - state.pvi.eta_q
    noise = 6 * max(mechanism.noise_multiplier for mechanism in silo.query.mechanisms) * np.sqrt(3 * 8)
    assert 0 < np.linalg.norm(moved.linear) <= 0.5 * (silo.total_shards + noise) * norms[0]
    assert 0 < np.linalg.norm(moved.quadratic) <= 0.5 * (silo.total_shards + noise) * norms[1]


def test_the_answer_knows_the_noise_of_the_chosen_norms():
    """The reading of q is that of a method with these norms, from one visit less."""
    doors = doors_of(LARGE, 3)
    run = build("virtual_clients", make_silos((40, 40, 40)), dataclasses.replace(LARGE, epsilon=200.0), doors).finish()
    server, state = run.plan.server, run.state
    assert state.pvi.num_visits == len(run.plan.visits) - 1 == 4
    expected = server.then.usable(state.pvi.eta_q, state, np.ones(4))
    assert np.array_equal(server.info(state)["eta"]["linear"], expected.linear)
    louder = dataclasses.replace(state, norms=2 * state.norms)
    twice = server.then.usable(state.pvi.eta_q, louder, np.ones(4))
    assert not np.array_equal(twice.linear, expected.linear)


@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.ASYNCHRONOUS, Schedule.SAMPLED])
def test_all_silos_are_asked_first_whatever_the_schedule(schedule):
    change = {"schedule": schedule, "clients_per_round": 2 if schedule is Schedule.SAMPLED else None}
    if schedule is Schedule.SAMPLED:
        change |= {"aggregation": SUM}
    doors = doors_of(LARGE, 3)
    run = build("virtual_clients", make_silos((40, 40, 40)), doors=doors, **change)
    assert run.plan.visits[0].silos == (0, 1, 2)
    run.finish()
    for door, events in zip(doors, run.plan.total_events, strict=True):
        assert len(door.account.charged) == sum(event.count for event in events)


@pytest.mark.parametrize(
    ("key", "epsilon", "change"),
    [
        ("protocol.clip_norm", 1.0, {}),  # twelve shards
        ("protocol.clip_norm", 3000.0, {"clip_quantile": 0.01}),
        ("protocol.clip_norm", 3000.0, {"clip_norm": 1.0}),
        ("protocol.clip_norm", 3000.0, {"scales": (1.0, 0.5)}),
        ("protocol.clip_quantile", 3000.0, {"clip_quantile": 1.0}),
        ("protocol.clip_quantile", 3000.0, {"clip_quantile": 0.0}),
        ("protocol.clip_quantile", 3000.0, {"clip_quantile": float("nan")}),
        ("protocol.schedule", 3000.0, {"schedule": Schedule.SEQUENTIAL, "aggregation": SUM}),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_its_name(key, epsilon, change):
    with pytest.raises(InvalidInput) as caught:
        build("virtual_clients", make_silos(), dataclasses.replace(LARGE, epsilon=epsilon), **change)
    assert caught.value.key == key


def test_nothing_is_charged_for_a_quantile_that_noise_would_hide(tmp_path):
    inputs = make_inputs(privatise="virtual_clients", clip_norm="quantile", shards=4)
    with pytest.raises(InvalidInput) as caught:
        run(inputs, tmp_path / "run")
    assert caught.value.key == "protocol.clip_norm"
    assert not (tmp_path / "run").exists()


def test_the_rule_gives_the_middle_of_the_grid_and_a_tenth_of_epsilon():
    facts = PublicFacts.of(MODEL, [silo.num_rows for silo in make_silos()])
    rule = settings_of(make_study(privatise="virtual_clients"), facts)
    chosen = settings_of(make_study(privatise="virtual_clients", clip_norm="quantile"), facts)
    assert rule.clip_quantile is None
    assert (chosen.clip_norm, chosen.clip_quantile, chosen.first_share) == (rule.clip_norm, 0.5, 0.1)
    own = {"clip_norm": "quantile", "clip_quantile": 0.8, "first_share": 0.2}
    chosen = settings_of(make_study(privatise="local_averaging", **own), facts)
    assert (chosen.clip_quantile, chosen.first_share) == (0.8, 0.2)


# Record and replay: bugs that the gate (test_record_replay) must catch.

GATE = Case("quantile, virtual_clients")


@pytest.mark.usefixtures("calibrated_once")
def test_norms_of_counts_without_their_noise_are_caught(monkeypatch):
    """Planted: the norms follow from what was not released."""

    def exact(self, door, seat, own, down, found):
        state, _ = right_reply(self, door, seat, own, down, found)
        parts = self.then.ball_at(down).flatten(self.then.change(seat, own, found))
        counts = clip_norms.bounded_counts(parts, clip_norms.grids_of(self.then.ball), self.then.ball.unit)
        whole = np.concatenate(counts.decode(counts.total))
        return state, Message(payload=whole, value=whole)

    right_reply = clip_norms.CountingSilo.reply
    monkeypatch.setattr(clip_norms.CountingSilo, "reply", exact)
    with pytest.raises(PrivacyViolation, match="public"):
        GATE.check(Relation.SUBSTITUTE, 40)


@pytest.mark.usefixtures("calibrated_once")
def test_norms_in_units_of_the_silos_own_mean_are_caught(monkeypatch):
    """Planted: a scale that all rows of a silo decide, so that one of them moves every shard's count."""

    def relative(part, grid):
        norms = np.linalg.norm(part, axis=1)
        mean = np.mean(norms[np.isfinite(norms)]) if len(part) else 1.0
        return right_counts(part * grid[len(grid) // 2] / mean, grid)

    right_counts = clip_norms._one_hot
    monkeypatch.setattr(clip_norms, "_one_hot", relative)
    with pytest.raises(PrivacyViolation, match="Release 0"):
        GATE.check(Relation.SUBSTITUTE, 40)


@pytest.mark.usefixtures("calibrated_once")
def test_counts_priced_as_if_a_shard_vanished_with_its_row_are_caught(monkeypatch):
    """Planted: under add_remove a shard that loses a row stays and goes to another bin, which moves two counts."""

    def unsharded(parts, grids, unit):
        hot = [clip_norms.non_negative(clip_norms._one_hot(*one)) for one in zip(parts, grids, strict=True)]
        return clip_norms.clip_blocks(hot, [1.0, 1.0], unit=unit, sharded=False)

    monkeypatch.setattr(clip_norms, "bounded_counts", unsharded)
    with pytest.raises(PrivacyViolation, match="Release 0"):
        GATE.check(Relation.ADD_REMOVE, 40)


# A whole run.

PROTOCOL = {"privatise": "virtual_clients", "clip_norm": "quantile", "rounds": 3, "first_share": 0.3, "epsilon": 20.0}


@pytest.mark.parametrize(
    "change", [{}, {"privatise": "local_averaging"}, {"aggregation": {"kind": "secret_sharing"}}], ids=str
)
def test_a_run_that_is_resumed_after_the_first_visit_ends_where_an_uninterrupted_one_does(change, tmp_path):
    inputs = make_inputs(**{**PROTOCOL, **change})
    whole = run(inputs, tmp_path / "whole")
    for step in (1, 2):
        out = tmp_path / f"stopped-{step}"
        with pytest.raises(Stop):
            run(inputs, out, stop_after(step))
        assert same(resume(inputs, out), whole)
        assert (out / "trace.jsonl").read_text() == (tmp_path / "whole" / "trace.jsonl").read_text()
        assert charges(out) == [2, 2, 2]


def test_a_finished_run_says_which_norms_were_released_and_can_be_verified(tmp_path):
    run(make_inputs(noise_seed=None, **PROTOCOL), tmp_path / "run")
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    norms = certificate["released"]["clip_norms"]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms)
    trace = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert [line["released"]["clip_norms"] for line in trace] == [norms] * 4
    assert 19.8 < certificate["epsilon"] <= 20.0
    for path in (tmp_path / "run" / "ledgers").glob("*.ledger"):
        assert [entry.event.count for entry in Ledger.open(path).entries()] == [1, 3]
    checked = verify(read_run(tmp_path / "run"))
    assert checked.passed
    assert "4 released, 4 paid" in {check.detail for check in checked.checks}
    assert "released.clip_norms" in write_report(tmp_path / "run")["html"].read_text()
