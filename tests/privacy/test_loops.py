"""The door for compiled loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from silobayes.core.errors import BudgetExceeded, InvalidInput
from silobayes.families import MeanFieldGaussian
from silobayes.inference.coordinates import point_at
from silobayes.inference.dp_vi import ascend_privately
from silobayes.inference.global_steps import OPTIMISER, Group, Position, ReleasedGradient, run_steps
from silobayes.inference.rows import pad
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.loops import Step, StepPlan, clip_factors, clipped_sum, open_steps
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import PoissonSampler
from silobayes.testing import FreeAccount

PLAN = StepPlan(
    sampler=PoissonSampler(sample_rate=0.2, max_rows=100),
    num_steps=400,
    clip_norm=2.0,
    noise_multiplier=1.5,
    dimension=50,
)
ALARM = 1e-6


def a_door(account=None) -> Door:
    return Door(account or FreeAccount(Relation.SUBSTITUTE, Unit.ROW), FreshDraws(Entropy.not_private(2)))


def test_all_steps_are_charged_as_one_event_before_the_first_draw():
    class Draws(FreshDraws):
        def loop(self, sampler, dimension, event):
            assert account.charged == [event]
            assert event.count == PLAN.num_steps
            return super().loop(sampler, dimension, event)

    account = FreeAccount(Relation.SUBSTITUTE, Unit.ROW)
    open_steps(Door(account, Draws(Entropy.from_os())), PLAN)
    assert len(account.charged) == 1
    assert account.charged[0].sampling == PLAN.sampler.sampling


def test_a_refused_loop_draws_nothing():
    class Refusing(FreeAccount):
        def charge(self, event):
            raise BudgetExceeded("nothing left")

    class Draws(FreshDraws):
        def loop(self, sampler, dimension, event):
            raise AssertionError("drew before the charge")

    with pytest.raises(BudgetExceeded):
        open_steps(Door(Refusing(Relation.SUBSTITUTE, Unit.ROW), Draws(Entropy.from_os())), PLAN)


def test_a_plan_for_another_unit_than_the_accounts_is_refused():
    account = FreeAccount(Relation.SUBSTITUTE, Unit.PERSON)
    with pytest.raises(InvalidInput, match="unit"):
        open_steps(a_door(account), PLAN)
    assert account.charged == []
    persons = dataclasses.replace(PLAN, unit=Unit.PERSON)
    with pytest.raises(InvalidInput, match="unit"):
        open_steps(a_door(), persons)
    open_steps(a_door(account), persons)
    assert account.charged == [PLAN.event]  # the price is that of slots, whoever they are


def test_inputs_have_the_priced_noise_and_batches():
    steps = open_steps(a_door(), PLAN)
    noise = np.asarray(steps.noise).ravel()
    law = stats.norm(scale=PLAN.event.std)
    assert stats.kstest(noise, law.cdf).pvalue > ALARM
    for factor in (2 / 3, 3 / 2):
        assert stats.kstest(noise * factor, law.cdf).pvalue < ALARM
    sizes = np.asarray(steps.mask).sum()
    assert stats.binomtest(int(sizes), PLAN.num_steps * 100, 0.2).pvalue > ALARM


USUAL, CAPACITY = PLAN.sampler.usual_size(PLAN.num_steps), PLAN.sampler.capacity


@pytest.mark.parametrize(
    ("largest", "width"), [(0, USUAL), (USUAL, USUAL), (USUAL + 1, CAPACITY), (CAPACITY, CAPACITY)]
)
def test_batches_of_usual_and_unusual_sizes_are_kept_whole(largest, width):
    batches: list[np.ndarray] = []

    class Draws(FreshDraws):
        def loop(self, sampler, dimension, event):
            drawn = super().loop(sampler, dimension, event)
            drawn.batches[7] = np.arange(largest)
            batches.extend(drawn.batches)
            return drawn

    account = FreeAccount(Relation.SUBSTITUTE, Unit.ROW)
    inputs = open_steps(Door(account, Draws(Entropy.not_private(2))), PLAN)
    assert USUAL < CAPACITY
    assert inputs.indices.shape == inputs.mask.shape == (PLAN.num_steps, width)
    for batch, indices, mask in zip(batches, inputs.indices, inputs.mask, strict=True):
        np.testing.assert_array_equal(indices[mask], batch)


def test_a_normal_run_returns_nothing_but_releases():
    steps = open_steps(a_door(), PLAN)

    def body(state, step):
        released, seen = step.release(jnp.ones(PLAN.dimension))
        return state + released, seen

    state, seen = jax.jit(lambda inputs: jax.lax.scan(body, jnp.zeros(PLAN.dimension), inputs))(steps)
    assert seen is None
    np.testing.assert_allclose(state, PLAN.num_steps + np.asarray(steps.noise).sum(axis=0), rtol=1e-4, atol=1e-2)


compiled_sum = jax.jit(clipped_sum)
terms = arrays(
    np.float32, (4, 3), elements=st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=False, width=32)
)


@given(terms, st.floats(np.float32(1e-3), 1e3, width=32))
@settings(max_examples=300)
def test_each_term_enters_with_norm_at_most_clip_norm(values, clip_norm):
    for k in range(len(values)):
        total = np.asarray(compiled_sum(values, np.arange(4) == k, clip_norm), dtype=np.float64)
        assert np.linalg.norm(total) <= clip_norm


@pytest.mark.parametrize("num_terms", [512, 4096, 32768])
def test_rounding_of_a_long_sum_stays_within_the_price(num_terms):
    """Terms that are all alike err the most; one of them is taken away or turned round."""
    rng = np.random.default_rng(num_terms)
    for _ in range(5):
        values = np.tile(rng.normal(size=20), (num_terms, 1)) + 0.05 * rng.normal(size=(num_terms, 20))
        whole = np.ones(num_terms, dtype=bool)
        place = rng.integers(num_terms)
        turned, without = values.copy(), whole.copy()
        turned[place] *= -1
        without[place] = False
        total = np.asarray(compiled_sum(values, whole, 0.1), dtype=np.float64)
        assert np.linalg.norm(total - np.asarray(compiled_sum(turned, whole, 0.1))) <= 0.2
        assert np.linalg.norm(total - np.asarray(compiled_sum(values, without, 0.1))) <= 0.1


def test_a_step_aims_below_the_clip_norm_by_what_its_sum_may_err():
    inputs = open_steps(a_door(), PLAN)
    width = inputs.mask.shape[1]
    assert inputs.aim(1.0) == pytest.approx(1 / (1 + width / 2**20), rel=1e-12)
    assert inputs.aim(1.0, 3) == pytest.approx(1 / (1 + 3 * width / 2**20), rel=1e-12)
    # Filled up beside silos with wider batches, a silo clips to the norm that it clips to alone.
    wider = dataclasses.replace(inputs, mask=np.pad(inputs.mask, ((0, 0), (0, 100))))
    np.testing.assert_array_equal(wider.aim(1.0), inputs.aim(1.0))


MODEL = LogisticRegression(num_features=3)
FAMILY = MeanFieldGaussian(event_shape=(3,))
MANY = 4096


def first_sum(
    which: str, steps: Step, *, num_rows: int, clip_norm: float, rows_per_unit: int = 1, x=None
) -> np.ndarray:
    """What a compiled loop sums up in its first step, before noise. By default all rows are alike and too long."""
    x = np.full((num_rows * rows_per_unit, 3), 37.123, dtype=np.float32) if x is None else x
    rows = pad(x, np.ones(len(x), dtype=np.int32), len(x))
    eta = MODEL.prior_eta(FAMILY)
    steps = dataclasses.replace(steps, replayed=np.full_like(steps.noise, np.nan))  # so that sums are shown
    size = np.zeros(steps.noise.shape[0], dtype=np.float32)
    if which == "local":
        public = {"clip_norm": clip_norm, "sample_rate": 1.0, "step_size": size, "clipping": "ordinary"}
        public |= {"rows_per_unit": rows_per_unit}
        _, seen = ascend_privately(MODEL, FAMILY, jax.random.key(0), eta, eta, rows, steps, **public)
        return np.asarray(seen[0][0], dtype=np.float64)
    stacked = jax.tree.map(lambda leaf: leaf[None], (rows, steps))
    group = Group(rows=stacked[0], steps=stacked[1], sample_rates=np.ones(1, np.float32))
    point = point_at(FAMILY, eta)
    server = Position(point=point, adam=OPTIMISER.init(jnp.zeros(point.num_coordinates)))
    gradient = ReleasedGradient(
        model=MODEL, clip_norm=np.float32(clip_norm), clipping="ordinary", rows_per_unit=rows_per_unit
    )
    _, (seen,) = run_steps(gradient, eta, server, (group,), None, size)
    return np.asarray(seen[0][0][0], dtype=np.float64)


def whole_batch(num_units: int) -> Step:
    return Step(
        indices=np.arange(num_units, dtype=np.int32)[None],
        mask=np.ones((1, num_units), dtype=bool),
        slots=np.array([num_units], dtype=np.int32),
        noise=np.zeros((1, 6), dtype=np.float32),
    )


@pytest.mark.parametrize("rows_per_unit", [1, 4])
@pytest.mark.parametrize("which", ["local", "global"])
def test_every_compiled_sum_leaves_room_for_its_rounding(which, rows_per_unit):
    """The sum of n terms that are all alike and clipped is n clip norms long, less the room: 2^-20 for each row added.

    Half of the room is what n float32 additions could use in the cases that were measured, and much more.
    """
    num_units = MANY // rows_per_unit
    total = first_sum(which, whole_batch(num_units), num_rows=num_units, clip_norm=0.1, rows_per_unit=rows_per_unit)
    full, room = 0.1 * num_units, MANY * 2.0**-20
    assert full * (1 - 2 * room - 1e-4) < np.linalg.norm(total) < full * (1 - room / 2)


@pytest.mark.parametrize("which", ["local", "global"])
def test_a_row_moves_every_compiled_sum_by_at_most_the_clip_norm_rounding_included(which):
    """The float32 sums are subtracted in float64: a row goes, or is turned round, among rows that are nearly alike."""
    rng, clip_norm, num_rows = np.random.default_rng(1), 0.1, MANY
    for scale in (0.3, 37.123, 37.123, 400.0):
        x = (scale * (1 + 0.01 * rng.normal(size=(num_rows, 3)))).astype(np.float32)
        place = int(rng.integers(num_rows))
        turned, step = x.copy(), whole_batch(num_rows)
        turned[place] *= -1
        without = dataclasses.replace(step, mask=np.arange(num_rows)[None] != place)
        own = {"num_rows": num_rows, "clip_norm": clip_norm}
        total = first_sum(which, step, x=x, **own)
        assert np.linalg.norm(total - first_sum(which, without, x=x, **own)) <= clip_norm
        assert np.linalg.norm(total - first_sum(which, step, x=turned, **own)) <= 2 * clip_norm


@given(terms)
def test_a_masked_or_non_finite_term_contributes_zero(values):
    mask = np.array([True, False, True, True])
    usable = mask & np.isfinite(values).all(axis=1)
    kept = np.where(usable[:, None], values, 0.0).astype(np.float32)
    np.testing.assert_array_equal(compiled_sum(values, mask, 1.0), compiled_sum(kept, np.ones(4, dtype=bool), 1.0))


@given(arrays(np.float32, 5, elements=st.floats(0, np.float32(3e38), width=32)))
def test_factors_bring_norms_below_the_bound(norms):
    factors = np.asarray(clip_factors(jnp.asarray(norms), 0.7), dtype=np.float64)
    assert (norms.astype(np.float64) * factors <= 0.7).all()
    assert (factors[norms < 0.69] == 1.0).all()
    assert clip_factors(jnp.array([jnp.nan, jnp.inf]), 0.7).tolist() == [0.0, 0.0]
