"""Bayesian committee machines (SPEC 3, baselines): every silo works once and alone, the server multiplies.

*same*: each silo uses the whole prior, `eta_q = sum eta_m - (M - 1) eta_p`. *split*: each uses the prior to the power
1/M, `eta_q = sum eta_m`. Both are one visit of PVI in which a silo sends what it adds to its share of the prior, so the
server is that of PVI: *same* is one synchronous undamped visit of it.

Guarantees:
    - same: the server ends with sum eta_m - (M - 1) eta_p
    - split: the server ends with sum eta_m
"""

from enum import StrEnum
from typing import Any

import equinox as eqx
from jaxtyping import PRNGKeyArray

from silobayes.inference.solvers import Refit, RefitPrivately
from silobayes.protocols.etas import Eta
from silobayes.protocols.pvi import Down


class Committee(StrEnum):
    """What prior a silo uses."""

    SAME = "same"
    SPLIT = "split"


def prior_share(committee: Committee, num_silos: int) -> float:
    """The power of the prior that each silo uses."""
    return 1.0 if committee is Committee.SAME else 1.0 / num_silos


class Alone(eqx.Module):
    """Local inference against a share of the prior, which is what the first q is."""

    refit: Refit | RefitPrivately
    share: float = eqx.field(static=True)

    @classmethod
    def against(cls, refit: Refit | RefitPrivately, share: float) -> "Alone":
        """Against this share; the floor of a cavity goes with the prior that it is made of."""
        return cls(refit=eqx.tree_at(lambda own: own.local, refit, refit.local.floored(share)), share=share)

    @property
    def side_by_side(self) -> bool:
        """See the refit."""
        return self.refit.side_by_side

    @property
    def local(self) -> Any:
        """Of the refit."""
        return self.refit.local

    def __call__(self, rows: Any, own: Eta, down: Down, drawn: Any, key: PRNGKeyArray) -> Any:
        """The silo's factor; `own` is the first q, which is the prior."""
        return self.refit(rows, self.share * own, down, drawn, key)
