"""Natural parameters between host and device, and as the flat vectors that messages are."""

from typing import Any, TypeVar

import jax
import numpy as np

# Natural parameters of the family of a study: which one it is, only the plan knows.
Eta = Any
# A usable posterior or cavity keeps at least this share of the prior's smallest precision. Log-concave likelihoods
# never reach it without noise; with noise, a floor near the prior keeps means from running away (see family.project).
FLOOR_SHARE = 0.5
# Of a natural parameter that float32 code can still work with.
_LARGEST = 1e30
Tree = TypeVar("Tree")


def to_single(eta: Tree) -> Tree:
    """The same numbers as float32, as compiled code takes them."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), eta)


def to_host(eta: Tree) -> Tree:
    """The same numbers as float64 host arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), eta)


def flatten_eta(eta: Eta) -> np.ndarray:
    """All numbers in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(eta)])


def unflatten_eta(vector: np.ndarray, like: Eta) -> Any:
    """Inverse of `flatten_eta`, for an eta of the same shape as `like`."""
    leaves, structure = jax.tree.flatten(like)
    shaped, start = [], 0
    for leaf in leaves:
        shaped.append(vector[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(structure, shaped)


def is_in_range(eta: Eta) -> bool:
    """Finite, and with room to multiply in float32."""
    return all(bool(np.all(np.abs(leaf) <= _LARGEST)) for leaf in jax.tree.leaves(eta))


def eta_info(eta: Eta) -> dict[str, Any]:
    """A q for the trace."""
    return {"eta": {"linear": np.asarray(eta.linear).tolist(), "quadratic": np.asarray(eta.quadratic).tolist()}}


def precision_floor(eta_p: Eta) -> float:
    """The floor of usable posteriors and cavities: a public number, from the prior alone."""
    quadratic = np.asarray(eta_p.quadratic, dtype=np.float64)
    precision = -2 * (np.diagonal(quadratic) if quadratic.ndim == 2 else quadratic)
    return float(FLOOR_SHARE * precision.min())
