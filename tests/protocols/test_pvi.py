"""PVI against closed forms and its own invariants; solves are exact here, so nothing hides behind an optimiser."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian
from silobayes.protocols import pvi
from silobayes.protocols.schedule import Schedule, visits

DIM, NOISE, PRIOR_STDDEV = 3, 0.5, 2.0
FULL = FullGaussian(dimension=DIM)
FIELD = MeanFieldGaussian(event_shape=(DIM,))


def prior() -> FullGaussianEta:
    return pvi.to_host(FullGaussianEta(linear=np.zeros(DIM), quadratic=-0.5 * np.eye(DIM) / PRIOR_STDDEV**2))


def regression(num_clients: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(int(rng.integers(5, 30)), DIM)) for _ in range(num_clients)]
    return [(rows, rows @ np.array([1.0, -2.0, 0.5]) + NOISE * rng.normal(size=len(rows))) for rows in x]


def factor(x, y) -> FullGaussianEta:
    return FullGaussianEta(linear=x.T @ y / NOISE**2, quadratic=-0.5 * x.T @ x / NOISE**2)


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def exact_refit(data):
    """The factors of a conjugate model, whatever the cavity is: the likelihoods."""
    factors = stacked([factor(x, y) for x, y in data])
    return lambda eta_cavity, eta_q: factors


def run(schedule, data, *, num_rounds, damping, order=None):
    """Steps one client at a time except under synchronous schedules; returns server, clients and every q on the way."""
    num_clients = len(data)
    server, clients = pvi.init_server(prior()), pvi.init_clients(FULL, num_clients)
    history = [server.eta_q]
    steps = visits(
        schedule,
        num_clients=num_clients,
        num_rounds=num_rounds,
        clients_per_round=2 if schedule is Schedule.SAMPLED else None,
        seed=1,
    )
    for visit in steps:
        at = list(visit.clients) if order is None else [order[m] for m in visit.clients]
        down = pvi.Broadcast(eta_q=history[max(0, len(history) - 1 - visit.lag)])
        chosen = jax.tree.map(lambda leaf, at=at: leaf[at], clients)
        new, ups = pvi.client_step(chosen, down, exact_refit([data[m] for m in at]), damping=damping)
        for leaf, fresh in zip(jax.tree.leaves(clients), jax.tree.leaves(new), strict=True):
            leaf[at] = fresh
        server = pvi.server_step(server, pvi.plain_sum(ups))
        history.append(server.eta_q)
    return server, clients, history


def exact_posterior(data) -> FullGaussianEta:
    return factor(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data])) + prior()


def assert_close(a, b, rtol):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * np.abs(right).max())


@pytest.mark.parametrize("num_clients", [1, 2, 7, 40])
def test_for_conjugate_models_one_synchronous_undamped_pass_is_the_exact_posterior(num_clients):
    data = regression(num_clients)
    server, _, _ = run(Schedule.SYNCHRONOUS, data, num_rounds=1, damping=1.0)
    assert_close(server.eta_q, exact_posterior(data), 1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_schedule_converges_to_the_exact_posterior_of_a_conjugate_model(schedule):
    data = regression(4)
    server, _, _ = run(schedule, data, num_rounds=120, damping=0.5)
    assert_close(server.eta_q, exact_posterior(data), 1e-6)


def test_one_sequential_pass_is_streaming_vb():
    data = regression(5)
    server, _, history = run(Schedule.SEQUENTIAL, data, num_rounds=1, damping=1.0)
    assert_close(server.eta_q, exact_posterior(data), 1e-12)
    assert_close(history[2], factor(*data[0]) + factor(*data[1]) + prior(), 1e-12)


@given(
    schedule=st.sampled_from(list(Schedule)),
    damping=st.floats(0.05, 1.0),
    num_clients=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_eta_q_is_the_prior_plus_the_sum_of_factors_after_every_step(schedule, damping, num_clients, seed):
    """For any solver whatever: the identity is one of the protocol, not of the optimum."""
    rng = np.random.default_rng(seed)
    eta_p = prior()
    server, clients = pvi.init_server(eta_p), pvi.init_clients(FULL, num_clients)
    history = [server.eta_q]
    steps = visits(
        schedule,
        num_clients=num_clients,
        num_rounds=3,
        clients_per_round=2 if schedule is Schedule.SAMPLED else None,
        seed=seed,
    )
    for visit in steps:
        at = list(visit.clients)
        chosen = jax.tree.map(lambda leaf, at=at: leaf[at], clients)
        down = pvi.Broadcast(eta_q=history[max(0, len(history) - 1 - visit.lag)])

        def refit(eta_cavity, eta_q):
            return jax.tree.map(lambda value: value + 10 * rng.normal(size=value.shape), eta_cavity)

        new, ups = pvi.client_step(chosen, down, refit, damping=damping)
        for leaf, fresh in zip(jax.tree.leaves(clients), jax.tree.leaves(new), strict=True):
            leaf[at] = fresh
        server = pvi.server_step(server, pvi.plain_sum(ups))
        history.append(server.eta_q)
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0), clients.eta_t)
        assert_close(server.eta_q, eta_p + total, 1e-12)
    assert server.round_index == len(steps)


def test_permuting_clients_changes_nothing():
    data = regression(6)
    server, _, _ = run(Schedule.SYNCHRONOUS, data, num_rounds=3, damping=0.3)
    order = np.random.default_rng(2).permutation(6)
    permuted, _, _ = run(Schedule.SYNCHRONOUS, [data[k] for k in order], num_rounds=3, damping=0.3)
    assert_close(server.eta_q, permuted.eta_q, 1e-12)


def test_a_usable_posterior_is_proper_and_leaves_the_raw_sum_alone():
    eta_p = pvi.to_host(FIELD.from_standard(mean=np.zeros(DIM), stddev=np.full(DIM, 2.0)))
    floor = pvi.precision_floor(eta_p)
    assert floor == pytest.approx(0.5 * 0.25)
    raw = eta_p - 3.0 * eta_p
    assert not FIELD.is_proper(raw)
    proper = pvi.usable(FIELD, raw, floor)
    assert FIELD.is_proper(proper)
    np.testing.assert_allclose(-2 * np.asarray(proper.quadratic), floor, rtol=1e-6)
    assert_close(pvi.usable(FIELD, eta_p, floor), eta_p, 1e-6)
