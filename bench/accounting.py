"""Seconds for the accountant's speed targets, warm: `python bench/accounting.py` (a measurement, never a test)."""

import time

from silobayes.privacy import accounting
from silobayes.privacy.events import GaussianEvent, Relation, Sampling, Scheme

POISSON = Sampling(scheme=Scheme.POISSON, rate=0.01)
FIXED = Sampling(scheme=Scheme.WITHOUT_REPLACEMENT, rate=0.01)
SUBSTITUTE, ADD_REMOVE = Relation.SUBSTITUTE, Relation.ADD_REMOVE


def gaussian(std, sampling):
    return GaussianEvent(clip_norm=1.0, std=std, count=1000, sampling=sampling)


def best(action, repeats=5):
    times = []
    for _ in range(repeats):
        # A price is cached; what is measured is the first one.
        accounting._total.cache_clear()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main():
    print(f"{'what':<52}{'seconds':>9}{'target':>8}")
    for name, sampling, relation, price_target, calibrate_target in [
        ("closed form", None, SUBSTITUTE, 0.01, 1.5),
        ("poisson .01 x 1000, add_remove", POISSON, ADD_REMOVE, 0.5, 1.5),
        ("poisson .01 x 1000, substitute", POISSON, SUBSTITUTE, 0.5, 1.5),
        ("without replacement .01 x 1000, substitute", FIXED, SUBSTITUTE, 0.5, 1.5),
    ]:

        def price(sampling=sampling, relation=relation):
            accounting.price([gaussian(1.0, sampling)], relation=relation, delta=1e-5)

        def calibrate(sampling=sampling, relation=relation):
            accounting.calibrate(lambda v: gaussian(v, sampling), relation=relation, epsilon=1.0, delta=1e-5)

        price()
        print(f"{'price ' + name:<52}{best(price):>9.4f}{price_target:>8}")
        print(f"{'calibrate ' + name:<52}{best(calibrate, 3):>9.4f}{calibrate_target:>8}")


if __name__ == "__main__":
    main()
