"""`silobayes privacy price|calibrate|profile`: the accountant as a calculator (DESIGN 8).

FILE holds `{"relation": "substitute", "events": [{"mechanism": "gaussian", "clip_norm": 1.0, "std": 4.0, ...}]}`;
`-` reads standard input. Everything that is wrong with it raises `InvalidInput`, which main.py turns into one line.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from silobayes.core.digits import round_down, round_up
from silobayes.core.errors import InvalidInput, refuse_unknown_keys, require_count, require_member, require_number

if TYPE_CHECKING:
    from silobayes.privacy.events import AbstractEvent
    from silobayes.privacy.relation import Relation

_ACCOUNTANTS = ("pld", "rdp", "moments", "advanced", "optimal", "basic")
_NOISE_KEYS = ("std", "scale", "gamma")
_PLOT_POINTS = 201

_file = click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
_delta = click.option("--delta", type=float, required=True, help="The delta of the guarantee.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


@click.group()
def privacy() -> None:
    """The accountant as a calculator."""


@privacy.command()
@_file
@_delta
@click.option("--accountant", type=click.Choice(_ACCOUNTANTS), default="pld", show_default=True)
@_as_json
def price(file: Path, delta: float, accountant: str, as_json: bool) -> None:
    """The epsilon that the events in FILE cost at --delta."""
    from silobayes.privacy import accounting

    relation, events = _complete_events(_read(file))
    found = accounting.price(events, relation=relation, delta=delta, accountant=accountant)
    _require_finite(found.epsilon, delta)
    answer = {
        "epsilon": found.epsilon,
        "epsilon_lower": found.epsilon_lower,
        "delta": found.delta,
        "relation": found.relation.value,
        "accountant": found.accountant,
    }
    _print(answer, as_json, title=f"Price of {len(events)} event{'s' * (len(events) > 1)}")


@privacy.command()
@_file
@click.option("--epsilon", type=float, required=True, help="The epsilon that may be spent.")
@_delta
@_as_json
def calibrate(file: Path, epsilon: float, delta: float, as_json: bool) -> None:
    """The least noise with which the event in FILE costs at most --epsilon at --delta.

    FILE holds one event and leaves out its noise: `std`, for laplace `scale`, for randomised_response `gamma`.
    """
    from silobayes.privacy import accounting

    relation, items = _read(file)
    if len(items) != 1:
        raise InvalidInput("events", "exactly one event", len(items), "Calibrate one event at a time.")
    key, with_noise = _without_noise(items[0])
    event = accounting.calibrate(with_noise, relation=relation, epsilon=epsilon, delta=delta)
    spent = accounting.price([event], relation=relation, delta=delta).epsilon
    _print({key: getattr(event, key), "epsilon": spent}, as_json, title=f"Least noise at epsilon {epsilon:g}")


@privacy.command()
@_file
@click.option("--epsilon-max", type=float, help="Largest epsilon; by default where delta has fallen to 1e-10.")
@click.option("--points", type=int, default=21, show_default=True, help="Number of epsilons.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw delta(epsilon) into this picture file.")
@_as_json
def profile(file: Path, epsilon_max: float | None, points: int, plot: Path | None, as_json: bool) -> None:
    """The delta that the events in FILE cost at every epsilon."""
    import numpy as np

    from silobayes.privacy import accounting

    relation, events = _complete_events(_read(file))
    require_count("points", points, at_least=2, fix="Pass the number of rows of the table.")
    if epsilon_max is None:
        epsilon_max = accounting.price(events, relation=relation, delta=1e-10).epsilon
        if not 0.0 < epsilon_max < math.inf:
            fix = "Pass --epsilon-max: delta does not fall to 1e-10 within any epsilon above 0."
            raise InvalidInput("epsilon-max", "a number > 0", None, fix)
    require_number("epsilon-max", epsilon_max, above=0.0, fix="Pass the largest epsilon of interest.")

    def deltas(epsilons: np.ndarray) -> np.ndarray:
        return accounting.profile(events, relation=relation, epsilons=epsilons.tolist())

    epsilons = np.linspace(0.0, epsilon_max, points)
    answer = {"epsilon": epsilons.tolist(), "delta": deltas(epsilons).tolist(), "relation": relation.value}
    if plot is not None:
        dense = np.linspace(0.0, epsilon_max, _PLOT_POINTS)
        _draw(plot, dense, deltas(dense), relation)
    if as_json:
        click.echo(json.dumps(answer, allow_nan=False))
    else:
        rows = [[_digits(value) for value in answer[key]] for key in ("epsilon", "delta")]
        _print_table(f"Privacy profile ({relation.value})", *rows, heading=("epsilon", "delta"))


def _read(file: Path) -> "tuple[Relation, list[Mapping[str, Any]]]":
    """Relation and raw events of FILE."""
    from silobayes.privacy.relation import Relation

    data = _load(file)
    if not isinstance(data, Mapping):
        raise InvalidInput("file", "a JSON object", data, 'Write {"relation": "substitute", "events": [...]}.')
    refuse_unknown_keys(data, ["relation", "events"], "the file")
    relation = require_member("relation", data.get("relation"), Relation, 'Add "relation": there is no default.')
    items = data.get("events")
    if not isinstance(items, list) or not items:
        raise InvalidInput("events", "a list of at least one event", items, 'Write [{"mechanism": "gaussian", ...}].')
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidInput(f"events[{index}]", "an object", item, 'Write {"mechanism": "gaussian", ...}.')
    return relation, items


def _load(file: Path) -> object:
    """The JSON value of FILE: strict, because a number read wrongly is a guarantee given wrongly.

    NaN and Infinity are read, so that the check of the field they stand in can refuse them by its name.
    """

    def no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise InvalidInput(key, "each key once", f"{key!r} twice", "Remove one of the two.")
        return dict(pairs)

    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("file", "a readable UTF-8 file", str(file), f"It could not be read: {error}.") from error
    try:
        return json.loads(text, object_pairs_hook=no_repeats)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput("file", "valid JSON", str(file), f"It could not be parsed: {error}.") from error


def _complete_events(
    content: "tuple[Relation, list[Mapping[str, Any]]]",
) -> "tuple[Relation, list[AbstractEvent]]":
    relation, items = content
    return relation, [_event(item, index) for index, item in enumerate(items)]


def _event(item: Mapping[str, Any], index: int) -> "AbstractEvent":
    from silobayes.privacy.events import from_json

    try:
        return from_json(item)
    except InvalidInput as error:
        error.args = (f"events[{index}].{error}",)  # in a long file the key alone does not say where
        raise


def _without_noise(item: Mapping[str, Any]) -> "tuple[str, Callable[[float], AbstractEvent]]":
    """The noise key that `item` leaves out, which the reader itself names, and the event as a function of it."""
    try:
        _event(item, 0)
    except InvalidInput as error:
        key = error.key
        if key not in _NOISE_KEYS or key in item:
            raise
    else:
        fix = f"Remove the one that is to be found: {', '.join(_NOISE_KEYS)}."
        raise InvalidInput("events[0]", "an event without its noise", dict(item), fix)
    _event({**item, key: 1.0}, 0)  # so that any other mistake is named before the search
    return key, lambda noise: _event({**item, key: noise}, 0)


def _require_finite(epsilon: float, delta: float) -> None:
    if not math.isfinite(epsilon):
        fix = "The events fail openly more often than that, or hide nothing: raise delta or the noise."
        raise InvalidInput("delta", "a delta at which the events have a finite epsilon", delta, fix)


def _print(answer: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        click.echo(json.dumps(answer, allow_nan=False))
        return
    _print_table(title, list(answer), [_digits(value, down=key.endswith("_lower")) for key, value in answer.items()])


def _digits(value: object, down: bool = False) -> str:
    if not isinstance(value, float):
        return str(value)
    return round_down(value) if down else round_up(value)


def _print_table(title: str, left: list[str], right: list[str], heading: tuple[str, str] | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*(heading or ("", "")), title=title, title_justify="left", show_header=heading is not None)
    for row in zip(left, right, strict=True):
        table.add_row(*row)
    Console().print(table)


def _draw(path: Path, epsilons: Any, deltas: Any, relation: "Relation") -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(
        xlabel="epsilon", ylabel="delta", yscale="log", title=f"Privacy profile ({relation.value})"
    )
    axes.plot(epsilons[deltas > 0.0], deltas[deltas > 0.0])
    axes.grid(visible=True, which="both", alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidInput("plot", "a writable .png, .pdf or .svg file", str(path), f"It failed: {error}.") from error
