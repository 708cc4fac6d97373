"""Methods that let out more than they pay for, each in its own way: the gate must tell them all from `right`.

All are small variations of noisy sums over Poisson batches of two silos. Each says in its docstring what is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from silobayes.privacy.clipping import clip, general, non_negative
from silobayes.privacy.door import Door, FreshDraws
from silobayes.privacy.entropy import Entropy
from silobayes.privacy.mechanisms import AbstractMechanism, GaussianMechanism, LaplaceMechanism, SkellamMechanism
from silobayes.privacy.queries import PrivateSum, Total
from silobayes.privacy.relation import Relation
from silobayes.privacy.sampling import FixedSizeSampler, PoissonSampler
from tests.testing.methods import FEATURES, MAX_ROWS

CLIP_NORM, STEPS = 1.0, 3
SAMPLER = PoissonSampler(sample_rate=0.5, max_rows=MAX_ROWS)
SOME = FixedSizeSampler(batch_size=MAX_ROWS // 2, max_rows=MAX_ROWS)
RARE = PoissonSampler(sample_rate=0.05, max_rows=MAX_ROWS)
NOISE = GaussianMechanism(noise_multiplier=2.0)
OTHER_ROWS = np.random.default_rng(8).normal(size=(MAX_ROWS, FEATURES))


def features(rows) -> np.ndarray:
    return np.nan_to_num(np.asarray(rows["x"], dtype=np.float64), posinf=0.0, neginf=0.0)


def chosen(x: np.ndarray, batch) -> np.ndarray:
    return x[batch.indices[batch.indices < len(x)]]


def right(rows, doors: Sequence[Door]):
    """Nothing is wrong: three noisy sums of each of two silos."""
    return noisy_sums(rows, doors)


def noisy_sums(rows, doors, *, mechanism: AbstractMechanism = NOISE, sampler=SAMPLER, terms=None, batch=None):
    released = []
    for step in range(STEPS):
        for silo, door in enumerate(doors):
            x = features(rows) if silo == 0 else OTHER_ROWS
            own = door.batch(sampler) if batch is None else batch(door, silo, step)
            values = chosen(x, own) if terms is None else terms(chosen(x, own))
            released.append(door.release(mechanism, clip(general(values), CLIP_NORM, batch=own)).value)
    return released


# What the attackers found.


def ball_around_a_centre(rows, doors):
    """(a) Terms lie within the clip norm of a public centre: near each other, far from the absent term."""
    centre = np.full(FEATURES, 10.0)

    def released(door, x):
        batch = door.batch(SAMPLER)
        bounded = clip(general(chosen(x, batch)), CLIP_NORM, batch=batch)
        count = len(chosen(x, batch))
        moved = replace(bounded, total=bounded.total + np.rint(count * centre / bounded.grid).astype(np.int64))
        return door.release(NOISE, moved).value

    return [released(door, features(rows) if k == 0 else OTHER_ROWS) for k, door in enumerate(doors)]


@dataclass(frozen=True, kw_only=True)
class Scaled(AbstractMechanism):
    """Draws a share of the noise that it prices."""

    share: float

    def event(self, bounded, relation):
        return NOISE.event(bounded, relation)

    def noise(self, entropy, bounded):
        return np.rint(self.share * NOISE.noise(entropy, bounded)).astype(np.int64)

    def stddevs(self, bounded):
        return NOISE.stddevs(bounded)


def hundredth_of_the_noise(rows, doors):
    """(b) A hundredth of the priced noise."""
    return noisy_sums(rows, doors, mechanism=Scaled(share=0.01))


@dataclass
class Remembered(AbstractMechanism):
    """Noise that is drawn once and used again."""

    drawn: np.ndarray | None = None

    def event(self, bounded, relation):
        return NOISE.event(bounded, relation)

    def noise(self, entropy, bounded):
        if self.drawn is None:
            self.drawn = NOISE.noise(entropy, bounded)
        return self.drawn

    def stddevs(self, bounded):
        return NOISE.stddevs(bounded)


def one_noise_for_all_silos(rows, doors):
    """(b) In every step all silos add the same noise: their difference has none."""
    released = []
    for _ in range(STEPS):
        once = Remembered()
        for silo, door in enumerate(doors):
            batch = door.batch(SAMPLER)
            x = features(rows) if silo == 0 else OTHER_ROWS
            released.append(door.release(once, clip(general(chosen(x, batch)), CLIP_NORM, batch=batch)).value)
    return released


def draw_without_a_charge(rows, doors):
    """(c) The second release is drawn and not paid."""
    bounded = clip(general(features(rows)), CLIP_NORM)
    event = NOISE.event(bounded, doors[0].account.relation)
    paid = doors[0].release(NOISE, bounded).value
    return [paid, bounded.decode(doors[0].draws.noisy_counts(NOISE, bounded, event))[0]]


def charges_that_rows_decide(rows, doors):
    """(c) Heavy rows are charged twice: the ledger tells of them."""
    bounded = clip(general(features(rows)), CLIP_NORM)
    if np.abs(features(rows)).max() > 50.0:
        doors[0].account.charge(NOISE.event(bounded, doors[0].account.relation))
    return doors[0].release(NOISE, bounded).value


def keys_of_a_dict(rows, doors):
    """(d) What is published stands in the keys."""
    noisy_sums(rows, doors)
    return {f"{features(rows)[0, 0]:.3f}": 1}


def a_bit_far_below(rows, doors):
    """(e) A large public number, and a bit of the rows far below it."""
    released = noisy_sums(rows, doors)
    return [1e6 + 1e-6 * float(features(rows).sum() > 0.0), released]


# More of the same kinds.


def noise_drawn_once(rows, doors):
    """Every step of a silo has the same noise: differences of steps have none."""
    once = [Remembered() for _ in doors]
    released = []
    for _ in range(STEPS):
        for silo, door in enumerate(doors):
            batch = door.batch(SAMPLER)
            x = features(rows) if silo == 0 else OTHER_ROWS
            released.append(door.release(once[silo], clip(general(chosen(x, batch)), CLIP_NORM, batch=batch)).value)
    return released


class OneNumber(Scaled):
    """The same noise on every coordinate."""

    def noise(self, entropy, bounded):
        return np.full(bounded.total.size, NOISE.noise(entropy, bounded)[0])


def one_number_for_all_coordinates(rows, doors):
    """Each coordinate has the right noise, all have the same: contrasts have none."""
    return noisy_sums(rows, doors, mechanism=OneNumber(share=1.0))


class Uniform(Scaled):
    """Uniform noise of the priced variance: it never goes beyond its edge."""

    def noise(self, entropy, bounded):
        edge = np.sqrt(3.0) * NOISE.noise_multiplier / bounded.grid
        uniform = (entropy.uint64(bounded.total.size) >> np.uint64(11)) * 2.0**-53
        return np.rint(edge * (2.0 * uniform - 1.0)).astype(np.int64)


def uniform_noise_priced_as_gaussian(rows, doors):
    """The right variance and the wrong law."""
    return noisy_sums(rows, doors, mechanism=Uniform(share=1.0))


def less_noise_in_the_last_step(rows, doors):
    """Only one of many releases has too little noise."""
    released = noisy_sums(rows, doors)
    bounded = clip(general(features(rows)), CLIP_NORM)
    return [*released, doors[0].release(Scaled(share=0.3), bounded).value]


def noise_from_a_fixed_seed(rows, doors):
    """Noise that can be repeated: in every run the same."""
    fixed = [Door(door.account, _with_fixed_noise(door.draws)) for door in doors]
    return noisy_sums(rows, fixed)


def _with_fixed_noise(draws):
    # Only the source of fresh draws is swapped; a replay has none.
    return replace(draws, inner=FreshDraws(Entropy.not_private(5))) if hasattr(draws, "inner") else draws


def another_silos_batch(rows, doors):
    """All silos sum over the batch of the first."""
    batches = {}

    def batch(door, silo, step):
        own = door.batch(SAMPLER)
        return batches.setdefault(step, own)

    return noisy_sums(rows, doors, batch=batch)


def never_empty(rows, doors):
    """Batches are drawn again until they are not empty: rare rows are in them far too often."""

    def batch(door, silo, step):
        while True:
            own = door.batch(RARE)
            if len(own.indices):
                return own

    return noisy_sums(rows, doors, batch=batch)


def fixed_size_batches_until_one_suits(rows, doors):
    """Batches are drawn again until the first slot is in one: all that were drawn follow the law, those used do not."""

    def batch(door, silo, step):
        while True:
            own = door.batch(SOME)
            if 0 in own.indices:
                return own

    return noisy_sums(rows, doors, sampler=SOME, batch=batch)


def one_batch_for_two_releases(rows, doors):
    """Both are priced as if they were over batches of their own."""
    batches = {}

    def batch(door, silo, step):
        if step % 2 == 0:
            batches[silo] = door.batch(SAMPLER)
        return batches[silo]

    return noisy_sums(rows, doors, batch=batch)


class FirstSlotAlways(FreshDraws):
    """A sampler whose first slot is always drawn, in place of another so that sizes are right."""

    def batch(self, sampler):
        indices = super().batch(sampler)
        return indices if len(indices) == 0 or indices[0] == 0 else np.r_[0, indices[1:]]


def a_slot_that_is_always_drawn(rows, doors):
    """Sizes of batches are right, but one row is in nearly all of them."""
    greedy = [
        Door(door.account, replace(door.draws, inner=FirstSlotAlways(door.draws.inner.entropy)))
        if hasattr(door.draws, "inner")
        else door
        for door in doors
    ]
    for old, new in zip(doors, greedy, strict=True):
        if hasattr(old.draws, "inner"):
            new.draws.log, new.draws.batches = old.draws.log, old.draws.batches
    return noisy_sums(rows, greedy)


def charge_after_the_draw(rows, doors):
    """A refusal would come too late: the noise is drawn already."""
    door, bounded = doors[0], clip(general(features(rows)), CLIP_NORM)
    event = NOISE.event(bounded, door.account.relation)
    counts = door.draws.noisy_counts(NOISE, bounded, event)
    door.account.charge(event)
    return bounded.decode(counts)[0]


def abort_on_a_heavy_row(rows, doors):
    """That it stops tells that somebody's row is heavy."""
    if np.abs(features(rows)).max() > 1e4:
        raise ValueError("did not converge")
    return noisy_sums(rows, doors)


def a_type_that_rows_decide(rows, doors):
    """The numbers are equal, their type is not."""
    released = noisy_sums(rows, doors)
    return [released, 1 if features(rows).sum() > 0.0 else 1.0]


def a_sign_of_zero(rows, doors):
    """Equal as numbers, other bits."""
    return [noisy_sums(rows, doors), np.copysign(0.0, features(rows).sum())]


def shards_by_rank(rows, doors):
    """Rows go to shards by the rank of their first feature: one row moves others between shards."""
    x = features(rows)
    x = x[np.argsort(x[:, 0], kind="stable")]
    means = np.array([np.tanh(x[k::4]).prod(axis=0) for k in range(4)])
    return doors[0].release(NOISE, clip(general(5.0 * means), CLIP_NORM, sharded=True)).value


def shares_for_more_silos_than_there_are(rows, doors):
    """The noise of a sum is divided among fifty silos; there are two."""
    bounded = [clip(general(x), CLIP_NORM) for x in (features(rows), OTHER_ROWS)]
    mechanism = SkellamMechanism(noise_multiplier=2.0, num_shares=50)
    query = PrivateSum(
        relation=doors[0].account.relation,
        layouts=tuple(bounded),
        mechanisms=(mechanism, mechanism),
        num_terms=MAX_ROWS,
        num_sums=1,
        together=2,
    )
    shares = [query.write(door, silo, own).payload for silo, (door, own) in enumerate(zip(doors, bounded, strict=True))]
    payload = doors[0].draws.total(np.sum(shares, axis=0))
    return query.read(Total(payload=payload, members=(0, 1))).value


def laplace_of_half_the_scale(rows, doors):
    """Half of the priced scale."""

    class Half(LaplaceMechanism):
        def noise(self, entropy, bounded):
            return super().noise(entropy, bounded) // 2

    return doors[0].release(Half(noise_multiplier=2.0), clip(general(features(rows)), CLIP_NORM, order=1)).value


def answers_that_are_hardly_ever_changed(rows, doors):
    """Randomised response with a tenth of the declared probability."""

    class Lazy(FreshDraws):
        def answers(self, answers, event):
            return super().answers(answers, replace(event, gamma=event.gamma / 10))

    door = doors[0]
    if hasattr(door.draws, "inner"):
        door.draws.inner = Lazy(door.draws.inner.entropy)
    return door.randomise(np.asarray(rows["y"]), categories=2, gamma=0.5).value


def sqrt_two_under_poisson(rows, doors):
    """The sensitivity of unsampled non-negative terms as if it were a clip norm under Poisson sampling."""
    door, batch = doors[0], doors[0].batch(SAMPLER)
    bounded = clip(non_negative(np.abs(chosen(features(rows), batch))), CLIP_NORM, batch=batch)

    class Short(Scaled):
        def event(self, bounded, relation):
            return replace(NOISE.event(bounded, relation), clip_norm=bounded.norm / np.sqrt(2.0))

    return door.release(Short(share=1.0), bounded).value


@dataclass(frozen=True)
class Plant:
    method: Callable
    relation: Relation = Relation.SUBSTITUTE


PLANTS = [
    Plant(ball_around_a_centre),
    Plant(hundredth_of_the_noise),
    Plant(one_noise_for_all_silos),
    Plant(draw_without_a_charge),
    Plant(charges_that_rows_decide),
    Plant(keys_of_a_dict),
    Plant(a_bit_far_below),
    Plant(noise_drawn_once),
    Plant(one_number_for_all_coordinates),
    Plant(uniform_noise_priced_as_gaussian),
    Plant(less_noise_in_the_last_step),
    Plant(noise_from_a_fixed_seed),
    Plant(another_silos_batch),
    Plant(never_empty, Relation.ADD_REMOVE),
    Plant(fixed_size_batches_until_one_suits),
    Plant(one_batch_for_two_releases),
    Plant(a_slot_that_is_always_drawn),
    Plant(charge_after_the_draw),
    Plant(abort_on_a_heavy_row),
    Plant(a_type_that_rows_decide),
    Plant(a_sign_of_zero),
    Plant(shards_by_rank),
    Plant(shares_for_more_silos_than_there_are),
    Plant(laplace_of_half_the_scale),
    Plant(answers_that_are_hardly_ever_changed),
    Plant(sqrt_two_under_poisson),
]
