"""The explanation says what the study says, rounded against ourselves."""

import math

import pytest

from silobayes.report.explain import explain, what_leaves
from silobayes.study import Study
from tests.report import run_cases

BASE = run_cases.study().to_dict()


def text_of(**sections: dict) -> str:
    tables = {name: {**table, **sections.get(name, {})} for name, table in BASE.items()}
    return "\n".join(p for section in explain(Study.from_dict(tables)) for p in section.paragraphs)


def test_the_budget_the_neighbours_and_the_unit_are_named() -> None:
    text = text_of()
    assert "epsilon 1 at delta 1e-05" in text
    assert "one row of the table" in text
    assert "any other values instead" in text
    assert "1 in 100,000" in text
    assert "2 silos" in text
    assert "not been in the data" in text_of(privacy={"relation": "add_remove"})
    person = text_of(privacy={"unit": "person"}, data={"unit": "patient"})
    assert "all rows of one person" in person


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 3.0, 8.0])
def test_factors_are_rounded_upward(epsilon: float) -> None:
    text = text_of(privacy={"epsilon": epsilon})
    factor = float(text.split("than a factor of ")[1].split(" ")[0])
    assert math.exp(epsilon) <= factor <= 1.011 * math.exp(epsilon)
    if "becomes at most" in text:
        percent = float(text.split("becomes at most ")[1].split(" ")[0])
        assert 100 / (1 + math.exp(-epsilon)) <= percent < 100


def test_a_useless_epsilon_is_called_that() -> None:
    assert "no protection worth the name" in text_of(privacy={"epsilon": 50.0})


def test_what_is_not_protected_is_said() -> None:
    text = text_of(data={"public": ["rows", "test"], "test": 0.2})
    assert "number of rows of each silo" in text
    assert "test rows: metrics on them are printed without noise" in text
    assert "several silos" in text
    assert "several rows" in text
    assert "spreads" not in text
    column = next(iter(BASE["data"]["bounds"]))
    declared = text_of(data={"typical": {column: 0.0}, "spread": {column: 0.1}})
    assert "ranges, categories, typical values, spreads and the names of the silos" in declared
    assert "several rows" not in text_of(privacy={"unit": "person"}, data={"unit": "patient"})


def test_a_bound_on_the_rows_of_a_person_is_said_with_what_happens_beyond_it() -> None:
    data = {"unit": "patient", "rows_per_person": 5, "public": ["rows", "test", "persons"]}
    text = text_of(privacy={"unit": "person"}, data=data)
    assert "at most 5 rows are used at a silo; a table with more is refused" in text
    assert "the number of persons of each silo" in text
    assert "others are left out" in text_of(privacy={"unit": "person"}, data={**data, "outside": "clip"})


def test_what_public_numbers_and_sides_tell_of_a_person_is_said() -> None:
    data = {"unit": "patient", "rows_per_person": 5, "public": ["rows", "test", "persons"], "test": 0.3}
    text = text_of(privacy={"unit": "person"}, data=data)
    assert "How many rows one person has: whoever knows" in text
    assert "it follows from their id and the seed" in text
    hidden = text_of(privacy={"unit": "person"}, data={**data, "public": ["test", "persons"]})
    assert "How many rows one person has" not in hidden
    assert "the number of rows of each silo" not in hidden


def test_a_study_without_privacy_is_called_that_first() -> None:
    tables = {**BASE, "privacy": {"mode": "none"}}
    sections = explain(Study.from_dict(tables))
    assert sections[0].paragraphs[0].startswith("NOT PRIVATE")
    assert not any("promised" in section.heading for section in sections)


def test_what_leaves_a_site_is_that_of_the_method() -> None:
    said = {}
    for method in ("dp_optimisation", "parameter_perturbation", "local_averaging", "virtual_clients"):
        said[method] = what_leaves(Study.from_dict({**BASE, "protocol": {"privatise": method}}))
    assert len(set(said.values())) == len(said)
    assert all("noise" in text for text in said.values())
    assert what_leaves(Study.from_dict(BASE)) == said["dp_optimisation"]
    common = what_leaves(Study.from_dict({**BASE, "protocol": {"kind": "global_vi"}}))
    assert "common optimisation" in common


@pytest.mark.parametrize("kind", ["none", "trusted"])
def test_the_release_that_chooses_clip_norms_is_said(kind: str) -> None:
    for method in ("parameter_perturbation", "local_averaging", "virtual_clients"):
        tables = {**BASE, "aggregation": {"kind": kind}}
        later = what_leaves(Study.from_dict({**tables, "protocol": {"privatise": method}}))
        said = what_leaves(Study.from_dict({**tables, "protocol": {"privatise": method, "clip_norm": "quantile"}}))
        assert said.endswith(f"then, in each round, {later}")
        assert said.startswith("once, before the first round, counts of how large the changes are")
        assert said.count("share of the noise") == (2 if kind == "trusted" else 0)


SUMS = ("trusted", "secret_sharing", "pairwise_masks")


def silos(count: int) -> dict:
    return {"files": {f"silo-{k}": f"{k}.csv" for k in range(count)}}


def test_who_sees_what_a_site_sends_is_said() -> None:
    shares = {"kind": "global_vi"}
    said = {kind: text_of(protocol=shares, data=silos(5), aggregation={"kind": kind}) for kind in SUMS}
    assert len(set(said.values())) == 3
    for kind, text in said.items():
        assert "with its share of the noise" in text
        assert "all silos but 1 (4 of 5)" in text
        assert "more than 1 together" in text
        assert ("Nobody sees it" in text) == (kind != "trusted")
        assert ("Anything from the aggregator" in text) == (kind == "trusted")
    assert "share" not in text_of(protocol=shares)
    nodes = text_of(protocol=shares, aggregation={"kind": "secret_sharing", "compute_nodes": 7}, data=silos(5))
    assert "all 7 nodes" in nodes
    sampled = {"privatise": "virtual_clients", "schedule": "sampled", "clients_per_round": 4}
    text = text_of(protocol=sampled, data=silos(9), aggregation={"kind": "secret_sharing", "colluding": 2})
    assert "all silos but 3 (1 of 4)" in text
    assert "2 more may do so with it" in text
    assert "If more than 2 are missing" in text


def test_messages_that_are_private_already_rest_on_nobody_elses_noise() -> None:
    for kind in SUMS:
        text = text_of(data=silos(5), aggregation={"kind": kind})
        assert "share of" not in text
        assert "sum over the silos" in text
        assert "Anything from the aggregator" not in text
