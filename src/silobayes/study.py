"""Studies as users meet them: with all methods of the registry."""

from silobayes.plans import METHODS
from silobayes.plans.keys import Clipping, PosteriorKind
from silobayes.studies.method import register
from silobayes.studies.reading import encode_silos, load_silos
from silobayes.studies.study import (
    AggregationKind,
    AggregationSection,
    Mode,
    ModelKind,
    ModelSection,
    PrivacySection,
    Study,
    StudySection,
)

register(METHODS)

__all__ = [
    "AggregationKind",
    "AggregationSection",
    "Clipping",
    "Mode",
    "ModelKind",
    "ModelSection",
    "PosteriorKind",
    "PrivacySection",
    "Study",
    "StudySection",
    "encode_silos",
    "load_silos",
]
