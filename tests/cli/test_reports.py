"""`silobayes explain | verify | report`: thin doors to the report room, with exit codes that scripts can trust."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from silobayes.cli.main import COMMANDS, main
from tests.report import run_cases


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases.write_run(tmp_path_factory.mktemp("finished") / "run", comparisons=False)


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    assert invoke("init", tmp_path).exit_code == 0
    return tmp_path / "study.toml"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_has_help(name: str) -> None:
    assert isinstance(getattr(import_module(COMMANDS[name].module), name), click.Command)
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_explain_says_the_budget_in_words(study_file: Path) -> None:
    result = invoke("explain", study_file)
    assert result.exit_code == 0
    assert "What is promised" in result.output
    assert "epsilon 1 at delta 1e-05" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 100


def test_explain_as_json(study_file: Path) -> None:
    answer = json.loads(invoke("explain", study_file, "--json").output)
    assert answer["study"] == "mortality"
    assert answer["sections"][0]["heading"] == "What is done"


def test_explain_names_the_key_of_a_bad_study(study_file: Path) -> None:
    study_file.write_text(study_file.read_text().replace('relation = "substitute"', 'relation = "similar"'))
    result = invoke("explain", study_file)
    assert result.exit_code == 2
    assert "privacy.relation" in result.stderr
    assert invoke("explain", study_file.with_name("none.toml")).exit_code == 2


def test_verify_confirms_an_honest_run(finished: Path) -> None:
    result = invoke("verify", finished)
    assert result.exit_code == 0
    assert result.output.rstrip().endswith("The certificate is confirmed.")
    assert json.loads(invoke("verify", finished, "--json").output)["passed"] is True


def test_verify_fails_with_code_1_when_a_check_fails(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "run"))
    run_cases.claim(directory, 0.01)
    result = invoke("verify", directory)
    assert result.exit_code == 1
    assert "FAILED  north: claim" in result.output
    assert "NOT confirmed" in result.output
    answer = invoke("verify", directory, "--json")
    assert answer.exit_code == 1
    assert json.loads(answer.output)["passed"] is False


def test_verify_does_not_call_fixed_noise_private(tmp_path: Path) -> None:
    directory = run_cases.write_run(tmp_path / "run", comparisons=False, fixed_noise=True)
    result = invoke("verify", directory)
    assert result.exit_code == 0
    assert result.output.rstrip().endswith("NOT PRIVATE, and that is so.")


def test_report_writes_both_files(finished: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "run"))
    answer = json.loads(invoke("report", directory, "--json").output)
    assert Path(answer["html"]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(Path(answer["json"]).read_text(encoding="utf-8"))["is_private"] is True


@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_directory_that_is_no_run_is_bad_input(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
