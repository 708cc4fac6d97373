import pytest

from tests.secure import make_vectors
from tests.secure.cases import vectors


@pytest.mark.parametrize("make", make_vectors.MAKERS, ids=lambda make: make.__name__)
def test_the_script_makes_the_frozen_vectors(make):
    assert make() == vectors(make.__name__)


def test_the_script_agrees_with_published_examples():
    make_vectors.check_hkdf()
    make_vectors.check_x25519()
    make_vectors.check_aes()
    make_vectors.check_aead()


def test_a_quarter_of_the_vectors_is_bad():
    rows = [row for make in make_vectors.MAKERS for row in vectors(make.__name__)]
    bad = [row for row in rows if row.get("bad") or row.get("refusal")]
    assert len(rows) >= 40
    assert 4 * len(bad) >= len(rows)
