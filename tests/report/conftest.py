"""One honest run per session, copied for each test: ledgers take time to write."""

import shutil
from pathlib import Path

import pytest

from tests.report import run_cases


@pytest.fixture(scope="session")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases.write_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture
def run_dir(honest_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def fixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with noise from a seed."""
    return run_cases.write_run(tmp_path_factory.mktemp("fixed") / "run", comparisons=False, fixed_noise=True)
