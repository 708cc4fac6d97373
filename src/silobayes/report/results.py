"""The object with which `silobayes run` ends (DESIGN 8), from the files of the run directory alone."""

from collections.abc import Mapping
from typing import Any

from silobayes.posteriors import DESCRIPTION
from silobayes.report.run_files import RunFiles
from silobayes.study import Study


def result(run: RunFiles) -> dict[str, Any]:
    """Metrics, privacy, communications, timing and where the posterior is.

    Guarantees:
        A run that is not private has no epsilon, and its stamp.
        The word on intervals is that of the study's method.
    """
    certificate = run.certificate
    is_private = certificate.get("is_private") is True
    silos = [silo for silo in certificate.get("silos", []) if isinstance(silo, Mapping)]
    return {
        "metrics": run.metrics.get("metrics", {}),
        "privacy": {
            "is_private": is_private,
            "stamp": certificate.get("stamp"),
            "epsilon": certificate.get("epsilon") if is_private else None,
            "delta": certificate.get("delta") if is_private else None,
            "relation": certificate.get("relation"),
            "unit": certificate.get("unit"),
            "per_silo": {str(silo.get("name")): silo.get("epsilon") for silo in silos} if is_private else {},
        },
        "communications": run.metrics.get("communications", {}),
        "timing": run.metrics.get("timing", {}),
        "posterior": str(run.directory / DESCRIPTION),
        "directory": str(run.directory),
        "study_hash": certificate.get("study_hash"),
        "intervals": Study.from_dict(run.study).method.intervals.value if is_private else None,
    }
