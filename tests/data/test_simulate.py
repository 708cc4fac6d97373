import numpy as np

from silobayes.data.simulate import icu_study
from silobayes.study import Study, encode_silos


def encoded(seed: int):
    icus = icu_study(seed)
    study = Study.from_dict(
        {
            "study": {"name": "icus"},
            "data": icus.data,
            "model": {"kind": "logistic_regression"},
            "privacy": {"epsilon": 1.0, "delta": 1e-5, "relation": "substitute", "unit": "row"},
        }
    )
    return icus, *encode_silos(study, icus.frames)


def test_icus_differ_in_size_and_case_mix_and_satisfy_their_description():
    icus, silos, test, encoding = encoded(0)
    assert test is not None
    sizes = [silo.num_rows for silo in silos]
    assert (len(silos), sum(sizes), test.num_rows) == (10, 16000, 4000)
    assert max(sizes) >= 8 * min(sizes)
    assert len(icus.data["features"]) == 15
    deaths = [silo.y.mean() for silo in silos]
    assert max(deaths) > 1.5 * min(deaths) > 0.0
    lactate = encoding.feature_names.index("lactate")
    # Case mix: means of ICUs differ by far more than their standard errors (about .16 / sqrt(400) = .008).
    assert np.ptp([silo.x[:, lactate].mean() for silo in silos]) > 0.05


def test_deaths_follow_the_stated_coefficients():
    icus, silos, _, encoding = encoded(1)
    assert set(encoding.feature_names) == set(icus.coefficients)
    x, y = np.concatenate([s.x for s in silos]).astype(float), np.concatenate([s.y for s in silos])
    truth = np.array([icus.coefficients[name] for name in encoding.feature_names])

    def score_chi_square(coefficients: np.ndarray) -> float:
        """Score statistic of a logistic regression; chi-square with 18 degrees of freedom at the truth."""
        p = 1.0 / (1.0 + np.exp(-x @ coefficients))
        score, information = x.T @ (y - p), (x * (p * (1 - p))[:, None]).T @ x
        return float(score @ np.linalg.pinv(information, rcond=1e-10) @ score)

    limit = 55.0  # P(chi-square_18 > 55) = 1.3e-5
    assert score_chi_square(truth) < limit
    assert score_chi_square(2 / 3 * truth) > limit
    assert score_chi_square(3 / 2 * truth) > limit


def test_same_seed_same_patients():
    first, again, other = icu_study(2), icu_study(2), icu_study(3)
    assert all(first.frames[name].equals(again.frames[name]) for name in first.frames)
    assert not first.frames["icu-00"].equals(other.frames["icu-00"])
    assert "lactate" not in repr(first).split("data=")[0]
