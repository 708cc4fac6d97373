"""docs/adding-a-method.md keeps its word: its two files and its one line are a whole method, as it stands there.

The files are put beside the package for the time of these tests, the line into the registry's own source; nothing else
is told of the method.
"""

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import silobayes
from silobayes import plans
from silobayes.cli.main import main
from silobayes.core.errors import InvalidInput
from silobayes.models.gaussian import GaussianMean
from silobayes.privacy.clipping import clip, general
from silobayes.privacy.relation import Relation, Unit
from silobayes.report import planning
from silobayes.studies.method import registered
from silobayes.study import AggregationKind, AggregationSection, Study
from silobayes.testing import PrivacyViolation, check_method
from tests.docs.test_docs import OWN_TESTS, ROOT, Block, blocks_of, expect, run_python
from tests.engines.gate import FEATURES, budget_of, calibrated_once, pairs_of, whole_run
from tests.engines.harness import Settings

__all__ = ["calibrated_once"]  # a fixture
(PAGE,) = OWN_TESTS
BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))
REGISTRY = "src/silobayes/plans/__init__.py"
FILES = {block.title: block.text for block in BLOCKS if block.title not in (None, REGISTRY)}
(LINE,) = [block.text for block in BLOCKS if block.title == REGISTRY]
LARGEST_METHOD = 120
NOISE, PRIOR, SIZES = 0.3, 2.0, (150, 100, 120, 130)


@pytest.fixture(scope="module", autouse=True)
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's method, added as the page says; its roles."""
    patch, folder, added = pytest.MonkeyPatch(), tmp_path_factory.mktemp("added"), []
    for title, text in FILES.items():
        room, file = Path(title).parts[-2:]
        (folder / room).mkdir(exist_ok=True)
        (folder / room / file).write_text(text + "\n")
        package = importlib.import_module(f"silobayes.{room}")
        patch.setattr(package, "__path__", [*package.__path__, str(folder / room)])
        added.append((package, Path(file).stem))
    source = (ROOT / REGISTRY).read_text(encoding="utf-8")
    names: dict = {"__name__": "silobayes.plans"}
    exec(compile(re.sub(r"^_MODULES = .*$", LINE, source, flags=re.MULTILINE), REGISTRY, "exec"), names)
    for key, method in names["METHODS"].items():
        if key not in plans.METHODS:
            patch.setitem(plans.METHODS, key, method)
            patch.setitem(registered(), key, method)  # type: ignore[arg-type]
    yield sys.modules["silobayes.protocols.column_means"]
    patch.undo()
    for package, name in added:
        sys.modules.pop(f"{package.__name__}.{name}")
        delattr(package, name)


def test_the_page_does_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    printed = ""
    for block in BLOCKS:
        where = f"{PAGE.name}:{block.line}"
        if block.title is not None:
            continue
        if block.language == "python":
            printed = run_python(block, where, namespace)
        elif block.language == "console":
            run_here(block, where)
        else:
            assert block.language == "text", where
            expect(block.text, printed, where)


def run_here(block: Block, where: str) -> None:
    """`silobayes` commands, in this process, which knows the method."""
    for part in re.split(r"^\$ silobayes ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, f"{where}: {command}: {done.output}"
        expect(output, done.output, f"{where}: {command}")


def test_a_method_is_two_short_files_and_one_line() -> None:
    assert {Path(title).parent.name for title in FILES} == {"protocols", "plans"}
    assert sum(len(text.splitlines()) for text in FILES.values()) < LARGEST_METHOD
    assert len(LINE.splitlines()) == 1
    present = re.search(r"^_MODULES = \((.*)\)$", (ROOT / REGISTRY).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert present is not None
    assert f'_MODULES = ({present[1]}, "column_means")' == LINE


def ages(kind: str = "none", epsilon: float = 1.0, mode: str = "dp", **options: float) -> Study:
    budget = {"epsilon": epsilon, "delta": 1e-5, "relation": "substitute", "unit": "row"} if mode == "dp" else {}
    return Study.from_dict({
        "study": {"name": "ages"},
        "data": {"features": ["age", "dose"], "bounds": {"age": [20, 80], "dose": [0, 1]}, "public": ["rows"]},
        "model": {"kind": "gaussian", "options": options or {"noise_stddev": NOISE, "prior_stddev": PRIOR}},
        "privacy": {"mode": mode, **budget},
        "protocol": {"kind": "column_means"},
        "aggregation": {"kind": kind},
    })  # fmt: skip


def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(4)
    return {
        f"silo-{m}": pd.DataFrame({"age": rng.uniform(30, 75, size).round(), "dose": rng.beta(2, 5, size)})
        for m, size in enumerate(SIZES)
    }


@pytest.mark.parametrize("kind", ["none", "secret_sharing"])
@pytest.mark.parametrize("epsilon", [1.0, 1000.0])
def test_a_run_is_the_closed_form_at_the_planned_price(kind: str, epsilon: float, tmp_path: Path) -> None:
    """The means: noise is fixed; with any other one coordinate would be beyond six deviations once in 5e8."""
    study, rows = ages(kind, epsilon), tables()
    posterior = silobayes.fit(study, rows, out=tmp_path / "run", noise_seed=2)
    planned = planning.plan(study, list(SIZES))
    certified = posterior.provenance["silos"]
    assert [own["events"] for own in certified] == [own["events"] for own in planned.to_json()["silos"]]
    assert all(own["epsilon"] <= epsilon for own in certified)

    x = np.concatenate([study.encoding.encode_features(frame) for frame in rows.values()]).astype(float)
    (event,) = planned.silos[0].events
    stddev = event.std * np.sqrt(len(SIZES) / (planned.num_shares or 1))  # type: ignore[attr-defined]
    variance = len(x) * NOISE**2 + stddev**2
    precision = PRIOR**-2 + len(x) ** 2 / variance
    np.testing.assert_allclose(posterior.stddev, precision**-0.5, rtol=1e-5)
    exact = len(x) * x.sum(axis=0) / variance / precision
    noise_of_mean = len(x) * stddev / variance / precision
    assert np.all(np.abs(posterior.mean - exact) < 6 * noise_of_mean)
    # The total is what is noised, each silo's share or not.
    assert np.any(np.abs(posterior.mean - exact) > noise_of_mean / 100)


def test_a_run_is_verified(tmp_path: Path) -> None:
    silobayes.fit(ages("pairwise_masks"), tables(), out=tmp_path / "run")
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output


CASES = [(AggregationKind.NONE, relation) for relation in Relation] + [
    (AggregationKind.SECRET_SHARING, relation) for relation in Relation
]


def column_means(kind: AggregationKind, relation: Relation, count: int) -> int:
    settings = Settings(
        kind="column_means",
        privatise="sums",
        rounds=1,
        damping=1.0,
        steps=1,
        step_size=1.0,
        clip_norm=1.5,
        aggregation=AggregationSection(kind=kind),
    )
    model = GaussianMean(num_features=FEATURES, noise_stddev=NOISE)
    method = whole_run(model, settings, budget_of(relation, Unit.ROW), 2)
    pairs = pairs_of(settings, Unit.ROW, relation, count, real_target=False)
    return check_method(method, pairs, unit=Unit.ROW, num_silos=2)


@pytest.mark.usefixtures("calibrated_once")
@pytest.mark.parametrize(("kind", "relation"), CASES)
def test_one_changed_row_moves_the_sum_by_no_more_than_is_priced(kind: AggregationKind, relation: Relation) -> None:
    assert column_means(kind, relation, 32) == 32


@pytest.mark.usefixtures("calibrated_once")
def test_rows_that_are_centred_before_clipping_are_caught(
    protocol: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def centred(self, x, y, down):
        return clip(general(x - x.mean(axis=0)), self.clip_norm) if len(x) else clip(general(x), self.clip_norm)

    monkeypatch.setattr(protocol.ColumnSilo, "bounded", centred)
    with pytest.raises(PrivacyViolation):
        column_means(AggregationKind.NONE, Relation.SUBSTITUTE, 32)


def test_what_the_method_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        ages(mode="none")
    assert refused.value.key == "privacy.mode"
    with pytest.raises(InvalidInput) as refused:
        silobayes.fit(ages(prior_stddev=PRIOR), tables(), out=tmp_path / "run")
    assert refused.value.key == "model.options.noise_stddev"
    assert not (tmp_path / "run").exists()
    study = ages()
    with pytest.raises(InvalidInput) as refused:
        Study.from_dict({**study.to_dict(), "protocol": {"kind": "column_means", "rounds": 3}})
    assert refused.value.key == "protocol.rounds"
    assert [own.name for own in dataclasses.fields(study.method.keys)] == ["kind", "privatise", "clip_norm"]
