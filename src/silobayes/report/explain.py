"""A study in plain words, for the person who has to allow it. Everything said follows from the study file alone.

Numbers that promise something are rounded against ourselves: factors upward.

Guarantees:
    The budget, the neighbours and the unit of the study are named in words.
    What is not protected is said: declared facts, test rows, other tables, a person at several silos.
    A study without privacy is called that in its first sentence.
    What leaves a site is that of the study's method.
    Who sees what a site sends is said, and on whose noise the promise rests.
"""

import math
from dataclasses import dataclass

from silobayes.data.description import Public
from silobayes.data.encoding import Outside
from silobayes.privacy.events import GaussianEvent
from silobayes.privacy.relation import Relation, Unit
from silobayes.study import AggregationKind, Mode, Study


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and its paragraphs."""

    heading: str
    paragraphs: tuple[str, ...]


_UNITS = {
    Unit.ROW: "one row of the table",
    Unit.PERSON: "all rows of one person at one silo",
    Unit.CLIENT: "a whole silo",
}
_RELATIONS = {
    Relation.SUBSTITUTE: "would have had any other values instead",
    Relation.ADD_REMOVE: "had not been in the data at all, or had been added to it",
}
_PUBLIC = {
    Public.ROWS: "the number of rows of each silo",
    Public.PERSONS: "the number of persons of each silo",
    Public.TEST: "the test rows: metrics on them are printed without noise",
    Public.BOUNDS: "the ranges of the columns",
    Public.CATEGORIES: "the categories of the columns",
    Public.CLASSES: "the classes of the target",
}


def what_leaves(study: Study) -> str:
    """What a site sends, as the rest of the sentence "Each site sends ..."."""
    return study.method.leaves(study).format(noise="its share of the noise" if sends_shares(study) else "noise")


def sends_shares(study: Study) -> bool:
    """Whether only the sum over silos has all the noise that is priced, and a site's own message too little."""
    return study.aggregation.kind is not AggregationKind.NONE and study.method.shares


def clients_per_round(study: Study) -> int | None:
    """How many silos a round visits where it does not visit all."""
    return getattr(study.protocol, "clients_per_round", None)


def explain(study: Study) -> tuple[Section, ...]:
    """The sections of the explanation, in reading order."""
    sections = [_purpose(study)]
    if study.privacy.mode is Mode.DP:
        sections += [_promise(study), _leaves(study), _not_protected(study), _checks()]
    else:
        sections.append(_leaves(study))
    return tuple(sections)


def _purpose(study: Study) -> Section:
    target = f" of {study.data.target!r}" if study.data.target is not None else ""
    names = study.description.silo_names
    silos = f"{len(names)} silos" if names else "silos that are named when the run starts"
    kind = study.model.kind.value.replace("_", " ")
    paragraphs = [
        f"The study {study.study.name!r} fits one Bayesian model ({kind}{target}, {len(study.description.features)} "
        f"columns) to the rows of {silos}. The rows stay where they are."
    ]
    if study.privacy.mode is Mode.NONE:
        paragraphs.insert(0, "NOT PRIVATE: this study protects nobody. It is meant for comparison on harmless data.")
    return Section(heading="What is done", paragraphs=tuple(paragraphs))


def _promise(study: Study) -> Section:
    epsilon, delta, unit, relation = (getattr(study.privacy, key) for key in ("epsilon", "delta", "unit", "relation"))
    factor = _factor(epsilon)
    paragraphs = [
        f"Each silo may spend epsilon {epsilon:g} at delta {delta:g}. What is protected is {_UNITS[unit]}: everything "
        f"that is released looks almost the same as if that {_short(unit)} {_RELATIONS[relation]}.",
        f"In numbers: no result that anyone could look for in the releases becomes more probable by more than a "
        f"factor of {factor} plus delta ({delta:g}, 1 in {_floor_inverse(delta)}), whatever else is known and however "
        f"long one computes. But for that delta, the odds of a guess about it change by at most this "
        f"factor{_example(epsilon)}.",
        "The silo writes the price of the whole study into its own ledger before the first noise is drawn. A study "
        "that would exceed the budget is refused and nothing is released. What is spent never comes back.",
    ]
    return Section(heading="What is promised", paragraphs=tuple(paragraphs))


def _leaves(study: Study) -> Section:
    paragraphs = [f"Each site sends {what_leaves(study)}"]
    if study.privacy.mode is Mode.DP:
        paragraphs.append(
            "It sends nothing else: no rows, no counts, no column means, no losses, no text of errors. The rounds are "
            "fixed beforehand, so that when it stops says nothing either."
        )
    if study.data.rows_per_person is not None:
        others = "a table with more is refused" if study.data.outside is Outside.REFUSE else "others are left out"
        paragraphs.append(f"Of one person at most {study.data.rows_per_person} rows are used at a silo; {others}.")
    if study.aggregation.kind is not AggregationKind.NONE:
        paragraphs += _sums(study)
    return Section(heading="What leaves a site", paragraphs=tuple(paragraphs))


def _sums(study: Study) -> list[str]:
    """Who sees what a site sends when only the sum over silos is published, and on whose noise the promise rests."""
    section = study.aggregation
    nodes = section.compute_nodes or 3
    paragraphs = [
        {
            AggregationKind.TRUSTED: (
                "An aggregator sees what each site sends, adds it up and publishes only the sum over the silos."
            ),
            AggregationKind.SECRET_SHARING: (
                f"Nobody sees it. A site splits it into {nodes} random parts, one for each of {nodes} compute nodes, "
                "which add up what they get and publish only the sum over the silos. Parts reveal something only if "
                f"all {nodes} nodes put theirs together."
            ),
            AggregationKind.PAIRWISE_MASKS: (
                "Nobody sees it. A site hides it under masks that it has agreed upon with each other site and that "
                "cancel in the sum, so that the server can read only the sum over the silos. The server is trusted to "
                "tell all sites the same about who has dropped out."
            ),
        }[section.kind]
    ]
    if sends_shares(study):
        num_clients = clients_per_round(study) or len(study.description.silo_names)
        example = f" ({section.num_shares(num_clients)} of {num_clients})" if num_clients else ""
        others = section.num_colluding
        more = f", and {others} more may do so with it, or drop out" if others else ""
        missing = f"more than {others} are" if others else "one is"
        paragraphs.append(
            f"All silos of a sum draw its noise together, each a share of it. The shares of all silos but {others + 1}"
            f"{example} are already all the noise that is priced: any silo may be curious and take away its own share"
            f"{more}. If {missing} missing, the sum is given up and nobody reads it."
        )
    return paragraphs


def _not_protected(study: Study) -> Section:
    paragraphs = []
    if sends_shares(study):
        paragraphs.append(
            f"Silos that pool what they know, if they are more than {study.aggregation.num_colluding + 1} together: "
            "less noise than was priced is left to protect the others."
        )
        if study.aggregation.kind is AggregationKind.TRUSTED:
            paragraphs.append("Anything from the aggregator: a site's own share of the noise is too little.")
    declared = [_PUBLIC[fact] for fact in study.data.public]
    if declared:
        paragraphs.append(f"What the study declares public: {'; '.join(declared)}.")
    paragraphs += [
        f"The study file itself is public, with its columns, ranges, categories{_sizes(study)} and the names of the "
        "silos.",
        "What is true of people in general: if the model finds that a risk is high for a group, that is learned about "
        "members of the group whether or not their rows took part.",
    ]
    if study.privacy.unit is Unit.PERSON and Public.ROWS in study.data.public:
        paragraphs.append(
            "How many rows one person has: whoever knows those of all others at the silo reads it from their number. "
            'Leave "rows" out of data.public and declare "persons" and rows_per_person if that matters.'
        )
    if study.privacy.unit is Unit.PERSON and (isinstance(study.data.test, float) or study.data.source is not None):
        paragraphs.append(
            "Who is tested, and at which silo of one table somebody is: it follows from their id and the seed, so it "
            "tells that their id is one of those that are dealt there."
        )
    if study.privacy.unit is Unit.ROW:
        paragraphs.append(
            "A person with several rows: each row is protected, the person only by the epsilons of the rows together. "
            'Use unit = "person" if that can happen.'
        )
    if study.privacy.unit is not Unit.CLIENT:
        and_delta = " Inside one sum, delta grows by more than that." if sends_shares(study) else ""
        paragraphs.append(
            f"A person with rows at several silos: each silo spends its own epsilon, and they add up.{and_delta}"
        )
    paragraphs.append(
        "Anything from the machine that runs the study: this version plays all silos, and whoever adds up, on one."
    )
    if GaussianEvent in study.method.noise:
        paragraphs.append(
            "Noise inside compiled optimisation steps is made of floating-point numbers, not of integers on a grid; "
            "the certificate of the run says where."
        )
    return Section(heading="What is not protected", paragraphs=tuple(paragraphs))


def _sizes(study: Study) -> str:
    """What else the file says of the columns: somebody may have computed it from rows."""
    said = {
        "typical values": study.data.typical,
        "spreads": study.data.spread,
        "shares of the categories": study.data.shares,
    }
    return "".join(f", {name}" for name, values in said.items() if values)


def _checks() -> Section:
    return Section(
        heading="How to check it",
        paragraphs=(
            "`silobayes plan study.toml` shows the noise before any row is read.",
            "`silobayes verify DIR` recomputes the price of a finished run from the ledgers alone, by two methods.",
            "`silobayes ledger show FILE` shows what a silo has allowed and spent, over all studies.",
        ),
    )


def _short(unit: Unit) -> str:
    return {Unit.ROW: "row", Unit.PERSON: "person", Unit.CLIENT: "silo"}[unit]


def _factor(epsilon: float) -> str:
    """e^epsilon, upward to three digits."""
    if epsilon > 20.0:
        return "more than 400 million, which is no protection worth the name"
    value = math.exp(epsilon)
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale) / scale:g}"


def _example(epsilon: float) -> str:
    """What the factor does to a guess of one half, upward to a percent."""
    raised = math.ceil(100.0 / (1.0 + math.exp(-epsilon)))
    return f" (a guess of 50 % becomes at most {raised} %)" if raised < 100 else ""


def _floor_inverse(delta: float) -> str:
    return f"{math.floor(1.0 / delta * (1.0 + 1e-12)):,}"
