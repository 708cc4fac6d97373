"""Paying for a whole study at once."""

import dataclasses

import numpy as np
import pytest

from silobayes.core.errors import BudgetExceeded
from silobayes.privacy.clipping import clip, general
from silobayes.privacy.door import Door
from silobayes.privacy.events import GaussianEvent
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


def test_a_loop_uses_up_as_many_runs_as_it_has_steps():
    event = GaussianEvent(clip_norm=1.0, std=2.0)
    prepaid = Prepaid.of(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), [dataclasses.replace(event, count=10)])
    prepaid.charge(dataclasses.replace(event, count=6))
    with pytest.raises(BudgetExceeded, match="at most 4"):
        prepaid.charge(dataclasses.replace(event, count=5))
    prepaid.charge(dataclasses.replace(event, count=4))
    with pytest.raises(BudgetExceeded, match="at most 0"):
        prepaid.charge(event)


def test_what_was_taken_before_a_crash_cannot_be_taken_again():
    event = GaussianEvent(clip_norm=1.0, std=2.0)
    paid, taken = dataclasses.replace(event, count=10), dataclasses.replace(event, count=7)
    prepaid = Prepaid.of(FreeAccount(Relation.SUBSTITUTE, Unit.ROW), [paid], [taken])
    with pytest.raises(BudgetExceeded, match="at most 3"):
        prepaid.charge(dataclasses.replace(event, count=4))
    prepaid.charge(dataclasses.replace(event, count=3))
