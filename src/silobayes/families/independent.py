"""Products of families: named, independent parts, such as the weights and the noise rate of a regression.

Named `Independent` because `product` is the product of two densities of one family. Everything adds over parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from silobayes.core.errors import InvalidInput
from silobayes.families.base import AbstractEta, AbstractFamily


class IndependentEta(AbstractEta):
    """The natural parameters of each part, by name."""

    parts: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Independent(AbstractFamily[IndependentEta, dict[str, Any]]):
    """Independent parts; events are dicts with the same names. Built by `independent(weights=..., noise=...)`.

    Parts may be products themselves. Reparameterised if every part is.

    Guarantees:
        - log partition, KL, entropy and log_prob are sums over parts
    """

    parts: tuple[tuple[str, AbstractFamily[Any, Any]], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if not names or names != sorted(set(names)):
            raise InvalidInput("parts", "distinct names in sorted order", names, "Use independent(name=family, ...).")

    @property
    def is_reparameterised(self) -> bool:
        """Whether every part is."""
        return all(family.is_reparameterised for _, family in self.parts)

    def _check(self, eta: Any) -> None:
        names = [name for name, _ in self.parts]
        if not isinstance(eta, IndependentEta) or sorted(eta.parts) != names:
            got = sorted(eta.parts) if isinstance(eta, IndependentEta) else type(eta).__name__
            raise InvalidInput("eta", f"an IndependentEta with parts {names}", got, "Name every part of the family.")

    def _sum(self, method: str, *trees: Mapping[str, Any]) -> Float[Array, ""]:
        terms = [getattr(family, method)(*[tree[name] for tree in trees]) for name, family in self.parts]
        return jnp.sum(jnp.stack(terms))

    def zeros(self, dtype: Any = None) -> IndependentEta:
        """The uniform factor of every part."""
        return IndependentEta(parts={name: family.zeros(dtype) for name, family in self.parts})

    def from_standard(self, **standard: Any) -> IndependentEta:
        """`eta` from one named tuple or dict of textbook parameters per part."""
        if sorted(standard) != [name for name, _ in self.parts]:
            raise InvalidInput("parts", f"{[name for name, _ in self.parts]}", sorted(standard), "Name every part.")
        parts = {}
        for name, family in self.parts:
            values = standard[name]
            build = getattr(family, "from_standard")  # noqa: B009 - its keywords differ by family, so it is in no base
            parts[name] = build(**(values if isinstance(values, dict) else values._asdict()))
        return IndependentEta(parts=parts)

    def to_standard(self, eta: IndependentEta) -> dict[str, Any]:
        """The textbook parameters of each part, by name."""
        self._check(eta)
        return {name: family.to_standard(eta[name]) for name, family in self.parts}

    def log_partition(self, eta: IndependentEta) -> Float[Array, ""]:
        """Sum over parts."""
        self._check(eta)
        return self._sum("log_partition", eta.parts)

    def mean_parameters(self, eta: IndependentEta) -> IndependentEta:
        """Mean parameters of each part."""
        self._check(eta)
        return IndependentEta(parts={name: family.mean_parameters(eta[name]) for name, family in self.parts})

    def sufficient_statistics(self, x: Mapping[str, Any]) -> IndependentEta:
        """Statistics of each part."""
        return IndependentEta(parts={name: family.sufficient_statistics(x[name]) for name, family in self.parts})

    def log_prob(self, eta: IndependentEta, x: Mapping[str, Any]) -> Float[Array, ""]:
        """Sum over parts."""
        self._check(eta)
        return self._sum("log_prob", eta.parts, x)

    def entropy(self, eta: IndependentEta) -> Float[Array, ""]:
        """Sum over parts."""
        self._check(eta)
        return self._sum("entropy", eta.parts)

    def kl(self, eta_q: IndependentEta, eta_p: IndependentEta) -> Float[Array, ""]:
        """Sum over parts."""
        self._check(eta_q)
        self._check(eta_p)
        return self._sum("kl", eta_q.parts, eta_p.parts)

    def sample(self, key: PRNGKeyArray, eta: IndependentEta, shape: tuple[int, ...] = ()) -> dict[str, Any]:
        """Draws of each part, by name, each from its own key."""
        self._check(eta)
        keys = jax.random.split(key, len(self.parts))
        return {name: family.sample(keys[i], eta[name], shape) for i, (name, family) in enumerate(self.parts)}

    def is_proper(self, eta: IndependentEta) -> Bool[Array, ""]:
        """Whether every part is."""
        self._check(eta)
        return jnp.all(jnp.stack([family.is_proper(eta[name]) for name, family in self.parts]))

    def project(self, eta: IndependentEta, floor: float) -> IndependentEta:
        """Each part with the same floor; project parts by hand where they need different ones."""
        self._check(eta)
        return IndependentEta(parts={name: family.project(eta[name], floor) for name, family in self.parts})


def independent(**families: AbstractFamily[Any, Any]) -> Independent:
    """A product of named families."""
    return Independent(parts=tuple(sorted(families.items())))
