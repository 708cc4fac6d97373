"""`silobayes calibrate`: what is printed and written, and what is refused."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from silobayes.cli.main import main

STUDY = """
[study]
name = "small"
[data]
target = "y"
target_bounds = [-20, 20]
[data.bounds]
a = [-6, 6]
b = [-6, 6]
[data.spread]
a = 1.0
b = 1.0
[silos]
count = 2
[model]
kind = "linear_regression"
options = {noise_stddev = 1.0}
[privacy]
mode = "none"
[protocol]
kind = "linreg"
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    (tmp_path / "study.toml").write_text(STUDY)
    return str(tmp_path / "study.toml")


def test_a_table_a_sentence_and_two_files(study: str, tmp_path: Path) -> None:
    command = ["calibrate", study, "--rows", "30,20", "--repetitions", "20", "--workers", "1"]
    done = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "20 repetitions of linreg/none on made-up rows" in done.stdout
    for word in ("intercept", "all", "width ratio", "95 % intervals covered", "nothing was charged"):
        assert word in done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["calibration.json", "calibration.png"]
    as_json = CliRunner().invoke(main, [*command, "--json"], catch_exceptions=False)
    answer = json.loads(as_json.stdout)
    assert answer == json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert answer["repetitions"] == 20
    assert answer["rows"] == [30, 20]
    assert [entry["name"] for entry in answer["parameters"]] == ["a", "b", "intercept"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--rows", "50", "--repetitions", "5"], "repetitions"),
        ([], "rows"),
        (["--rows", "many"], "--rows"),
        (["--rows", "50", "--persons", "20"], "persons"),
        (["--rows", "50", "--correlation", "1"], "correlation"),
        (["--rows", "50", "--at", "nowhere.toml"], "at"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_do(study: str, options: list[str], word: str) -> None:
    done = CliRunner().invoke(main, ["calibrate", study, *options])
    assert done.exit_code == 2
    assert f"Error: {word}: expected" in done.stderr


def test_an_interrupt_before_the_first_repetition_ends_with_130(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **keys: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("silobayes.engines.calibrating.calibrate", stop)
    done = CliRunner().invoke(main, ["calibrate", study, "--rows", "50"])
    assert done.exit_code == 130
    assert "nothing was charged" in done.stderr
