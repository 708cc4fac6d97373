import numpy as np
import pandas as pd
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.report.planning import plan
from silobayes.study import Study, encode_silos, load_silos
from tests.data.studies import changed, rows

CANARY = "canary-7341"


def write(directory, frame: pd.DataFrame, name: str = "rows.csv") -> None:
    frame.to_csv(directory / name, index=False)


def refusal(directory, tables) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load_silos(Study.from_dict(tables), directory)
    assert CANARY not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def with_cell(column: str, cell: object) -> pd.DataFrame:
    frame = rows().astype(object)
    frame.loc[7, column] = cell
    return frame


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet", "npz"])
def test_every_format_gives_the_same_silos(tmp_path, suffix):
    frame, name = rows(), f"rows.{suffix}"
    if suffix == "parquet":
        frame.to_parquet(tmp_path / name)
    elif suffix == "npz":
        np.savez(tmp_path / name, age=frame.age, ward=frame.ward.to_numpy("U"), died=frame.died.to_numpy("U"))
    else:
        write(tmp_path, frame, name)
    silos, test, encoding = load_silos(Study.from_dict(changed(data__source=name)), tmp_path)
    write(tmp_path, frame, "plain.csv")
    expected, _, _ = load_silos(Study.from_dict(changed(data__source="plain.csv")), tmp_path)
    assert test is None
    assert encoding.feature_names == ("age", "ward=b", "ward=c", "intercept")
    assert [(silo.name, silo.num_rows) for silo in silos] == [("silo-00", 20), ("silo-01", 20)]
    for silo, same in zip(silos, expected, strict=True):
        np.testing.assert_array_equal(silo.x, same.x)
        np.testing.assert_array_equal(silo.y, same.y)


def test_same_study_same_silos_and_another_seed_others(tmp_path):
    write(tmp_path, rows())
    first, again, other = (load_silos(Study.from_dict(changed(study__seed=seed)), tmp_path)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first[0].x, again[0].x)
    assert not np.array_equal(first[0].x, other[0].x)


def ages(silo) -> list[float]:
    return ((silo.x[:, 0] + 1) / 2).tolist()  # the middle of the range became zero


def test_held_out_rows_are_in_no_silo(tmp_path):
    frame = rows(100).assign(age=np.arange(100))
    write(tmp_path, frame)
    tables = changed(data__test=0.25, data__public=["rows", "test"])
    silos, test, _ = load_silos(Study.from_dict(tables), tmp_path)
    assert test is not None
    assert [silo.num_rows for silo in [*silos, test]] == [38, 37, 25]
    assert sorted(age for silo in [*silos, test] for age in ages(silo)) == pytest.approx(np.arange(100) / 100)


def test_files_per_silo_hold_out_their_own_rows(tmp_path):
    write(tmp_path, rows(40).assign(age=np.arange(40)), "north.csv")
    write(tmp_path, rows(20).assign(age=np.arange(60, 80)), "south.csv")
    tables = changed(
        data__source=None, silos={}, data__test=0.1, data__public=["rows", "test"],
        data__files={"north": "north.csv", "south": "south.csv"},
    )  # fmt: skip
    silos, test, _ = load_silos(Study.from_dict(tables), tmp_path)
    assert test is not None
    assert [(silo.name, silo.num_rows) for silo in silos] == [("north", 36), ("south", 18)]
    assert sum(age < 0.5 for age in ages(test)) == 4
    assert sum(age > 0.5 for age in ages(test)) == 2
    frames = {"north": pd.read_csv(tmp_path / "north.csv"), "south": pd.read_csv(tmp_path / "south.csv")}
    same, same_test, _ = encode_silos(Study.from_dict(tables), frames)
    assert same_test is not None
    np.testing.assert_array_equal(same[1].x, silos[1].x)
    np.testing.assert_array_equal(same_test.y, test.y)
    tables["data"]["files"] = ["north.csv", "south.csv"]
    assert [silo.name for silo in load_silos(Study.from_dict(tables), tmp_path)[0]] == ["north", "south"]


def test_a_test_table_is_encoded_alike(tmp_path):
    write(tmp_path, rows())
    write(tmp_path, rows(9), "held_out.csv")
    tables = changed(data__test="held_out.csv", data__public=["rows", "test"])
    silos, test, encoding = load_silos(Study.from_dict(tables), tmp_path)
    assert test is not None
    assert (sum(silo.num_rows for silo in silos), test.num_rows, test.name) == (40, 9, "test")
    np.testing.assert_array_equal(test.x, encoding.encode(rows(9), "test")[0])


def by_hospital(**changes):
    bounds = {"age": [0, 100], "ward": ["a", "b", "c"], "hospital": ["south", "north"]}
    column = {"scheme": "column", "column": "hospital"}
    return changed(data__features=["age", "ward"], data__bounds=bounds, silos=column, **changes)


def test_a_column_names_the_silos(tmp_path):
    hospital = np.where(np.arange(40) < 10, "north", "south")
    write(tmp_path, rows().assign(hospital=hospital))
    silos, _, encoding = load_silos(Study.from_dict(by_hospital()), tmp_path)
    assert [(silo.name, silo.num_rows) for silo in silos] == [("south", 30), ("north", 10)]
    assert len(encoding.feature_names) == 4
    write(tmp_path, rows().assign(hospital="north"))
    assert "empty silo" in str(refusal(tmp_path, by_hospital()))
    write(tmp_path, rows().assign(hospital=np.where(np.arange(40) < 10, "north", CANARY)))
    assert refusal(tmp_path, by_hospital()).key == "silos.column"
    write(tmp_path, rows())
    assert refusal(tmp_path, by_hospital()).key == "silos.column"


def test_a_person_is_in_one_silo_and_not_also_in_the_test_rows(tmp_path):
    frame = rows(90).assign(age=np.arange(90), who=[f"{CANARY}-{k // 3}" for k in range(90)])
    write(tmp_path, frame)
    tables = changed(
        data__unit="who", privacy__unit="person", data__test=0.2, data__public=["rows", "test"], silos__count=3
    )
    silos, test, _ = load_silos(Study.from_dict(tables), tmp_path)
    assert test is not None
    holders = [{round(age * 100) // 3 for age in ages(silo)} for silo in [*silos, test]]
    assert sum(map(len, holders)) == 30
    assert len(set.union(*holders)) == 30
    for silo in silos:
        assert silo.persons is not None
        assert len(np.unique(silo.persons)) == silo.num_rows / 3


@pytest.mark.parametrize("per_silo", [False, True])
def test_nobodys_id_moves_others_between_training_and_test(tmp_path, per_silo):
    """Metrics have no noise: whose rows they are computed on must not tell which id a training person has."""
    tables = changed(
        data__unit="who", privacy__unit="person", data__test=0.3, data__public=["rows", "test"], silos__count=2
    )
    if per_silo:
        del tables["silos"]
        del tables["data"]["source"]
        tables["data"]["files"] = {"one": "a.csv", "two": "b.csv"}
    study, found = Study.from_dict(tables), set()
    for candidate in range(12):
        frame = rows(90).assign(age=np.arange(90), who=[f"p{k}" for k in range(90)])
        frame.loc[7, "who"] = f"candidate-{candidate}"
        if per_silo:
            frame[:45].to_csv(tmp_path / "a.csv", index=False)
            frame[45:].to_csv(tmp_path / "b.csv", index=False)
        else:
            write(tmp_path, frame)
        silos, test, _ = load_silos(study, tmp_path)
        others = [[round(100 * age) for age in ages(silo) if round(100 * age) != 7] for silo in [*silos, test]]
        found.add(str(others))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("column", "cell", "key", "said"),
    [
        ("age", "", "data.bounds.age", "finite numbers"),
        ("age", "nan", "data.bounds.age", "finite numbers"),
        ("age", "inf", "data.bounds.age", "finite numbers"),
        ("age", CANARY, "data.bounds.age", "finite numbers"),
        ("age", 101, "data.bounds.age", "numbers in [0, 100]"),
        ("ward", CANARY, "data.bounds.ward", "listed categories"),
        ("ward", "", "data.bounds.ward", "an empty cell"),
        ("died", CANARY, "data.target", "listed classes"),
        ("died", "", "data.target", "an empty cell"),
    ],
)
def test_a_bad_cell_stops_the_study_before_it_starts(tmp_path, column, cell, key, said):
    write(tmp_path, with_cell(column, cell))
    error = refusal(tmp_path, changed())
    assert error.key == key
    assert said in str(error)


def test_outside_clip_accepts_what_refuse_does_not(tmp_path):
    write(tmp_path, with_cell("age", 5000))
    assert refusal(tmp_path, changed()).key == "data.bounds.age"
    silos, _, _ = load_silos(Study.from_dict(changed(data__outside="clip")), tmp_path)
    assert max(age for silo in silos for age in ages(silo)) == 1.0


def test_a_file_without_a_header_is_refused_without_quoting_its_first_row(tmp_path):
    rows().assign(note=CANARY).to_csv(tmp_path / "rows.csv", index=False, header=False)
    assert refusal(tmp_path, changed()).key == "data.features"
    write(tmp_path, rows().assign(note="x").rename(columns={"note": CANARY}))
    assert refusal(tmp_path, changed()).key == "data.features"


def test_columns_to_ignore_may_be_there_or_not(tmp_path):
    write(tmp_path, rows().assign(note=CANARY))
    assert refusal(tmp_path, changed()).key == "data.features"
    silos, _, _ = load_silos(Study.from_dict(changed(data__ignore=["note", "other"])), tmp_path)
    assert len(silos) == 2


def test_missing_columns_and_targets_are_refused(tmp_path):
    write(tmp_path, rows().drop(columns="ward"))
    assert refusal(tmp_path, changed()).key == "data.features"
    write(tmp_path, rows().drop(columns="died"))
    assert refusal(tmp_path, changed()).key == "data.target"


def test_empty_silos_are_refused(tmp_path):
    write(tmp_path, rows(3))
    assert "empty silo" in str(refusal(tmp_path, changed(silos__count=4)))
    write(tmp_path, rows().iloc[:0])
    assert "an empty table" in str(refusal(tmp_path, changed()))
    write(tmp_path, rows(), "north.csv")
    write(tmp_path, rows().iloc[:0], "south.csv")
    files = changed(data__source=None, silos={}, data__files={"north": "north.csv", "south": "south.csv"})
    assert "south" in str(refusal(tmp_path, files))


def test_rows_of_one_class_are_refused_without_privacy_but_a_silo_of_one_class_is_not(tmp_path):
    write(tmp_path, rows().assign(died="no"))
    error = refusal(tmp_path, changed(privacy={"mode": "none"}))
    assert error.key == "data.target"
    assert "one class" in str(error)
    write(tmp_path, rows())
    write(tmp_path, rows().assign(died="no"), "south.csv")
    files = changed(data__source=None, silos={}, data__files={"north": "rows.csv", "south": "south.csv"})
    silos, _, _ = load_silos(Study.from_dict(files), tmp_path)
    assert np.unique(silos[1].y).tolist() == [0]


def test_that_a_private_run_starts_does_not_tell_a_rows_class(tmp_path):
    """Whoever knows that all others are of one class would read the last one's from a refusal, or from a run."""
    started = set()
    for last in ("no", "yes"):
        frame = rows().assign(died="no")
        frame.loc[7, "died"] = last
        write(tmp_path, frame)
        silos, _, _ = load_silos(Study.from_dict(changed()), tmp_path)
        started.add(tuple(silo.num_rows for silo in silos))
    assert started == {(20, 20)}


def test_a_study_without_tables_takes_frames(tmp_path):
    tables = changed(data__source=None, silos={})
    assert refusal(tmp_path, tables).key == "data.source"
    silos, _, _ = encode_silos(Study.from_dict(tables), {"north": rows(), "south": rows(seed=1)})
    assert [silo.name for silo in silos] == ["north", "south"]
    with pytest.raises(InvalidInput, match="at least one silo"):
        encode_silos(Study.from_dict(tables), {})


def test_missing_files_are_named_by_their_key(tmp_path):
    assert refusal(tmp_path, changed()).key == "data.source"
    write(tmp_path, rows())
    assert refusal(tmp_path, changed(data__test="none.csv", data__public=["rows", "test"])).key == "data.test"
    files = changed(data__source=None, silos={}, data__files={"north": "none.csv"})
    assert refusal(tmp_path, files).key == "data.files.north"


@pytest.mark.parametrize(
    ("silos", "sizes"),
    [
        ({"count": 4, "scheme": "rho_kappa", "rho": 0.5, "kappa": 0.5}, [15, 15, 45, 45]),
        ({"count": 3, "scheme": "label_skew", "rho": 0.5}, [40, 40, 40]),
    ],
)
def test_splits_by_label(tmp_path, silos, sizes):
    write(tmp_path, rows(120))
    loaded, _, _ = load_silos(Study.from_dict(changed(silos=silos)), tmp_path)
    assert [silo.num_rows for silo in loaded] == sizes


def test_fewer_rows_than_shards_are_refused():
    def planned(shards, sizes):
        study = Study.from_dict(changed(protocol={"privatise": "virtual_clients", "shards": shards}))
        return plan(study, sizes)

    assert len(planned(20, [20, 20]).silos) == 2
    for shards, sizes in ((21, [20, 20]), (41, [40, 40])):
        with pytest.raises(InvalidInput, match=r"protocol\.shards"):
            planned(shards, sizes)
