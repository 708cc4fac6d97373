import gzip

import numpy as np
import pandas as pd
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.data.tables import read_table

CANARY = "canary-7341"
FRAME = pd.DataFrame({"age": [1, 20, 3], "ward": ["NA", 'say "x", y', "null"]})


def test_cells_of_a_csv_file_stay_as_they_are_written(tmp_path):
    text = '\ufeffcode,ward\r\n007,NA\r\n1e3,"two\r\nlines"\r\n,\r\n'
    (tmp_path / "rows.csv").write_bytes(text.encode())
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    for name in ("rows.csv", "rows.csv.gz"):
        frame = read_table(tmp_path / name, "data.source")
        assert frame.to_dict("list") == {"code": ["007", "1e3", ""], "ward": ["NA", "two\r\nlines", ""]}


def test_parquet_has_no_hidden_columns(tmp_path):
    FRAME[FRAME.age != 20].to_parquet(tmp_path / "a.parquet")
    FRAME.set_index("ward").to_parquet(tmp_path / "b.parquet")
    assert list(read_table(tmp_path / "a.parquet", "data.source").columns) == ["age", "ward"]
    assert set(read_table(tmp_path / "b.parquet", "data.source").columns) == {"age", "ward"}


def test_npz_matrices_become_numbered_columns(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(6.0).reshape(3, 2), y=np.array([1, 0, 1]))
    frame = read_table(tmp_path / "rows.npz", "data.source")
    assert frame.to_dict("list") == {"x_0": [0.0, 2.0, 4.0], "x_1": [1.0, 3.0, 5.0], "y": [1, 0, 1]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("long.csv", f"a,b\n1,2\n{CANARY},2,3\n".encode()),
        ("short.csv", f"a,b\n1,2\n{CANARY}\n".encode()),
        ("twice.csv", f"a,a\n1,{CANARY}\n".encode()),
        ("empty.csv", b""),
        ("latin.csv", f"a\n{CANARY}\xe9\n".encode("latin-1")),
        ("broken.csv.gz", gzip.compress(f"a\n{CANARY}\n".encode(), mtime=0)[:-9]),
        ("not.parquet", CANARY.encode()),
        ("not.npz", CANARY.encode()),
        ("rows.txt", CANARY.encode()),
        ("missing.csv", None),
    ],
)
def test_unreadable_files_are_refused_without_quoting_them(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput) as refusal:
        read_table(tmp_path / name, "data.source")
    assert refusal.value.key == "data.source"
    assert CANARY not in str(refusal.value)
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_npz_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "rows.npz", a=np.array([CANARY, 1], object), allow_pickle=True)
    with pytest.raises(InvalidInput) as refusal:
        read_table(tmp_path / "rows.npz", "data.source")
    assert CANARY not in str(refusal.value)


def test_npz_columns_of_different_lengths_are_refused(tmp_path):
    np.savez(tmp_path / "rows.npz", a=np.zeros(3), b=np.zeros(2))
    with pytest.raises(InvalidInput, match=r"data\.source"):
        read_table(tmp_path / "rows.npz", "data.source")
