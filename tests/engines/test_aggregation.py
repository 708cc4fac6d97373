"""Methods over sums: one result for every kind of sum, the noise that was priced, closed forms, runs and refusals."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo
from silobayes.engines.local import resume, run
from silobayes.models.linear_regression import LinearRegression
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.plans.aggregation import sum_of
from silobayes.privacy.accounting import price
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.events import SkellamEvent
from silobayes.privacy.ledger import Budget
from silobayes.privacy.mechanisms import SkellamMechanism
from silobayes.privacy.queries import PrivateSum, Total
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.ball import no_change
from silobayes.protocols.bcm import Committee
from silobayes.protocols.etas import to_host
from silobayes.protocols.perturbed import PerturbedServer
from silobayes.protocols.schedule import Schedule
from silobayes.secure.sums import AbstractSum, SumAborted
from silobayes.study import AggregationKind, AggregationSection, PosteriorKind
from silobayes.testing import FreeAccount
from tests.engines import test_local as local
from tests.engines.cases import make_silos
from tests.engines.harness import Privatise, ProtocolKind, Run, Settings
from tests.engines.regression import PLAIN, REGRESSION, exact_regression, regression_silos

SUMS = [kind for kind in AggregationKind if kind is not AggregationKind.NONE]
FEATURES, NUM_CLIENTS, NUM_ROWS = 3, 4, 40
LOGISTIC = LogisticRegression(num_features=FEATURES)
LINEAR = LinearRegression(num_features=FEATURES, noise_stddev=0.5)
BASE = Settings(privatise=Privatise.NONE, rounds=3, damping=0.5, steps=5, step_size=0.1, clip_norm=0.3, sample_rate=0.3)


def changed(**changes) -> Settings:
    return dataclasses.replace(BASE, **changes)


METHODS = {
    "local_averaging": changed(privatise=Privatise.LOCAL_AVERAGING, shards=4),
    "virtual_clients": changed(privatise=Privatise.VIRTUAL_CLIENTS, shards=4, clip_norm=(0.3, 0.1)),
    "parameter_perturbation": changed(privatise=Privatise.PARAMETER_PERTURBATION, posterior=PosteriorKind.FULL),
    "client level": changed(privatise=Privatise.PARAMETER_PERTURBATION),
    "dp_optimisation": changed(privatise=Privatise.DP_OPTIMISATION),
    "global_vi": changed(kind=ProtocolKind.GLOBAL_VI, privatise=Privatise.DP_OPTIMISATION),
    "bcm, same": changed(kind=ProtocolKind.BCM, privatise=Privatise.DP_OPTIMISATION, rounds=1),
    "bcm, split": changed(
        kind=ProtocolKind.BCM, privatise=Privatise.DP_OPTIMISATION, rounds=1, committee=Committee.SPLIT
    ),
    "sufficient_statistics": changed(privatise=Privatise.SUFFICIENT_STATISTICS, rounds=1),
    "sampled": changed(
        privatise=Privatise.VIRTUAL_CLIENTS, shards=4, schedule=Schedule.SAMPLED, clients_per_round=3, rounds=4
    ),
    "none": changed(),
    "none, bcm": changed(kind=ProtocolKind.BCM, rounds=1),
}


def silos(num_clients: int = NUM_CLIENTS) -> list[Silo]:
    rng = np.random.default_rng(1)
    return [
        Silo(name=str(m), x=rng.normal(size=(NUM_ROWS, FEATURES)), y=rng.integers(2, size=NUM_ROWS))
        for m in range(num_clients)
    ]


def unit_of(name: str) -> Unit:
    return Unit.CLIENT if name == "client level" else Unit.ROW


def budget_of(name: str) -> Budget | None:
    if METHODS[name].privatise == Privatise.NONE:
        return None
    return Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=unit_of(name))


def build(name: str, kind: AggregationKind, colluding: int | None = 1, noise_seed: int = 0) -> Run:
    """Noise of a silo depends on its number alone, so that it is the same over every kind of sum."""
    settings = dataclasses.replace(METHODS[name], aggregation=AggregationSection(kind=kind, colluding=colluding))
    model = LINEAR if settings.privatise == Privatise.SUFFICIENT_STATISTICS else LOGISTIC
    budget = budget_of(name)
    doors = [] if budget is None else fixed_doors(NUM_CLIENTS, budget.unit, noise_seed)
    return Run(model, silos(), settings, budget, doors=doors)


@functools.cache
def finished(name: str, kind: AggregationKind, colluding: int | None = 1) -> Run:
    return build(name, kind, colluding).finish()


def fixed_doors(count: int, unit: Unit, seed: int = 0) -> list[Door]:
    account = FreeAccount(Relation.SUBSTITUTE, unit)
    return [Door(account, FreshDraws(Entropy.not_private(100 * seed + k))) for k in range(count)]


def shared_query(run: Run) -> PrivateSum:
    query = run.plan.silos[0].query
    assert isinstance(query, PrivateSum)
    return query


def secure_sum(run: Run, kind: AggregationKind, colluding: int = 1) -> AbstractSum:
    query, section = run.plan.silos[0].query, AggregationSection(kind=kind, colluding=colluding)
    return sum_of(section, query, len(run.plan.seats), "0" * 64)


# What another committee, and silos that refit without privacy, do too.
SLOW = {"bcm, split", "none, bcm"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in METHODS]
)
def test_the_total_is_the_same_with_every_kind_of_sum(name):
    """Bit for bit, server and silos, when the noise is."""
    first, *others = (finished(name, kind) for kind in SUMS)
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(first.state)])).all()
    for other in others:
        every = [jax.tree.leaves((run.state, run.parties.states)) for run in (first, other)]
        for left, right in zip(*every, strict=True):
            assert np.array_equal(left, right)


@pytest.mark.parametrize("name", ["local_averaging", "global_vi"])
def test_other_noise_gives_another_total(name):
    """Otherwise the comparison above could not fail."""
    results = []
    for seed in range(2):
        state = build(name, AggregationKind.TRUSTED, noise_seed=seed).step().state
        eta_q = to_host(state.point.to_eta()) if name == "global_vi" else state.pvi.eta_q
        results.append(eta_q.linear)
    assert not np.array_equal(*results)


@pytest.mark.parametrize("name", ["dp_optimisation", "bcm, same", "none"])
def test_messages_that_are_private_already_are_only_rounded(name):
    """Against no sum at all: a message moves by half a cell of 2^-16, and later rounds answer to the moved q."""
    summed = finished(name, AggregationKind.SECRET_SHARING).state.eta_q
    plain = finished(name, AggregationKind.NONE, None).state.eta_q
    for left, right in zip(jax.tree.leaves(summed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dp_optimisation", "none"])
def test_q_stays_the_prior_times_the_factors(name):
    run = finished(name, AggregationKind.SECRET_SHARING)
    factors = [state.eta_t for state in run.parties.states]
    total = run.plan.server.eta_p + jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *factors)
    for left, right in zip(jax.tree.leaves(run.state.eta_q), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


CONJUGATE = [
    *((kind, shards) for kind in (Privatise.LOCAL_AVERAGING, Privatise.VIRTUAL_CLIENTS) for shards in (1, 3, 8)),
    (Privatise.PARAMETER_PERTURBATION, 1),
]


def quieted(run: Run) -> Run:
    """The same run with next to no noise, and the last q for the answer."""
    (silo,), server = run.plan.silos, run.plan.server
    assert isinstance(server, PerturbedServer)
    quiet = tuple(SkellamMechanism(noise_multiplier=1e-12, num_shares=2) for _ in run.plan.seats)
    query = dataclasses.replace(shared_query(run), mechanisms=quiet)
    server = dataclasses.replace(
        server,
        query=query,
        inner=dataclasses.replace(server.inner, averages=False),
        variances=np.full(len(run.plan.visits), 3 * 1e-24 / 2),
    )
    silo = dataclasses.replace(silo, query=query)  # type: ignore[type-var]
    run.plan = run.parties.plan = dataclasses.replace(run.plan, silos=(silo,), server=server)
    return run


@pytest.mark.parametrize(("privatise", "num_shards"), CONJUGATE)
def test_inside_a_sum_shards_reach_the_exact_posterior_for_any_number_of_them(privatise, num_shards):
    """000 Theorem 7 with a factor per shard (SPEC 3), as the noise goes to zero; parameter perturbation: client level.

    The tolerance is that of the grid, 2^-17 of a ball that no change leaves. Rows are many, so that every cavity is
    proper: a shard that stands for its silo must not know more than all silos together.
    """
    unit = Unit.CLIENT if privatise == Privatise.PARAMETER_PERTURBATION else Unit.ROW
    rows = regression_silos((200, 300, 250))
    settings = dataclasses.replace(
        PLAIN,
        privatise=privatise,
        shards=num_shards,
        rounds=40,
        damping=0.3,
        posterior=PosteriorKind.FULL,
        clip_norm=2e4,
        aggregation=AggregationSection(kind=AggregationKind.SECRET_SHARING, compute_nodes=2),
    )
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=unit)
    run = quieted(Run(REGRESSION, rows, settings, budget, doors=fixed_doors(3, unit))).finish()
    mean, covariance = run.standard
    exact_mean, exact_covariance = exact_regression(rows)
    np.testing.assert_allclose(mean, exact_mean, atol=1e-3)
    np.testing.assert_allclose(covariance, exact_covariance, rtol=5e-3, atol=5e-3 * exact_covariance.max())


FALSE_ALARM = 1e-6


@pytest.mark.parametrize(("num_clients", "colluding"), [(4, 0), (6, 3)])
def test_the_noise_in_a_sum_has_the_priced_variance_of_its_honest_shares(num_clients, colluding):
    """Sums of zeros: variance std^2 M / (M - T - 1); chi-square, a false alarm in 10^6 runs; fixed keys."""
    settings = dataclasses.replace(
        METHODS["virtual_clients"],
        clip_norm=0.3,
        aggregation=AggregationSection(kind=AggregationKind.SECRET_SHARING, colluding=colluding),
    )
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    run = Run(LOGISTIC, silos(num_clients), settings, budget)
    ((event,),) = {run.plan.events(silo, 1) for silo in range(num_clients)}
    (silo,), query = run.plan.silos, shared_query(run)
    doors, everybody = fixed_doors(num_clients, Unit.ROW), tuple(range(num_clients))
    zeros = no_change(silo.ball, silo.solve.local.family)
    sums, answers = secure_sum(run, AggregationKind.SECRET_SHARING, colluding), []
    for number in range(300):
        payloads = {m: query.write(doors[m], m, zeros).payload for m in everybody}
        answers.append(query.read(Total(payload=sums.total(payloads, sum_index=number), members=everybody)))
    values = np.concatenate([answer.value for answer in answers])
    expected = event.std * np.sqrt(num_clients / (num_clients - colluding - 1))
    assert answers[0].stddevs == pytest.approx((expected,))
    assert query.event(0) == event
    assert set(doors[0].account.charged) == {event}

    def p_value(stddev: float) -> float:
        statistic = np.sum((values / stddev) ** 2)
        return 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))

    assert p_value(expected) > FALSE_ALARM
    for wrong in (2 / 3, 3 / 2):
        assert p_value(wrong * expected) < FALSE_ALARM


@pytest.mark.parametrize("name", ["local_averaging", "global_vi", "sufficient_statistics", "client level", "sampled"])
def test_every_silo_pays_for_the_whole_sum_within_the_budget(name):
    run, budget = finished(name, AggregationKind.PAIRWISE_MASKS), budget_of(name)
    epsilons = []
    for events in run.plan.total_events:
        assert all(isinstance(event, SkellamEvent) for event in events)
        if events:
            epsilons.append(price(events, relation=budget.relation, delta=budget.delta).epsilon)
    assert 0.97 < max(epsilons) <= 1.0


class Listening(AbstractSum):
    """Hears who is in which sum."""

    def __init__(self, inner: AbstractSum) -> None:
        self.inner, self.heard = inner, []

    def total(self, vectors, *, sum_index, among=None):
        self.heard.append((tuple(vectors), tuple(among)))
        return self.inner.total(vectors, sum_index=sum_index, among=among)

    @property
    def messages_per_client(self) -> int:
        return self.inner.messages_per_client

    def bytes_per_client(self, dimension: int) -> int:
        return self.inner.bytes_per_client(dimension)


def test_a_sampled_sum_is_sized_for_those_who_are_in_it_and_they_keep_their_numbers():
    """Three of four silos a round, one of which may collude: the noise of one silo alone must do."""
    run = build("sampled", AggregationKind.PAIRWISE_MASKS)
    assert all(len(visit.silos) == 3 for visit in run.plan.visits)
    assert {mechanism.num_shares for mechanism in shared_query(run).mechanisms} == {1}
    listening = run.parties._sums[0] = Listening(secure_sum(run, AggregationKind.PAIRWISE_MASKS))
    before = list(run.parties.states)
    for visit in run.plan.visits:
        run.step()
        for m in range(NUM_CLIENTS):
            stays = np.array_equal(run.parties.states[m].eta_t.linear, before[m].eta_t.linear)
            assert stays == (m not in visit.silos)
        before = list(run.parties.states)
    assert listening.heard == [(visit.silos, visit.silos) for visit in run.plan.visits]
    assert len(set(listening.heard)) > 1


@pytest.mark.parametrize("kind", SUMS)
def test_below_the_floor_nothing_is_decoded(kind):
    sums = secure_sum(finished("local_averaging", kind), kind)
    counts = {m: np.ones(6, dtype=np.int64) for m in range(NUM_CLIENTS)}
    assert sums.total({m: counts[m] for m in (0, 2, 3)}, sum_index=0).tolist() == [3] * 6
    with pytest.raises(SumAborted):
        sums.total({m: counts[m] for m in (0, 2)}, sum_index=1)


RUNS = {
    "local_averaging": {"privatise": "local_averaging", "rounds": 4, "steps": 10, "shards": 5},
    "global_vi": {"kind": "global_vi", "rounds": 4, "steps": 3, "sample_rate": 0.3},
    "dp_optimisation": {"privatise": "dp_optimisation", "rounds": 4, "steps": 10, "sample_rate": 0.3},
    "client level": {"unit": "client", "rounds": 4, "steps": 10},
    "none": {"mode": "none", "rounds": 4, "steps": 10},
}


def make_inputs(name: str, kind: str, **aggregation):
    rows = make_silos((80, 100, 120, 90))
    return local.make_inputs(silos=rows, aggregation={"kind": kind, "colluding": 1, **aggregation}, **RUNS[name])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("local_averaging", "secret_sharing"),
        ("global_vi", "pairwise_masks"),
        pytest.param("dp_optimisation", "secret_sharing", marks=pytest.mark.slow),
        pytest.param("client level", "pairwise_masks", marks=pytest.mark.slow),
        pytest.param("none", "secret_sharing", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_over_sums_ends_where_an_uninterrupted_one_does_and_charges_once(name, kind, tmp_path):
    inputs = make_inputs(name, kind)
    whole = run(inputs, tmp_path / "whole")
    out = tmp_path / "stopped"
    with pytest.raises(local.Stop):
        run(inputs, out, local.stop_after(1))
    with pytest.raises(local.Stop):
        resume(inputs, out, local.stop_after(3))
    assert local.same(resume(inputs, out), whole)
    assert (out / "trace.jsonl").read_text() == (tmp_path / "whole" / "trace.jsonl").read_text()
    assert local.charges(out) == ([] if name == "none" else [1, 1, 1, 1])


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory) -> Path:
    """The directory of a finished run with pairwise masks."""
    out = tmp_path_factory.mktemp("masks") / "run"
    run(make_inputs("local_averaging", "pairwise_masks"), out)
    return out


def test_the_certificate_says_who_adds_up_and_with_which_noise(masked_run, tmp_path):
    seen = {}
    run(make_inputs("dp_optimisation", "trusted"), tmp_path / "run")
    for kind, out in (("pairwise_masks", masked_run), ("trusted", tmp_path / "run")):
        seen[kind] = json.loads((out / "certificate.json").read_text())
        assert seen[kind]["aggregation"] == {"kind": kind, "colluding": 1}
    assert seen["pairwise_masks"]["noise"] == "Skellam on a grid, in shares of the silos"
    assert seen["trusted"]["noise"].startswith("float32 Gaussian")
    for silo in seen["pairwise_masks"]["silos"]:
        (event,) = silo["events"]
        assert (event["mechanism"], event["count"]) == ("skellam", 4)
        assert 0.97 < silo["epsilon"] <= 1.0


def test_messages_and_bytes_follow_the_aggregator(masked_run, tmp_path):
    """Eight numbers of eight bytes down; up what this kind of sum sends. 4 rounds, 4 silos."""
    sent = {}
    for kind, extra in (
        ("trusted", {}),
        ("secret_sharing", {"compute_nodes": 2}),
        ("secret_sharing", {"compute_nodes": 5}),
        ("pairwise_masks", {}),
    ):
        out = masked_run if kind == "pairwise_masks" else tmp_path / f"{kind}{extra}"
        if kind != "pairwise_masks":
            run(make_inputs("local_averaging", kind, **extra), out)
        found = json.loads((out / "metrics.json").read_text())["communications"]
        answers = {"trusted": 1, "pairwise_masks": 3}.get(kind, extra.get("compute_nodes"))
        assert (found["rounds"], found["messages"]) == (4, 16 * (1 + answers))
        sent[kind, *extra.values()] = found["bytes"] / 16 - 64
    assert sent["trusted",] == 64
    assert sent["secret_sharing", 5] / 5 == sent["secret_sharing", 2] / 2
    assert sent["secret_sharing", 2] / 2 % 8 == 0  # so many bytes a number
    assert sent["pairwise_masks",] > sent["secret_sharing", 2] / 2 + 3 * 100


BAD = {
    "as many colluders as leave one silo": ("aggregation.colluding", {"colluding": 3}, {}),
    "half of the silos with masks": ("aggregation.colluding", {"kind": "pairwise_masks", "colluding": 2}, {}),
    "more than are visited": (
        "aggregation.colluding",
        {"colluding": 2},
        {"schedule": "sampled", "clients_per_round": 3},
    ),
    "one after the other": ("protocol.schedule", {}, {"schedule": "sequential"}),
    "answers to old broadcasts": ("protocol.schedule", {}, {"schedule": "asynchronous"}),
    "a pass of streaming_vb": ("protocol.schedule", {}, {"kind": "streaming_vb"}),
    "global_vi without privacy": ("aggregation.kind", {}, {"kind": "global_vi", "mode": "none"}),
    "batches of a fixed size": ("protocol.sampler", {}, {"kind": "global_vi", "sampler": "without_replacement"}),
    "silos as units without a sum": ("privacy.unit", {"kind": "none", "colluding": None}, {"unit": "client"}),
    "silos as units of steps": ("privacy.unit", {}, {"unit": "client", "privatise": "dp_optimisation"}),
    "silos as units of shards": ("privacy.unit", {}, {"unit": "client", "privatise": "virtual_clients"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_sum_cannot_do_is_refused_before_anything_is_spent(case, tmp_path):
    key, aggregation, protocol = BAD[case]
    section = {"kind": "secret_sharing", "colluding": 1, **aggregation}
    section = {key: value for key, value in section.items() if value is not None}
    inputs = local.make_inputs(silos=make_silos((80, 100, 120, 90)), aggregation=section, rounds=1, **protocol)
    with pytest.raises(InvalidInput) as refusal:
        run(inputs, tmp_path / "run")
    assert refusal.value.key == key
    assert not (tmp_path / "run").exists()
