import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.secure import sums
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.streams import keystream
from silobayes.secure.sums import PairwiseMaskSum, PlainSum, SecretSharingSum, SumAborted
from tests.secure.cases import STUDY


def kinds(num_clients, colluding, bits=64, compute_nodes=3):
    return [
        PlainSum(num_clients=num_clients, colluding=colluding),
        SecretSharingSum(
            modulus=Modulus(bits),
            num_clients=num_clients,
            colluding=colluding,
            compute_nodes=compute_nodes,
            study_hash=STUDY,
        ),
        PairwiseMaskSum(modulus=Modulus(bits), num_clients=num_clients, colluding=colluding, study_hash=STUDY),
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), num_clients=st.integers(2, 7), bits=st.sampled_from([24, 40, 64]))
def test_all_kinds_agree(data, num_clients, bits):
    colluding = data.draw(st.integers(0, (num_clients - 1) // 2).filter(lambda t: num_clients - t >= 2))
    present = data.draw(st.sets(st.integers(0, num_clients - 1), min_size=num_clients - colluding))
    limit = 2 ** (bits - 1) // num_clients - 1
    for sum_index, all_kinds in enumerate([kinds(num_clients, colluding, bits)] * 2):  # two sums of the same objects
        row = st.lists(st.integers(-limit, limit), min_size=3, max_size=3)
        vectors = {i: np.array(data.draw(row), dtype=np.int64) for i in sorted(present)}
        exact = [sum(int(v[c]) for v in vectors.values()) for c in range(3)]
        for kind in all_kinds:
            total = kind.total(vectors, sum_index=sum_index)
            assert total.dtype == np.int64
            assert total.tolist() == exact


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_sums_over_some_of_the_clients(data):
    """One sum after the other over other clients, who keep their numbers; of those asked, one may drop out."""
    groups = st.sets(st.integers(0, 6), min_size=3)
    all_kinds = kinds(7, 1, bits=32)
    for sum_index in range(3):
        asked = sorted(data.draw(groups))
        present = asked[: len(asked) - data.draw(st.integers(0, 1))]
        vectors = {i: np.array([10**i, -i], dtype=np.int64) for i in present}
        for kind in all_kinds:
            total = kind.total(vectors, sum_index=sum_index, among=asked)
            assert total.tolist() == [sum(10**i for i in present), -sum(present)]


@pytest.mark.parametrize("kind", kinds(5, 1), ids=lambda kind: type(kind).__name__)
def test_sums_over_some_of_the_clients_refuse_the_others(kind):
    row = np.ones(2, dtype=np.int64)
    with pytest.raises(InvalidInput, match="vectors"):
        kind.total(dict.fromkeys((0, 2, 3), row), sum_index=0, among=(1, 2, 3))
    for bad in ((1, 2), (2, 3, 5), (1, 1, 2, 3)):  # one would be alone, a stranger, one twice
        with pytest.raises(InvalidInput, match=r"colluding|only|vectors"):
            kind.total(dict.fromkeys(bad, row), sum_index=0, among=bad)
    with pytest.raises(SumAborted, match="below_floor"):
        kind.total({4: row}, sum_index=0, among=(1, 2, 4))
    assert kind.total(dict.fromkeys((1, 4), row), sum_index=1, among=(4, 1, 2)).tolist() == [2, 2]
    assert kind.total(dict.fromkeys(range(5), row), sum_index=2).tolist() == [5, 5]


def test_many_clients_go_through_windows(monkeypatch):
    monkeypatch.setattr(sums, "CHUNK_BYTES", 64)
    rows = np.random.default_rng(3).integers(-1000, 1000, (50, 7))
    vectors = {int(i): rows[i] for i in np.random.default_rng(4).permutation(50)[:48]}
    kind = kinds(50, 2, bits=32)[1]
    assert kind.total(vectors, sum_index=0).tolist() == rows[sorted(vectors)].sum(axis=0).tolist()


@pytest.mark.parametrize("kind", kinds(5, 1), ids=lambda kind: type(kind).__name__)
def test_sums_refuse(kind):
    row = np.ones(2, dtype=np.int64)
    for bad in (
        {},
        {0: row, 1: row, 2: row, 3: row[:1]},
        {0: row[:0], 1: row[:0], 2: row[:0], 3: row[:0]},
        {0: row, 1: row, 2: row, 5: row},
        {0: row, 1: row, 2: row, -1: row},
        {i: row.astype(np.float64) for i in range(5)},
        dict.fromkeys(range(5), row[None]),
    ):
        with pytest.raises(InvalidInput, match="vectors"):
            kind.total(bad, sum_index=0)
    assert kind.total(dict.fromkeys(range(4), row), sum_index=0).tolist() == [4, 4]
    with pytest.raises(SumAborted, match="below_floor"):
        kind.total(dict.fromkeys(range(3), row), sum_index=1)
    assert kind.total(dict.fromkeys(range(5), row), sum_index=2).tolist() == [5, 5]


@pytest.mark.parametrize("kind", kinds(5, 1)[1:], ids=lambda kind: type(kind).__name__)
def test_a_sum_index_is_used_once(kind):
    vectors = {i: np.ones(2, dtype=np.int64) for i in range(5)}
    kind.total(vectors, sum_index=3)
    for used in (3, 2):
        with pytest.raises(SumAborted, match="wrong_sum"):
            kind.total(vectors, sum_index=used)
    with pytest.raises(SumAborted, match="below_floor"):
        kind.total({i: vectors[i] for i in range(3)}, sum_index=4)
    with pytest.raises(SumAborted, match="wrong_sum"):
        kind.total(vectors, sum_index=4)
    assert kind.total(vectors, sum_index=5).tolist() == [5, 5]


def test_bytes_per_client():
    plain, sharing, masks = kinds(10, 2, bits=32)
    assert plain.bytes_per_client(100) == 800
    assert sharing.bytes_per_client(100) == 1200
    # Nine sealed pairs of shares and seeds, one tag, the vector, ten shares in the answer.
    assert masks.bytes_per_client(100) == 9 * (12 + 66 + 16 + 32) + 16 + 400 + 330


def test_long_streams_are_short_streams_continued():
    key = bytes(range(32))
    long = keystream(key, (1 << 19) + 5)
    assert long[: 1 << 18].tobytes() == keystream(key, 1 << 18).tobytes()
    assert long[:100].tobytes() == keystream(key, 100).tobytes()
    assert len(set(long[: 1 << 19].reshape(-1, 16).view("<u8")[:, 0].tolist())) == 1 << 15
