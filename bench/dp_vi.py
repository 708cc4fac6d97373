"""One step of private variational inference, ours and others', in microseconds: `python bench/dp_vi.py`.

Logistic regression with 109 coefficients and a Bayesian network 108-50-1, mean-field, expected batches of 32, 200 and
1000 of 20,000 rows. Our time holds everything that a private step needs: the Poisson batches, the cryptographic noise
(both drawn on the host) and the clipped, noisy gradient step. `peers` says how the others are run; to have them,
`pip install -e '.[bench]'`. A measurement, never a test.
"""

import jax
import numpy as np
import peers
from timing import Arm, Time, interleaved, pinned

from silobayes.families import MeanFieldGaussian
from silobayes.inference.coordinates import num_coordinates
from silobayes.inference.dp_vi import maximise_privately
from silobayes.inference.rows import pad
from silobayes.models.base import AbstractModel
from silobayes.models.logistic_regression import LogisticRegression
from silobayes.models.mlp import BinaryMLP
from silobayes.privacy.door import Door
from silobayes.privacy.loops import StepPlan, close_steps, open_steps
from silobayes.privacy.relation import Relation, Unit
from silobayes.privacy.sampling import PoissonSampler
from silobayes.testing import FreeAccount

NUM_ROWS = 20_000
BATCHES = (32, 200, 1000)
REPEATS = 7
OURS = "silobayes"
NOT_PRIVATE = "NumPyro SVI, not private"
PEERS = {"Opacus": peers.opacus, "torch.func vmap(grad)": peers.torch_func, NOT_PRIVATE: peers.numpyro_svi}


def rows_of(num_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Like an encoded table: mostly zeros and ones, norms of about 3."""
    rng = np.random.default_rng(0)
    x = (rng.random((NUM_ROWS, num_features)) < 9 / num_features).astype(np.float32)
    y = rng.random(NUM_ROWS) < 1 / (1 + np.exp(-x @ rng.standard_normal(num_features)))
    return x, y.astype(np.int32)


def ours(model: AbstractModel, x: np.ndarray, y: np.ndarray, batch: int, num_steps: int) -> Arm:
    family = MeanFieldGaussian(event_shape=(model.dim,))
    plan = StepPlan(
        sampler=PoissonSampler(sample_rate=batch / NUM_ROWS, max_rows=NUM_ROWS),
        num_steps=num_steps,
        clip_norm=peers.CLIP_NORM,
        noise_multiplier=peers.NOISE_MULTIPLIER,
        dimension=num_coordinates(family),
    )
    door = Door.open(FreeAccount(Relation.SUBSTITUTE, Unit.ROW))
    rows = pad(x, y, NUM_ROWS)
    key = jax.random.key(0)
    prior, start = model.prior_eta(family), model.start_eta(family, key)

    def run() -> None:
        steps = open_steps(door, plan)
        eta, seen = maximise_privately(model, family, key, prior, start, rows, steps, plan, step_size=peers.STEP_SIZE)
        close_steps(door, seen)
        jax.block_until_ready(eta)

    return Arm(name=OURS, num_steps=num_steps, run=run)


def arms(model: AbstractModel, widths: tuple[int, ...], batch: int, num_steps: int, peer_steps: int) -> list[Arm]:
    x, y = rows_of(widths[0])
    rng = np.random.default_rng(1)
    found = [ours(model, x, y, batch, num_steps)]
    for name, build in PEERS.items():
        # Compiled loops need as many steps as ours to be measured alike; the others pay per step.
        count = num_steps if build is peers.numpyro_svi else peer_steps
        batches = np.sort([rng.choice(NUM_ROWS, batch, replace=False) for _ in range(count)], axis=1)
        try:
            found.append(Arm(name=name, num_steps=count, run=build(widths, x, y, batches)))
        except ImportError:
            continue  # `report` says that it is not installed
    return found


def report(title: str, times: dict[int, dict[str, Time]], targets: dict[str, str]) -> None:
    print(f"\n{title}; us per step, best wall / median CPU")
    print("".join([f"{'':<28}"] + [f"{f'B={batch}':>16}" for batch in times]))
    for name in (OURS, *PEERS):
        cells = [str(times[batch][name]) if name in times[batch] else "not installed" for batch in times]
        print("".join([f"{name:<28}"] + [f"{cell:>16}" for cell in cells]))
    print("CPU time over ours")
    for name in PEERS:
        if all(name in times[batch] for batch in times):
            ratios = [times[batch][name].cpu / times[batch][OURS].cpu for batch in times]
            cells = "".join(f"{ratio:>15.2f}x" for ratio in ratios)
            print(f"{name:<28}{cells}   {targets.get(name, '')}".rstrip())


def main() -> None:
    at_most = "target at B=200: >= 0.67x (we are at most 1.5x slower)"
    regression = LogisticRegression(num_features=109)
    times = {b: interleaved(arms(regression, (109, 1), b, 1000, 50), REPEATS) for b in BATCHES}
    report(
        "Logistic regression, 109 coefficients",
        times,
        {"Opacus": "target at B=200: >= 20x", NOT_PRIVATE: at_most},
    )
    network = BinaryMLP(num_features=108, hidden=(50,))
    times = {b: interleaved(arms(network, (108, 50, 1), b, 100, 5), REPEATS) for b in BATCHES}
    report(
        "Bayesian network 108-50-1",
        times,
        {"Opacus": "target at B=200: >= 15x", NOT_PRIVATE: at_most},
    )


if __name__ == "__main__":
    pinned(main)
