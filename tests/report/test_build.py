"""The report: one file, complete, harmless, and the same for the same run."""

import base64
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.models import LinearRegression
from silobayes.posteriors import Posterior
from silobayes.report import figures
from silobayes.report.build import write_report
from silobayes.report.reading import forest, reading, variance_shares
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


def test_a_report_says_what_its_intervals_include(run_dir: Path) -> None:
    (said,) = [line for line in write_report(run_dir)["html"].read_text().splitlines() if "Intervals:" in line]
    assert "Intervals: no: they do not include the privacy noise" in said
    assert "docs/honest-intervals.md" in said


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


def told(posterior: Posterior | None = None, **facts) -> Posterior:
    """A posterior that knows its units, and what its widths are made of."""
    return dataclasses.replace((posterior or run_cases.posterior()).with_units((1 / 50, 1 / 20, 1.0)), **facts)


SHARES = {"privacy_share": np.array([0.75, 0.0, 0.2]), "prior_share": np.array([0.05, 0.5, 0.1])}


def test_a_report_of_a_regression_has_ratios_shares_and_warnings(run_dir: Path) -> None:
    told(**SHARES, warnings=("Few rows <b>: widen",)).save(run_dir)
    run_cases.seal(run_dir)
    paths = write_report(run_dir)
    html, data = paths["html"].read_text(encoding="utf-8"), json.loads(paths["json"].read_text(encoding="utf-8"))
    assert html.count("data:image/svg+xml;base64,") == 5
    for text in (
        "odds ratio per unit",
        f"{np.exp(-1 / 20):.5g}",
        "Few rows &lt;b&gt;: widen",
        'alt="Odds ratios per encoded unit with 95 % intervals, with and without the privacy noise"',
        'alt="Shares of each parameter&#39;s variance: privacy noise, prior, rows"',
    ):
        assert text in html or text.replace("&#39;", "'") in html, text
    assert all("alt=" in image for image in re.findall(r"<img [^>]*>", html))
    assert data["reading"]["warnings"] == ["Few rows <b>: widen"]
    assert data["reading"]["parameters"]["age"]["ratio"]["ratio"] == pytest.approx(np.exp(0.5 / 50))
    assert paths["html"].read_bytes() == write_report(run_dir)["html"].read_bytes()


def test_a_report_without_units_or_shares_has_none_of_it(report: tuple[str, dict]) -> None:
    html, data = report
    assert "Reading the coefficients" not in html
    assert "What the widths are made of" not in html
    assert 'class="warnings"' not in html
    assert data["reading"]["ratio"] is None


def test_intervals_without_the_noise_have_the_rest_of_the_variance() -> None:
    drawn = forest(told(**SHARES), 0.95, run_cases.NAMES)
    assert drawn is not None
    assert list(drawn.index) == ["age (per 50)", "lactate (per 20)"]
    age, lactate = np.log(drawn.iloc[0]), np.log(drawn.iloc[1])
    assert age["upper_without"] - age["value"] == pytest.approx(0.5 * (age["upper"] - age["value"]))
    assert age["upper"] == pytest.approx(0.5 + 1.959964 * 0.2, rel=1e-4)
    assert lactate["lower_without"] == pytest.approx(lactate["lower"])


def test_linear_coefficients_are_drawn_again_only_with_what_the_noise_adds() -> None:
    linear = dataclasses.replace(run_cases.posterior(), model=LinearRegression(num_features=3, noise_stddev=1.0))
    assert forest(told(linear), 0.95, run_cases.NAMES) is None
    drawn = forest(told(linear, **SHARES), 0.95, run_cases.NAMES)
    assert drawn is not None
    assert drawn["value"].tolist() == pytest.approx([0.5, -1.0], rel=1e-5)
    assert figures.forest_figure(drawn, None) == figures.forest_figure(drawn, None)


def test_shares_of_the_variance_add_up_and_say_what_is_not_known() -> None:
    both, one = variance_shares(told(**SHARES)), variance_shares(told(prior_share=SHARES["prior_share"]))
    assert both is not None
    assert one is not None
    assert list(both.columns) == ["privacy noise", "prior", "rows"]
    assert list(one.columns) == ["prior", "rows and privacy noise"]
    for table in (both, one):
        np.testing.assert_allclose(table.sum(axis=1), 1.0)
    assert variance_shares(told()) is None


def test_a_ratio_that_no_float_holds_is_null_and_not_drawn() -> None:
    wide = told(run_cases.posterior(stddev=2000.0))
    json.dumps(reading(wide, 0.95), allow_nan=False)
    assert reading(wide, 0.95)["parameters"]["age"]["ratio"]["encoded_upper"] is None
    drawn = forest(wide, 0.95, run_cases.NAMES)
    assert drawn is not None
    assert drawn.empty
