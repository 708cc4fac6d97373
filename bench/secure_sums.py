"""Cost of secure sums: `OMP_NUM_THREADS=1 python bench/secure_sums.py` (a measurement, never a test).

One thread does the work of all clients, compute nodes and the collector; seconds are wall-clock, CPU beside them. The
paper's column (004 I, table 1) is Spark on a cluster without encryption, so the ratio is not like for like. `million`
is 10^6 clients of length 10^3; its peak memory holds every role at once and so bounds each. `masks` has CPU and bytes
of one client in sums of 218 numbers mod 2^32 where a tenth of the silos drop out; growth is the exponent of the silos.
"""

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silobayes.secure import pairwise_masks as masks
from silobayes.secure import roster as rosters
from silobayes.secure.fixed_point import Modulus
from silobayes.secure.sums import CHUNK_BYTES, SecretSharingSum

MODULUS = Modulus(32)
NODES = 10
STUDY = bytes(32)
PAPER = {
    10: {10**2: 1.72, 10**3: 1.89, 10**4: 2.99, 10**5: 8.58},
    10**2: {10**2: 2.03, 10**3: 2.86, 10**4: 12.36, 10**5: 65.64},
    10**3: {10**2: 3.43, 10**3: 10.56, 10**4: 101.2, 10**5: 610.55},
    10**4: {10**2: 15.30, 10**3: 84.95, 10**4: 994.96, 10**5: 1592.29},
}
SILOS = (10, 30, 100, 300, 1000)
DIMENSION = 218


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def share_sum(num_clients, dimension):
    """Wall and CPU seconds of one sum by secret sharing; the result is checked."""
    sums = SecretSharingSum(
        modulus=MODULUS, num_clients=num_clients, colluding=0, compute_nodes=NODES, study_hash=STUDY
    )
    rows = min(num_clients, max(1, CHUNK_BYTES // (dimension * MODULUS.dtype.itemsize)))
    block = np.random.default_rng(0).integers(0, 1 << 20, (rows, dimension)).astype(MODULUS.dtype)

    def chunks():  # every client's vector is a row of one block, so that making vectors is not measured
        for start in range(0, num_clients, rows):
            numbers = np.arange(start, min(start + rows, num_clients))
            yield numbers, block[: numbers.size]

    wall, cpu = time.perf_counter(), time.process_time()
    total = sums.total_of_chunks(chunks(), dimension=dimension, sum_index=0)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    whole, rest = divmod(num_clients, rows)
    exact = whole * block.sum(axis=0, dtype=np.uint64) + block[:rest].sum(axis=0, dtype=np.uint64)
    assert np.array_equal(total, exact.astype(MODULUS.dtype))
    return wall, cpu


def million():
    before = peak_mib()
    wall, cpu = share_sum(10**6, 10**3)
    peak = peak_mib()
    print(f"{'N=10^6 d=10^3, 10 nodes':<28}{'seconds':>9}{'CPU':>9}{'peak MiB':>10}{'target':>8}")
    print(f"{'':<28}{wall:>9.1f}{cpu:>9.1f}{peak:>10.0f}{'< 1024':>8}   ({before:.0f} MiB before)\n", flush=True)
    return {"seconds": wall, "cpu_seconds": cpu, "peak_mib": peak, "mib_before": before}


def table():
    print(f"{'N':>8}{'d':>8}{'seconds':>11}{'CPU':>11}{'paper':>9}{'ratio':>8}   (target: ratio >= 50)")
    out = []
    for dimension, row in PAPER.items():
        for num_clients, paper in row.items():
            repeats = 3 if num_clients * dimension <= 10**7 else 1
            wall, cpu = min(share_sum(num_clients, dimension) for _ in range(repeats))
            cell = {"N": num_clients, "d": dimension, "seconds": wall, "cpu_seconds": cpu, "paper_seconds": paper}
            out.append({**cell, "ratio": paper / wall})
            print(
                f"{num_clients:>8}{dimension:>8}{wall:>11.4f}{cpu:>11.4f}{paper:>9.2f}{paper / wall:>8.0f}", flush=True
            )
    print()
    return out


def stopwatch():
    """A function that calls another and adds its CPU seconds to those of `who`, and the dictionary of these."""
    seconds = {"setup": 0.0, "client": 0.0, "server": 0.0}

    def clock(who: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = function(*args, **kwargs)
        seconds[who] += time.process_time() - start
        return out

    return clock, seconds


def meet_all(num_clients, colluding, clock):
    identities = [Ed25519PrivateKey.generate() for _ in range(num_clients)]
    keys = tuple(identity.public_key().public_bytes_raw() for identity in identities)
    roster = rosters.Roster(study_hash=STUDY, identities=keys, colluding=colluding, modulus=MODULUS)
    joined = [
        rosters.join(roster, i, identity=identity, random_bytes=os.urandom) for i, identity in enumerate(identities)
    ]
    announcements = [step.messages[0] for step in joined]
    # The first client pays for checking all signatures; for the others they are remembered.
    rosters.is_signed.cache_clear()
    members = [clock("setup", rosters.meet, joined[0].state, announcements).state]
    members += [rosters.meet(step.state, announcements).state for step in joined[1:]]
    return roster, [masks.ClientState(member=member) for member in members]


def mask_sum(num_clients):
    """CPU seconds of one client's setup and sum and of the server, and bytes of a client, with a tenth missing."""
    colluding = num_clients // 10
    clock, seconds = stopwatch()
    roster, clients = meet_all(num_clients, colluding, clock)
    values = np.random.default_rng(0).integers(0, 1 << 32, (num_clients, DIMENSION)).astype(MODULUS.dtype)
    server = masks.open_sum(masks.ServerState(roster=roster), sum_index=0, dimension=DIMENSION).state
    sent = 0
    for i, client in enumerate(clients):
        step = clock("client", masks.share, client, sum_index=0, random_bytes=os.urandom)
        clients[i] = step.state
        server = clock("server", masks.receive_upload, server, step.messages[0]).state
        sent = sum(map(len, step.messages[0].sealed.values())) + len(step.messages[0].locked_seeds)
    step = clock("server", masks.deliver, server)
    server = step.state
    for delivery in step.messages[colluding:]:
        i = delivery.receiver
        masked = clock("client", masks.mask, clients[i], delivery, values[i])
        clients[i] = masked.state
        server = clock("server", masks.receive_masked, server, masked.messages[0]).state
    step = clock("server", masks.request_unmask, server)
    server = step.state
    for i in step.messages[0].survivors:
        answer = clock("client", masks.unmask, clients[i], step.messages[0])
        server = clock("server", masks.receive_answer, server, answer.messages[0]).state
    total = clock("server", masks.finish, server).result
    assert np.array_equal(total, values[colluding:].sum(axis=0, dtype=MODULUS.dtype))
    sent += DIMENSION * MODULUS.num_bytes + num_clients * masks.SHARE_BYTES
    return {
        "silos": num_clients,
        "bytes_per_client": sent,
        "setup_cpu_seconds": seconds["setup"],
        "client_cpu_seconds": seconds["client"] / num_clients,
        "server_cpu_seconds": seconds["server"],
    }


def mask_table():
    print(
        f"{'silos':>6}{'bytes/client':>14}{'setup ms':>10}{'client ms':>11}{'growth':>8}{'server ms':>11}{'growth':>8}"
    )
    out = []
    for num_clients in SILOS:
        row = mask_sum(num_clients)
        growth = {"client": 0.0, "server": 0.0}
        if out:  # the exponent of the number of silos since the line above
            step = math.log(num_clients / out[-1]["silos"])
            growth = {who: math.log(row[f"{who}_cpu_seconds"] / out[-1][f"{who}_cpu_seconds"]) / step for who in growth}
        out.append(row)
        print(
            f"{num_clients:>6}{row['bytes_per_client']:>14}{1e3 * row['setup_cpu_seconds']:>10.2f}"
            f"{1e3 * row['client_cpu_seconds']:>11.3f}{growth['client']:>8.2f}"
            f"{1e3 * row['server_cpu_seconds']:>11.2f}{growth['server']:>8.2f}",
            flush=True,
        )
    return out


def draw(results, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, dimension in enumerate(PAPER):
        cells = [cell for cell in results.get("table", []) if cell["d"] == dimension]
        clients = [cell["N"] for cell in cells]
        left.loglog(clients, [cell["seconds"] for cell in cells], "o-", color=f"C{color}", label=f"d = {dimension}")
        left.loglog(clients, [cell["paper_seconds"] for cell in cells], "x:", color=f"C{color}")
    left.set(xlabel="clients", ylabel="seconds", title="secret sharing, 10 nodes (dotted: 004 I, Spark)")
    left.legend(loc="lower right")
    rows = results.get("masks", [])
    silos = [row["silos"] for row in rows]
    for key, label in (
        ("client_cpu_seconds", "client, a sum"),
        ("setup_cpu_seconds", "client, setup"),
        ("server_cpu_seconds", "server, a sum"),
    ):
        right.loglog(silos, [row[key] for row in rows], "o-", label=label)
    right.set(xlabel="silos", ylabel="CPU seconds", title="pairwise masks, 218 numbers")
    right.legend()
    figure.savefig(path, dpi=150)


def main():
    parts = {"million": million, "table": table, "masks": mask_table}
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", choices=parts, help="one part instead of all")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--figure", metavar="FILE.png")
    arguments = parser.parse_args()
    # The million first: peak memory is that of the process so far.
    results = {name: part() for name, part in parts.items() if arguments.only in (None, name)}
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)
    if arguments.figure:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
