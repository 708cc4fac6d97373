"""Plans: the noise of the run, within the budget, from public facts alone."""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.columns import Categorical, Numeric
from silobayes.privacy import accounting
from silobayes.privacy.events import AbstractGaussianLikeEvent
from silobayes.privacy.relation import Relation
from silobayes.report.choice import choice
from silobayes.report.planning import made_up_rows, plan
from silobayes.studies.sizes import counted_rows, silo_rows
from silobayes.study import Study
from tests.report import run_cases

BASE = run_cases.study().to_dict()
FEW = {"rounds": 2, "steps": 5, "sample_rate": 0.5}


def study_with(**sections: dict) -> Study:
    tables = {**BASE, "protocol": FEW}
    return Study.from_dict({**tables, **{name: {**tables[name], **keys} for name, keys in sections.items()}})


def test_the_planned_price_is_within_the_budget_and_the_noise_follows_it() -> None:
    stds = []
    for epsilon in (0.5, 1.0, 2.0):
        made = plan(study_with(privacy={"epsilon": epsilon}), [1000, 700])
        assert [silo.rows for silo in made.silos] == [1000, 700]
        for silo in made.silos:
            assert silo.epsilon is not None
            assert 0.9 * epsilon < silo.epsilon <= epsilon
            (event,) = silo.events
            assert isinstance(event, AbstractGaussianLikeEvent)
            assert event.count == 10
        stds.append(made.silos[0].events[0].std)  # type: ignore[attr-defined]
    assert stds == sorted(stds, reverse=True)


def test_a_plan_with_a_quantile_has_the_release_that_chooses_the_norms() -> None:
    protocol = {"privatise": "virtual_clients", "clip_norm": "quantile", "rounds": 3}
    made = plan(Study.from_dict({**BASE, "protocol": protocol}), [3000, 2000])
    known = {"relation": Relation.SUBSTITUTE, "delta": 1e-5}
    for silo in made.silos:
        assert [event.count for event in silo.events] == [1, 3]
        assert 0.099 < accounting.price(silo.events[:1], **known).epsilon <= 0.1
        assert silo.epsilon is not None
        assert 0.99 < silo.epsilon <= 1.0
    assert made.num_messages == 2 * 2 * 4
    answer = made.to_json()
    assert answer["settings"]["clip_quantile"] == 0.5
    assert answer["leaves_a_site"].startswith("once, before the first round, counts")


def test_widths_without_privacy_are_the_closed_form_and_noise_never_narrows_them() -> None:
    """Logistic regression at theta = 0: covariance (n/4 E[xx'] + prior)^-1."""
    widths = {}
    for epsilon in (0.1, 1.0, 6.0):
        made = plan(study_with(privacy={"epsilon": epsilon}, protocol={"clip_norm": 1.0}), [1000, 700])
        assert made.widths is not None
        widths[epsilon] = np.array([[width.private, width.not_private] for width in made.widths])
    x = made_up_rows(study_with().encoding)
    expected = np.sqrt(np.diag(np.linalg.inv(1700 / 4 * x.T @ x / len(x) + np.eye(3))))
    np.testing.assert_allclose(widths[1.0][:, 1], expected, rtol=1e-5)
    assert (widths[0.1][:, 0] > 1.05 * widths[1.0][:, 0]).all()
    assert (widths[1.0][:, 0] > 1.05 * widths[6.0][:, 0]).all()
    assert (widths[6.0][:, 0] >= widths[6.0][:, 1]).all()


def test_batches_of_persons_are_planned_for_as_few_as_there_can_be_or_for_as_many_as_are_said() -> None:
    keys = {"unit": "patient", "rows_per_person": 4, "public": ["rows", "test", "persons"]}
    study = study_with(
        data=keys, privacy={"unit": "person"}, protocol={"privatise": "dp_optimisation", "sample_rate": 0.1}
    )
    few, many = plan(study, [1000, 702]), plan(study, [1000, 702], [900, 600])
    assert [silo.persons for silo in few.silos] == [250, 176]
    assert [silo["persons"] for silo in many.to_json()["silos"]] == [900, 600]
    assert [silo.rows for silo in many.silos] == [1000, 702]
    # Noise in units of the clip norm, and the price, do not depend on how many there are; the widths do.
    ratios = [made.silos[0].events[0].std / made.settings.clip_norm for made in (few, many)]  # type: ignore[attr-defined]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-6)
    assert few.widths is not None
    assert many.widths is not None
    assert few.widths[0].private > 1.5 * many.widths[0].private
    # Where the numbers of rows are not public the plan is for as many as the persons may have, whatever the method.
    keys["public"] = ["test", "persons"]
    protocol = {"privatise": "local_averaging", "rounds": 2, "steps": 5}
    hidden = Study.from_dict({**study_with(data=keys, privacy={"unit": "person"}).to_dict(), "protocol": protocol})
    settings = [plan(hidden, rows, [300, 200]).settings for rows in ([1000, 702], [400, 220])]
    assert settings[0] == settings[1]
    for persons in ([249, 176], [1001, 600], [900]):
        with pytest.raises(InvalidInput, match="persons"):
            plan(study, [1000, 702], persons)
    with pytest.raises(InvalidInput, match="persons"):
        plan(study_with(), [1000, 702], [900, 600])


def test_the_noise_of_a_sum_is_drawn_once_for_all_silos() -> None:
    """Four silos: with a noise each, the sum has 4 times the priced variance; over a sum 4 / (4 - T - 1) times."""
    common = {**FEW, "kind": "global_vi"}
    data = {**BASE["data"], "files": {name: f"{name}.csv" for name in "abcd"}}
    tables = {**BASE, "protocol": common, "data": data}

    def widest(aggregation: dict) -> tuple[float, int | None]:
        made = plan(Study.from_dict({**tables, "aggregation": aggregation}), [500] * 4)
        assert made.widths is not None
        return max(width.private for width in made.widths), made.num_shares

    alone, one_alone = widest({"kind": "none"})
    trusted, three = widest({"kind": "trusted"})
    colluding, two = widest({"kind": "pairwise_masks", "colluding": 1})
    every, one = widest({"kind": "secret_sharing", "colluding": 2})
    assert (one_alone, three, two, one) == (None, 3, 2, 1)
    assert trusted < colluding < every
    assert every == pytest.approx(alone, rel=5e-3)  # a single share must do: nothing is gained


def test_made_up_rows_are_as_the_study_describes_them() -> None:
    """2,000 rows from a fixed key; a mean beyond .1 or a variance beyond a quarter would be one chance in 10^5."""
    columns = (
        Numeric(name="age", low=0.0, high=100.0, typical=20.0, spread=5.0),
        Categorical(name="ward", categories=("a", "b"), shares=(0.9, 0.1)),
    )
    x = made_up_rows(dataclasses.replace(study_with().encoding, columns=columns))
    np.testing.assert_allclose(x.mean(axis=0), [0.0, 0.0, 0.0, 1.0], atol=0.1)
    np.testing.assert_allclose(x.var(axis=0), [1.0, 0.09, 0.09, 0.0], rtol=0.25)


def test_a_plan_without_privacy_has_no_price() -> None:
    study = Study.from_dict({**BASE, "privacy": {"mode": "none"}, "protocol": {"rounds": 2, "steps": 5}})
    made = plan(study, [10, 20])
    assert [silo.epsilon for silo in made.silos] == [None, None]
    assert made.widths is not None
    assert all(width.private == width.not_private for width in made.widths)
    assert made.to_json()["silos"][0]["events"] == []


@pytest.mark.parametrize("rows", [[10], [10, 0], [10, 20, 30]])
def test_rows_must_fit_the_silos(rows: list[int]) -> None:
    with pytest.raises(InvalidInput, match="rows"):
        plan(study_with(), rows)


def test_tables_are_counted_and_not_read(tmp_path: Path) -> None:
    """Cells that no encoding would accept, and line breaks inside quotes, do not matter."""
    (tmp_path / "north.csv").write_text('age,lactate,died\n"a\nb",x,?\n1,2,3\n')
    (tmp_path / "south.csv").write_text("age,lactate,died\n" + "z,z,z\n" * 7)
    assert counted_rows(study_with(), tmp_path) == [2, 7]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet", "npz"])
def test_every_format_can_be_counted(suffix: str, tmp_path: Path) -> None:
    path, frame = tmp_path / f"all.{suffix}", pd.DataFrame({"age": np.arange(11), "died": ["no"] * 11})
    if suffix == "parquet":
        frame.to_parquet(path)
    elif suffix == "npz":
        np.savez(path, age=frame["age"].to_numpy())
    else:
        text = frame.to_csv(index=False)
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    data = {key: value for key, value in BASE["data"].items() if key != "files"}
    data |= {"source": path.name, "test": 0.2, "public": ["rows", "test"]}
    study = Study.from_dict({**BASE, "data": data, "silos": {"count": 2}})
    assert counted_rows(study, tmp_path) == [5, 4]  # 11 rows, 2 held out


def test_a_table_that_is_not_there_asks_for_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--rows"):
        counted_rows(study_with(), tmp_path)


def test_rows_are_dealt_as_the_split_says() -> None:
    data = {key: value for key, value in BASE["data"].items() if key != "files"} | {"source": "all.csv"}
    tables = {**BASE, "data": data}
    even = Study.from_dict({**tables, "silos": {"count": 3}})
    assert silo_rows(even, 11) == [4, 4, 3]
    skewed = Study.from_dict({**tables, "silos": {"count": 4, "scheme": "rho_kappa", "rho": 0.5, "kappa": 0.0}})
    assert silo_rows(skewed, 100) == [12, 12, 37, 37]


OPEN = {key: value for key, value in BASE.items() if key != "protocol"}
PERSONS = {
    "data": {**BASE["data"], "unit": "id", "public": ["rows"]},
    "privacy": {**BASE["privacy"], "unit": "person"},
}


def chosen(**sections: dict) -> str:
    return choice(Study.from_dict({**OPEN, **sections}))


def test_a_plan_says_which_method_leads_and_whether_its_intervals_are_honest() -> None:
    leading = chosen()
    assert leading.startswith("centred/scores leads for a logistic regression: ")
    assert "Intervals: honest: they include the privacy noise." in leading
    assert leading.count("leads") == 1
    other = chosen(protocol={"kind": "pvi"})
    assert other.startswith("pvi/dp_optimisation: ")
    assert "Intervals: no: they do not include the privacy noise" in other
    assert "For a logistic regression centred/scores leads (intervals: honest)" in other


def test_a_plan_says_what_a_leading_method_would_need() -> None:
    undeclared = chosen(**PERSONS)
    assert "centred/scores (intervals: honest) would lead if persons were declared" in undeclared
    declared = {**PERSONS["data"], "public": ["rows", "persons"], "rows_per_person": 3}
    assert chosen(**{**PERSONS, "data": declared}).startswith("centred/scores leads")


def test_where_no_method_leads_a_plan_names_none() -> None:
    network = {"kind": "mlp", "options": {"hidden": [2]}}
    assert "lead" not in chosen(model=network)
    assert "no noise to include" in chosen(privacy={"mode": "none"})


def test_a_plan_tells_the_share_of_each_variance_that_privacy_makes() -> None:
    """At a large epsilon nearly none, and the two widths agree; at a small one most of it."""
    found = {}
    for epsilon in (0.05, 50.0):
        made = plan(Study.from_dict({**OPEN, "privacy": {**BASE["privacy"], "epsilon": epsilon}}), [1000, 700])
        answer = made.to_json()
        assert (answer["method"], answer["intervals"]) == ("centred/scores", "honest")
        assert answer["choice"] == choice(made.study)
        found[epsilon] = answer["expected_sd"]
    assert all(own["privacy_share"] < 0.05 for own in found[50.0])
    assert all(own["privacy_share"] > 0.2 for own in found[0.05])
    for own in found[50.0]:
        assert own["not_private"] <= own["private"] < 1.2 * own["not_private"]
    assert plan(study_with(), [1000, 700]).to_json()["expected_sd"][0]["privacy_share"] is None
