"""The gate: right methods pass 2,000 random pairs, each planted bug is caught."""

from functools import partial

import numpy as np
import pytest

from silobayes.privacy.relation import Relation
from silobayes.privacy.sampling import PoissonSampler
from silobayes.testing import PrivacyViolation, check_method, neighbours
from silobayes.testing.laws import check_batch_law
from tests.testing import planted
from tests.testing.methods import MAX_ROWS, METHODS, PLANTED, dp_sgd, make_full_rows, make_rows, survey

PAIRS = 2000
# These show only when rows come and go: under substitution a batch keeps its size and a term is replaced anyway.
RELATION_OF = {"division by the batch size": Relation.ADD_REMOVE, "shards priced as rows": Relation.ADD_REMOVE}


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", METHODS)
def test_the_right_methods_pass(name, relation):
    count = PAIRS // (2 * len(METHODS))  # 2,000 pairs over all methods and both relations
    pairs = neighbours(np.random.default_rng(1), make_rows, relation, count)
    assert check_method(METHODS[name], pairs) == count


@pytest.mark.slow
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", METHODS)
def test_each_right_method_passes_2000_pairs(name, relation):
    pairs = neighbours(np.random.default_rng(2), make_rows, relation, PAIRS)
    assert check_method(METHODS[name], pairs) == PAIRS


def test_fixed_size_batches_pass():
    pairs = neighbours(np.random.default_rng(3), make_full_rows, Relation.SUBSTITUTE, 100)
    check_method(partial(dp_sgd, fixed_size=True), pairs)


def test_randomised_answers_pass():
    check_method(survey, neighbours(np.random.default_rng(3), make_full_rows, Relation.SUBSTITUTE, 100))


@pytest.mark.parametrize(("bug", "method"), PLANTED)
def test_a_planted_bug_is_caught(bug, method):
    relation = RELATION_OF.get(bug, Relation.SUBSTITUTE)
    with pytest.raises(PrivacyViolation):
        check_method(partial(method, bug=bug), neighbours(np.random.default_rng(4), make_rows, relation, 200))


@pytest.mark.parametrize("relation", list(Relation))
def test_every_right_method_passes(relation):
    pairs = neighbours(np.random.default_rng(4), make_rows, relation, 200)
    assert check_method(planted.right, pairs, num_silos=2) == 200


@pytest.mark.parametrize("plant", planted.PLANTS, ids=lambda plant: plant.method.__name__)
def test_an_attack_is_caught(plant):
    pairs = neighbours(np.random.default_rng(4), make_rows, plant.relation, 200)
    with pytest.raises(PrivacyViolation):
        check_method(plant.method, pairs, num_silos=2)


def test_a_public_result_that_went_around_the_door_is_caught():
    def leaky(rows, door):
        METHODS["statistics"](rows, door)
        return {"rows": len(rows["x"]), "mean": np.nan_to_num(rows["x"]).mean()}

    with pytest.raises(PrivacyViolation, match="around the door"):
        check_method(leaky, neighbours(np.random.default_rng(5), make_rows, Relation.SUBSTITUTE, 50))


def test_shuffled_epochs_do_not_follow_the_poisson_law():
    """Right marginals, no repeats within an epoch: the overlap of successive batches gives them away."""
    sampler = PoissonSampler(sample_rate=0.25, max_rows=MAX_ROWS)
    rng = np.random.default_rng(6)
    shuffled = [[(sampler, part) for part in np.split(rng.permutation(MAX_ROWS), 4)] for _ in range(100)]
    with pytest.raises(PrivacyViolation, match="not drawn as priced"):
        check_batch_law([[run] for run in shuffled])
    fresh = [[(sampler, np.flatnonzero(rng.random(MAX_ROWS) < 0.25)) for _ in range(4)] for _ in range(100)]
    check_batch_law([[run] for run in fresh])
