"""What every family offers, and the algebra of natural parameters (SPEC 1).

A density is `exp(<eta, T(x)> - A(eta) + c)`. The base measure `exp(c)` is a constant in every family here, so that
multiplying densities is adding `eta` and a cavity is a subtraction, exactly and whether or not a factor is proper.
`eta`, the statistics `T(x)` and the mean parameters `E[T(x)] = grad A(eta)` are dual vectors and share one pytree class
per family.

A family is static: it says which distribution and which event shape, holds no array, hashes, and passes through
`jax.jit` without becoming a tracer. Functions take one unbatched `eta`; batches of silos or shards go through
`jax.vmap`. An `eta` of another shape is an `InvalidInput` when the function is traced, never a silent broadcast.
"""

import abc
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from silobayes.core.errors import InvalidInput, require_count, require_number

Tree = TypeVar("Tree")


def product(eta_a: Tree, eta_b: Tree) -> Tree:
    """Natural parameters of the product of two densities.

    Guarantees:
        - product and quotient are inverse to each other
        - improper factors add up exactly
    """
    return jax.tree.map(lambda a, b: a + b, eta_a, eta_b)


def quotient(eta_a: Tree, eta_b: Tree) -> Tree:
    """Natural parameters of a density divided by another: the cavity `q / t`. The result may be improper."""
    return jax.tree.map(lambda a, b: a - b, eta_a, eta_b)


def scale(eta: Tree, power: ArrayLike) -> Tree:
    """Natural parameters of a density raised to `power`."""
    return jax.tree.map(lambda a: power * a, eta)


def damp(eta_old: Tree, eta_new: Tree, damping: ArrayLike) -> Tree:
    """`old^(1 - damping) * new^damping`, normalised: 1 is the undamped update, as in `d_eta = damping * (new - old)`.

    Written as a mean of the two and not as a step from the old one, so that both endpoints are exact in floats.

    Guarantees:
        - damping 0 is the old and damping 1 the new factor, exactly
    """
    return jax.tree.map(lambda old, new: (1 - damping) * old + damping * new, eta_old, eta_new)


class AbstractEta(eqx.Module):
    """Natural parameters; `+`, `-` and scalar `*` are the algebra above, so that protocols read as the paper does."""

    __array_ufunc__ = None  # a NumPy scalar on the left must defer to __rmul__ instead of making an object array

    def __add__(self, other: Self) -> Self:
        return product(self, other)

    def __sub__(self, other: Self) -> Self:
        return quotient(self, other)

    def __mul__(self, power: ArrayLike) -> Self:
        return scale(self, power)

    def __rmul__(self, power: ArrayLike) -> Self:
        return scale(self, power)


EtaT = TypeVar("EtaT", bound=AbstractEta)
StandardT = TypeVar("StandardT")


class AbstractFamily(abc.ABC, Generic[EtaT, StandardT]):
    """Which distribution; no parameters. Final families also have `from_standard(**named)`, inverse to `to_standard`.

    Guarantees (each over every family, in float32 and float64, compiled and vmapped):
        - mean parameters are the gradient of the log partition
        - log_prob is <eta, T(x)> - A(eta) up to one constant
        - kl is the Bregman divergence of the log partition, >= 0, and 0 iff the distributions are equal
        - entropy is minus the mean of log_prob
        - standard parameters convert back and forth
        - a finite eta outside the proper cone gives NaN from every function but `is_proper` and `project`, never a
          number that looks right (discrete draws excepted: every finite eta of theirs is proper)
        - project is proper, idempotent, and the identity on what is already above the floor
        - samples have the mean parameters as moments
    """

    @property
    @abc.abstractmethod
    def is_reparameterised(self) -> bool:
        """Whether gradients flow from `sample` to `eta` (pathwise, or implicitly through `jax.random`'s gamma)."""

    @abc.abstractmethod
    def zeros(self, dtype: Any = None) -> EtaT:
        """The uniform factor, eta = 0: the unit of `product`. Improper in most families."""

    @abc.abstractmethod
    def to_standard(self, eta: EtaT) -> StandardT:
        """The textbook parameters as a named tuple; NaN where `eta` is improper."""

    @abc.abstractmethod
    def log_partition(self, eta: EtaT) -> Float[Array, ""]:
        """A(eta), summed over the event; NaN where `eta` is improper."""

    @abc.abstractmethod
    def mean_parameters(self, eta: EtaT) -> EtaT:
        """E[T(x)] in closed form."""

    @abc.abstractmethod
    def sufficient_statistics(self, x: Any) -> EtaT:
        """T(x) of one event."""

    @abc.abstractmethod
    def log_prob(self, eta: EtaT, x: Any) -> Float[Array, ""]:
        """Log density (or mass) of one event."""

    @abc.abstractmethod
    def entropy(self, eta: EtaT) -> Float[Array, ""]:
        """Entropy in nats."""

    @abc.abstractmethod
    def kl(self, eta_q: EtaT, eta_p: EtaT) -> Float[Array, ""]:
        """KL(q || p) in nats; written in differences of parameters, because A(p) - A(q) cancels in float32."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, eta: EtaT, shape: tuple[int, ...] = ()) -> Any:
        """Independent draws with leading axes `shape`; see `is_reparameterised`.

        A draw that would underflow stays inside the open support, so that its `log_prob` is finite.
        """

    @abc.abstractmethod
    def is_proper(self, eta: EtaT) -> Bool[Array, ""]:
        """Whether `eta` is finite and normalisable; NaN is improper."""

    @abc.abstractmethod
    def project(self, eta: EtaT, floor: float) -> EtaT:
        """The usable version of a finite `eta`: moved into the proper cone, at least `floor` from its boundary.

        Post-processing: no rows, no price. NaN stays NaN, so that `is_proper` still refuses it.
        """


def zeros_like_shapes(cls: type[EtaT], shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> EtaT:
    """An `eta` of class `cls` with every array zero."""
    return cls(**{name: jnp.zeros(shape, dtype) for name, shape in shapes.items()})


def check_eta(eta: Any, cls: type[EtaT], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an `eta` of another family or shape; shapes are static, so this costs nothing at run time."""
    if not isinstance(eta, cls):
        raise InvalidInput("eta", f"a {cls.__name__}", type(eta).__name__, "Pass the family its own parameters.")
    for name, shape in shapes.items():
        got = jnp.shape(getattr(eta, name))
        if got != shape:
            raise InvalidInput(f"eta.{name}", f"shape {shape}", got, "Use jax.vmap over batches of parameters.")


def check_event_shape(event_shape: object, *, at_least_axes: int = 0) -> None:
    """Refuse an event shape that is not a tuple of positive integers."""
    if not isinstance(event_shape, tuple) or len(event_shape) < at_least_axes:
        raise InvalidInput(
            "event_shape", f"a tuple of at least {at_least_axes} integers", event_shape, "E.g. event_shape=(3,)."
        )
    for size in event_shape:
        require_count("event_shape", size, at_least=1, fix="Pass positive sizes.")


def check_floor(floor: float) -> float:
    """Refuse a floor that is not a positive finite number."""
    return require_number("floor", floor, above=0.0, fix="Pass the smallest precision, rate or shape to allow.")


def all_finite(eta: AbstractEta) -> Bool[Array, ""]:
    """Whether every entry of every array is a finite number."""
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(eta)]))


def positive_or_nan(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`value` where it is > 0 and finite, otherwise NaN: how an improper parameter refuses to become a number."""
    return jnp.where((value > 0) & (value < jnp.inf), value, jnp.nan)


def finite_or_nan(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`value` where it is finite, otherwise NaN; for parameters that may have any sign."""
    return jnp.where(jnp.abs(value) < jnp.inf, value, jnp.nan)
