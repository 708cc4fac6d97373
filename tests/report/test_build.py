"""The report: one file, complete, harmless, and the same for the same run."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.report import figures
from silobayes.report.build import write_report
from tests.report import run_cases


@pytest.fixture(scope="module")
def report(honest_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    directory = Path(shutil.copytree(honest_run, tmp_path_factory.mktemp("report") / "run"))
    paths = write_report(directory)
    return paths["html"].read_text(encoding="utf-8"), json.loads(paths["json"].read_text(encoding="utf-8"))


def test_the_report_shows_posterior_price_metrics_and_checks(report: tuple[str, dict]) -> None:
    html, data = report
    assert data["verification"]["passed"]
    assert data["posterior"]["lactate"]["mean"] == pytest.approx(-1.0, rel=1e-5)
    assert set(data["comparisons"]) == {"not_private", "north", "south"}
    assert data["metrics"] == {"accuracy": 0.875}
    for text in (
        *run_cases.NAMES,
        "-1.000",
        "0.875",
        "0.6339",
        "poisson 0.05",
        "In plain words",
        "north: claim",
        "not private",
    ):
        assert text in html, text
    assert html.count("data:image/svg+xml;base64,") == 3  # intervals, trace, epsilons
    assert "NOT PRIVATE" not in html


def test_the_html_fetches_nothing_and_runs_nothing(report: tuple[str, dict]) -> None:
    html, _ = report
    assert "<script" not in html
    assert "<link" not in html
    assert all(uri.startswith("data:") for uri in re.findall(r'(?:src|href)="([^"]*)"', html))
    for picture in re.findall(r"base64,([A-Za-z0-9+/=]+)", html):
        svg = base64.b64decode(picture).decode()
        assert "<script" not in svg
        assert set(re.findall(r'href="([^"#][^"]*)"', svg)) == set()


def test_texts_of_a_study_cannot_become_markup(report: tuple[str, dict]) -> None:
    html, _ = report
    assert "mortality <b>" not in html
    assert "mortality &lt;b&gt;&amp;" in html


def test_equal_runs_give_equal_bytes(report: tuple[str, dict], run_dir: Path) -> None:
    assert write_report(run_dir)["html"].read_text(encoding="utf-8") == report[0]


def test_a_run_that_is_not_private_is_stamped(run_dir: Path) -> None:
    study = run_cases.study(mode="none")
    run_cases.write_json(run_dir / "study.json", study.to_dict())
    run_cases.edit_certificate(run_dir, study_hash=study.hash, is_private=False, epsilon=None, silos=[])
    html = write_report(run_dir)["html"].read_text(encoding="utf-8")
    assert html.index("NOT PRIVATE") < html.index("<h1>")
    assert "largest epsilon" not in html


def test_a_refuted_certificate_is_shown_as_failed(run_dir: Path) -> None:
    run_cases.claim(run_dir, 0.1)
    html = write_report(run_dir)["html"].read_text(encoding="utf-8")
    assert '<b class="bad">FAILED</b>' in html


@pytest.mark.parametrize("value", [None, "a lot"])
def test_a_certificate_without_numbers_gives_a_report_that_says_so(run_dir: Path, value: object) -> None:
    run_cases.claim(run_dir, value)  # type: ignore[arg-type]
    html = write_report(run_dir)["html"].read_text(encoding="utf-8")
    assert '<b class="bad">FAILED</b>' in html
    assert "no number" in html


def test_comparisons_and_trace_are_optional(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "comparisons")
    (run_dir / "trace.jsonl").write_text("")
    html = write_report(run_dir)["html"].read_text(encoding="utf-8")
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "silo alone" not in html


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"study\.json"):
        write_report(tmp_path)


def test_many_parameters_are_cut_to_the_strongest() -> None:
    table = pd.DataFrame({"mean": np.arange(100.0), "sd": np.ones(100)}, index=[f"w{k}" for k in range(100)])
    assert figures.strongest(table, 3) == ["w97", "w98", "w99"]
    assert figures.strongest(table[:2], 3) == ["w0", "w1"]
