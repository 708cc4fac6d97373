import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from silobayes.cli.main import main
from silobayes.core.digits import round_down, round_up
from silobayes.privacy import accounting
from silobayes.privacy.events import GaussianEvent
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit

EVENT = GaussianEvent(clip_norm=1.0, std=4.0, count=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    ledger = Ledger.create(path, Budget(epsilon=8.0, delta=1e-6, relation=Relation.SUBSTITUTE, unit=Unit.ROW))
    ledger.account("icu [bold]", epsilon=5.0, delta=1e-7).charge(EVENT)
    ledger.account("wards", epsilon=2.0, delta=1e-6)
    return path


def epsilon(delta: float) -> float:
    return accounting.price([EVENT], relation=Relation.SUBSTITUTE, delta=delta).epsilon


def test_show_prints_budgets_and_charges(path):
    result = CliRunner().invoke(main, ["ledger", "show", str(path)], env={"COLUMNS": "140"})
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in result.output.splitlines()]
    study, site = epsilon(1e-7), epsilon(1e-6)
    assert 0.0 < site < study < 5.0
    assert ["icu [bold]", "5", round_up(study), round_down(5 - study), "1e-07", "1"] in rows
    assert ["wards", "2", "0", "2", "1e-06", "0"] in rows
    assert ["all studies", "8", round_up(site), round_down(8 - site), "1e-06", "1"] in rows
    assert '"mechanism":"gaussian"' in result.output
    assert "substitute, per row" in result.output.replace("\n", " ")


def test_show_json_is_one_object(path):
    result = CliRunner().invoke(main, ["ledger", "show", str(path), "--json"])
    assert result.exit_code == 0
    shown = json.loads(result.output)
    assert shown["budget"] == {"epsilon": 8.0, "delta": 1e-6, "relation": "substitute", "unit": "row"}
    site = epsilon(1e-6)
    assert shown["spent"] == {"epsilon": site, "delta": 1e-6, "epsilon_left": 8.0 - site, "charges": 1}
    assert [(study["study"], study["epsilon"], study["spent"]["charges"]) for study in shown["studies"]] == [
        ("icu [bold]", 5.0, 1),
        ("wards", 2.0, 0),
    ]
    (entry,) = shown["entries"]
    assert entry["event"] == {"mechanism": "gaussian", "count": 2, "clip_norm": 1.0, "std": 4.0}
    assert (entry["relation"], entry["unit"], entry["study"]) == ("substitute", "row", "icu [bold]")


@pytest.mark.parametrize(("harm", "exit_code"), [("missing", 2), ("damaged", 1)])
def test_show_refuses_in_one_line(path, harm, exit_code):
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    result = CliRunner().invoke(main, ["ledger", "show", str(path), "--json"])
    assert result.exit_code == exit_code
    assert "ledger" in result.output
    assert "Traceback" not in result.output


@given(st.floats(1e-9, 1e9), st.integers(2, 8))
def test_what_people_read_is_still_a_bound(value, digits):
    assert float(round_down(value, digits)) <= value <= float(round_up(value, digits))
    assert float(round_up(value, digits)) == pytest.approx(value, rel=10.0 ** (1 - digits))
