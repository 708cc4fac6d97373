"""Dealing rows to silos: the splits of the experiments, as lists of row numbers.

These simulate a federation: they run before the silos exist, and the guarantee of a study is about each silo's rows as
dealt. Row numbers are returned in random order. With `persons`, all rows of one person go to one part, because a
person in two silos would pay twice.

Guarantees:
    Parts do not overlap, and no part is empty.
    The rows of one person stay together.
"""

import numpy as np

from silobayes.core.errors import InvalidInput

Parts = list[np.ndarray]


def even(rng: np.random.Generator, num_rows: int, *, count: int, persons: np.ndarray | None = None) -> Parts:
    """All rows in `count` parts whose sizes differ by at most one (with persons: by little more than one person)."""
    if persons is None:
        return _no_empty(np.array_split(rng.permutation(num_rows), count))
    order, ends = _shuffled_persons(rng, persons)
    cuts = ends[np.searchsorted(ends, np.arange(1, count) * num_rows / count)]
    return _no_empty(np.split(order, cuts))


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
    """(training rows, test rows): round(share * n) rows to test, whole persons only if `persons` are given."""
    num_test = round(share * num_rows)
    if persons is None:
        order = rng.permutation(num_rows)
    else:
        order, ends = _shuffled_persons(rng, persons)
        num_test = int(ends[np.searchsorted(ends, num_test)])
    if not 0 < num_test < num_rows:
        fix = "Take another share, add rows, or pass the path of a test table."
        raise InvalidInput("data.test", "a share that leaves rows to train and to test", share, fix)
    return order[num_test:], order[:num_test]


def _shuffled_persons(rng: np.random.Generator, persons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in a random order of persons, and where in it each person ends."""
    _, codes = np.unique(persons, return_inverse=True)
    rank = rng.permutation(codes.max() + 1)[codes]
    order = np.argsort(rank, kind="stable")
    return order, np.cumsum(np.bincount(rank))


def _no_empty(parts: Parts) -> Parts:
    if any(len(part) == 0 for part in parts):
        raise InvalidInput("silos", "rows for each silo", "an empty silo", "Take fewer silos or more rows.")
    return parts
