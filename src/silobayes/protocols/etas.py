"""Natural parameters between host and device, and as the flat vectors that messages are."""

from typing import Any, TypeVar

import jax
import numpy as np

from silobayes.models.base import GaussianEta

Tree = TypeVar("Tree")


def to_single(eta: Tree) -> Tree:
    """The same numbers as float32, as compiled code takes them."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), eta)


def to_host(eta: Tree) -> Tree:
    """The same numbers as float64 host arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), eta)


def flatten_eta(eta: GaussianEta) -> np.ndarray:
    """All numbers in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(eta)])


def unflatten_eta(vector: np.ndarray, like: GaussianEta) -> Any:
    """Inverse of `flatten_eta`, for an eta of the same shape as `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)
