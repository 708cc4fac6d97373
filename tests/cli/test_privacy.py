"""`silobayes privacy`: the surface of DESIGN 8, and what bad input gets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from silobayes.cli import main as main_module
from silobayes.cli.main import main
from silobayes.cli.privacy import _digits
from silobayes.core.errors import BudgetExceeded
from silobayes.privacy import accounting
from silobayes.privacy.events import GaussianEvent, Relation, from_json

GAUSSIAN = {"mechanism": "gaussian", "clip_norm": 1.0, "std": 4.0}
SAMPLED = GAUSSIAN | {"terms": "general", "sampling": {"scheme": "poisson", "rate": 0.01}, "count": 1000}
VIPS = {
    "mechanism": "gaussian",
    "sensitivity": 1.0,
    "std": 1.0,
    "count": 100,
    "sampling": {"scheme": "without_replacement", "rate": 0.004},
}


def content(*events: dict, relation: str = "substitute") -> str:
    return json.dumps({"relation": relation, "events": list(events)})


def run(text: str, *arguments: str) -> Result:
    """`silobayes privacy COMMAND - ...` with `text` as standard input."""
    command, *options = arguments
    return CliRunner().invoke(main, ["privacy", command, "-", *options], input=text)


def answer(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_price_prints_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text(content(SAMPLED))
    found = answer(CliRunner().invoke(main, ["privacy", "price", str(path), "--delta", "1e-5", "--json"]))
    assert list(found) == ["epsilon", "epsilon_lower", "delta", "relation", "accountant"]
    expected = accounting.price([from_json(SAMPLED)], relation=Relation.SUBSTITUTE, delta=1e-5)
    assert found["epsilon"] == expected.epsilon
    assert 0.0 < found["epsilon_lower"] <= found["epsilon"] < 0.57
    assert (found["delta"], found["relation"], found["accountant"]) == (1e-5, "substitute", "pld")
    assert answer(run(path.read_text(), "price", "--delta", "1e-5", "--json")) == found


def test_every_accountant_answers_and_none_is_below_pld() -> None:
    text = content(SAMPLED, GAUSSIAN | {"std": 20.0})
    found = {
        name: answer(run(text, "price", "--delta", "1e-5", "--json", "--accountant", name))
        for name in ("pld", "rdp", "moments", "advanced", "optimal", "basic")
    }
    assert all(found[name]["accountant"] == name for name in found)
    epsilons = {name: row["epsilon"] for name, row in found.items()}
    assert epsilons["pld"] < epsilons["rdp"] < epsilons["moments"] < epsilons["optimal"] <= epsilons["advanced"]
    assert epsilons["advanced"] <= epsilons["basic"]


@pytest.mark.parametrize(("std", "published"), [(1.0, 0.816), (6.0, 0.0520), (12.0, 0.0258)])
def test_moments_accountant_prints_the_published_epsilon_of_vips(std: float, published: float) -> None:
    result = run(content(VIPS | {"std": std}), "price", "--delta", "1e-3", "--accountant", "moments", "--json")
    assert answer(result)["epsilon"] == pytest.approx(published, rel=2e-3)


def test_the_relation_decides() -> None:
    substitute = answer(run(content(GAUSSIAN), "price", "--delta", "1e-5", "--json"))["epsilon"]
    add_remove = answer(run(content(GAUSSIAN, relation="add_remove"), "price", "--delta", "1e-5", "--json"))["epsilon"]
    assert substitute == pytest.approx(1.9930914044151198, rel=1e-8)
    assert add_remove < 0.6 * substitute


def test_human_output_is_a_table_rounded_up() -> None:
    result = run(content(GAUSSIAN), "price", "--delta", "1e-5")
    assert result.exit_code == 0
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines()]
    assert ["epsilon", "1.9931"] in cells
    assert ["relation", "substitute"] in cells
    assert _digits(1.00000001) == "1.00001"
    assert _digits(1.99999999, down=True) == "1.99999"
    assert _digits(1e-5) == "1e-05"


@pytest.mark.parametrize(
    ("event", "key"),
    [
        ({"mechanism": "gaussian", "clip_norm": 1.0, "count": 10}, "std"),
        ({"mechanism": "discrete_gaussian", "clip_norm": 5.0, "grid": 0.5}, "std"),
        ({"mechanism": "laplace", "clip_norm": 1.0, "count": 3}, "scale"),
        ({"mechanism": "randomised_response", "categories": 4, "count": 2}, "gamma"),
    ],
)
def test_calibrate_finds_the_noise_that_is_left_out(event: dict, key: str) -> None:
    found = answer(run(content(event), "calibrate", "--epsilon", "1.5", "--delta", "1e-5", "--json"))
    assert list(found) == [key, "epsilon"]
    assert 1.49 < found["epsilon"] <= 1.5
    priced = answer(run(content(event | {key: found[key]}), "price", "--delta", "1e-5", "--json"))
    assert priced["epsilon"] == found["epsilon"]
    dearer = answer(run(content(event | {key: 0.99 * found[key]}), "price", "--delta", "1e-5", "--json"))
    assert dearer["epsilon"] > 1.5


@pytest.mark.parametrize("key", ["count", "clip_norm"])
def test_numbers_beyond_all_floats_are_refused(key: str) -> None:
    text = content(GAUSSIAN | {key: 10**400})
    refused(run(text, "price", "--delta", "1e-5"), key)
    refused(run(text, "profile"), key)


def test_calibrate_refuses_what_leaves_nothing_to_find() -> None:
    options = ("calibrate", "--epsilon", "1", "--delta", "1e-5")
    bare = {"mechanism": "gaussian", "clip_norm": 1.0}
    refused(run(content(GAUSSIAN), *options), "without its noise", "std")
    refused(run(content({"mechanism": "approximate_dp", "epsilon": 1.0, "delta": 0.0}), *options), "without its noise")
    refused(run(content(bare, bare), *options), "exactly one event")
    refused(run(content(bare | {"clip_norm": -1.0}), *options), "clip_norm", "-1.0")
    refused(run(content({"mechanism": "randomised_response"}), *options), "categories")
    refused(run(content(bare), "calibrate", "--epsilon", "-1", "--delta", "1e-5"), "epsilon", "-1.0")
    refused(run(content(bare), "calibrate", "--epsilon", "1", "--delta", "0"), "delta")


def test_profile_prints_delta_at_every_epsilon(tmp_path: Path) -> None:
    picture = tmp_path / "profile.png"
    options = ("--epsilon-max", "2", "--points", "5", "--plot", str(picture))
    found = answer(run(content(GAUSSIAN), "profile", *options, "--json"))
    assert found["epsilon"] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert found["relation"] == "substitute"
    events = [GaussianEvent(clip_norm=1.0, std=4.0)]
    assert found["delta"][2] == accounting.delta_at(events, relation=Relation.SUBSTITUTE, epsilon=1.0)
    assert found["delta"] == sorted(found["delta"], reverse=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = run(content(GAUSSIAN), "profile")
    assert table.exit_code == 0
    assert len([line for line in table.stdout.splitlines() if line.startswith("│")]) == 21


def test_profile_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    refused(run(content(GAUSSIAN), "profile", "--points", "1"), "points")
    refused(run(content(GAUSSIAN), "profile", "--epsilon-max", "0"), "epsilon-max")
    refused(run(content(GAUSSIAN), "profile", "--plot", str(tmp_path / "no" / "where.png")), "plot")
    refused(run(content(GAUSSIAN), "profile", "--plot", str(tmp_path / "picture.docx")), "plot")
    box = {"mechanism": "approximate_dp", "epsilon": 1.0, "delta": 1e-3}
    refused(run(content(box), "profile"), "epsilon-max")


BAD_FILES = {
    "not JSON": ("{", ["file", "JSON"]),
    "empty": ("", ["file", "JSON"]),
    "NaN": (
        '{"relation": "substitute", "events": [{"mechanism": "gaussian", "clip_norm": 1, "std": NaN}]}',
        ["std", "nan"],
    ),
    "infinity": (
        '{"relation": "substitute", "events": [{"mechanism": "laplace", "clip_norm": Infinity, "scale": 1}]}',
        ["clip_norm", "inf"],
    ),
    "-Infinity": (
        '{"relation": "substitute", "events": [{"mechanism": "gaussian", "clip_norm": 1, "std": -Infinity}]}',
        ["std", "-inf"],
    ),
    "a number too large": (content(GAUSSIAN).replace("4.0", "1e999"), ["std", "inf"]),
    "a key twice": (content(GAUSSIAN).replace('"std"', '"clip_norm": 9.0, "std"'), ["clip_norm", "twice"]),
    "a list": ("[]", ["file", "object"]),
    "no relation": (json.dumps({"events": [GAUSSIAN]}), ["relation", "substitute", "add_remove"]),
    "unknown relation": (content(GAUSSIAN, relation="replace"), ["relation", "replace"]),
    "relation is a list": (json.dumps({"relation": [], "events": [GAUSSIAN]}), ["relation"]),
    "unknown top-level key": (json.dumps({"relation": "substitute", "events": [GAUSSIAN], "delta": 1}), ["delta"]),
    "no events": (json.dumps({"relation": "substitute"}), ["events"]),
    "empty events": (content(), ["events"]),
    "event is a number": (json.dumps({"relation": "substitute", "events": [GAUSSIAN, 3]}), ["events[1]", "3"]),
    "unknown mechanism": (content(GAUSSIAN | {"mechanism": "gauss"}), ["events[0].mechanism", "gauss", "laplace"]),
    "no mechanism": (content({"std": 1.0}), ["mechanism"]),
    "unknown key": (content(GAUSSIAN | {"sigma": 1.0}), ["sigma"]),
    "no std": (content({"mechanism": "gaussian", "clip_norm": 1.0}), ["std"]),
    "count 0": (content(GAUSSIAN, GAUSSIAN | {"count": 0}), ["events[1].count", "0"]),
    "count 1.5": (content(GAUSSIAN | {"count": 1.5}), ["count", "1.5"]),
    "count true": (content(GAUSSIAN | {"count": True}), ["count", "True"]),
    "rate above 1": (content(SAMPLED | {"sampling": {"scheme": "poisson", "rate": 1.5}}), ["sampling.rate", "1.5"]),
    "unknown scheme": (content(SAMPLED | {"sampling": {"scheme": "shuffled", "rate": 0.1}}), ["scheme", "shuffled"]),
    "negative clip norm": (content(GAUSSIAN | {"clip_norm": -1.0}), ["clip_norm", "-1.0"]),
    "zero std": (content(GAUSSIAN | {"std": 0}), ["std", "0"]),
    "std is text": (content(GAUSSIAN | {"std": "4"}), ["std", "'4'"]),
    "fixed batches, add_remove": (content(VIPS, relation="add_remove"), ["relation", "add_remove"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_bad_file_gets_one_line_that_names_the_key_and_exit_code_2(name: str, as_json: tuple[str, ...]) -> None:
    text, words = BAD_FILES[name]
    refused(run(text, "price", "--delta", "1e-5", *as_json), *words)


@pytest.mark.parametrize("delta", ["0", "1", "-1e-5", "nan", "inf", "1e-300"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_bad_delta_is_refused(delta: str, accountant: str) -> None:
    refused(run(content(GAUSSIAN), "price", "--delta", delta, "--accountant", accountant), "delta")


def test_a_delta_without_a_finite_epsilon_is_refused() -> None:
    box = {"mechanism": "approximate_dp", "epsilon": 1.0, "delta": 1e-3}
    for accountant in ("pld", "rdp", "optimal"):
        refused(run(content(box), "price", "--delta", "1e-5", "--accountant", accountant, "--json"), "delta", "finite")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, binary):
        refused(CliRunner().invoke(main, ["privacy", "price", str(path), "--delta", "1e-5"]), "file")


def test_usage_mistakes_exit_with_2() -> None:
    for arguments in (["privacy", "price", "-"], ["privacy", "price", "-", "--delta", "x"], ["bogus"]):
        assert CliRunner().invoke(main, arguments, input="{}").exit_code == 2


def test_other_refusals_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BudgetExceeded("spent\nall of it")

    monkeypatch.setattr(accounting, "price", refuse)
    result = run(content(GAUSSIAN), "price", "--delta", "1e-5")
    assert (result.exit_code, result.stderr) == (1, "Error: spent all of it\n")


def test_every_command_of_the_table_exists_and_help_imports_none() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from silobayes.cli.main import main\n"
        "result = CliRunner().invoke(main, ['--help'])\n"
        "assert result.exit_code == 0 and 'privacy' in result.output\n"
        "heavy = {'numpy', 'scipy', 'jax', 'rich', 'matplotlib', 'silobayes.privacy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in main_module.COMMANDS:
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
