"""Coverage, its errors and what is said of it, from posteriors whose law is known. Fixed keys."""

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from silobayes.report.calibration import write_calibration
from silobayes.runs.coverage import LEVELS, Calibration, Places, Verdict
from silobayes.studies.method import Intervals

REPETITIONS, PARAMETERS = 400, 5


def places(width: float = 1.0, repetitions: int = REPETITIONS, correlation: float = 0.0, seed: int = 0) -> Places:
    """Truths N(mean, 1) and posteriors that call it N(mean, width^2)."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(repetitions, 1))
    own = rng.normal(size=(repetitions, PARAMETERS))
    errors = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own
    return Places(
        positions=stats.norm.cdf(-errors / width), stddevs=np.full(errors.shape, 0.3 * width), errors=0.3 * errors
    )


def calibration(found: Places, **changes: Any) -> Calibration:
    keys: dict[str, Any] = {
        "study": "made up",
        "study_hash": "0" * 64,
        "method": "pvi/dp_optimisation",
        "is_private": True,
        "intervals": Intervals.NO,
        "is_mean_field": False,
        "names": tuple(f"x{k}" for k in range(PARAMETERS)),
        "places": found,
        "exact": places(),
        "prior_stddev": 1.0,
        "truths": np.zeros(found.positions.shape),
        "asked": len(found.positions),
        "failures": (),
        "warned": 0.0,
        "clipped": 0.0,
        "dealt_evenly": 0,
        "facts": {"seed": 0},
    }
    return Calibration(**{**keys, **changes})


def test_exact_posteriors_cover_as_often_as_they_claim():
    """Five standard errors; ranks by chi-square at 1e-4. Intervals 2/3 and 3/2 as wide are told apart from them."""
    found = places()
    for level in LEVELS:
        share = found.coverage(level)
        assert abs(share.value - level) < 5 * share.error
        for width in (2 / 3, 3 / 2):
            wrong = places(width).coverage(level)
            assert abs(wrong.value - level) > (5 if level < 0.9 or width < 1 else 3) * wrong.error
    assert stats.chisquare(found.ranks(10).sum(axis=0)).pvalue > 1e-4
    for width in (2 / 3, 3 / 2):
        assert stats.chisquare(places(width).ranks(10).sum(axis=0)).pvalue < 1e-4
    assert found.ranks(7).sum() == found.positions.size


def test_standard_errors_count_repetitions_not_parameters():
    """Parameters that move together are one: 300 studies of 100 repetitions spread as the error says, within 15 %."""
    for correlation in (0.0, 1.0):
        shares = [
            places(repetitions=100, correlation=correlation, seed=seed).coverage(0.8) for seed in range(300)
        ]  # their spread is known to 4 %
        spread = np.std([share.value for share in shares])
        told = np.mean([share.error for share in shares])
        assert told == pytest.approx(spread, rel=0.15)
    one = places(correlation=1.0)
    assert one.coverage(0.95).error == pytest.approx(one.coverage_of_each(0.95)[0].error, rel=0.1)
    assert one.ranks_error(10) == pytest.approx(5 * places().ranks_error(10) / math.sqrt(5), rel=0.1)


def test_each_verdict_is_reached_and_says_why():
    assert calibration(places()).verdict is Verdict.HONEST
    assert calibration(places()).sentence.endswith("% of the truths: honest.")
    narrow = calibration(places(0.6), is_mean_field=True, clipped=0.1)
    assert narrow.verdict is Verdict.TOO_NARROW
    assert narrow.sentence.endswith(
        "too narrow: they do not include the privacy noise; they take parameters for independent; numbers outside "
        "their declared range were moved into it."
    )
    partly = calibration(places(0.6), intervals=Intervals.PARTLY).sentence
    assert "they do not include all of the privacy noise" in partly
    for known in ({"intervals": Intervals.HONEST}, {"is_private": False}):
        assert calibration(places(0.6), **known).sentence.endswith("of the truths: too narrow.")
    assert calibration(places(2.0)).verdict is Verdict.TOO_WIDE
    assert calibration(places(repetitions=20, correlation=1.0)).verdict is Verdict.UNCLEAR


def test_remarks_say_what_a_reader_must_know():
    assert calibration(places()).remarks == ()
    told = calibration(
        places(),
        exact=places(0.6),
        prior_stddev=0.32,
        asked=500,
        failures=("eta: ran away.",) * 3,
        warned=0.5,
        clipped=0.034,
        dealt_evenly=2,
        notes=("A note.",),
    ).remarks
    starts = (
        "A note.",
        "Stopped after 403 of 500",
        "3 of 500 rep",
        "3.4 % of the drawn",
        "In 2 rep",
        "50 % of the post",
    )
    starts = (*starts, "Without privacy 95 % intervals covered", "5 of 5 parameters stay about as wide as the prior")
    assert len(told) == len(starts)
    assert not any("this point" in remark for remark in told)
    assert "this point" in calibration(places(), exact=places(0.6), facts={"at": {"x0": 1.0}}).remarks[0]
    for remark, start in zip(told, starts, strict=True):
        assert remark.startswith(start)


def test_what_is_written_is_json_and_a_picture(tmp_path):
    found = calibration(places(0.5))
    written = write_calibration(found, tmp_path / "out")
    answer = json.loads(written["json"].read_text())
    assert answer == json.loads(json.dumps(found.to_json()))
    assert answer["verdict"] == "too narrow"
    assert answer["coverage"]["0.95"]["value"] == found.places.coverage(0.95).value
    assert answer["width_ratio"] == pytest.approx(0.5)
    first = answer["parameters"][0]
    assert first["name"] == "x0"
    assert sum(first["ranks"]) == REPETITIONS
    assert first["rmse"] == pytest.approx(0.3, rel=0.15)
    assert first["sd"] == pytest.approx(0.15)
    assert written["png"].read_bytes().startswith(b"\x89PNG")
    alone = calibration(places(repetitions=30), exact=None)
    assert alone.width_ratios is None
    assert alone.to_json()["without_privacy"] is None
