"""The walk of a visit through the house: which room calls which, as it happens.

An import contract sees imports only. A room may still be handed a function of a higher room and call it: then one has
to read both at once to know what happens. Such calls are found here, by a profiler, also through JAX's transformations.
"""

import inspect
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

Call = tuple[str, str]
Run = Callable[[Callable[[Any], None]], Any]

_PACKAGE = "silobayes."
# What a visit begins with.
_VISIT = "engines.loop.make_visit"


def upward_calls(run: Run) -> list[Call]:
    """The (caller, callee) of each call in which a lower room calls a function of a higher one; see `walk`."""
    ranks = room_ranks()
    return [(caller, callee) for caller, callee in walk(run) if ranks[_room(callee)] > ranks[_room(caller)]]


def walk(run: Run) -> list[Call]:
    """All different (caller, callee) between two rooms during the visits of a run, in the order of their first time.

    Args:
        run: Runs a study on this machine. It takes the function that `silobayes.fit(progress=...)` is to call after
            each visit.

    Returns:
        Names are those in the source, without the package: `protocols.pvi.client_step`. Frames of other packages
        are left out, so that a function that is compiled or mapped counts as called by who had it compiled. What
        comes before the first visit (planning, payment) and after the last one is left out too, and so is what runs in
        other threads.
    """
    ranks = room_ranks()
    told: dict[Call, None] = {}
    pending: dict[Call, None] = {}
    is_open = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_open
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(_PACKAGE) or not _is_function(frame):
            return
        is_open = is_open or _name(frame) == _VISIT
        caller = _nearest_caller(frame)
        if not is_open or caller is None:
            return
        names = (_name(caller), _name(frame))
        rooms = tuple(_room(name) for name in names)
        assert all(room in ranks for room in rooms), f"rooms without a place in the house: {rooms}"
        if rooms[0] != rooms[1]:
            pending[names] = None

    def progress(_: Any) -> None:
        told.update(pending)
        pending.clear()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run(progress)
    finally:
        sys.setprofile(before)
    assert told, "the run called nothing between its first visit and its last one"
    return list(told)


@cache
def room_ranks() -> dict[str, int]:
    """Room -> how high it is in the house, as the import contract has it."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {
        room.strip(" ()").removeprefix(_PACKAGE): rank
        for rank, floor in enumerate(reversed(layers))
        for room in floor.replace(":", "|").split("|")
    }


def _is_function(frame: FrameType) -> bool:
    """Not the body of a class or module, and not a generator, which hands over values that somebody asked for."""
    flags = frame.f_code.co_flags
    return bool(flags & inspect.CO_OPTIMIZED) and not flags & inspect.CO_GENERATOR


def _nearest_caller(frame: FrameType) -> FrameType | None:
    """The nearest frame of a room that led to this one."""
    caller = frame.f_back
    while caller is not None and not caller.f_globals.get("__name__", "").startswith(_PACKAGE):
        caller = caller.f_back
    return caller


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__'].removeprefix(_PACKAGE)}.{frame.f_code.co_qualname}"


def _room(name: str) -> str:
    return name.split(".", 1)[0]
