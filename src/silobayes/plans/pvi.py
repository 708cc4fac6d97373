"""Partitioned variational inference without privacy and with DP optimisation; Bayesian committees are one visit of it."""

import numpy as np

from silobayes.plans.situation import Situation
from silobayes.protocols import bcm, pvi
from silobayes.protocols.roles import Plan
from silobayes.protocols.schedule import numbered


def plan(situation: Situation) -> Plan:
    """PVI without privacy."""
    return _rounds(situation, pvi.Refit(local=situation.local))


def plan_optimisation(situation: Situation) -> Plan:
    """PVI by DP optimisation."""
    return _rounds(situation, private_refit(situation))


def plan_committee(situation: Situation) -> Plan:
    """Every silo alone, once."""
    share = bcm.prior_share(situation.settings.committee, situation.num_silos)
    refit = pvi.Refit(local=situation.local) if situation.budget is None else private_refit(situation)
    return _rounds(situation, bcm.Alone.against(refit, share))


def private_refit(situation: Situation) -> pvi.RefitPrivately:
    (clip_norm,) = situation.settings.clip_norms
    return pvi.RefitPrivately(
        local=situation.local,
        clip_norm=np.float32(clip_norm),  # type: ignore[arg-type]
        clipping=situation.settings.clipping.value,
        rows_per_unit=situation.rows_per_unit,
    )


def optimising_silo(situation: Situation, seats: tuple, refit: pvi.RefitPrivately | bcm.Alone) -> pvi.OptimisingSilo:
    """A silo with a private loop."""
    return pvi.OptimisingSilo(
        solve=refit,
        damping=situation.settings.damping,
        query=situation.sums.open(),
        loop=situation.loop(seats[0].sampler, seats[0].noise_multiplier),
    )


def _rounds(situation: Situation, refit: pvi.Refit | pvi.RefitPrivately | bcm.Alone) -> Plan:
    if situation.budget is None:
        seats = situation.row_seats()
        silo = pvi.PVISilo(solve=refit, damping=situation.settings.damping, query=situation.sums.open())
    else:
        seats = situation.loop_seats(situation.visits)
        silo = optimising_silo(situation, seats, refit)
    return Plan(
        visits=numbered(situation.visits),
        seats=seats,
        silos=(silo,),
        server=situation.pvi_server(),
        numbers=situation.numbers,
    )
