"""The page of attacks keeps its word: each row names tests, and each of them exists."""

import re
from pathlib import Path

import pytest

from tests.testing.methods import PLANTED
from tests.testing.planted import PLANTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
HEADER = "| attack | what it got before | test |"
CASES = {
    "test_an_attack_is_caught": {plant.method.__name__ for plant in PLANTS},
    "test_a_planted_bug_is_caught": {f"{bug}-{method.__name__}" for bug, method in PLANTED},
}


def named_tests(page: str) -> list[tuple[str, str]]:
    """The tests in the last cells of all tables, as (name, case in brackets); each row has at least one."""
    named = []
    for table in page.split(HEADER)[1:]:
        rows = re.match(r"\n\|[-|]+\|\n((?:\|.*\n)+)", table)
        assert rows, "expected a table with rows"
        for row in rows[1].splitlines():
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert len(cells) == 3, f"expected three cells, got {row}"
            assert all(cells), f"expected no empty cell, got {row}"
            listed = [re.fullmatch(r"`(test_\w+)(?:\[(.+)\])?`", name) for name in cells[2].split(", ")]
            assert all(listed), f"expected names of tests in the last cell, got {row}"
            named += [(name[1], name[2] or "") for name in listed if name]
    return named


def check_tests_exist(page: str) -> None:
    """Each named test is defined in tests/, and each named case of a plant is one."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)\(", sources, flags=re.MULTILINE))
    named = named_tests(page)
    assert named, "expected tests, got none"
    for name, case in named:
        assert name in defined, f"{name} is not in tests/"
        assert case in CASES.get(name, {""}), f"{name} has no case {case}"


def test_each_named_test_exists() -> None:
    check_tests_exist(PAGE)


@pytest.mark.parametrize("name", CASES)
def test_every_planted_method_is_on_the_page_once(name: str) -> None:
    assert sorted(case for listed, case in named_tests(PAGE) if listed == name) == sorted(CASES[name])


@pytest.mark.parametrize(
    "row",
    [
        "| an attack | all | `test_that_nobody_wrote` |",
        "| an attack | all | `test_an_attack_is_caught[that_nobody_planted]` |",
        "| an attack | all | `test_an_attack_is_caught` |",
        "| an attack | all | a test |",
        "| an attack | all | |",
        "| an attack | `test_each_named_test_exists` |",
    ],
)
def test_a_row_without_a_test_that_exists_is_noticed(row: str) -> None:
    good = f"{HEADER}\n|---|---|---|\n| an attack | all | `test_each_named_test_exists` |\n"
    check_tests_exist(good)
    with pytest.raises(AssertionError):
        check_tests_exist(good + row + "\n")
