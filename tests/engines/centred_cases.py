"""Small studies from centred scores: every model, sum, unit and schedule once. What they end with is not frozen."""

from tests.oracle.cases import KNOWN_NOISE, MASKS, SHARING, TRUSTED, Case

SCORES = {"kind": "centred", "privatise": "scores", "rounds": 4}
SAMPLED = {**SCORES, "schedule": "sampled", "clients_per_round": 2}
UNKNOWN = {"kind": "linear_regression"}
COUNTS = {"kind": "negative_binomial_regression", "options": {"concentration": 2.0}}

CENTRED = (
    Case(name="centred", protocol=SCORES),
    Case(name="centred, softmax", protocol=SCORES, model={"kind": "softmax_regression"}),
    Case(name="centred, poisson", protocol=SCORES, model={"kind": "poisson_regression"}),
    Case(name="centred, negative binomial", protocol=SCORES, model=COUNTS),
    Case(name="centred, linear", protocol=SCORES, model=KNOWN_NOISE),
    Case(name="centred, unknown noise", protocol=SCORES, model=UNKNOWN),
    Case(
        name="centred, unknown noise, person, masks",
        protocol=SCORES,
        model=UNKNOWN,
        unit="person",
        aggregation=MASKS,
    ),
    Case(name="centred, person", protocol=SCORES, unit="person"),
    Case(name="centred, masks, person", protocol=SCORES, unit="person", aggregation=MASKS),
    Case(name="centred, trusted", protocol=SCORES, aggregation=TRUSTED),
    Case(name="centred, sharing, add_remove", protocol=SCORES, aggregation=SHARING, relation="add_remove"),
    Case(name="centred, sampled", protocol=SAMPLED),
    Case(
        name="centred, masks, sampled",
        protocol={**SAMPLED, "clients_per_round": 3},
        num_silos=4,
        aggregation=MASKS,
    ),
)
BY_NAME = {case.name: case for case in CENTRED}
