from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from silobayes.core.errors import InvalidInput
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.skellam import MAX_VARIANCE, PoissonDeviation, skellam, skellam_survival
from tests.privacy.goodness import fits_cdf, fits_pmf, fits_uniform

FACTORS = [(1.0, True), (2 / 3, False), (3 / 2, False)]
MEANS = [Fraction(mean) for mean in (2**17, 2**17 + 0.999, 1e6 + 0.37, 2**29, 2.0**59 - 64)]


def _pmf(variance: float, reach: int):
    return special.ive(np.abs(np.arange(-reach, reach + 1)), variance)


@pytest.mark.parametrize("variance", [0.01, 0.5, Fraction(4), 30.25, 3000.0, 2.0**18 - 1])
def test_skellam_matches_its_pmf(variance):
    draws = skellam(Entropy.not_private(1), variance, 300_000)
    assert draws.dtype == np.int64
    reach = int(10 * float(variance) ** 0.5) + 10
    for factor, right in FACTORS:
        assert fits_pmf(draws, _pmf(factor**2 * float(variance), reach)) is right


@pytest.mark.parametrize("variance", [2.0**18, 400_000.7, 2.0**22])
def test_skellam_at_large_variance_matches_its_pmf(variance):
    draws = skellam(Entropy.not_private(2), variance, 300_000)
    for factor, right in FACTORS:
        assert fits_pmf(draws, _pmf(factor**2 * variance, int(8 * variance**0.5))) is right


@pytest.mark.parametrize("variance", [2.0**30, 1e15 / 3, 2.0**60])
def test_skellam_at_huge_variance(variance):
    draws = skellam(Entropy.not_private(3), variance, 200_000)
    for factor, right in FACTORS:
        assert fits_cdf(draws, stats.norm(scale=factor * variance**0.5).cdf) is right
    for base in (2, 7, 16):
        assert fits_uniform(draws % base, base)


@pytest.mark.parametrize("variance", [0.01, 2.0**18 - 1, 2.0**18, 2.0**60])
def test_skellam_is_symmetric(variance):
    draws = skellam(Entropy.not_private(4), variance, 200_000)
    positive, negative = int((draws > 0).sum()), int((draws < 0).sum())
    assert stats.binomtest(positive, positive + negative).pvalue > 1e-6


def test_skellam_is_closed_under_sums():
    entropy = Entropy.not_private(5)
    total = sum(skellam(entropy, 2.5, 200_000) for _ in range(10))
    for factor, right in FACTORS:
        assert fits_pmf(total, _pmf(factor**2 * 25.0, 80)) is right


@pytest.mark.parametrize("variance", [Fraction(0.01), Fraction(1, 3), Fraction(7), Fraction(300.25), Fraction(5000)])
@pytest.mark.parametrize("bits", [63, 192])
def test_skellam_survival_bounds_enclose_mpmath(variance, bits):
    lo, hi = skellam_survival(variance, bits)
    assert all(high - low <= 2 for low, high in zip(lo, hi, strict=True))
    assert hi[-1] == 1
    with mpmath.workdps(120):
        v = mpmath.mpf(variance.numerator) / variance.denominator
        inside = mpmath.exp(-v) * mpmath.besseli(0, v)
        for k in range(1, min(len(lo), 250) + 1):
            assert lo[k - 1] <= mpmath.ldexp(1 - inside, bits) <= hi[k - 1]
            inside += 2 * mpmath.exp(-v) * mpmath.besseli(k, v)


def _log_acceptance(mean: Fraction, y: int) -> mpmath.mpf:
    """g(y) - C of the module's docstring at the working precision of mpmath."""
    mu = mpmath.mpf(mean.numerator) / mean.denominator
    m = int(mean)
    t = mpmath.mpf(int(mpmath.floor(mpmath.sqrt(m))) + 1)
    log_ratio = y * mpmath.log(mu) - mpmath.loggamma(m + y + 1) + mpmath.loggamma(m + 1)
    return log_ratio + abs(y) / t - 1 / t - mu * (1 / (2 * t**2) + 1 / (6 * t**3) + 1 / (12 * t**4))


def _deviations(deviation: PoissonDeviation) -> list[int]:
    reach = deviation._reach
    inside = [int(u) - reach for u in Entropy.not_private(6).uniform_below(2 * reach + 1, 150)]
    near = [int(u) - deviation._scale for u in Entropy.not_private(7).uniform_below(2 * deviation._scale + 1, 50)]
    return [0, 1, -1, reach, -reach, *inside, *near]


@pytest.mark.parametrize("mean", MEANS)
def test_poisson_float_error_is_within_its_bound(mean):
    deviation = PoissonDeviation(mean)
    y = _deviations(deviation)
    fast = deviation.log_acceptance(np.array(y)).tolist()
    with mpmath.workdps(60):
        worst = max(abs(_log_acceptance(mean, value) - got) for value, got in zip(y, fast, strict=True))
    assert worst < 2.0**-39  # the sampler allows for 2^-32


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("bits", [64, 256])
def test_poisson_decimal_bounds_enclose_mpmath(mean, bits):
    deviation = PoissonDeviation(mean)
    far = [-int(mean), -int(mean) + 3, -int(mean) // 2, 60 * deviation._scale]
    with mpmath.workdps(200):
        for y in far + _deviations(deviation)[:25]:
            lo, hi = deviation.bounds(y, bits)
            assert lo <= mpmath.ldexp(mpmath.exp(_log_acceptance(mean, y)), bits) <= hi
            assert hi - lo <= 2
    assert deviation.bounds(-int(mean) - 1, bits) == (0, 0)


@pytest.mark.parametrize("mean", MEANS)
def test_poisson_envelope_holds(mean):
    deviation = PoissonDeviation(mean)
    step = max(1, deviation._scale // 2000)
    values = deviation.log_acceptance(np.arange(-4 * deviation._scale, 4 * deviation._scale, step))
    assert values.max() <= 0.0
    assert values.max() > -0.01  # and no looser than it must be


@pytest.mark.parametrize("mean", [Fraction(2**17), Fraction(2**17) + Fraction(2, 3), Fraction(10**7)])
def test_poisson_deviations_match_their_pmf(mean):
    draws = PoissonDeviation(mean).draw(Entropy.not_private(8), 300_000)
    k = np.arange(-int(8 * float(mean) ** 0.5), int(8 * float(mean) ** 0.5) + 1)
    for shift, right in ((0, True), (int(float(mean) ** 0.5) // 5, False)):
        assert fits_pmf(draws + shift, stats.poisson(float(mean)).pmf(k + int(mean))) is right


def test_the_decimal_route_decides_alone_when_floats_know_nothing(monkeypatch):
    mean = Fraction(2**17)
    y = PoissonDeviation(mean)._propose(Entropy.not_private(9), 600)
    monkeypatch.setattr("silobayes.privacy.skellam._REACH", -1)
    blind = PoissonDeviation(mean)
    assert blind._reach < 0
    assert blind._propose(Entropy.not_private(9), 600).tolist() == y.tolist()
    assert 150 < y.size < 400


@pytest.mark.parametrize("variance", [5e-324, 1e-12])
def test_tiny_variances_give_zeros(variance):
    assert not skellam(Entropy.not_private(10), variance, 1000).any()


@pytest.mark.parametrize("size", [0, 1, (3, 4), ()])
def test_draws_have_any_shape(size):
    for variance in (3.0, 1e9):
        assert skellam(Entropy.not_private(11), variance, size).shape == np.empty(size).shape


@pytest.mark.parametrize("variance", [0, -1.0, float("nan"), float("inf"), 2 * MAX_VARIANCE, True, "1"])
def test_bad_variances_are_refused(variance):
    with pytest.raises(InvalidInput, match=r"^variance: expected"):
        skellam(Entropy.not_private(0), variance, 1)


def test_frozen_vectors():
    assert skellam(Entropy.not_private(12), 9.0, 10).tolist() == [0, 0, 2, 3, 0, 0, 1, 0, 1, -1]
    assert skellam(Entropy.not_private(12), 2.0**40, 4).tolist() == [1549794, -1414093, -522240, 1399832]
