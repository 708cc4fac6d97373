"""Default rules: the study always wins, and only public facts count."""

import dataclasses
import inspect
import json

import numpy as np
import pandas as pd
import pytest

import silobayes
from silobayes.models.linear_regression import LinearRegression
from silobayes.plans import plan_of
from silobayes.plans.rules import Limits, PublicFacts, settings_of
from silobayes.plans.situation import Situation, Sizes
from silobayes.protocols.schedule import Schedule
from silobayes.study import Study
from tests.engines.cases import MODEL, make_silos, make_study
from tests.engines.harness import Privatise

FACTS = PublicFacts(silo_rows=(500, 2000, 4000), num_parameters=19)
OWN = {
    "rounds": 7,
    "damping": 0.9,
    "steps": 3,
    "step_size": 0.7,
    "clip_norm": 12.0,
    "sample_rate": 0.01,
    "schedule": "sequential",
    "clipping": "ordinary",
    "sampler": "without_replacement",
    "posterior": "full",
}


@pytest.mark.parametrize("kind", ["pvi", "global_vi"])
def test_what_a_study_says_is_never_overruled(kind):
    own = OWN if kind == "pvi" else {key: value for key, value in OWN.items() if key != "schedule"}
    settings = settings_of(make_study(kind=kind, privatise="dp_optimisation", **own), FACTS)
    assert {key: getattr(settings, key) for key in own} == own
    assert settings_of(make_study(privatise="virtual_clients", shards=3), FACTS).shards == 3


@pytest.mark.parametrize(
    "privatise", ["dp_optimisation", "parameter_perturbation", "local_averaging", "virtual_clients"]
)
def test_every_method_has_settings_that_can_be_planned(privatise):
    study = make_study(privatise=privatise)
    silos = make_silos()
    settings = settings_of(study, PublicFacts.of(MODEL, [silo.num_rows for silo in silos]))
    assert settings.privatise == privatise
    found = getattr(settings, "shards", 1)
    shards = found if isinstance(found, tuple) else (found,) * len(silos)
    assert all(1 <= count <= silo.num_rows for count, silo in zip(shards, silos, strict=True))
    assert (max(shards) > 1) == (privatise in ("local_averaging", "virtual_clients"))


def test_shards_are_in_proportion_to_rows_and_never_too_many():
    study = make_study(privatise="virtual_clients")
    shards = settings_of(study, PublicFacts(silo_rows=(100, 1000, 10), num_parameters=4)).shards
    assert shards == (100, 1000, 10)
    many = settings_of(study, PublicFacts(silo_rows=(10**6, 10**5), num_parameters=40)).shards
    assert sum(many) * 2 * 40 <= 24_000_000
    assert many[0] == pytest.approx(10 * many[1], rel=0.01)


def test_a_study_without_privacy_and_one_of_persons():
    assert settings_of(make_study(mode="none"), FACTS).privatise == Privatise.NONE
    assert settings_of(make_study(), FACTS).privatise == Privatise.DP_OPTIMISATION
    assert settings_of(make_study(unit="person"), FACTS).privatise == Privatise.LOCAL_AVERAGING
    persons = settings_of(make_study(unit="person", rows_per_person=4), FACTS)
    assert persons.privatise == Privatise.DP_OPTIMISATION
    assert persons.clip_norm == settings_of(make_study(), FACTS).clip_norm


def test_noisy_local_optima_of_many_silos_are_damped_and_get_more_rounds():
    exact = PublicFacts(silo_rows=(50,) * 100, num_parameters=9)
    noisy = dataclasses.replace(exact, solves_exactly=False)
    study = make_study(mode="none")
    assert (settings_of(study, exact).damping, settings_of(study, exact).rounds) == (0.5, 10)
    assert (settings_of(study, noisy).damping, settings_of(study, noisy).rounds) == (0.08, 63)
    one_by_one = settings_of(make_study(mode="none", schedule="sequential"), noisy)
    assert (one_by_one.damping, one_by_one.rounds) == (0.5, 10)
    steps = settings_of(make_study(mode="none", kind="global_vi"), noisy)
    assert (steps.damping, steps.rounds) == (1.0, 100)


@pytest.mark.parametrize("kind", ["pvi", "bcm", "streaming_vb"])
def test_one_visit_without_privacy_takes_enough_steps_where_optima_are_noisy(kind):
    noisy = PublicFacts(silo_rows=(500,), num_parameters=9, solves_exactly=False)
    assert settings_of(make_study(mode="none", kind=kind), noisy).steps == 2000
    assert settings_of(make_study(kind=kind), noisy).steps < 2000


@pytest.mark.parametrize(("hidden", "expected"), [([8], 0.0094), ([30], 0.0049), (None, 0.05)])
def test_steps_of_full_networks_are_shorter_the_more_parameters_there_are(hidden, expected):
    """41 and 151 parameters; the logistic regression has closed forms."""
    facts = PublicFacts(
        silo_rows=(500,) * 4,
        num_parameters=4 if hidden is None else 5 * hidden[0] + 1,
        start_precision=None if hidden is None else 400.0,
        solves_exactly=hidden is None,
    )
    assert settings_of(make_study(mode="none", posterior="full"), facts).step_size == pytest.approx(expected, rel=0.01)
    assert settings_of(make_study(mode="none", posterior="mean_field"), facts).step_size == 0.05


def test_sampled_rounds_give_every_silo_its_turn():
    facts = PublicFacts(silo_rows=(50,) * 40, num_parameters=9)
    settings = settings_of(make_study(mode="none", schedule="sampled", clients_per_round=4), facts)
    assert settings.rounds == 100


def test_streaming_vb_is_one_sequential_undamped_pass_of_pvi():
    settings = settings_of(make_study(mode="none", kind="streaming_vb"), FACTS)
    assert settings.schedule is Schedule.SEQUENTIAL
    assert (settings.rounds, settings.damping) == (1, 1.0)
    silos, names = make_silos(), ("a", "b", "c", "d")
    sizes = tuple(Sizes(rows=silo.num_rows, num_features=silo.num_features) for silo in silos)
    plan = plan_of(Situation.of(make_study(mode="none", kind="streaming_vb"), MODEL, names, sizes))
    assert [visit.silos for visit in plan.visits] == [(0,), (1,), (2,)]


def test_the_rules_look_at_public_facts_only():
    """A silo's rows are not among the arguments; of a silo only its size counts."""
    silos = make_silos()
    zeros = [dataclasses.replace(silo, x=0 * silo.x, y=0 * silo.y) for silo in silos]
    first, second = (PublicFacts.of(MODEL, [silo.num_rows for silo in own]) for own in (silos, zeros))
    assert first == second
    assert list(inspect.signature(settings_of).parameters) == ["study", "facts"]


def test_the_clip_norm_follows_the_size_of_the_score():
    sharp = LinearRegression(num_features=4, noise_stddev=0.1)
    assert PublicFacts.of(sharp, [silo.num_rows for silo in make_silos()]).score == pytest.approx(10.0)
    narrow, wide = (
        settings_of(make_study(), dataclasses.replace(FACTS, score=score)).clip_norm for score in (1.0, 10.0)
    )
    assert wide == pytest.approx(10 * narrow)


def test_sizes_follow_what_the_study_declares_and_bounds_what_it_accepts():
    """Three numbers in [-1, 1] and the intercept: squared norm 4; with a spread of a tenth, at most 301."""
    tables = make_study().to_dict()
    tables["data"]["spread"] = dict.fromkeys(tables["data"]["bounds"], 0.1)
    studies = (make_study(), Study.from_dict(tables))
    assert [Limits.of(study).x for study in studies] == pytest.approx([2.0, 301**0.5])
    plain, scaled = (settings_of(study, FACTS) for study in studies)
    assert scaled.clip_norm == plain.clip_norm
    tables["data"]["bounds"]["x0"] = ["a", "b", "c"]
    del tables["data"]["spread"]["x0"]
    tables["data"] |= {"shares": {"x0": [0.2, 0.3, 0.5]}, "coding": "one_hot"}
    assert settings_of(Study.from_dict(tables), FACTS).clip_norm == pytest.approx(plain.clip_norm * (3.62 / 4) ** 0.5)


@pytest.mark.parametrize(
    ("protocol", "walkers"),
    [
        ({}, 3),
        ({"rounds": 5, "steps": 70, "damping": 0.5}, 3),
        ({"schedule": "sampled", "clients_per_round": 2, "steps": 50}, 2),
        ({"kind": "global_vi", "steps": 100}, 1),
        ({"kind": "streaming_vb"}, 3),
    ],
)
def test_noise_alone_moves_a_coefficient_by_three_tenths(protocol, walkers):
    """Steps of pure noise have size one in Adam's units; damped walks of the silos add up."""
    tables = make_study(**protocol).to_dict()
    tables["data"]["spread"] = dict.fromkeys(tables["data"]["bounds"], 0.5)
    settings = settings_of(Study.from_dict(tables), FACTS)
    noise = np.random.default_rng(0).normal(size=(4000, walkers, settings.rounds * settings.steps))
    walks = settings.damping * settings.step_size * noise.sum(axis=(1, 2))
    assert settings.step_size < 0.05
    assert walks.std() == pytest.approx(0.3, rel=0.05)  # 4.5 standard errors: one false alarm in 10^5 keys
    del tables["data"]["spread"]["x0"]
    partly = settings_of(Study.from_dict(tables), FACTS).step_size
    assert partly == pytest.approx(min(0.05, settings.step_size * 0.35 / 0.3))


def test_steps_are_never_longer_than_without_noise():
    assert settings_of(make_study(rounds=1, steps=1), FACTS).step_size == 0.05
    assert settings_of(make_study(mode="none"), FACTS).step_size == 0.05
    assert settings_of(make_study(privatise="virtual_clients"), FACTS).step_size == 0.05
    many = PublicFacts(silo_rows=(500,) * 300, num_parameters=19)
    steps = [settings_of(make_study(kind="bcm"), facts).step_size for facts in (FACTS, many)]
    assert steps == pytest.approx([0.45 * (3 / 400) ** 0.5, 0.05])  # an average of walks is shorter than one


def test_a_committee_of_networks_counts_the_walk_of_each():
    """Averages of weights are no average of networks: what one silo's noise does is not averaged out."""
    tables = make_study(kind="bcm").to_dict()
    steps = []
    for model in ({"kind": "logistic_regression"}, {"kind": "mlp", "options": {"hidden": [5]}}):
        steps.append(settings_of(Study.from_dict(tables | {"model": model}), FACTS).step_size)
    assert steps == pytest.approx([0.45 * (3 / 400) ** 0.5, 0.45 * (1 / 400) ** 0.5])


def many_columns(declared: bool, **protocol) -> tuple[Study, dict[str, pd.DataFrame]]:
    """Twelve columns of two categories each, most rows in the first: without shares they go with the intercept."""
    rng = np.random.default_rng(3)
    codes = (rng.random((1500, 12)) < 0.2).astype(int)
    odds = np.take_along_axis(rng.normal(size=(2, 12)), codes, axis=0).sum(axis=1)
    rows = pd.DataFrame({f"c{k}": np.array(["a", "b"])[codes[:, k]] for k in range(12)})
    rows["y"] = (rng.random(1500) < 1 / (1 + np.exp(-odds))).astype(int)
    data = {
        "target": "y",
        "classes": [0, 1],
        "bounds": {f"c{k}": ["a", "b"] for k in range(12)},
        "coding": "one_hot",
        "public": ["rows", "test"],
        "test": 0.4,
    }
    if declared:
        data["shares"] = {f"c{k}": [0.8, 0.2] for k in range(12)}
    privacy = {"epsilon": 50.0, "delta": 1e-5, "relation": "substitute", "unit": "row"}
    study = {"study": {"name": "many"}, "data": data, "model": {"kind": "logistic_regression"}, "privacy": privacy}
    frames = {"one": rows.iloc[:900], "two": rows.iloc[900:]}
    return Study.from_dict(study | {"protocol": protocol}), frames


def test_columns_that_nothing_centres_lower_the_damping_of_perturbing_methods_and_keep_their_path():
    declared, apart = (
        settings_of(many_columns(declared, privatise="virtual_clients")[0], FACTS) for declared in (True, False)
    )
    assert (declared.rounds, declared.damping) == (8, 0.4)
    assert apart.damping == pytest.approx(1.5 / 13)
    assert apart.rounds * apart.damping == pytest.approx(3.2, rel=0.05)


def test_perturbing_methods_do_not_run_away_where_columns_go_together(tmp_path):
    """With damping .4 they score little better than a model without features."""
    study, frames = many_columns(False, privatise="virtual_clients")
    silobayes.fit(study, frames, out=tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["metrics"]
    assert metrics["log_likelihood"] > -0.55
