import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from silobayes.cli.init import init
from silobayes.core.errors import InvalidInput
from silobayes.data.description import TargetKind
from silobayes.data.encoding import Outside
from silobayes.plans import METHODS
from silobayes.privacy.events import Scheme
from silobayes.privacy.relation import Relation, Unit
from silobayes.protocols.schedule import Schedule
from silobayes.studies.template import by_name, template
from silobayes.study import AggregationKind, AggregationSection, Clipping, Mode, ModelKind, PosteriorKind, Study
from tests.data.studies import changed

TOML = """
[study]
name = "icu"
seed = 7
[data]
files = {north = "north.csv", south = "south.parquet"}
target = "days"
target_bounds = [0, 60]
features = ["age", "ward"]
bounds = {age = [0, 100], ward = ["a", "b"]}
unit = "patient"
ignore = ["note"]
public = ["rows", "test"]
outside = "clip"
intercept = false
test = "test.csv"
[model]
kind = "linear_regression"
options = {noise = 2, widths = [1, {a = true}]}
[privacy]
epsilon = 2
delta = 1e-6
relation = "add_remove"
unit = "person"
mode = "dp"
[protocol]
kind = "pvi"
schedule = "sequential"
privatise = "virtual_clients"
rounds = 5
damping = 1
steps = 9
step_size = 0.1
clip_norm = 3
shards = 4
posterior = "full"
[aggregation]
kind = "none"
"""


def test_every_key_of_a_study_file_is_read(tmp_path):
    study = Study.from_toml(TOML)
    assert (study.study.name, study.study.seed) == ("icu", 7)
    assert study.data.files == {"north": "north.csv", "south": "south.parquet"}
    assert (study.data.bounds, study.data.target_bounds) == ({"age": (0.0, 100.0), "ward": ("a", "b")}, (0.0, 60.0))
    assert (study.data.unit, study.data.ignore, study.data.test) == ("patient", ("note",), "test.csv")
    assert (study.data.outside, study.data.intercept) == (Outside.CLIP, False)
    assert (study.model.kind, study.model.options) == (
        ModelKind.LINEAR_REGRESSION,
        {"noise": 2, "widths": [1, {"a": True}]},
    )
    privacy = study.privacy
    assert (privacy.epsilon, privacy.delta, privacy.relation, privacy.unit, privacy.mode) == (
        2.0,
        1e-6,
        Relation.ADD_REMOVE,
        Unit.PERSON,
        Mode.DP,
    )
    protocol = study.protocol
    assert (protocol.kind, protocol.schedule, protocol.privatise) == (
        "pvi",
        Schedule.SEQUENTIAL,
        "virtual_clients",
    )
    assert (protocol.rounds, protocol.damping, protocol.steps, protocol.shards) == (5, 1.0, 9, 4)
    assert (protocol.step_size, protocol.clip_norm, protocol.posterior) == (0.1, 3.0, PosteriorKind.FULL)
    batches = Study.from_dict(
        changed(protocol={"sample_rate": 1, "sampler": "poisson", "clipping": "ordinary"})
    ).protocol
    assert (batches.sample_rate, batches.sampler, batches.clipping) == (1.0, Scheme.POISSON, Clipping.ORDINARY)
    (tmp_path / "study.toml").write_text(TOML)
    assert Study.from_toml(tmp_path / "study.toml") == study
    assert Study.from_toml(str(tmp_path / "study.toml")) == study


def test_a_quantile_instead_of_a_clip_norm_is_read():
    chosen = {**VIRTUAL, "clip_norm": "quantile", "clip_quantile": 0.8, "first_share": 0.2}
    study = Study.from_dict(changed(protocol=chosen))
    assert (study.protocol.clip_norm, study.protocol.clip_quantile, study.protocol.first_share) == (
        "quantile",
        0.8,
        0.2,
    )
    assert Study.from_dict(study.to_dict()) == study
    persons = Study.from_dict(changed(**PERSON, protocol={"clip_norm": "quantile"}))  # local averaging is their default
    assert persons.protocol.clip_norm == "quantile"


def test_what_is_left_out_is_none_and_follows_the_default_rule():
    protocol = Study.from_dict(changed()).protocol
    assert protocol.kind == "centred"
    set_already = {field.name for field in dataclasses.fields(protocol) if getattr(protocol, field.name) is not None}
    assert set_already == {"kind"}


REAL = {"data__classes": None, "data__target_bounds": [0, 1]}
FILES = {"data__source": None, "data__files": {"a": "a.csv"}}
PERSON = {"data__unit": "patient", "privacy__unit": "person"}
VIRTUAL = {"privatise": "virtual_clients"}
OPTIMISATION = {"privatise": "dp_optimisation"}
PERSONS_DECLARED = {"data__rows_per_person": 4, "data__public": ["rows", "persons"]}
# Each line: the key that the error must name, and the change that is not acceptable.
BAD = [
    ("secrets", {"secrets": {}}),
    ("data.colour", {"data__colour": 1}),
    ("protocol.epsilon", {"protocol__epsilon": 1}),
    ("aggregation.colluding", {"aggregation__colluding": 1}),
    ("study.name", {"study__name": None}),
    ("study.name", {"study__name": "  "}),
    ("study.seed", {"study__seed": -1}),
    ("study.seed", {"study__seed": 1.0}),
    ("study.seed", {"study__seed": 2**63}),
    ("study", {"study": 3}),
    ("data.source", {"data__source": 3}),
    ("data.files", {"data__files": {"a": "a.csv"}}),
    ("data.files", {"data__source": None, "data__files": {}}),
    ("data.files", {"data__source": None, "data__files": ["a/x.csv", "b/x.csv"]}),
    ("data.files.a", {"data__source": None, "data__files": {"a": 3}}),
    ("data.target", {"data__target": None}),
    ("data.target", {"data__classes": None}),
    ("data.features", {"data__features": "age"}),
    ("data.features", {"data__features": []}),
    ("data.features", {"data__features": ["age", "age"]}),
    ("data.target", {"data__target": "age"}),
    ("data.ignore", {"data__ignore": ["age"]}),
    ("data.bounds", {"data__bounds": None}),
    ("data.bounds", {"data__bounds": {}}),
    ("data.bounds.ward", {"data__bounds": {"age": [0, 1]}}),
    ("data.bounds.extra", {"data__bounds": {"age": [0, 1], "ward": ["a", "b"], "extra": [0, 1]}}),
    ("data.bounds.age", {"data__bounds": {"age": [1, 0], "ward": ["a", "b"]}}),
    ("data.bounds.age", {"data__bounds": {"age": [1, 1], "ward": ["a", "b"]}}),
    ("data.bounds.age", {"data__bounds": {"age": [0, float("inf")], "ward": ["a", "b"]}}),
    ("data.bounds.age", {"data__bounds": {"age": [0, float("nan")], "ward": ["a", "b"]}}),
    ("data.bounds.age", {"data__bounds": {"age": 3, "ward": ["a", "b"]}}),
    ("data.bounds.ward", {"data__bounds": {"age": [0, 1], "ward": ["a"]}}),
    ("data.bounds.ward", {"data__bounds": {"age": [0, 1], "ward": ["a", "a"]}}),
    ("data.bounds.ward", {"data__bounds": {"age": [0, 1], "ward": ["a", 1]}}),
    ("data.bounds.ward", {"data__bounds": {"age": [0, 1], "ward": [True, False]}}),
    ("data.classes", {"data__classes": ["no"]}),
    ("data.classes", {"data__classes": ["a", "b", "c"]}),
    ("protocol.clients_per_round", {"protocol__schedule": "sampled"}),
    ("protocol.clients_per_round", {"protocol__clients_per_round": 2}),
    ("protocol.committee", {"protocol__committee": "same"}),
    ("data.typical.ward", {"data__typical": {"ward": 1.0}}),
    ("data.typical.age", {"data__typical": {"age": 101.0}}),
    ("data.typical", {"data__typical": 3}),
    ("data.spread", {"data__spread": 3}),
    ("data.spread.ward", {"data__spread": {"ward": 1.0}}),
    ("data.spread.height", {"data__spread": {"height": 1.0}}),
    ("data.spread.age", {"data__spread": {"age": 0.0}}),
    ("data.spread.age", {"data__spread": {"age": -1.0}}),
    ("data.spread.age", {"data__spread": {"age": float("nan")}}),
    ("data.spread.age", {"data__spread": {"age": 1e-9}}),
    ("data.spread.age", {"data__spread": {"age": 51.0}}),
    ("data.spread.age", {"data__spread": {"age": 91.0}, "data__typical": {"age": 10.0}}),
    ("data.shares", {"data__shares": [0.5, 0.5]}),
    ("data.shares.age", {"data__shares": {"age": [0.5, 0.5]}}),
    ("data.shares.height", {"data__shares": {"height": [0.5, 0.5]}}),
    ("data.shares.ward", {"data__shares": {"ward": 0.5}}),
    ("data.shares.ward", {"data__shares": {"ward": [0.5, 0.5]}}),
    ("data.shares.ward", {"data__shares": {"ward": [0.5, 0.5, 0.0]}}),
    ("data.shares.ward", {"data__shares": {"ward": [0.5, 0.3, 0.1]}}),
    ("data.shares.ward", {"data__shares": {"ward": [0.5, 0.3, "0.2"]}}),
    ("data.shares.ward", {"data__shares": {"ward": [0.5, 0.3, float("nan")]}}),
    ("data.shares.ward", {"data__shares": {"ward": {"a": 0.5, "b": 0.5}}}),
    ("data.shares.ward", {"data__shares": {"ward": {"a": 0.5, "b": 0.3, "d": 0.2}}}),
    ("data.target_bounds", {"data__target_bounds": [0, 1]}),
    ("data.classes", {"data__classes": None, "data__target_bounds": [0, 1]}),
    ("data.target_bounds", {"model__kind": "linear_regression"}),
    ("data.target_bounds", {"model__kind": "poisson_regression", **REAL, "data__target_bounds": [-1, 9]}),
    ("data.target_bounds", {"model__kind": "linear_regression", **REAL, "data__target_bounds": ["a", "b"]}),
    ("data.target", {"model__kind": "gaussian"}),
    ("data.unit", {"data__unit": "patient"}),
    ("data.unit", {"privacy__unit": "person"}),
    ("data.rows_per_person", {"data__rows_per_person": 4}),
    ("data.rows_per_person", {**PERSON, "data__rows_per_person": 0}),
    ("data.rows_per_person", {**PERSON, "data__rows_per_person": 2.0}),
    ("data.rows_per_person", {**PERSON, "protocol": OPTIMISATION, "data__public": ["rows", "persons"]}),
    ("data.rows_per_person", {**PERSON, "protocol": {"kind": "bcm"}, "data__public": ["rows", "persons"]}),
    ("protocol.clip_norm", {**PERSON, **PERSONS_DECLARED, "protocol": {"clip_norm": [1.0, 2.0]}}),
    ("data.public", {**PERSON, "protocol": OPTIMISATION, "data__rows_per_person": 4}),
    ("data.public", {**PERSON, "protocol": {"kind": "global_vi"}, "data__rows_per_person": 4}),
    ("data.public", {**PERSON, "data__rows_per_person": 4, "data__public": []}),
    ("data.public", {**PERSON, "data__public": ["persons"]}),
    ("data.public", {"data__public": None}),
    ("data.public", {"data__public": ["bounds"]}),
    ("data.public", {"data__public": ["rows", "everything"]}),
    ("data.public", {"data__test": 0.5}),
    ("data.outside", {"data__outside": "drop"}),
    ("data.intercept", {"data__intercept": 1}),
    ("data.test", {"data__test": 0.0}),
    ("data.test", {"data__test": 1.0}),
    ("data.test", {"data__test": True}),
    ("silos.count", {"silos__count": None}),
    ("silos.count", {"silos__count": 0}),
    ("silos.count", {"silos__count": True}),
    ("silos.count", {"silos": {"count": 3, "scheme": "rho_kappa", "rho": 0.5, "kappa": 0.0}}),
    ("silos.count", {"data__source": None, "data__files": {"a": "a.csv"}, "silos__count": 2}),
    ("silos.scheme", {"silos__scheme": "random"}),
    ("silos.scheme", {**FILES, "silos": {"scheme": "label_skew", "rho": 0.1}}),
    ("silos.scheme", {**PERSON, "silos": {"count": 2, "scheme": "label_skew", "rho": 0.5}}),
    ("silos.rho", {"silos__rho": 0.5}),
    ("silos.rho", {"silos": {"count": 2, "scheme": "rho_kappa", "kappa": 0.5}}),
    ("silos.rho", {"silos": {"count": 2, "scheme": "rho_kappa", "rho": 1.0, "kappa": 0.5}}),
    ("silos.rho", {"silos": {"count": 2, "scheme": "label_skew", "rho": 1.1}}),
    ("silos.kappa", {"silos": {"count": 2, "scheme": "rho_kappa", "rho": 0.5}}),
    ("silos.kappa", {"silos": {"count": 2, "scheme": "rho_kappa", "rho": 0.5, "kappa": 1.1}}),
    ("silos.kappa", {"silos": {"count": 2, "scheme": "rho_kappa", "rho": 0.5, "kappa": float("nan")}}),
    ("silos.column", {"silos": {"scheme": "column"}}),
    ("silos.column", {"silos": {"scheme": "column", "column": "died"}}),
    ("data.bounds.site", {"silos": {"scheme": "column", "column": "site"}}),
    ("data.bounds.age", {"silos": {"scheme": "column", "column": "age"}}),
    ("silos.count", {"silos": {"scheme": "column", "column": "ward", "count": 4}}),
    ("model.kind", {"model__kind": "forest"}),
    ("model.kind", {"model": {}}),
    ("model.options", {"model__options": 3}),
    ("model.options.a.b", {"model__options": {"a": {"b": float("nan")}}}),
    ("model.options.a", {"model__options": {"a": object()}}),
    ("privacy.mode", {"privacy__mode": "off"}),
    ("privacy.epsilon", {"privacy__epsilon": None}),
    ("privacy.epsilon", {"privacy__epsilon": 0}),
    ("privacy.epsilon", {"privacy__epsilon": float("inf")}),
    ("privacy.epsilon", {"privacy__epsilon": "1"}),
    ("privacy.delta", {"privacy__delta": None}),
    ("privacy.delta", {"privacy__delta": 1.0}),
    ("privacy.delta", {"privacy__delta": 1e-300}),
    ("privacy.relation", {"privacy__relation": None}),
    ("privacy.relation", {"privacy__relation": "neighbour"}),
    ("privacy.unit", {"privacy__unit": None}),
    ("privacy.unit", {"privacy__unit": "patient"}),
    ("protocol.kind", {"protocol__kind": "fedavg"}),
    ("protocol.schedule", {"protocol__schedule": "random"}),
    ("protocol.schedule", {"protocol": {"kind": "bcm", "schedule": "sequential"}}),
    ("protocol.rounds", {"protocol": {"kind": "streaming_vb", "rounds": 2}}),
    ("protocol.rounds", {"protocol__rounds": 0}),
    ("protocol.privatise", {"protocol__privatise": "none"}),
    ("protocol.privatise", {"protocol__privatise": "dp_optimisation", "privacy": {"mode": "none"}}),
    ("protocol.privatise", {"protocol__privatise": "sufficient_statistics"}),
    ("protocol.damping", {"protocol__damping": 0.0}),
    ("protocol.damping", {"protocol__damping": 1.5}),
    ("protocol.steps", {"protocol__steps": 2.5}),
    ("protocol.step_size", {"protocol__step_size": 0}),
    ("protocol.clip_norm", {"protocol__clip_norm": -1}),
    ("protocol.clip_norm", {"protocol": {**VIRTUAL, "clip_norm": [1.0]}}),
    ("protocol.clip_norm", {"protocol": {**VIRTUAL, "clip_norm": [1.0, 0.0]}}),
    ("protocol.clip_norm", {"protocol": {**VIRTUAL, "clip_norm": [1.0, float("nan")]}}),
    ("protocol.clip_norm", {"protocol__clip_norm": [1.0, 2.0]}),
    ("protocol.clip_norm", {"protocol": {**VIRTUAL, "scales": [1.0, 2.0]}}),
    ("protocol.clip_norm", {"protocol": {**VIRTUAL, "clip_norm": "median"}}),
    ("protocol.clip_norm", {"protocol": {"clip_norm": "quantile"}}),
    ("protocol.clip_norm", {"protocol": {"privatise": "dp_optimisation", "clip_norm": "quantile"}}),
    ("protocol.clip_quantile", {"protocol": {**VIRTUAL, "clip_quantile": 0.5}}),
    ("protocol.clip_quantile", {"protocol": {**VIRTUAL, "clip_norm": 1.0, "clip_quantile": 0.5}}),
    ("protocol.clip_quantile", {"protocol": {**VIRTUAL, "clip_norm": "quantile", "clip_quantile": 0.0}}),
    ("protocol.clip_quantile", {"protocol": {**VIRTUAL, "clip_norm": "quantile", "clip_quantile": 1.0}}),
    ("protocol.clip_quantile", {"protocol": {**VIRTUAL, "clip_norm": "quantile", "clip_quantile": "half"}}),
    ("protocol.first_share", {"protocol": {**VIRTUAL, "clip_norm": 1.0, "first_share": 0.1}}),
    ("protocol.first_share", {"protocol": {**VIRTUAL, "clip_norm": "quantile", "first_share": 1.0}}),
    ("protocol.scales", {"protocol": {**VIRTUAL, "clip_norm": "quantile", "scales": [1.0, 1.0]}}),
    ("protocol.scales", {"protocol": {**VIRTUAL, "clip_norm": 1.0, "scales": 3.0}}),
    ("protocol.scales", {"protocol": {**VIRTUAL, "clip_norm": 1.0, "scales": [1.0, -1.0]}}),
    ("protocol.scales", {"protocol": {"clip_norm": 1.0, "scales": [1.0, 1.0]}}),
    ("protocol.scales", {"protocol": {"privatise": "dp_optimisation", "clip_norm": 1.0, "scales": [1.0, 1.0]}}),
    ("protocol.sample_rate", {"protocol__sample_rate": 1.5}),
    ("protocol.rounds", {"protocol__rounds": 10**9}),
    ("protocol.steps", {"protocol__steps": 10**9}),
    ("protocol.shards", {"protocol__shards": 0}),
    ("protocol.shards", {"protocol": {"shards": 3, "privatise": "dp_optimisation"}}),
    ("protocol.clipping", {"protocol__clipping": "adaptive"}),
    ("protocol.clipping", {"protocol__clipping": "label_free", "model__kind": "numpyro"}),
    ("protocol.sampler", {"protocol__sampler": "shuffle"}),
    ("protocol.sampler", {"protocol__sampler": "without_replacement", "privacy__relation": "add_remove"}),
    ("protocol.posterior", {"protocol__posterior": "low_rank"}),
    ("aggregation.kind", {"aggregation__kind": "sum"}),
    ("aggregation.colluding", {"aggregation": {"kind": "trusted", "colluding": -1}}),
    ("aggregation.colluding", {"aggregation": {"kind": "trusted", "colluding": 0.5}}),
    ("aggregation.compute_nodes", {"aggregation__compute_nodes": 3}),
    ("aggregation.compute_nodes", {"aggregation": {"kind": "trusted", "compute_nodes": 3}}),
    ("aggregation.compute_nodes", {"aggregation": {"kind": "pairwise_masks", "compute_nodes": 3}}),
    ("aggregation.compute_nodes", {"aggregation": {"kind": "secret_sharing", "compute_nodes": 1}}),
]  # fmt: skip


@pytest.mark.parametrize("changes", [{"data__test": 1.0}, {"privacy__delta": 1.0}])
def test_an_open_end_of_a_range_is_written_as_one(changes):
    with pytest.raises(InvalidInput, match=r"a number in \(0, 1\), got 1.0"):
        Study.from_dict(changed(**changes))


@pytest.mark.parametrize(("key", "changes"), BAD, ids=[f"{k}-{key}" for k, (key, _) in enumerate(BAD)])
def test_what_is_not_acceptable_is_refused_by_its_dotted_name(key, changes):
    Study.from_dict(changed())  # what was changed was fine before
    with pytest.raises(InvalidInput) as refusal:
        Study.from_dict(changed(**changes))
    assert refusal.value.key == key
    assert str(refusal.value).startswith(f"{key}: expected ")
    assert ", got " in str(refusal.value)


@pytest.mark.parametrize("section", ["study", "data", "model", "privacy"])
def test_a_missing_section_is_refused_by_its_name(section):
    tables = changed()
    del tables[section]
    with pytest.raises(InvalidInput) as refusal:
        Study.from_dict(tables)
    assert refusal.value.key == section


@pytest.mark.parametrize(
    ("kind", "num_clients", "largest"),
    [
        ("trusted", 2, 0),
        ("trusted", 7, 5),
        ("secret_sharing", 7, 5),
        ("pairwise_masks", 7, 3),
        ("pairwise_masks", 8, 3),
    ],
)
def test_colluders_are_fewer_than_a_sum_can_bear(kind, num_clients, largest):
    for colluding in range(num_clients + 2):
        section = AggregationSection(kind=kind, colluding=colluding)
        if colluding <= largest:
            assert section.num_shares(num_clients) == num_clients - colluding - 1 >= 1
        else:
            with pytest.raises(InvalidInput) as refusal:
                section.num_shares(num_clients)
            assert refusal.value.key == "aggregation.colluding"


def test_every_kind_of_sum_is_read():
    for kind in AggregationKind:
        assert Study.from_dict(changed(aggregation={"kind": kind.value})).aggregation.num_colluding == 0
    shared = {"kind": "secret_sharing", "colluding": 1, "compute_nodes": 2}
    study = Study.from_dict(changed(aggregation=shared))
    assert study.to_dict()["aggregation"] == shared
    others = [{**shared, key: value} for key, value in (("colluding", 0), ("compute_nodes", 3))]
    assert len({study.hash, *(Study.from_dict(changed(aggregation=other)).hash for other in others)}) == 3


@pytest.mark.parametrize("text", ["[study\nname", "a = 1\na = 2", "\x00\n"])
def test_texts_that_are_no_toml_are_refused(text):
    with pytest.raises(InvalidInput, match="TOML"):
        Study.from_toml(text)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "latin.toml", "none.toml"):
        with pytest.raises(InvalidInput, match="readable study file"):
            Study.from_toml(path)


def test_mode_none_needs_nothing_else():
    study = Study.from_dict(changed(privacy={"mode": "none"}, data__public=None, data__test=0.5))
    assert study.privacy.epsilon is None
    kept = changed(privacy__mode="none", protocol__privatise="none")
    assert Study.from_dict(kept).privacy.epsilon == 1.0


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, TargetKind.CLASSES),
        ({"model__kind": "softmax_regression", "data__classes": [1, 2, 3]}, TargetKind.CLASSES),
        ({"model__kind": "mlp"}, TargetKind.CLASSES),
        ({"model__kind": "mlp", "data__classes": None, "data__target_bounds": [0, 1]}, TargetKind.REAL),
        (
            {"model__kind": "negative_binomial_regression", "data__classes": None, "data__target_bounds": [0, 9]},
            TargetKind.COUNT,
        ),
        ({"model__kind": "gaussian", "data__classes": None, "data__target": None}, TargetKind.NONE),
        ({"model__kind": "numpyro", "data__classes": None, "data__target": None}, TargetKind.NONE),
        ({"model__kind": "numpyro", "data__classes": None, "data__target_bounds": [0, 1]}, TargetKind.REAL),
    ],
)
def test_the_target_is_what_the_model_explains(changes, kind):
    study = Study.from_dict(changed(**changes))
    assert study.target_kind is kind
    assert (study.encoding.target is None) == (kind is TargetKind.NONE)


def test_features_follow_from_bounds():
    left_out = Study.from_dict(changed(data__features=None))
    assert left_out.data.features == ("age", "ward")
    assert left_out.hash == Study.from_dict(changed()).hash
    by_ward = Study.from_dict(changed(data__features=None, silos={"scheme": "column", "column": "ward"}))
    assert by_ward.data.features == ("age",)
    assert by_ward.description.silo_names == ("a", "b", "c")
    also_feature = Study.from_dict(changed(silos={"scheme": "column", "column": "ward"}))
    assert also_feature.encoding.feature_names == ("age", "ward=b", "ward=c", "intercept")


def test_silo_names_sort_as_they_are_numbered():
    for count in (1, 10, 11, 101, 2000):
        names = Study.from_dict(changed(silos__count=count)).description.silo_names
        assert len(names) == count
        assert list(names) == sorted(names)


CHANGES = {
    "study__seed": [0, 1, 2**40, 2**63 - 1],
    "data__test": [None, 0.5, "t.csv"],
    "data__outside": ["refuse", "clip"],
    "data__intercept": [True, False],
    "data__ignore": [[], ["note"]],
    "data__bounds": [
        {"age": [0, 100], "ward": ["a", "b"]},
        {"age": [0, 90], "ward": ["a", "b"]},
        {"age": [0, 100], "ward": ["b", "a"]},
        {"age": [0, 100], "ward": [1, 2, 3]},
        {"age": [0, 100], "ward": ["1", "2", "3"]},
    ],
    "data__spread": [None, {"age": 10}, {"age": 11.0}],
    "silos": [{"count": 2}, {"count": 3}, {"count": 2, "scheme": "rho_kappa", "rho": 0.5, "kappa": -1.0}],
    "model__options": [{}, {"scale": 1.5}, {"scale": 1, "names": ["a", {"b": False}]}],
    "privacy__epsilon": [0.1, 1, 3.0],
    "privacy__relation": ["substitute", "add_remove"],
    "protocol__clip_norm": [2, 3.0, [2, 3.0]],
    "protocol__scales": [None, (1, 0.5)],
    "protocol__damping": [None, 0.5],
    "protocol__shards": [None, 4],
    "protocol__posterior": [None, "full"],
}
choices = st.fixed_dictionaries({key: st.sampled_from(range(len(values))) for key, values in CHANGES.items()})


def build(chosen: dict[str, int]) -> Study:
    changes = {key: CHANGES[key][k] for key, k in chosen.items()}
    return Study.from_dict(changed(data__public=["rows", "test"], protocol__privatise="virtual_clients", **changes))


@given(choices)
def test_a_study_rebuilt_from_its_canonical_form_is_equal(chosen):
    study = build(chosen)
    tables = study.to_dict()
    again = Study.from_dict(json.loads(json.dumps(tables, allow_nan=False)))
    assert again == study
    assert again.to_dict() == tables
    assert again.hash == study.hash
    assert dataclasses.replace(study) == study
    for section in ("study", "data", "silos", "model", "privacy", "protocol", "aggregation"):
        value = getattr(study, section)
        assert dataclasses.replace(value) == value


@given(choices, st.sampled_from(sorted(CHANGES)), st.data())
def test_any_change_of_meaning_changes_the_hash(chosen, key, data):
    other = data.draw(st.sampled_from([k for k in range(len(CHANGES[key])) if k != chosen[key]]))
    assert build(chosen).hash != build(chosen | {key: other}).hash


def test_spelling_order_and_comments_do_not_change_the_hash():
    shuffled = TOML.replace("epsilon = 2\n", "").replace("[protocol]", "# a comment\nepsilon = 2.0\n[protocol]")
    shuffled = shuffled.replace("{age = [0, 100], ward", "{ward = ['a', 'b'], age = [0.0, 1e2]} #").replace(
        "damping = 1", "damping = 1.0"
    )
    assert shuffled != TOML
    assert Study.from_toml(shuffled).hash == Study.from_toml(TOML).hash
    assert Study.from_toml(TOML.replace("seed = 7", "seed = 8")).hash != Study.from_toml(TOML).hash


def test_shares_are_a_list_or_a_table_in_any_order():
    listed = Study.from_dict(changed(data__shares={"ward": [0.5, 0.3, 0.2]}))
    named = Study.from_dict(changed(data__shares={"ward": {"c": 0.2, "a": 0.5, "b": 0.3}}))
    assert listed.data.shares == {"ward": (0.5, 0.3, 0.2)}
    assert listed.hash == named.hash != Study.from_dict(changed()).hash
    assert Study.from_dict(listed.to_dict()) == listed
    assert Study.from_dict(changed(data__shares={"ward": [0.3, 0.5, 0.2]})).hash != listed.hash
    numbers = changed(
        data__bounds={"age": [0, 100], "ward": [1, 2, 3]}, data__shares={"ward": {"3": 0.2, "1": 0.5, "2": 0.3}}
    )
    assert Study.from_dict(numbers).data.shares == {"ward": (0.5, 0.3, 0.2)}


def test_spreads_and_shares_reach_the_encoding():
    scaled = changed(data__typical={"age": 40}, data__spread={"age": 20}, data__shares={"ward": [0.5, 0.3, 0.2]})
    age, ward = Study.from_dict(scaled).encoding.columns
    assert (getattr(age, "typical", None), getattr(age, "spread", None)) == (40.0, 20.0)
    assert getattr(ward, "shares", None) == (0.5, 0.3, 0.2)


def test_a_study_does_not_follow_changes_of_the_tables_it_was_built_from():
    tables = changed(model__options={"widths": [1, 2]})
    study = Study.from_dict(tables)
    before = study.hash
    tables["model"]["options"]["widths"].append(3)
    tables["data"]["bounds"]["age"][1] = 7
    study.to_dict()["model"]["options"]["widths"].append(3)
    assert study.hash == before


def test_the_hash_is_frozen():
    """Run directories name studies by it; a change here orphans them, so it belongs in the changelog."""
    canonical = (
        '{"aggregation":{"kind":"none"},"data":{"bounds":{"age":[0.0,100.0],"ward":["a","b","c"]},'
        '"classes":["no","yes"],"coding":"reference","features":["age","ward"],"ignore":[],"intercept":true,'
        '"outside":"refuse","public":["rows"],"reference":{"ward":"a"},"source":"rows.csv","target":"died"},"model":{"kind":"logistic_regression","options":{}},'
        '"privacy":{"delta":1e-05,"epsilon":1.0,"mode":"dp","relation":"substitute","unit":"row"},'
        '"protocol":{"kind":"centred"},"silos":{"count":2,"scheme":"even"},"study":{"name":"icu","seed":3}}'
    )
    assert Study.from_dict(changed()).hash == hashlib.sha256(canonical.encode()).hexdigest()


def test_init_writes_a_study_that_parses_and_never_overwrites(tmp_path):
    target = tmp_path / "new" / "study"
    done = CliRunner().invoke(init, [str(target)])
    assert done.exit_code == 0
    assert str(target / "study.toml") in done.output
    study = Study.from_toml(target / "study.toml")
    assert study.privacy.unit is Unit.ROW
    # What a study gets that names no method, and its keys.
    assert study.method.name == "centred/scores"
    assert '\n# kind = "centred"' in (target / "study.toml").read_text()
    (target / "study.toml").write_text("mine")
    again = CliRunner().invoke(init, [str(target)])
    assert isinstance(again.exception, InvalidInput)
    assert (target / "study.toml").read_text() == "mine"


def test_init_json_and_places_that_cannot_be(tmp_path):
    done = CliRunner().invoke(init, [str(tmp_path), "--json"])
    assert json.loads(done.output) == {"study": str(tmp_path / "study.toml")}
    for place in (tmp_path / "study.toml", tmp_path / "study.toml" / "below"):
        assert isinstance(CliRunner().invoke(init, [str(place)]).exception, InvalidInput)


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_the_template_shows_every_key(method):
    text = template(method, is_default=False)
    assert '"#' not in text  # a long value keeps its distance
    if method.models.startswith("linear"):
        text = text.replace('"logistic_regression"', '"linear_regression"')
        text = text.replace('classes = ["no", "yes"] ', "target_bounds = [0.0, 1.0] ").replace(
            "# target_bounds", "# classes"
        )
    study = Study.from_toml(text)
    assert study.method is method
    for section in ("study", "data", "silos", "model", "privacy", "protocol", "aggregation"):
        for field in dataclasses.fields(getattr(study, section)):
            shown = (f"\n{field.name} = ", f"\n# {field.name} = ", f"\n[{section}.{field.name}]")
            assert any(line in text for line in shown), f"{section}.{field.name}"


def test_the_documents_list_exactly_the_keys_of_the_code():
    text = (Path(__file__).resolve().parents[1] / "docs" / "study-file.md").read_text()
    study = Study.from_dict(changed())
    keys = {field.name for method in METHODS.values() for field in dataclasses.fields(method.keys)}
    for section in (field.name for field in dataclasses.fields(Study) if field.name != "method"):
        part = re.search(rf"^## `\[{section}\]`\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
        assert part is not None, section
        listed = re.findall(r"^\| `(\w+)` \|", part[1], flags=re.MULTILINE)
        own = keys if section == "protocol" else {field.name for field in dataclasses.fields(getattr(study, section))}
        assert sorted(listed) == sorted(own), section


def test_a_gaussian_of_the_columns_has_no_intercept():
    """A column of ones would make its covariance degenerate."""
    tables = {
        "study": {"name": "means"},
        "data": {"bounds": {"a": [0, 1], "b": [0, 1]}},
        "model": {"kind": "gaussian"},
        "privacy": {"mode": "none"},
    }
    assert Study.from_dict(tables).encoding.feature_names == ("a", "b")
    assert Study.from_dict(Study.from_dict(tables).to_dict()).hash == Study.from_dict(tables).hash
    tables["data"]["intercept"] = True
    with pytest.raises(InvalidInput, match=r"data\.intercept"):
        Study.from_dict(tables)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("pvi", "pvi/dp_optimisation"),
        ("virtual_clients", "pvi/virtual_clients"),
        ("linreg", "linreg/sufficient_statistics"),
        ("bcm/none", "bcm/none"),
    ],
)
def test_a_method_is_found_by_its_name_or_a_part_of_it(name, found):
    assert by_name(name, METHODS).name == found


def test_init_writes_just_the_keys_of_a_method(tmp_path):
    done = CliRunner().invoke(init, [str(tmp_path), "--method", "global_vi"])
    assert done.exit_code == 0
    text = (tmp_path / "study.toml").read_text()
    assert Study.from_toml(text).method.name == "global_vi/dp_optimisation"
    assert "sample_rate" in text
    assert "shards" not in text
    assert isinstance(CliRunner().invoke(init, [str(tmp_path / "b"), "--method", "fedavg"]).exception, InvalidInput)


@pytest.mark.parametrize(
    ("key", "protocol"),
    [
        ("protocol.shards", {"privatise": "dp_optimisation", "shards": 3}),
        ("protocol.sample_rate", {"privatise": "virtual_clients", "sample_rate": 0.1}),
        ("protocol.committee", {"kind": "global_vi", "committee": "same"}),
        ("protocol.projection", {"projection": True}),
    ],
)
def test_a_key_of_another_method_is_refused_by_its_name(key, protocol):
    with pytest.raises(InvalidInput, match=re.escape(key)):
        Study.from_dict(changed(protocol=protocol))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("intercept", {"age": [0, 1], "intercept": [0, 1]}),
        ("ward=b", {"ward": ["a", "b"], "ward=b": [0, 1]}),
    ],
)
def test_features_that_would_share_a_name_are_refused_before_anything_is_spent(name, bounds):
    with pytest.raises(InvalidInput, match=name) as caught:
        Study.from_dict(changed(data__features=None, data__bounds=bounds))
    assert caught.value.key == "data.features"
