"""The same variational step in other libraries, each written as its manual says; a missing library is an ImportError.

Model, prior, mean-field Gaussian in (mean, log s), one draw per step, Adam. What differs favours the peers: their
batches have a fixed size and are drawn before the clock starts, their noise is not cryptographic (the ready-made
secure mode of Opacus draws four normals for one and is off), and NumPyro protects nobody at all.

Opacus cannot see through parameters that are used by drawing from them, so `VariationalLinear` registers its own
per-row gradients (`register_grad_sampler`): that is faster than the generic path by functorch.
"""

import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np

Widths = tuple[int, ...]
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
STEP_SIZE = 0.01


def opacus(widths: Widths, x: np.ndarray, y: np.ndarray, batches: np.ndarray) -> Callable[[], object]:
    """`GradSampleModule` and `DPOptimizer`; the KL term sees no rows and joins after the noise."""
    import torch  # pyright: ignore[reportMissingImports]
    from opacus.grad_sample import GradSampleModule, register_grad_sampler  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook")  # the first layer's input needs no gradient

    class VariationalLinear(torch.nn.Module):
        def __init__(self, size_in: int, size_out: int) -> None:
            super().__init__()
            self.mean = torch.nn.Parameter(0.1 * torch.randn(size_out, size_in))
            self.log_stddev = torch.nn.Parameter(torch.full((size_out, size_in), -3.0))

        def forward(self, values):
            self.scaled = (self.log_stddev.exp() * torch.randn_like(self.mean)).detach()
            return values @ (self.mean + self.scaled).T

    @register_grad_sampler(VariationalLinear)
    def per_row(layer, activations, backprops):
        gradients = torch.einsum("no,ni->noi", backprops, activations[0])
        return {layer.mean: gradients, layer.log_stddev: gradients * layer.scaled}

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(VariationalLinear(*sizes) for sizes in _sizes(widths))

        def forward(self, values):
            for number, layer in enumerate(self.layers):
                if number:
                    values = torch.nn.functional.pad(values.relu(), (0, 1), value=1.0)
                values = layer(values)
            return values[:, 0]

    network = GradSampleModule(Network(), loss_reduction="sum")
    optimiser = DPOptimizer(
        torch.optim.Adam(network.parameters(), lr=STEP_SIZE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    rows, labels, places = torch.tensor(_with_bias(widths, x)), torch.tensor(y, dtype=torch.float32), _long(batches)
    scale = len(x) / batches.shape[1]
    loss_of = torch.nn.BCEWithLogitsLoss(reduction="sum")

    def run() -> None:
        for at in places:
            optimiser.zero_grad()
            loss_of(network(rows[at]), labels[at]).backward()
            optimiser.pre_step()
            with torch.no_grad():
                for layer in network._module.layers:
                    layer.mean.grad.mul_(scale).add_(layer.mean)
                    layer.log_stddev.grad.mul_(scale).add_((2 * layer.log_stddev).exp() - 1)
            optimiser.original_optimizer.step()

    return run


def torch_func(widths: Widths, x: np.ndarray, y: np.ndarray, batches: np.ndarray) -> Callable[[], object]:
    """`torch.func.vmap(grad)` with respect to all means and log standard deviations, without Opacus."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    shapes = _sizes(widths)
    means = [0.1 * torch.randn(size_in, size_out) for size_in, size_out in shapes]
    log_stddevs = [torch.full(shape, -3.0) for shape in shapes]
    values = means + log_stddevs
    optimiser = torch.optim.Adam(values, lr=STEP_SIZE)

    def loss(values, draws, row, label):
        weights = [
            mean + log_stddev.exp() * e
            for mean, log_stddev, e in zip(values[: len(shapes)], values[len(shapes) :], draws, strict=True)
        ]
        for number, weight in enumerate(weights):
            if number:
                row = torch.cat([row.relu(), torch.ones(1)])
            row = row @ weight
        return torch.nn.functional.softplus(row[0]) - label * row[0]

    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0, 0))
    rows, labels, places = torch.tensor(_with_bias(widths, x)), torch.tensor(y, dtype=torch.float32), _long(batches)
    scale = len(x) / batches.shape[1]

    def run() -> None:
        for at in places:
            draws = [torch.randn(shape) for shape in shapes]
            gradients = per_row(values, draws, rows[at], labels[at])
            norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
            weights = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)
            for number, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
                total = torch.einsum("n,n...->...", weights, gradient)
                total += NOISE_MULTIPLIER * CLIP_NORM * torch.randn_like(total)
                value.grad = scale * total + (value if number < len(shapes) else (2 * value).exp() - 1)
            optimiser.step()

    return run


def numpyro_svi(widths: Widths, x: np.ndarray, y: np.ndarray, batches: np.ndarray) -> Callable[[], object]:
    """`SVI` with `AutoNormal`, all steps in one `lax.scan`; no clipping, no noise."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(rows, labels):
        values = rows
        for number, sizes in enumerate(_sizes(widths)):
            if number:
                values = jnp.concatenate([jax.nn.relu(values), jnp.ones((len(values), 1))], axis=1)
            values = values @ numpyro.sample(f"layer{number}", dist.Normal().expand(sizes).to_event(2))
        with numpyro.plate("rows", len(rows)), numpyro.handlers.scale(scale=len(x) / len(rows)):
            numpyro.sample("y", dist.Bernoulli(logits=values[:, 0]), obs=labels)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(STEP_SIZE), Trace_ELBO())
    rows, labels, places = jnp.asarray(_with_bias(widths, x)), jnp.asarray(y), jnp.asarray(batches)
    start = svi.init(jax.random.key(0), rows[places[0]], labels[places[0]])

    @jax.jit
    def steps(state, places):
        return jax.lax.scan(lambda s, at: (svi.update(s, rows[at], labels[at])[0], None), state, places)[0]

    return lambda: jax.block_until_ready(steps(start, places))


def _sizes(widths: Widths) -> list[tuple[int, int]]:
    """Of the layers' matrices; a network has a bias in each layer, a regression has none."""
    bias = int(len(widths) > 2)
    return [(size_in + bias, size_out) for size_in, size_out in pairwise(widths)]


def _with_bias(widths: Widths, x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 1)), constant_values=1.0) if len(widths) > 2 else x


def _long(batches: np.ndarray):
    import torch  # pyright: ignore[reportMissingImports]

    return torch.tensor(batches, dtype=torch.int64)
