"""Small private methods, each right by default and wrong on request: what record/replay must tell apart."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from silobayes.privacy.clipping import clip, clip_blocks, general, non_negative, psd
from silobayes.privacy.door import Door
from silobayes.privacy.events import DiscreteGaussianEvent
from silobayes.privacy.loops import StepPlan, clipped_sum, close_steps, open_steps
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism
from silobayes.privacy.sampling import Batch, FixedSizeSampler, PoissonSampler

MAX_ROWS, FEATURES, STEPS, CLIP_NORM = 24, 3, 6, 1.0


def make_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    num_rows = MAX_ROWS - int(rng.integers(4))
    x = rng.normal(size=(num_rows, FEATURES)) * 10.0 ** rng.uniform(-1, 1)
    return {"x": x.astype(np.float32), "y": rng.integers(2, size=num_rows)}


def make_full_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """All slots filled, as fixed-size batches need it."""
    return {
        "x": rng.normal(size=(MAX_ROWS, FEATURES)).astype(np.float32),
        "y": rng.integers(2, size=MAX_ROWS),
    }


def padded(rows, key: str) -> np.ndarray:
    column = np.asarray(rows[key], dtype=np.float32)
    return np.concatenate([column, np.zeros((MAX_ROWS - len(column), *column.shape[1:]), dtype=np.float32)])


@partial(jax.jit, static_argnames="bug")
def _scan(x, y, present, inputs, *, bug):
    if bug == "standardisation from rows":
        weight = present / present.sum()
        mean = weight @ x
        x = (x - mean) / jnp.sqrt(weight @ (x - mean) ** 2 + 1e-6)

    def body(theta, step):
        features, labels = x[step.indices], y[step.indices]
        mask = step.mask & present[step.indices]
        terms = (labels - jax.nn.sigmoid(features @ theta))[:, None] * features
        if bug == "no clip":
            total = jnp.where(mask[:, None], terms, 0.0).sum(axis=0)
        elif bug == "NaN rows":
            norms = jnp.linalg.norm(terms, axis=1, keepdims=True)
            total = (terms * jnp.minimum(1.0, CLIP_NORM / jnp.maximum(norms, 1e-12)) * mask[:, None]).sum(axis=0)
        elif bug == "clip per block":
            total = jnp.concatenate([clipped_sum(terms[:, [k]], mask, CLIP_NORM) for k in range(FEATURES)])
        else:
            total = clipped_sum(terms, mask, CLIP_NORM)
        if bug == "division by the batch size":
            total = total * (MAX_ROWS / 2) / jnp.maximum(mask.sum(), 1)
        released, seen = step.release(total)
        return theta + 0.5 * released / MAX_ROWS, seen

    return jax.lax.scan(body, jnp.zeros(FEATURES), inputs)


def dp_sgd(rows, door: Door, *, bug: str | None = None, fixed_size: bool = False):
    """Logistic regression by DP-SGD in one compiled loop."""
    sampler = (
        FixedSizeSampler(batch_size=8, max_rows=MAX_ROWS)
        if fixed_size
        else PoissonSampler(sample_rate=0.5, max_rows=MAX_ROWS)
    )
    plan = StepPlan(sampler=sampler, num_steps=STEPS, clip_norm=CLIP_NORM, noise_multiplier=2.0, dimension=FEATURES)
    steps = open_steps(door, plan)
    present = np.arange(MAX_ROWS) < len(rows["x"])
    theta, seen = _scan(padded(rows, "x"), padded(rows, "y"), present, steps, bug=bug)
    close_steps(door, seen)
    return np.asarray(theta)


def statistics(rows, door: Door, *, bug: str | None = None):
    """Sufficient statistics of a linear regression as one joint release, twice."""
    x, y = np.asarray(rows["x"], dtype=np.float64), np.asarray(rows["y"], dtype=np.float64)
    mechanism: AbstractMechanism = GaussianMechanism(noise_multiplier=3.0)
    if bug == "substitute priced as add/remove":
        mechanism = PricedAsAddRemove()
    released = []
    for _ in range(2):
        with np.errstate(invalid="ignore"):
            blocks = [psd(x), general(x * y[:, None]), non_negative(y[:, None] ** 2)]
        released.append(door.release(mechanism, clip_blocks(blocks, [2.0, 1.0, 1.0])).blocks)
    return released


class PricedAsAddRemove(AbstractMechanism):
    """States the add/remove sensitivity whatever the relation is."""

    inner = GaussianMechanism(noise_multiplier=3.0)

    def event(self, bounded, relation):
        return DiscreteGaussianEvent(sensitivity=bounded.norm, std=3.0, grid=bounded.grid)

    def noise(self, entropy, bounded):
        return self.inner.noise(entropy, bounded)

    def stddevs(self, bounded):
        return self.inner.stddevs(bounded)


def virtual_clients(rows, door: Door, *, bug: str | None = None):
    """Four shards with a factor each; a shard's state is its own noise-free clipped change (SPEC 3)."""
    x = np.nan_to_num(np.asarray(rows["x"], dtype=np.float64), posinf=0.0, neginf=0.0)
    shards = [x[np.arange(len(x)) % 4 == k] for k in range(4)]
    eta_q, eta_shards = np.zeros(FEATURES), np.zeros((4, FEATURES))
    for _ in range(4):
        targets = np.array([shard.sum(axis=0) + 0.5 * eta_q for shard in shards])
        bounded = clip(general(targets - eta_shards), CLIP_NORM, sharded=bug != "shards priced as rows")
        release = door.release(GaussianMechanism(noise_multiplier=2.0), bounded)
        change = targets - eta_shards
        change /= np.maximum(1.0, np.linalg.norm(change, axis=1, keepdims=True) / CLIP_NORM)
        eta_shards = eta_shards + change
        if bug == "noise in private state":
            eta_shards = eta_shards + 3.0 * (release.value - bounded.decode(bounded.total)[0])
        eta_q = eta_q + release.value
    return eta_q


def early_stop(rows, door: Door, *, bug: str | None = None):
    """Noisy means until a fixed number of rounds, or (wrongly) until the private loss is small."""
    x = np.nan_to_num(np.asarray(rows["x"], dtype=np.float64), posinf=0.0, neginf=0.0)
    mean = np.zeros(FEATURES)
    for _ in range(5):
        release = door.release(GaussianMechanism(noise_multiplier=1.0), clip(general(x - mean), CLIP_NORM))
        mean = mean + release.value / MAX_ROWS
        if bug == "early stop on private loss" and np.abs(x - mean).mean() < 1.0:
            break
    return mean


def sampled_mean(rows, door: Door, *, bug: str | None = None):
    """Noisy sums over batches drawn on the host; shuffled epochs when wrong."""
    x = np.asarray(rows["x"], dtype=np.float64)
    sampler = PoissonSampler(sample_rate=0.25, max_rows=MAX_ROWS)
    order = np.random.default_rng(0).permutation(MAX_ROWS)
    total = np.zeros(FEATURES)
    for step in range(4):
        if bug == "shuffled batches priced as Poisson":
            batch = Batch(indices=order[6 * step : 6 * step + 6], sampling=sampler.sampling)
        else:
            batch = door.batch(sampler)
        chosen = x[batch.indices[batch.indices < len(x)]]
        total = (
            total
            + door.release(GaussianMechanism(noise_multiplier=1.0), clip(general(chosen), CLIP_NORM, batch=batch)).value
        )
    return total


def survey(rows, door: Door, *, bug: str | None = None):
    """Randomised answers."""
    return door.randomise(np.asarray(rows["y"]), categories=2, gamma=0.5).value


METHODS: dict[str, Callable] = {
    "dp_sgd": dp_sgd,
    "statistics": statistics,
    "virtual_clients": virtual_clients,
    "early_stop": early_stop,
    "sampled_mean": sampled_mean,
}

PLANTED = [
    ("no clip", dp_sgd),
    ("clip per block", dp_sgd),
    ("substitute priced as add/remove", statistics),
    ("division by the batch size", dp_sgd),
    ("standardisation from rows", dp_sgd),
    ("early stop on private loss", early_stop),
    ("noise in private state", virtual_clients),
    ("shards priced as rows", virtual_clients),
    ("NaN rows", dp_sgd),
    ("shuffled batches priced as Poisson", sampled_mean),
]
