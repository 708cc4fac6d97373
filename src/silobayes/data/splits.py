"""Dealing rows to silos: the splits of the experiments, as lists of row numbers.

These simulate a federation: they run before the silos exist. `even`, `column` and `hold_out` look at a row's own place
or person, so that neighbours in the table are neighbours in a silo. `rho_kappa` and `label_skew` make silos of given
class shares, which only all labels together can decide: there the guarantee of a study is about each silo's rows as
dealt, not about the table they were dealt from. With `persons`, all rows of one person go to one part, because a person
in two silos would pay twice; where they go follows from a keyed hash of their own id, and not from who else is there.
The side and the silo of an id are public: everybody may compute them. Neighbours are tables of one silo's rows as
dealt, in which somebody is another person who would have been dealt there.

Guarantees:
    Parts do not overlap, and no part is empty.
    The rows of one person stay together.
    A person's part follows from their own id alone.
"""

import numpy as np

from silobayes.core.errors import InvalidInput
from silobayes.core.hashing import stable_hashes

Parts = list[np.ndarray]


def even(rng: np.random.Generator, num_rows: int, *, count: int, persons: np.ndarray | None = None) -> Parts:
    """All rows in `count` parts whose sizes differ by at most one (with persons: as chance has it)."""
    if persons is None:
        return _no_empty(np.array_split(rng.permutation(num_rows), count))
    numbers = _own_numbers(rng, persons)
    return _no_empty([np.flatnonzero(np.floor(numbers * count) == k) for k in range(count)])


def rho_kappa(rng: np.random.Generator, labels: np.ndarray, *, count: int, rho: float, kappa: float) -> Parts:
    """Half of the silos small, with a share of the majority class of their own (000 App. B; SPEC 3).

    floor(count / 2) small silos of floor(n/M (1 - rho)) rows, the others large, of floor(n/M (1 + rho)); the small ones
    have a share lam + (1 - lam) kappa of the majority class, where lam is its share among all rows, and the large ones
    take what is left at random. The rows that the floors leave over (fewer than `count`) are dropped, as in the paper.
    """
    num_rows, num_small = len(labels), count // 2
    # Sizes from exact integers would need a rational rho; 1e-9 rows keep floor(10 * (1 - .7)) from losing a row.
    small, large = (int(np.floor(num_rows / count * (1.0 + sign * rho) + 1e-9)) for sign in (-1, 1))
    classes, sizes = np.unique(labels, return_counts=True)
    in_majority = labels == classes[np.argmax(sizes)]
    lam = in_majority.mean()
    share = lam + (1.0 - lam) * kappa
    if not (-1e-9 <= share <= 1.0 + 1e-9):
        raise InvalidInput("silos.kappa", "a kappa that leaves the share in [0, 1]", kappa, "Move it towards 0.")
    from_majority = round(small * float(np.clip(share, 0.0, 1.0)))
    majority, minority = (rng.permutation(np.flatnonzero(group)) for group in (in_majority, ~in_majority))
    need_majority, need_minority = num_small * from_majority, num_small * (small - from_majority)
    if need_majority > len(majority) or need_minority > len(minority):
        raise InvalidInput("silos.kappa", "a share that the classes can fill", kappa, "Move kappa or rho towards 0.")
    parts = [
        np.concatenate(
            [
                majority[k * from_majority : (k + 1) * from_majority],
                minority[k * (small - from_majority) : (k + 1) * (small - from_majority)],
            ]
        )
        for k in range(num_small)
    ]
    rest = rng.permutation(np.concatenate([majority[need_majority:], minority[need_minority:]]))
    parts += [rest[k * large : (k + 1) * large] for k in range(count - num_small)]
    return _no_empty([rng.permutation(part) for part in parts])


def label_skew(rng: np.random.Generator, labels: np.ndarray, *, count: int, rho: float) -> Parts:
    """Silos of equal size; a share `rho` of silo k has the class k mod K, the rest is of the others (003, 4.1).

    Near the end the other classes may run out; the last silos then take more of their own.
    """
    size = len(labels) // count
    classes = np.unique(labels)
    homes = classes[np.arange(count) % len(classes)]
    own = round(size * rho)
    left = {label: rng.permutation(np.flatnonzero(labels == label)) for label in classes}
    parts = []
    for home in homes:
        if own > len(left[home]):
            raise InvalidInput("silos.rho", "a share that each class can fill", rho, "Lower rho or take more silos.")
        parts.append(left[home][:own])
        left[home] = left[home][own:]
    pool = rng.permutation(np.concatenate(list(left.values())))
    for k, home in enumerate(homes):
        order = np.argsort(labels[pool] == home, kind="stable")  # other classes first
        chosen, kept = order[: size - own], order[size - own :]
        parts[k] = rng.permutation(np.concatenate([parts[k], pool[chosen]]))
        pool = pool[np.sort(kept)]
    return _no_empty(parts)


def column(codes: np.ndarray, *, count: int, persons: np.ndarray | None = None) -> Parts:
    """Part k holds the rows whose code is k; all rows are used."""
    if persons is not None:
        pairs = np.unique(np.column_stack([persons, codes]), axis=0)
        if len(pairs) > len(np.unique(persons)):
            fix = "Give each person one silo, or choose privacy.unit = 'row'."
            raise InvalidInput("silos.column", "all rows of a person in one silo", "a person in two silos", fix)
    return _no_empty([np.flatnonzero(codes == k) for k in range(count)])


def hold_out(
    rng: np.random.Generator, num_rows: int, *, share: float, persons: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, test rows): round(share * n) rows to test; each person with probability `share` if given.

    Metrics on test rows have no noise, so nobody's id may decide on whose rows they are computed: persons are not
    ranked, and their number is not looked at.
    """
    if persons is None:
        order, num_test = rng.permutation(num_rows), round(share * num_rows)
        train, test = order[num_test:], order[:num_test]
    else:
        is_test = _own_numbers(rng, persons) < share
        train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not (len(train) and len(test)):
        fix = "Take another share, add rows, or pass the path of a test table."
        raise InvalidInput("data.test", "a share that leaves rows to train and to test", share, fix)
    return train, test


def _own_numbers(rng: np.random.Generator, persons: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for the person of each row: a hash of their id under a key that is the same for all."""
    key = int(rng.integers(2**63))
    hashes = np.array(stable_hashes(f"{key}/{person}" for person in persons.tolist()), dtype=np.int64)
    return (hashes.view(np.uint64) >> np.uint64(11)) * 2.0**-53


def _no_empty(parts: Parts) -> Parts:
    if any(len(part) == 0 for part in parts):
        raise InvalidInput("silos", "rows for each silo", "an empty silo", "Take fewer silos or more rows.")
    return parts
