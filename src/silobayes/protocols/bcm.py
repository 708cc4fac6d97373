"""Bayesian committee machines (SPEC 3, baselines): every client works once and alone, the server multiplies.

*same*: each client uses the whole prior, `eta_q = sum eta_m - (M - 1) eta_p`. *split*: each uses the prior to the power
1/M, `eta_q = sum eta_m`. Both are one visit in which a client sends what it adds to its share of the prior, so the
server's step is that of PVI: *same* is one synchronous undamped round of it.
"""

from enum import StrEnum

from silobayes.models.base import GaussianEta
from silobayes.protocols.pvi import Broadcast, Refit, Upload


class Committee(StrEnum):
    """What prior a client uses."""

    SAME = "same"
    SPLIT = "split"


def prior_share(committee: Committee, num_clients: int) -> float:
    """The power of the prior that each client uses."""
    return 1.0 if committee is Committee.SAME else 1.0 / num_clients


def client_step(down: Broadcast, refit: Refit, *, share: float) -> Upload:
    """`eta_m` minus the client's share of the prior; `down` is the prior.

    Guarantees:
        - same: the server ends with sum eta_m - (M - 1) eta_p
        - split: the server ends with sum eta_m
    """
    eta_own: GaussianEta = share * down.eta_q
    return Upload(d_eta=refit(eta_own, eta_own))
