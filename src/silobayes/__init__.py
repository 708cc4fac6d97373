"""silobayes: one posterior from many silos, with a privacy guarantee you can check."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silobayes.posteriors import Posterior
    from silobayes.runs.coverage import Calibration

__version__ = "0.1.0"


def fit(study: Any, silos: Any = None, **options: Any) -> "Posterior":
    """Run a study on this machine; see `silobayes.engines.fitting.fit`."""
    from silobayes.engines.fitting import fit as run  # the command line's help must not wait for JAX

    return run(study, silos, **options)


def calibrate(study: Any, **options: Any) -> "Calibration":
    """How often a study's intervals would hold the truth; see `silobayes.engines.calibrating.calibrate`."""
    from silobayes.engines.calibrating import calibrate as repeat

    return repeat(study, **options)
