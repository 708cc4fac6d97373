"""Layered networks: what ghost norms need to know of a model (PERFORMANCE 2).

In each layer a row's gradient is an outer product of what came in and what is back-propagated, so its norm and weighted
sums over rows follow from the two factors; the gradients themselves, one matrix per row, are never built.
"""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from silobayes.models.base import AbstractGaussianPriorModel, aligned


class Passes(NamedTuple):
    """A forward pass over rows: what entered each layer, which units fired after it, and the output."""

    inputs: tuple[Float[Array, "n width_in"], ...]
    slopes: tuple[Float[Array, "n width_out"], ...]
    output: Float[Array, "n outputs"]


class AbstractLayeredModel(AbstractGaussianPriorModel):
    """Fully connected layers with ReLU between them and a likelihood of the last layer's output.

    theta holds the matrices (inputs [+ 1 for the bias], outputs) of the layers one after the other, row by row.
    """

    @property
    @abc.abstractmethod
    def widths(self) -> tuple[int, ...]:
        """Numbers entering the first layer, ..., leaving the last."""

    @property
    @abc.abstractmethod
    def has_bias(self) -> bool:
        """Whether each layer gets a constant 1 beside its inputs."""

    @abc.abstractmethod
    def output_log_likelihood(self, output: Float[Array, " outputs"], y_row: Num[Array, ""]) -> Float[Array, ""]:
        """Log-likelihood of one row given the network's output."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the layers' matrices."""
        return tuple(
            (size_in + self.has_bias, out) for size_in, out in zip(self.widths[:-1], self.widths[1:], strict=True)
        )

    @property
    def dim(self) -> int:
        """Entries of all matrices."""
        return sum(rows * columns for rows, columns in self.shapes)

    def matrices(self, theta: Float[Array, " dim"]) -> tuple[Float[Array, "rows columns"], ...]:
        """theta, layer by layer. Hidden layers have empty units besides their own, so that widths are `aligned`."""
        parts, start = [], 0
        for rows, columns in self.shapes:
            parts.append(theta[start : start + rows * columns].reshape(rows, columns))
            start += rows * columns
        return (*map(aligned, parts[:-1]), parts[-1])

    def flatten(self, matrices: Sequence[Float[Array, "rows columns"]]) -> Float[Array, " dim"]:
        """Inverse of `matrices`; what is there of empty units is dropped."""
        return jnp.concatenate(
            [matrix[:, :columns].ravel() for matrix, (_, columns) in zip(matrices, self.shapes, strict=True)]
        )

    def forward(self, theta: Float[Array, " dim"], x: Float[Array, "n d"]) -> Passes:
        """All rows through all layers."""
        inputs, slopes, values = [], [], x
        for number, matrix in enumerate(self.matrices(theta)):
            values = values[:, : self.widths[number]]
            if self.has_bias:
                values = jnp.concatenate([values, jnp.ones((values.shape[0], 1), values.dtype)], axis=1)
            inputs.append(values)
            values = values @ matrix
            if number + 1 < len(self.shapes):
                slopes.append((values > 0).astype(values.dtype))
                values = values * slopes[-1]
        return Passes(inputs=tuple(inputs), slopes=tuple(slopes), output=values)

    def backward(
        self, theta: Float[Array, " dim"], passes: Passes, d_output: Float[Array, "n outputs"]
    ) -> tuple[Float[Array, "n width_out"], ...]:
        """Derivatives with respect to what each layer gave out (before ReLU), first layer first."""
        back = [d_output]
        for matrix, slope in zip(self.matrices(theta)[:0:-1], passes.slopes[::-1], strict=True):
            weights = matrix[:-1] if self.has_bias else matrix
            back.append((back[-1] @ aligned(weights.T)) * slope)
        return tuple(back[::-1])

    def output_scores(self, output: Float[Array, "n outputs"], y: Num[Array, " n"]) -> Float[Array, "n outputs"]:
        """Derivative of each row's log-likelihood with respect to the output."""
        return jax.vmap(jax.grad(self.output_log_likelihood))(output, y)

    def log_likelihood(self, theta: Float[Array, " dim"], x_row: Float[Array, " d"], y_row: Num[Array, ""]) -> Array:
        """See `AbstractModel`."""
        return self.output_log_likelihood(self.forward(theta, x_row[None]).output[0], y_row)


def class_log_likelihood(logits: Float[Array, " classes"], y_row: Num[Array, ""]) -> Float[Array, ""]:
    """Log probability of a class given logits."""
    return jax.nn.log_softmax(logits) @ jax.nn.one_hot(y_row.astype(jnp.int32), logits.shape[0])
