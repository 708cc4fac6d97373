"""Which method suits a study, and why, in a sentence or two: from the study and the registry alone.

Guarantees:
    It says what the study runs, and whether its intervals include the privacy noise.
    If another method leads for the model, it is named.
"""

from silobayes.runs import claims
from silobayes.studies.method import Method, leading_method, registered
from silobayes.study import Mode, Study


def choice(study: Study) -> str:
    """Why the study runs its method, and which other one leads, if one does."""
    own = study.method
    if study.privacy.mode is Mode.NONE:
        return f"{own.name}: {own.summary}. It is not private, so that intervals have no noise to include."
    leading, said = leads(study), f"{own.name}: {own.summary}."
    kind = study.model.kind.value.replace("_", " ")
    if leading is own:
        said = f"{own.name} leads for a {kind}: {own.summary}."
    said += f" {claims.intervals_in_words(own.intervals)}"
    if leading is not None and leading is not own:
        return (
            f"{said} For a {kind} {leading.name} leads (intervals: {leading.intervals.value}): a study gets it that "
            "names no protocol.kind, nor a key that it has not."
        )
    if leading is None and (then := _would_lead(study)) is not None and then is not own:
        said += (
            f" {then.name} (intervals: {then.intervals.value}) would lead if persons were declared: "
            'data.rows_per_person, and "persons" in data.public.'
        )
    return said


def leads(study: Study) -> Method | None:
    """The method of a private study that leaves the choice open."""
    return leading_method({}, study.model, study.privacy.unit, study.can_sample_persons, registered())


def _would_lead(study: Study) -> Method | None:
    return leading_method({}, study.model, study.privacy.unit, True, registered())
