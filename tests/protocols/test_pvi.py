"""PVI against closed forms and its own invariants; solves are exact here, so nothing hides behind an optimiser."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.families import FullGaussian, FullGaussianEta, MeanFieldGaussian
from silobayes.inference.layouts import RowSlots
from silobayes.inference.solvers import LocalOptimum, Refit
from silobayes.models.linear_regression import LinearRegression
from silobayes.privacy.queries import OpenSum, Total
from silobayes.protocols import pvi
from silobayes.protocols.etas import precision_floor, to_host
from silobayes.protocols.roles import Seat
from silobayes.protocols.schedule import Schedule, numbered, visits

DIM, NOISE, PRIOR_STDDEV = 3, 0.5, 2.0
FULL = FullGaussian(dimension=DIM)
FIELD = MeanFieldGaussian(event_shape=(DIM,))
LOCAL = LocalOptimum(
    model=LinearRegression(num_features=DIM, noise_stddev=NOISE, prior_stddev=PRIOR_STDDEV),
    family=FULL,
    floor=1e-3,
    num_steps=1,
    step_size=np.float32(1.0),  # type: ignore[arg-type]
)

# What a silo's new factor is: (silo, cavity) -> factor.
Find = Callable[[int, FullGaussianEta], FullGaussianEta]


def prior() -> FullGaussianEta:
    return to_host(FullGaussianEta(linear=np.zeros(DIM), quadratic=-0.5 * np.eye(DIM) / PRIOR_STDDEV**2))


def regression(num_silos: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(int(rng.integers(5, 30)), DIM)) for _ in range(num_silos)]
    return [(rows, rows @ np.array([1.0, -2.0, 0.5]) + NOISE * rng.normal(size=len(rows))) for rows in x]


def factor(x, y) -> FullGaussianEta:
    return FullGaussianEta(linear=x.T @ y / NOISE**2, quadratic=-0.5 * x.T @ x / NOISE**2)


def made_visits(schedule: Schedule, num_silos: int, num_rounds: int, seed: int):
    chosen = 2 if schedule is Schedule.SAMPLED else None
    known: dict[str, Any] = {"num_silos": num_silos, "num_rounds": num_rounds, "silos_per_round": chosen}
    return numbered(visits(schedule, **known, seed=seed))


def states(schedule, num_silos, find: Find, *, num_rounds, damping, seed=1) -> Iterator[tuple[Any, list[Any]]]:
    """The server's state and the silos' factors before the first visit and after each, one silo after the other."""
    steps = made_visits(schedule, num_silos, num_rounds, seed)
    silo = pvi.PVISilo(solve=Refit(local=LOCAL), damping=damping, query=OpenSum())
    server = pvi.PVIServer(
        local=LOCAL,
        query=OpenSum(),
        names=tuple("abc"),
        eta_p=prior(),
        first_start=None,
        damping=damping,
        seed=0,
        num_visits=len(steps),
        averages=False,
        is_private=False,
    )
    seats = [Seat(index=m, size=1, layout=RowSlots(slots=1)) for m in range(num_silos)]
    state, owns = server.init(), [silo.init(seat) for seat in seats]
    yield state, owns
    for visit in steps:
        down = server.down(state, visit)
        found = {m: find(m, down.eta_q - owns[m].eta_t) for m in visit.silos}
        replies = {m: silo.reply(None, seats[m], owns[m], down, found[m]) for m in visit.silos}
        payload = np.sum([message.payload for _, message in replies.values()], axis=0)
        merged = server.merge(state, visit, Total(payload=payload, members=visit.silos))
        assert merged.counted
        state, owns = merged.state, [replies[m][0] if m in replies else own for m, own in enumerate(owns)]
        yield state, owns


def etas(schedule, data, *, num_rounds, damping) -> list[FullGaussianEta]:
    """Every q on the way, for a conjugate model: factors are likelihoods, whatever the cavity is."""
    factors = [factor(x, y) for x, y in data]
    made = states(schedule, len(data), lambda m, _: factors[m], num_rounds=num_rounds, damping=damping)
    return [state.eta_q for state, _ in made]


def exact_posterior(data) -> FullGaussianEta:
    return factor(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data])) + prior()


def assert_close(a, b, rtol):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * np.abs(right).max())


@pytest.mark.parametrize("num_silos", [1, 2, 7, 40])
def test_for_conjugate_models_one_synchronous_undamped_pass_is_the_exact_posterior(num_silos):
    data = regression(num_silos)
    assert_close(etas(Schedule.SYNCHRONOUS, data, num_rounds=1, damping=1.0)[-1], exact_posterior(data), 1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_schedule_converges_to_the_exact_posterior_of_a_conjugate_model(schedule):
    data = regression(4)
    assert_close(etas(schedule, data, num_rounds=120, damping=0.5)[-1], exact_posterior(data), 1e-6)


def test_one_sequential_pass_is_streaming_vb():
    data = regression(5)
    history = etas(Schedule.SEQUENTIAL, data, num_rounds=1, damping=1.0)
    assert_close(history[-1], exact_posterior(data), 1e-12)
    assert_close(history[2], factor(*data[0]) + factor(*data[1]) + prior(), 1e-12)


@given(
    schedule=st.sampled_from(list(Schedule)),
    damping=st.floats(0.05, 1.0),
    num_silos=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_eta_q_is_the_prior_plus_the_sum_of_factors_after_every_visit(schedule, damping, num_silos, seed):
    """For any solver whatever: the identity is one of the protocol, not of the optimum."""
    rng = np.random.default_rng(seed)

    def find(silo, eta_cavity):
        return jax.tree.map(lambda value: value + 10 * rng.normal(size=value.shape), eta_cavity)

    made = states(schedule, num_silos, find, num_rounds=3, damping=damping, seed=seed)
    for number, (state, owns) in enumerate(made):
        total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *(own.eta_t for own in owns))
        assert_close(state.eta_q, prior() + total, 1e-12)
        assert (state.num_visits, state.num_counted) == (number, number)
    assert number == len(made_visits(schedule, num_silos, 3, seed))


def test_permuting_silos_changes_nothing():
    data = regression(6)
    order = np.random.default_rng(2).permutation(6)
    ordered, permuted = (
        etas(Schedule.SYNCHRONOUS, own, num_rounds=3, damping=0.3)[-1] for own in (data, [data[k] for k in order])
    )
    assert_close(ordered, permuted, 1e-12)


def test_a_usable_posterior_is_proper_and_leaves_the_raw_sum_alone():
    eta_p = to_host(FIELD.from_standard(mean=np.zeros(DIM), stddev=np.full(DIM, 2.0)))
    floor = precision_floor(eta_p)
    assert floor == pytest.approx(0.5 * 0.25)
    raw = eta_p - 3.0 * eta_p
    assert not FIELD.is_proper(raw)
    proper = pvi.usable(FIELD, raw, floor)
    assert FIELD.is_proper(proper)
    np.testing.assert_allclose(-2 * np.asarray(proper.quadratic), floor, rtol=1e-6)
    assert_close(pvi.usable(FIELD, eta_p, floor), eta_p, 1e-6)
