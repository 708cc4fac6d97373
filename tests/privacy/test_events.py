"""Events: frozen JSON vectors, round trips, and errors that name the key.

`canonical` leaves defaults out, and ledgers store canonical lines: changing a default would re-price old ledgers. The
vectors below are frozen for that reason.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silobayes.core.errors import InvalidInput
from silobayes.privacy.events import (
    ApproximateDPEvent,
    DiscreteGaussianEvent,
    GaussianEvent,
    LaplaceEvent,
    RandomisedResponseEvent,
    Sampling,
    Scheme,
    SkellamEvent,
    Terms,
    canonical,
    from_json,
    to_json,
)
from silobayes.privacy.relation import Relation

POISSON = Sampling(scheme=Scheme.POISSON, rate=0.01, overflow=1e-12)

VECTORS = [
    (GaussianEvent(clip_norm=1.0, std=4.0), '{"clip_norm":1.0,"mechanism":"gaussian","std":4.0}'),
    (
        GaussianEvent(clip_norm=1.0, std=4.0, sampling=POISSON, count=1000),
        '{"clip_norm":1.0,"count":1000,"mechanism":"gaussian",'
        '"sampling":{"overflow":1e-12,"rate":0.01,"scheme":"poisson"},"std":4.0}',
    ),
    (
        GaussianEvent(
            clip_norm=2, std=4, terms=Terms.PSD, sampling=Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.5)
        ),
        '{"clip_norm":2.0,"mechanism":"gaussian","sampling":{"rate":0.5,"scheme":"without_replacement"},'
        '"std":4.0,"terms":"psd"}',
    ),
    (
        DiscreteGaussianEvent(sensitivity=1.5, std=3.0, grid=0.125, dimension=7),
        '{"dimension":7,"grid":0.125,"mechanism":"discrete_gaussian","sensitivity":1.5,"std":3.0}',
    ),
    (
        SkellamEvent(clip_norm=1.0, std=3.0, terms=Terms.NON_NEGATIVE, count=2),
        '{"clip_norm":1.0,"count":2,"mechanism":"skellam","std":3.0,"terms":"non_negative"}',
    ),
    (LaplaceEvent(clip_norm=1.0, scale=2.0), '{"clip_norm":1.0,"mechanism":"laplace","scale":2.0}'),
    (
        RandomisedResponseEvent(categories=4, gamma=0.25),
        '{"categories":4,"gamma":0.25,"mechanism":"randomised_response"}',
    ),
    (
        ApproximateDPEvent(epsilon=0.1, delta=0.0, count=50),
        '{"count":50,"delta":0.0,"epsilon":0.1,"mechanism":"approximate_dp"}',
    ),
]


@pytest.mark.parametrize(("event", "line"), VECTORS, ids=[type(event).__name__ for event, _ in VECTORS])
def test_the_json_form_is_frozen_and_round_trips(event, line):
    assert canonical(event) == line
    assert from_json(to_json(event)) == event


GOOD = {"mechanism": "gaussian", "clip_norm": 1.0, "std": 4.0, "sampling": {"scheme": "poisson", "rate": 0.01}}

BAD = [
    ({"clip_norm": -1.0}, "clip_norm"),
    ({"clip_norm": 0}, "clip_norm"),
    ({"clip_norm": math.inf}, "clip_norm"),
    ({"clip_norm": "1"}, "clip_norm"),
    ({"clip_norm": True}, "clip_norm"),
    ({"clip_norm": None}, "clip_norm"),
    ({"sensitivity": 2.0}, "clip_norm"),
    ({"std": math.nan}, "std"),
    ({"std": 0.0}, "std"),
    ({"std": []}, "std"),
    ({"count": 0}, "count"),
    ({"count": 1.5}, "count"),
    ({"count": -3}, "count"),
    ({"terms": "positive"}, "terms"),
    ({"mechanism": "gauss"}, "mechanism"),
    ({"mechanism": None}, "mechanism"),
    ({"noise": 1.0}, "noise"),
    ({"sampling": {"scheme": "shuffled", "rate": 0.01}}, "sampling.scheme"),
    ({"sampling": {"scheme": "poisson", "rate": 1.5}}, "sampling.rate"),
    ({"sampling": {"scheme": "poisson", "rate": 0}}, "sampling.rate"),
    ({"sampling": {"scheme": "poisson"}}, "sampling.rate"),
    ({"sampling": {"scheme": "poisson", "rate": 0.1, "q": 1}}, "q"),
    ({"sampling": {"scheme": "poisson", "rate": 0.1, "overflow": 2.0}}, "sampling.overflow"),
    ({"sampling": 0.1}, "sampling"),
]


@pytest.mark.parametrize(("change", "key"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_input_names_the_key_what_came_and_what_to_do(change, key):
    with pytest.raises(InvalidInput) as caught:
        from_json(GOOD | change)
    assert caught.value.key == key
    assert "expected" in str(caught.value)
    assert ", got " in str(caught.value)


def test_a_missing_number_is_asked_for():
    with pytest.raises(InvalidInput, match="std"):
        from_json({"mechanism": "gaussian", "clip_norm": 1.0})
    with pytest.raises(InvalidInput, match="events"):
        from_json(["gaussian"])


@given(st.floats(1e-3, 1e3), st.sampled_from(list(Terms)))
def test_substitution_costs_more_than_add_remove_and_signs_help_only_in_l2(clip_norm, terms):
    gaussian = GaussianEvent(clip_norm=clip_norm, std=1.0, terms=terms)
    factor = 2.0 if terms is Terms.GENERAL else math.sqrt(2.0)
    assert gaussian.l2_sensitivity(Relation.SUBSTITUTE) == pytest.approx(factor * clip_norm)
    assert gaussian.l2_sensitivity(Relation.SUBSTITUTE) >= factor * clip_norm
    assert gaussian.l2_sensitivity(Relation.ADD_REMOVE) == clip_norm
    laplace = LaplaceEvent(clip_norm=clip_norm, scale=1.0, terms=terms)
    assert laplace.l1_sensitivity(Relation.SUBSTITUTE) == 2.0 * clip_norm
