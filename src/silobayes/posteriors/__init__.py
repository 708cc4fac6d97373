"""What a run ends with."""

from silobayes.posteriors.base import AbstractPosterior
from silobayes.posteriors.gaussian import ARRAYS, DESCRIPTION, Posterior

__all__ = ["ARRAYS", "DESCRIPTION", "AbstractPosterior", "Posterior"]
