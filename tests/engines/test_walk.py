"""No room is called by a lower one during a visit."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import pytest

import silobayes
from tests.engines.centred_cases import CENTRED
from tests.engines.walk import room_ranks, upward_calls, walk
from tests.oracle.cases import CASES, NOISE_SEED

QUICK = ("dp_optimisation", "virtual_clients, masks")
# One of each method, of each way to run its visits and of each start before the rounds.
WALKED = (
    "none",
    "none, masks, softmax",
    "dp_optimisation, asynchronous, poisson",
    "parameter_perturbation, sharing, client",
    "local_averaging",
    "network, local_averaging",
    "quantile, virtual_clients",
    "sufficient_statistics",
    "hybrid",
    "bcm, same",
    "bcm, split, private",
    "global_vi",
    "global_vi, private",
    "global_vi, private, sharing",
    "streaming_vb, private",
    "linreg",
    "linreg, sharing",
    "linreg, input_perturbation",
    "centred, masks, person",
    "centred, softmax",
    "centred, poisson",
    "centred, unknown noise",
)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in WALKED)])
def test_no_room_is_called_by_a_lower_one_during_a_visit(name, tmp_path):
    (case,) = (case for case in (*CASES, *CENTRED) if case.name == name)

    def run(progress: Callable[[Any], None]) -> None:
        jax.clear_caches()  # what was compiled before would be called unseen
        silobayes.fit(case.study, case.silos, out=tmp_path / "run", noise_seed=NOISE_SEED, progress=progress)

    assert upward_calls(run) == []


def function_of(module: str, source: str, **known: Any) -> Any:
    """The function of a module that does not exist."""
    names = {"__name__": f"silobayes.{module}", **known}
    exec(source, names)
    return next(value for name, value in names.items() if inspect.isfunction(value) and name not in known)


def test_a_callback_is_seen_through_other_packages_and_a_call_downward_is_none():
    down = function_of("core.fake", "def act(): return [2, 1]")
    callback = function_of("engines.fake", "def act(number): return down()[number]", down=down)
    sort = "def act(): return sorted([0, 1], key=key)"  # the standard library calls the key
    protocol = function_of("protocols.fake", sort, key=callback)
    visit = function_of("engines.loop", "def make_visit(): protocol()", protocol=protocol)

    def run(progress: Callable[[Any], None]) -> None:
        function_of("core.fake", "def act(): callback(0)", callback=callback)()  # before the first visit
        visit()
        progress(None)
        function_of("core.fake", "def act(): callback(0)", callback=callback)()  # after the last visit

    assert walk(run) == [
        ("engines.loop.make_visit", "protocols.fake.act"),
        ("protocols.fake.act", "engines.fake.act"),
        ("engines.fake.act", "core.fake.act"),
    ]
    assert upward_calls(run) == [("protocols.fake.act", "engines.fake.act")]


def test_a_room_that_is_not_in_the_house_is_refused():
    lost = function_of("attic.fake", "def act(): pass")
    visit = function_of("engines.loop", "def make_visit(): lost()", lost=lost)
    with pytest.raises(AssertionError, match="attic"):
        upward_calls(lambda progress: visit())


def test_a_run_without_a_visit_is_refused():
    with pytest.raises(AssertionError, match="called nothing"):
        upward_calls(lambda progress: None)


def test_rooms_are_ranked_as_they_import():
    ranks = room_ranks()
    order = ["core", "secure", "privacy", "inference", "posteriors", "protocols", "studies", "plans", "engines", "cli"]
    assert [ranks[room] for room in order] == sorted({ranks[room] for room in order})
