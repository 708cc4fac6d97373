"""Partitioned variational inference (000 Algorithm 1; SPEC 2): `q = p prod_m t_m`, one factor per client.

States are natural parameters as float64 host arrays: a round is additions and subtractions, and the identity
`eta_q = eta_p + sum_m eta_m` then holds to the last digits over any number of rounds. Solvers cast to float32 as they
enter compiled code. Every function works on one client or on a stack of clients (a leading axis on `eta_t`), so an
engine may step all visited clients at once. One sequential undamped pass is streaming VB.

With private local solves (DP optimisation, SPEC 3) nothing here changes: the solver's result is post-processing of its
releases, so factors and changes are public.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import equinox as eqx
import jax
import numpy as np

from silobayes.families.base import AbstractEta
from silobayes.models.base import GaussianEta, GaussianFamily

Eta = TypeVar("Eta", bound=AbstractEta)

# A usable posterior or cavity keeps at least this share of the prior's smallest precision. Log-concave likelihoods
# never reach it without noise; with noise, a floor near the prior keeps means from running away (see family.project).
FLOOR_SHARE = 0.5


class ServerState(eqx.Module, Generic[Eta]):
    """The raw sum of prior and factors, which may be improper; `round_index` counts server steps."""

    eta_q: Eta
    round_index: int


class ClientState(eqx.Module, Generic[Eta]):
    """The client's factor `t_m`."""

    eta_t: Eta


class Broadcast(eqx.Module, Generic[Eta]):
    """What the server sends."""

    eta_q: Eta


class Upload(eqx.Module, Generic[Eta]):
    """What a client sends; the server only ever consumes a sum of these."""

    d_eta: Eta


# Local inference: (cavity, the current q) -> what the factor should become: the local free-energy maximum divided by
# the cavity that it was found with. Solvers start from the current q.
Refit = Callable[[Eta, Eta], Eta]


def init_server(eta_p: Eta) -> ServerState[Eta]:
    """Start from the prior."""
    return ServerState(eta_q=to_host(eta_p), round_index=0)


def init_clients(family: GaussianFamily, num_clients: int) -> ClientState:
    """Every factor is 1."""
    zeros = to_host(family.zeros())
    return ClientState(eta_t=jax.tree.map(lambda leaf: np.zeros((num_clients, *leaf.shape)), zeros))


def broadcast(server: ServerState[Eta]) -> Broadcast[Eta]:
    """The current q."""
    return Broadcast(eta_q=server.eta_q)


def client_step(
    client: ClientState[Eta], down: Broadcast[Eta], refit: Refit, *, damping: float
) -> tuple[ClientState[Eta], Upload[Eta]]:
    """One visit (000 eqs. 2-4); the broadcast may be an old one (asynchronous schedules).

    The paper's change `eta* - eta_q` is the difference of the new factor and the old one. We take it as that: an
    improper cavity is projected before it is used, and the way to its projection belongs to no factor. Counted as part
    of the change it would be made once by every client, and q run away where there are many.

    Guarantees:
        - for conjugate models one synchronous undamped pass is the exact posterior
        - fixed points are those of global VI
    """
    eta_cavity = down.eta_q - client.eta_t  # q(theta) / t_m(theta)
    d_eta = damping * (refit(eta_cavity, down.eta_q) - client.eta_t)
    return ClientState(eta_t=client.eta_t + d_eta), Upload(d_eta=d_eta)


def server_step(server: ServerState[Eta], total: Upload[Eta]) -> ServerState[Eta]:
    """Add the sum of the clients' changes.

    Guarantees:
        - eta_q = eta_p + sum of eta_m after every step of every schedule
        - permuting clients changes nothing
    """
    return ServerState(eta_q=server.eta_q + total.d_eta, round_index=server.round_index + 1)


def plain_sum(ups: Upload[Eta]) -> Upload[Eta]:
    """The sum over a stack of uploads; a secure sum has the same shape of result."""
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), ups)


def precision_floor(eta_p: GaussianEta) -> float:
    """The floor of usable posteriors and cavities: a public number, from the prior alone."""
    quadratic = np.asarray(eta_p.quadratic, dtype=np.float64)
    precision = -2 * (np.diagonal(quadratic) if quadratic.ndim == 2 else quadratic)
    return float(FLOOR_SHARE * precision.min())


def usable(family: GaussianFamily, eta: GaussianEta, floor: float) -> GaussianEta:
    """The proper version of a raw sum: what may be sampled from. The raw one stays in the states (SPEC 0)."""
    return _project(family, to_single(eta), floor)


@partial(jax.jit, static_argnums=2)
def _project(family: GaussianFamily, eta: GaussianEta, floor: float) -> GaussianEta:
    return family.project(eta, floor)  # type: ignore[arg-type]


def to_single(eta: Eta) -> Eta:
    """The same numbers as float32, as compiled code takes them."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), eta)


def to_host(eta: Eta) -> Eta:
    """The same numbers as float64 host arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), eta)
