"""Tools that check a private method: record/replay, worst-case neighbours, audits.

from silobayes.testing import check_method, neighbours
check_method(my_method, neighbours(rng, make_rows, Relation.SUBSTITUTE, 2000))
"""

from silobayes.testing.audit import Audit, audit
from silobayes.testing.laws import PrivacyViolation
from silobayes.testing.neighbours import Pair, neighbours, worst_case_streams
from silobayes.testing.record_replay import FreeAccount, check_method, check_pair, record

__all__ = [
    "Audit",
    "FreeAccount",
    "Pair",
    "PrivacyViolation",
    "audit",
    "check_method",
    "check_pair",
    "neighbours",
    "record",
    "worst_case_streams",
]
