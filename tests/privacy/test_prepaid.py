"""Paying for a whole study at once."""

import dataclasses

import numpy as np
import pytest

from silobayes.core.errors import BudgetExceeded
from silobayes.privacy.clipping import clip, general
from silobayes.privacy.door import Door
from silobayes.privacy.mechanisms import GaussianMechanism
from silobayes.privacy.prepaid import Prepaid
from silobayes.privacy.relation import Relation, Unit
from silobayes.testing import FreeAccount

BOUNDED = clip(general(np.ones((3, 2))), 1.0)
MECHANISM = GaussianMechanism(noise_multiplier=2.0)


def paid(runs: int) -> tuple[FreeAccount, Prepaid]:
    account = FreeAccount(Relation.SUBSTITUTE, Unit.ROW)
    event = dataclasses.replace(MECHANISM.event(BOUNDED, Relation.SUBSTITUTE), count=runs)
    account.charge(event)
    return account, Prepaid.of(account, [event])


def test_all_runs_are_charged_at_once_and_used_up_one_by_one():
    account, prepaid = paid(3)
    door = Door.open(prepaid)
    for _ in range(3):
        door.release(MECHANISM, BOUNDED)
    assert [event.count for event in account.charged] == [3]
    assert prepaid.remaining.total() == 0


def test_no_more_runs_can_be_taken_than_were_paid():
    _, prepaid = paid(1)
    door = Door.open(prepaid)
    door.release(MECHANISM, BOUNDED)
    with pytest.raises(BudgetExceeded, match="0 more runs"):
        door.release(MECHANISM, BOUNDED)


def test_nothing_but_the_event_that_was_paid_can_be_taken():
    _, prepaid = paid(2)
    with pytest.raises(BudgetExceeded, match="that was paid"):
        Door.open(prepaid).release(GaussianMechanism(noise_multiplier=1.0), BOUNDED)
    assert prepaid.remaining.total() == 2
