import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.data.silo import Silo, concatenate, places_of_rows


def test_the_text_of_a_silo_holds_no_rows():
    silo = Silo(name="north", x=np.full((2, 2), 12345.0), y=np.array([54321.0, 0.0]), persons=np.array([777, 777]))
    assert repr(silo) == str(silo) == "Silo(name='north')"


def test_arrays_get_the_types_that_models_expect():
    silo = Silo(name="a", x=np.eye(2), y=np.array([True, False]))
    assert (silo.x.dtype, silo.y.dtype, silo.num_rows, silo.num_features) == (np.float32, np.int32, 2, 2)
    assert Silo(name="a", x=np.eye(2), y=np.array([0.5, 1.0])).y.dtype == np.float32


@pytest.mark.parametrize(
    "harm",
    [
        {"x": np.zeros((0, 2)), "y": np.zeros(0)},
        {"x": np.zeros((2, 0))},
        {"x": np.zeros(2)},
        {"x": np.array([["a", "b"], ["c", "d"]])},
        {"x": np.array([[np.nan, 0.0], [0.0, 0.0]])},
        {"x": np.array([[1e300, 0.0], [0.0, 0.0]])},
        {"y": np.array([np.inf, 0.0])},
        {"y": np.zeros(3)},
        {"y": np.zeros((2, 1))},
        {"persons": np.zeros(3, int)},
        {"persons": np.zeros(2)},
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_silo_has_rows_and_finite_numbers(harm):
    with pytest.raises(InvalidInput, match="silo a"):
        Silo(**({"name": "a", "x": np.eye(2), "y": np.zeros(2)} | harm))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 6))
def test_which_rows_of_a_person_stay_depends_on_that_persons_rows_only(persons, limit, leaving):
    persons = np.array(persons)
    silo = Silo(name="a", x=np.arange(len(persons))[:, None], y=np.zeros(len(persons)), persons=persons)
    kept = silo.first_rows(limit)
    assert kept.persons is not None
    for person in np.unique(persons):
        own = np.flatnonzero(persons == person)[:limit]
        assert kept.x[kept.persons == person, 0].tolist() == own.tolist()
    stay = np.flatnonzero(persons != leaving)
    if len(stay):
        others = silo.take("a", stay).first_rows(limit)
        assert others.x.tolist() == kept.x[kept.persons != leaving].tolist()


def test_places_follow_first_appearance_and_numbers_the_order_of_rows():
    places, numbers = places_of_rows(np.array([70, 5, 70, 9, 5, 70]))
    assert places.tolist() == [0, 1, 0, 2, 1, 0]
    assert numbers.tolist() == [0, 0, 1, 0, 1, 2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.permutations(range(7)))
def test_places_do_not_depend_on_what_ids_are(persons, names):
    renamed = np.array(names)[persons] * 10**12 - 3
    for places, same in zip(places_of_rows(np.array(persons)), places_of_rows(renamed), strict=True):
        assert places.tolist() == same.tolist()


def test_concatenated_silos_keep_their_persons_apart():
    parts = [Silo(name=n, x=np.eye(3), y=np.arange(3), persons=np.array([0, 1, 1])) for n in "ab"]
    whole = concatenate("all", parts)
    assert whole.persons is not None
    assert whole.persons.tolist() == [0, 1, 1, 2, 3, 3]
    assert whole.take("few", np.array([4, 0])).y.tolist() == [1, 0]
