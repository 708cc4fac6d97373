"""The coverage experiment: its page says what its results say, and every cell is a study that can be planned."""

import pytest
from experiments.coverage import report
from experiments.coverage.designs import CELLS, study_of


def test_the_table_is_that_of_the_results():
    text = (report.HERE / "README.md").read_text()
    assert report.filled(text, report.tables(report.results())) == text


def test_honest_intervals_cover():
    """Three standard errors around the margins that the method promises."""
    for name, found in report.results().items():
        cell = CELLS[name]
        if cell.protocol == "centred" and cell.signal == 1.5:
            low, high = (0.93, 0.97) if cell.epsilon >= 1 else (0.92, 0.99)
            error = 3 * found["error"][-1]
            assert low - error <= found["coverage"][-1] <= high + error, name


@pytest.mark.parametrize("name", list(CELLS))
def test_every_cell_is_a_study(name):
    assert study_of(CELLS[name]).method.kind == CELLS[name].protocol
