"""The private solver: its gate, its limits, its noise-free limit."""

import dataclasses
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from silobayes.core.errors import InvalidInput
from silobayes.families import FullGaussian, MeanFieldGaussian
from silobayes.inference.coordinates import num_coordinates
from silobayes.inference.dp_vi import ascend_privately, maximise_privately, usual_part
from silobayes.inference.rows import Rows, pad
from silobayes.inference.vi import maximise
from silobayes.models.numpyro_model import from_numpyro
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.loops import Step, StepPlan, close_steps, open_steps
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler
from silobayes.testing import FreeAccount, PrivacyViolation, check_method, neighbours
from tests.inference.oracles import assert_close
from tests.models.cases import MODELS, labels

KEY = jax.random.key(3)
MAX_ROWS, FEATURES, NUM_STEPS, CLIP_NORM = 24, 3, 5, 0.5
LOGISTIC = MODELS["logistic"]


def make_family(model, name):
    return FullGaussian(dimension=model.dim) if name == "full" else MeanFieldGaussian(event_shape=(model.dim,))


def make_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    num_rows = MAX_ROWS - int(rng.integers(4))
    x = rng.normal(size=(num_rows, FEATURES)) * 10.0 ** rng.uniform(-1, 1)
    return {"x": x.astype(np.float32), "y": rng.integers(2, size=num_rows).astype(np.float32)}


def labelled_rows(model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Labels of the model's kind; classes are integers, so that a canary takes another row's class."""
    x = make_rows(rng)["x"]
    return {"x": x, "y": labels(model, rng, len(x))}


def make_full_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    x = rng.normal(size=(MAX_ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(2, size=MAX_ROWS).astype(np.float32)}


def plan_for(family, sampler=None, num_steps=NUM_STEPS):
    return StepPlan(
        sampler=PoissonSampler(sample_rate=0.5, max_rows=MAX_ROWS) if sampler is None else sampler,
        num_steps=num_steps,
        clip_norm=CLIP_NORM,
        noise_multiplier=2.0,
        dimension=num_coordinates(family),
    )


def two_rounds(rows, door, *, model, family, clipping, sampler=None):
    """A silo's two rounds of DP optimisation: the second starts from, and has a cavity made of, the first's result."""
    plan = plan_for(family, sampler)
    eta_p = model.prior_eta(family)
    eta_q = model.start_eta(family, KEY)
    eta_t, public = family.zeros(), []
    silo = pad(rows["x"], rows["y"], MAX_ROWS)
    for _ in range(2):
        steps = open_steps(door, plan)
        eta_new, seen = maximise_privately(
            model, family, KEY, eta_q - eta_t, eta_q, silo, steps, plan, step_size=0.1, clipping=clipping
        )
        close_steps(door, seen)
        eta_t, eta_q = eta_new - eta_p, eta_new
        public.append(jax.tree.map(np.asarray, eta_q))
    return public


def numpyro_shrinkage(x, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


GATE = [
    ("logistic", "mean_field", "label_free", Relation.SUBSTITUTE),
    ("logistic", "mean_field", "label_free", Relation.ADD_REMOVE),
    ("numpyro", "mean_field", "label_free", Relation.ADD_REMOVE),
]


def gate_model(name):
    return from_numpyro(numpyro_shrinkage, np.zeros(FEATURES), np.asarray(0.0)) if name == "numpyro" else MODELS[name]


@pytest.mark.parametrize(("name", "kind", "clipping", "relation"), GATE)
def test_one_changed_row_moves_each_released_sum_by_no_more_than_the_plan_prices(name, kind, clipping, relation):
    model = gate_model(name)
    method = partial(two_rounds, model=model, family=make_family(model, kind), clipping=clipping)
    assert check_method(method, neighbours(np.random.default_rng(1), make_rows, relation, 24)) == 24


SLOW_GATE = [
    *((name, "mean_field", "label_free", relation) for name in [*MODELS, "numpyro"] for relation in Relation),
    *((name, "mean_field", "ordinary", Relation.SUBSTITUTE) for name in ("logistic", "softmax", "mlp_binary")),
    *((name, "full", "label_free", Relation.SUBSTITUTE) for name in ("logistic", "mlp_binary")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "clipping", "relation"), SLOW_GATE)
def test_every_model_passes_the_gate(name, kind, clipping, relation):
    model = gate_model(name)
    rows = partial(labelled_rows, model)
    method = partial(two_rounds, model=model, family=make_family(model, kind), clipping=clipping)
    assert check_method(method, neighbours(np.random.default_rng(2), rows, relation, 96)) == 96


def test_fixed_size_batches_pass_the_gate():
    family = make_family(LOGISTIC, "mean_field")
    sampler = FixedSizeSampler(batch_size=8, max_rows=MAX_ROWS)
    method = partial(two_rounds, model=LOGISTIC, family=family, clipping="label_free", sampler=sampler)
    assert check_method(method, neighbours(np.random.default_rng(2), make_full_rows, Relation.SUBSTITUTE, 24)) == 24


def test_the_gate_catches_a_larger_clip_norm_than_was_priced():
    family = make_family(LOGISTIC, "mean_field")

    def underpaid(rows, door):
        steps = open_steps(door, plan_for(family))
        eta = LOGISTIC.prior_eta(family)
        _, seen = ascend_privately(
            LOGISTIC, family, KEY, eta, eta, pad(rows["x"], rows["y"], MAX_ROWS), steps,
            clip_norm=1.5 * CLIP_NORM, sample_rate=0.5, step_size=0.1, clipping="label_free",
        )  # fmt: skip
        close_steps(door, seen)

    with pytest.raises(PrivacyViolation, match="move by at most"):
        check_method(underpaid, neighbours(np.random.default_rng(3), make_rows, Relation.SUBSTITUTE, 40))


def every_row(num_rows, num_steps, dimension):
    """The steps of a loop without sampling and noise."""
    return Step(
        indices=jnp.tile(jnp.arange(num_rows), (num_steps, 1)),
        mask=jnp.ones((num_steps, num_rows), dtype=bool),
        slots=np.full(num_steps, num_rows),
        noise=jnp.zeros((num_steps, dimension)),
    )


@pytest.mark.parametrize(("name", "clipping"), [("mean_field", "label_free"), ("full", "ordinary")])
def test_without_noise_clipping_and_sampling_it_is_vi(name, clipping):
    family = make_family(LOGISTIC, name)
    raw = make_rows(np.random.default_rng(5))
    rows = pad(raw["x"], raw["y"], MAX_ROWS)
    eta = LOGISTIC.prior_eta(family)
    private, seen = ascend_privately(
        LOGISTIC, family, KEY, eta, eta, rows, every_row(MAX_ROWS, 800, num_coordinates(family)),
        clip_norm=1e12, sample_rate=1.0, step_size=0.1, clipping=clipping,
    )  # fmt: skip
    plain = maximise(LOGISTIC, family, KEY, eta, eta, rows, tempering=1.0, num_steps=1, step_size=0.1)
    assert seen is None
    assert_close(private, plain, rtol=1e-3, atol=1e-3)


def test_without_noise_models_with_draws_take_the_steps_of_vi_with_one_draw():
    model = MODELS["mlp_binary"]
    family = make_family(model, "mean_field")
    raw = labelled_rows(model, np.random.default_rng(5))
    rows = pad(raw["x"], raw["y"], MAX_ROWS)
    eta = model.start_eta(family, KEY)
    private, _ = ascend_privately(
        model, family, KEY, eta, eta, rows, every_row(MAX_ROWS, 10, num_coordinates(family)),
        clip_norm=1e12, sample_rate=1.0, step_size=0.01, clipping="label_free",
    )  # fmt: skip
    plain = maximise(model, family, KEY, eta, eta, rows, tempering=1.0, num_steps=10, step_size=0.01, num_draws=1)
    assert_close(private, plain, rtol=1e-3, atol=1e-3)


def test_padding_rows_change_nothing():
    family = make_family(LOGISTIC, "mean_field")
    raw = make_full_rows(np.random.default_rng(6))
    eta = LOGISTIC.prior_eta(family)
    steps = every_row(MAX_ROWS, 20, num_coordinates(family))
    run = partial(ascend_privately, LOGISTIC, family, KEY, eta, eta)
    options = {"clip_norm": CLIP_NORM, "sample_rate": 1.0, "step_size": 0.1, "clipping": "label_free"}
    padded = pad(raw["x"][:10], raw["y"][:10], MAX_ROWS)
    garbage = Rows(x=padded.x.at[10:].set(jnp.inf), y=padded.y.at[10:].set(jnp.nan), present=padded.present)
    short = pad(raw["x"][:10], raw["y"][:10], 10)
    expected, _ = run(padded, steps, **options)
    for rows in (garbage, short):
        eta_q, _ = run(rows, steps, **options)
        assert_close(eta_q, expected, rtol=1e-4, atol=1e-5)


def test_with_one_row_per_person_it_is_the_loop_over_rows():
    """Persons of two rows of which one is empty, against rows: the same weights, so the same sums."""
    family = make_family(LOGISTIC, "mean_field")
    raw = make_full_rows(np.random.default_rng(8))
    eta = LOGISTIC.prior_eta(family)
    plan = dataclasses.replace(plan_for(family, num_steps=20), unit=Unit.PERSON)
    steps = open_steps(Door(FreeAccount(Relation.SUBSTITUTE, Unit.PERSON), FreshDraws(Entropy.not_private(1))), plan)
    run = partial(maximise_privately, LOGISTIC, family, KEY, eta, eta, step_size=0.1)
    rows = pad(raw["x"], raw["y"], MAX_ROWS)
    expected, _ = run(rows, steps, plan)
    apart = pad(np.repeat(raw["x"], 2, axis=0), np.repeat(raw["y"], 2), 2 * MAX_ROWS)
    apart = Rows(x=apart.x, y=apart.y, present=jnp.arange(2 * MAX_ROWS) % 2 == 0)
    got, _ = run(apart, steps, plan, rows_per_unit=2)
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_one_changed_person_moves_each_released_sum_by_no_more_than_the_plan_prices():
    """Persons of two rows; the gate for methods is tests/engines/test_persons.py."""
    family = make_family(LOGISTIC, "mean_field")
    plan = dataclasses.replace(plan_for(family), unit=Unit.PERSON)
    eta = LOGISTIC.prior_eta(family)

    def method(rows, door):
        steps = open_steps(door, plan)
        silo = pad(np.repeat(rows["x"], 2, axis=0), np.repeat(rows["y"], 2), 2 * MAX_ROWS)
        eta_q, seen = maximise_privately(
            LOGISTIC, family, KEY, eta, eta, silo, steps, plan, step_size=0.1, rows_per_unit=2
        )
        close_steps(door, seen)
        return jax.tree.map(np.asarray, eta_q)

    pairs = neighbours(np.random.default_rng(1), make_rows, Relation.SUBSTITUTE, 24)
    assert check_method(method, pairs, unit=Unit.PERSON) == 24


@pytest.mark.parametrize("name", ["logistic", "mlp_binary"])
def test_rows_count_alike_in_every_slot_of_a_batch(name):
    model = MODELS[name]
    family = make_family(model, "mean_field")
    data = labelled_rows(model, np.random.default_rng(5))
    rows, width = pad(data["x"], data["y"], MAX_ROWS), 70
    assert 12 < usual_part(width) < width - 12

    def solve(first_slot: int):
        slots = np.arange(width) - first_slot
        mask = np.tile((slots >= 0) & (slots < 12), (NUM_STEPS, 1))
        indices = np.where(mask, slots, 0).astype(np.int32)
        noise = np.zeros((NUM_STEPS, num_coordinates(family)), np.float32)
        step = Step(indices=indices, mask=mask, slots=np.full(NUM_STEPS, width), noise=noise)
        eta = model.prior_eta(family), model.start_eta(family, KEY)
        public = {"clip_norm": CLIP_NORM, "sample_rate": 0.5, "step_size": 0.1, "clipping": "label_free"}
        return ascend_privately(model, family, KEY, *eta, rows, step, **public)[0]

    for first_slot in (width - 12, usual_part(width) - 5):
        assert_close(solve(first_slot), solve(0), rtol=1e-3, atol=1e-3)


def test_vmap_over_silos_is_the_loop_over_silos():
    family = make_family(LOGISTIC, "mean_field")
    rng = np.random.default_rng(7)
    silos = [pad(raw["x"], raw["y"], MAX_ROWS) for raw in (make_rows(rng), make_rows(rng))]
    eta = LOGISTIC.prior_eta(family)
    steps = [
        Step(
            indices=jnp.asarray(rng.integers(MAX_ROWS, size=(20, 6))),
            mask=jnp.asarray(rng.random((20, 6)) < 0.8),
            slots=jnp.full(20, 6),
            noise=jnp.asarray(rng.normal(size=(20, 6)).astype(np.float32)),
        )
        for _ in silos
    ]
    rates = jnp.array([0.5, 0.25])

    def solve(rows, inputs, rate):
        return ascend_privately(
            LOGISTIC, family, KEY, eta, eta, rows, inputs,
            clip_norm=CLIP_NORM, sample_rate=rate, step_size=0.1, clipping="label_free",
        )[0]  # fmt: skip

    def stack(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    together = jax.vmap(solve)(stack(silos), stack(steps), rates)
    for index in range(2):
        alone = solve(silos[index], steps[index], rates[index])
        assert_close(jax.tree.map(itemgetter(index), together), alone, rtol=1e-4, atol=1e-5)


def test_a_plan_of_another_shape_is_refused():
    family = make_family(LOGISTIC, "mean_field")
    plan = plan_for(family)
    eta = LOGISTIC.prior_eta(family)
    steps = every_row(MAX_ROWS, NUM_STEPS, 6)
    raw = make_full_rows(np.random.default_rng(6))
    run = partial(maximise_privately, LOGISTIC, family, KEY, eta, eta)
    with pytest.raises(InvalidInput, match="slots"):
        run(pad(raw["x"][:10], raw["y"][:10], 10), steps, plan, step_size=0.1)
    rows = pad(raw["x"], raw["y"], MAX_ROWS)
    with pytest.raises(InvalidInput, match="rows_per_unit"):
        run(pad(raw["x"], raw["y"], 2 * MAX_ROWS), steps, plan, step_size=0.1, rows_per_unit=2)
    with pytest.raises(InvalidInput, match="slots"):
        run(rows, steps, dataclasses.replace(plan, unit=Unit.PERSON), step_size=0.1, rows_per_unit=2)
    with pytest.raises(InvalidInput, match="clipping"):
        run(rows, steps, plan, step_size=0.1, clipping="none")
    with pytest.raises(InvalidInput, match="One per step"):
        run(rows, steps, plan, step_size=np.ones(NUM_STEPS + 1))
    wrong = StepPlan(sampler=plan.sampler, num_steps=5, clip_norm=1.0, noise_multiplier=1.0, dimension=3)
    with pytest.raises(InvalidInput, match="dimension"):
        run(rows, steps, wrong, step_size=0.1)
