"""`silobayes plan | run | resume` on a small study, from the study file to a verified report."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

import silobayes
from silobayes.cli.main import main
from silobayes.engines import local
from silobayes.posteriors import Posterior
from silobayes.privacy.ledger import Budget, Ledger
from silobayes.privacy.relation import Relation, Unit

STUDY = """
[study]
name = "small"
[data]
source = "rows.csv"
target = "died"
classes = ["no", "yes"]
public = ["rows", "test"]
test = 0.25
[data.bounds]
age = [0, 100]
[silos]
count = 2
[model]
kind = "logistic_regression"
[privacy]
epsilon = 1.0
delta = 1e-5
relation = "substitute"
unit = "row"
[protocol]
rounds = 2
steps = 3
sample_rate = 0.5
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def write_study(folder: Path, text: str = STUDY) -> Path:
    rng = np.random.default_rng(1)
    age = rng.uniform(0, 100, 160).round(2)
    died = np.where(rng.uniform(size=160) < age / 100, "yes", "no")
    pd.DataFrame({"age": age, "died": died}).to_csv(folder / "rows.csv", index=False)
    (folder / "study.toml").write_text(text)
    return folder / "study.toml"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    study = write_study(tmp_path_factory.mktemp("ran"))
    result = invoke("run", study, "--json")
    assert result.exit_code == 0, result.output
    return study, json.loads(result.stdout)


def test_run_ends_with_the_object_of_the_stable_surface(ran: tuple[Path, dict]) -> None:
    study, ended = ran
    assert {"metrics", "privacy", "communications", "timing", "posterior"} <= set(ended)
    assert 0.0 <= ended["metrics"]["accuracy"] <= 1.0
    assert ended["privacy"]["epsilon"] <= 1.0
    assert set(ended["privacy"]["per_silo"]) == {"silo-00", "silo-01"}
    assert ended["privacy"]["unit"] == "row"
    assert ended["communications"]["messages"] == 8
    assert Path(ended["posterior"]).parent == study.parent / "study-run"
    assert Posterior.load(Path(ended["posterior"]).parent).names == ("age", "intercept")


def test_what_ran_is_what_was_planned(ran: tuple[Path, dict]) -> None:
    study, ended = ran
    planned = json.loads(invoke("plan", study, "--json").stdout)
    certificate = json.loads((Path(ended["directory"]) / "certificate.json").read_text())
    assert planned["study_hash"] == certificate["study_hash"]
    assert [silo["events"] for silo in planned["silos"]] == [silo["events"] for silo in certificate["silos"]]
    assert planned["messages"] == ended["communications"]["messages"]


def test_a_real_run_is_verified_and_reported(ran: tuple[Path, dict]) -> None:
    directory = ran[1]["directory"]
    assert json.loads(invoke("verify", directory, "--json").stdout)["passed"] is True
    html = Path(json.loads(invoke("report", directory, "--json").stdout)["html"]).read_text(encoding="utf-8")
    assert "FAILED" not in html
    assert "NOT PRIVATE" not in html


def test_the_summary_of_a_run_has_units_and_odds_ratios(ran: tuple[Path, dict]) -> None:
    directory = Path(ran[1]["directory"])
    answer = json.loads(invoke("summary", directory, "--json", "--level", 0.8).stdout)
    assert (answer["level"], answer["ratio"], answer["is_private"]) == (0.8, "odds ratio", True)
    age, intercept = answer["parameters"]["age"], answer["parameters"]["intercept"]
    assert age["per_unit"]["unit"] == pytest.approx(1 / 50)
    assert age["per_unit"]["mean"] == pytest.approx(age["mean"] / 50)
    assert age["ratio"]["ratio"] == pytest.approx(np.exp(age["mean"] / 50))
    assert age["ratio"]["encoded_upper"] == pytest.approx(np.exp(age["upper"]))
    assert "ratio" not in intercept
    text = invoke("summary", directory).stdout
    assert "95 % interval" in text
    assert "Odds ratios per unit of the column" in text
    assert "NOT PRIVATE" not in text
    assert "80 % interval" in invoke("summary", directory, "--level", 0.8).stdout


def test_a_run_says_what_its_intervals_include(ran: tuple[Path, dict]) -> None:
    _, ended = ran
    certificate = json.loads((Path(ended["directory"]) / "certificate.json").read_text())
    assert ended["intervals"] == certificate["intervals"] == "no"
    for command in ("summary", "resume"):
        text = " ".join(invoke(command, ended["directory"]).stdout.split())
        assert "Intervals: no: they do not include the privacy noise" in text
        assert "docs/honest-intervals.md" in text


def test_a_plan_says_which_method_it_is_and_what_privacy_adds(tmp_path: Path) -> None:
    study = write_study(tmp_path, STUDY[: STUDY.index("[protocol]")])
    text = " ".join(invoke("plan", study).stdout.split())
    for said in ("Method: centred/scores leads", "Intervals: honest", "due to privacy", "15 │ ", " to "):
        assert said in text
    assert "due to privacy" not in invoke("plan", write_study(tmp_path)).stdout


def test_the_list_of_methods_says_what_their_intervals_include() -> None:
    listed = {one["method"]: one["intervals"] for one in json.loads(invoke("methods", "--json").stdout)["methods"]}
    assert listed["centred/scores"] == "honest"
    assert listed["pvi/virtual_clients"] == "partly"
    assert listed["pvi/dp_optimisation"] == "no"
    assert listed["pvi/none"] is None
    text = invoke("methods").stdout
    assert text.count("intervals: ") == sum(word is not None for word in listed.values())


@pytest.mark.parametrize(("arguments", "key"), [(["--level", "95"], "level"), (["--level", "nan"], "level")])
def test_a_level_that_is_no_probability_is_refused(ran: tuple[Path, dict], arguments: list[str], key: str) -> None:
    for command in (["summary"], ["predict", "--at", str(ran[0].parent / "rows.csv")]):
        result = invoke(*command, ran[1]["directory"], *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"Error: {key}: ")


def test_summary_refuses_what_is_no_run(tmp_path: Path) -> None:
    result = invoke("summary", tmp_path)
    assert result.exit_code == 2
    assert "study.json" in result.stderr


def test_new_rows_are_predicted_with_intervals(ran: tuple[Path, dict], tmp_path: Path) -> None:
    directory = Path(ran[1]["directory"])
    pd.DataFrame({"age": [10, 90.5], "died": ["no", "?"]}).to_csv(tmp_path / "new.csv", index=False)
    answer = json.loads(invoke("predict", directory, "--at", tmp_path / "new.csv", "--json", "--level", 0.9).stdout)
    assert (answer["level"], answer["is_private"], answer["stamp"]) == (0.9, True, None)
    x = np.array([[10 / 50 - 1, 1.0], [90.5 / 50 - 1, 1.0]])
    posterior = Posterior.load(directory)
    lower, upper = posterior.predict_interval(x, 0.9)
    for row, p, low, high in zip(answer["rows"], posterior.predict_proba(x), lower, upper, strict=True):
        assert row["class"] == ("yes" if p[1] > p[0] else "no")
        assert row["probability of yes"] == pytest.approx(p[1], rel=1e-5)
        assert (row["lower of yes"], row["upper of yes"]) == pytest.approx((low[1], high[1]), rel=1e-5)
        assert low[1] < p[1] < high[1]
    text = invoke("predict", directory, "--at", tmp_path / "new.csv")
    assert text.exit_code == 0
    assert "95 % interval of the mean" in text.stdout
    written = invoke("predict", directory, "--at", tmp_path / "new.csv", "--out", tmp_path / "out.csv", "--level", 0.9)
    assert "Wrote 2 rows" in written.stdout
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out.csv"), pd.DataFrame(answer["rows"]))


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ("died\nno\n", "data.features", "column 'age'"),
        ("age\n101\n", "data.bounds.age", "numbers in [0, 100]"),
        ("age\nold\n", "data.bounds.age", "finite numbers"),
        ('age\n""\n', "data.bounds.age", "finite numbers"),
        ("age,height\n5,3\n", "data.features", "1 more columns"),
        ("age\n", "data", "rows in new rows"),
        (None, "--at", "a file"),
    ],
)
def test_rows_that_cannot_be_predicted_are_refused(
    ran, table: str | None, key: str, words: str, tmp_path: Path
) -> None:
    if table is not None:
        (tmp_path / "new.csv").write_text(table)
    result = invoke("predict", ran[1]["directory"], "--at", tmp_path / "new.csv", "--out", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {key}")
    assert words in result.stderr
    assert not (tmp_path / "out.csv").exists()


def test_predictions_do_not_overwrite_a_file(ran: tuple[Path, dict], tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age\n5\n")
    result = invoke("predict", ran[1]["directory"], "--at", tmp_path / "new.csv", "--out", tmp_path / "new.csv")
    assert result.exit_code == 2
    assert (tmp_path / "new.csv").read_text() == "age\n5\n"


COUNTS = """
[study]
name = "falls"
[data]
source = "rows.csv"
target = "falls"
target_bounds = [0, 20]
public = ["rows"]
terms = ["age:ward"]
[data.bounds]
age = [0, 100]
ward = ["a", "b"]
[silos]
count = 1
[model]
kind = "poisson_regression"
[privacy]
mode = "none"
"""


def test_counts_by_ward_are_read_as_rate_ratios_and_predicted(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"age": rng.uniform(0, 100, 200).round(), "ward": rng.choice(["a", "b"], 200)})
    frame["falls"] = rng.poisson(np.exp(frame["age"] / 100)).clip(0, 20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "study.toml").write_text(COUNTS)
    run = invoke("run", tmp_path / "study.toml", "--out", tmp_path / "run")
    assert run.exit_code == 0, run.output
    assert "silobayes summary" in run.stdout
    text = invoke("summary", tmp_path / "run").stdout
    assert "Rate ratios" in text
    assert "NOT PRIVATE" in text
    read = json.loads(invoke("summary", tmp_path / "run", "--json").stdout)
    assert read["stamp"].startswith("NOT PRIVATE")
    assert list(read["parameters"]) == ["age", "ward=b", "age:ward=b", "intercept"]
    frame.drop(columns="falls").to_csv(tmp_path / "new.csv", index=False)
    found = json.loads(invoke("predict", tmp_path / "run", "--at", tmp_path / "new.csv", "--json").stdout)["rows"]
    assert all(row["lower"] < row["mean"] < row["upper"] for row in found)
    assert invoke("predict", tmp_path / "run", "--at", tmp_path / "new.csv").stdout.count("\n") < 40
    (tmp_path / "bad.csv").write_text("age,ward\n5,c\n")
    refused = invoke("predict", tmp_path / "run", "--at", tmp_path / "bad.csv")
    assert refused.exit_code == 2
    assert "data.bounds.ward" in refused.stderr


def test_resuming_a_finished_run_shows_it_and_charges_nothing(ran: tuple[Path, dict]) -> None:
    result = invoke("resume", ran[1]["directory"], "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == ran[1]
    table = invoke("resume", ran[1]["directory"])
    assert "95 % interval" in table.stdout
    assert "epsilon" in table.stdout


def test_a_second_run_does_not_overwrite_the_first(ran: tuple[Path, dict]) -> None:
    result = invoke("run", ran[0])
    assert result.exit_code == 2
    assert "silobayes resume" in result.stderr


def test_another_seed_is_another_study(ran: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def stop(inputs, out, progress):
        seen.update(seed=inputs.study.study.seed, hash=inputs.study.hash, rows=inputs.silos[0].x)
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "run", stop)
    first = []
    for seed in (1, 2):
        result = invoke("run", ran[0], "--seed", seed, "--out", tmp_path / "run")
        assert result.exit_code == 130
        assert "nothing was charged" in result.stderr
        assert seen["seed"] == seed
        first.append(seen["rows"])
    assert seen["hash"] != ran[1]["study_hash"]
    assert not np.array_equal(*first)


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = write_study(tmp_path)
    whole = local.run

    def interrupted(inputs, out, progress):
        def stop(state):
            progress(state)
            raise KeyboardInterrupt

        return whole(inputs, out, stop)

    monkeypatch.setattr(local, "run", interrupted)
    result = invoke("run", study, "--out", tmp_path / "elsewhere" / "run")
    assert result.exit_code == 130
    command = result.stderr.rstrip().rsplit("silobayes ", 1)[1]
    done = invoke(*command.split(), "--json")
    assert done.exit_code == 0, done.output
    ended = json.loads(done.stdout)
    assert ended["privacy"]["epsilon"] <= 1.0  # the one charge
    assert invoke("verify", ended["directory"]).exit_code == 0


def test_a_sites_own_ledger_pays_and_refuses(ran: tuple[Path, dict], tmp_path: Path) -> None:
    budget = Budget(epsilon=1.0, delta=1e-5, relation=Relation.SUBSTITUTE, unit=Unit.ROW)
    ledger = Ledger.create(tmp_path / "site.ledger", budget)
    arguments = ["run", ran[0], "--ledger", f"silo-01={tmp_path / 'site.ledger'}", "--json", "--out"]
    first = invoke(*arguments, tmp_path / "first")
    assert first.exit_code == 0, first.output
    assert len(ledger.entries()) == 1
    assert invoke("verify", tmp_path / "first").exit_code == 0
    again = invoke(*arguments, tmp_path / "again")
    assert again.exit_code == 1
    assert "budget" in again.stderr
    assert len(ledger.entries()) == 1
    assert invoke("run", ran[0], "--ledger", "silo-01").exit_code == 2


def test_a_refused_run_leaves_nothing_to_resume(ran: tuple[Path, dict], tmp_path: Path) -> None:
    path = tmp_path / "site.ledger"
    create = [
        "ledger",
        "create",
        path,
        "--epsilon",
        0.5,
        "--delta",
        "1e-5",
        "--relation",
        "substitute",
        "--unit",
        "row",
    ]
    assert invoke(*create).exit_code == 0
    (tmp_path / "rows.csv").write_text("age\n1\n")
    for name, place, code, said in (
        ("silo-01", path, 1, "No silo was charged"),
        ("silo-9", path, 2, "silos of the study"),
        ("silo-01", tmp_path / "none.ledger", 2, "silobayes ledger create"),
        ("silo-01", tmp_path / "rows.csv", 2, "a missing ledger is not an empty one"),
    ):
        result = invoke("run", ran[0], "--ledger", f"{name}={place}", "--out", tmp_path / "run")
        assert (result.exit_code, said in result.stderr) == (code, True), result.stderr
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "none.ledger").exists()
    assert not Ledger.open(path).entries()
    assert invoke(*create).exit_code == 2  # not overwritten


def test_a_finished_run_of_frames_is_shown(tmp_path: Path) -> None:
    text = STUDY.replace('source = "rows.csv"\n', "").replace("[silos]\ncount = 2\n", "").replace("test = 0.25\n", "")
    rows = pd.read_csv(write_study(tmp_path, text).parent / "rows.csv")
    stopping = {"progress": lambda now: (_ for _ in ()).throw(KeyboardInterrupt)}
    for options in (stopping, {}):
        with suppress(KeyboardInterrupt):
            silobayes.fit(tmp_path / "study.toml", {"a": rows[:80], "b": rows[80:]}, out=tmp_path / "run", **options)
        result = invoke("resume", tmp_path / "run", "--json")
        if options:
            assert result.exit_code == 2
            assert "silobayes.fit(study, silos, out=DIR)" in result.stderr
    assert set(json.loads(result.stdout)["privacy"]["per_silo"]) == {"a", "b"}


def test_a_run_without_privacy_is_stamped(tmp_path: Path) -> None:
    text = STUDY.split("[privacy]")[0] + '[privacy]\nmode = "none"\n[protocol]\nrounds = 1\nsteps = 3\n'
    study = write_study(tmp_path, text)
    result = invoke("run", study)
    assert result.exit_code == 0, result.output
    assert "NOT PRIVATE" in result.stdout
    ended = json.loads(invoke("resume", tmp_path / "study-run", "--json").stdout)
    assert ended["privacy"]["epsilon"] is None
    assert "NOT PRIVATE, and that is so" in invoke("verify", tmp_path / "study-run").stdout
    html = Path(json.loads(invoke("report", tmp_path / "study-run", "--json").stdout)["html"]).read_text()
    assert "NOT PRIVATE" in html


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "study.toml", "--rows", "many"], "--rows"),
        (["plan", "none.toml"], "study"),
        (["run", "study.toml", "--seed", "-1"], "study.seed"),
        (["run", "study.toml", "--seed", str(2**63)], "study.seed"),
        (["run", "study.toml", "--engine", "remote"], "--engine"),
        (["run", "study.toml", "--out", "/proc/x/y"], "out"),
        (["resume", "none"], "run.json"),
    ],
)
def test_bad_input_is_named(arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert not (tmp_path / "study-run").exists()


def test_a_plan_for_people(ran: tuple[Path, dict]) -> None:
    result = invoke("plan", ran[0], "--rows", 5000)
    assert result.exit_code == 0
    for text in ("noise std", "dp_optimisation", "Each site sends", "not private", "2500"):
        assert text in result.output, text
