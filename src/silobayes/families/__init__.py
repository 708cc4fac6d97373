"""Exponential families in natural parameters: product is addition, cavity is subtraction."""

from silobayes.families.base import AbstractEta, AbstractFamily, damp, product, quotient, scale
from silobayes.families.bernoulli import Bernoulli, BernoulliEta, Probability
from silobayes.families.beta import AlphaBeta, Beta, BetaEta
from silobayes.families.categorical import Categorical, CategoricalEta, Probabilities
from silobayes.families.dirichlet import Concentration, Dirichlet, DirichletEta
from silobayes.families.full_gaussian import FullGaussian, FullGaussianEta, MeanCovariance
from silobayes.families.gamma import Gamma, GammaEta, ShapeRate
from silobayes.families.independent import Independent, IndependentEta, independent
from silobayes.families.mean_field_gaussian import MeanFieldGaussian, MeanFieldGaussianEta, MeanStddev
from silobayes.families.normal_inverse_gamma import (
    CoefficientsVariance,
    NormalInverseGamma,
    NormalInverseGammaEta,
    NormalInverseGammaStandard,
)
from silobayes.families.normal_wishart import MeanPrecision, NormalWishart, NormalWishartEta, NormalWishartStandard

__all__ = [
    "AbstractEta",
    "AbstractFamily",
    "AlphaBeta",
    "Bernoulli",
    "BernoulliEta",
    "Beta",
    "BetaEta",
    "Categorical",
    "CategoricalEta",
    "CoefficientsVariance",
    "Concentration",
    "Dirichlet",
    "DirichletEta",
    "FullGaussian",
    "FullGaussianEta",
    "Gamma",
    "GammaEta",
    "Independent",
    "IndependentEta",
    "MeanCovariance",
    "MeanFieldGaussian",
    "MeanFieldGaussianEta",
    "MeanPrecision",
    "MeanStddev",
    "NormalInverseGamma",
    "NormalInverseGammaEta",
    "NormalInverseGammaStandard",
    "NormalWishart",
    "NormalWishartEta",
    "NormalWishartStandard",
    "Probabilities",
    "Probability",
    "ShapeRate",
    "damp",
    "independent",
    "product",
    "quotient",
    "scale",
]
