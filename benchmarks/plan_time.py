"""How long planning takes: the median of many calls, each with its Python call and argument checks.

python benchmarks/plan_time.py --out plan_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

import themis
from themis.core.placement import even_owner
from themis.core.topology import Topology
from themis.planning import dispatch, materialize, shard, transfers

#: Experts, nodes, devices a node, overlap degree, budget; and the goal of `materialize`, in microseconds.
SETTINGS = [
    (64, 4, 8, 8, 2, 25.0),
    (64, 4, 8, 16, 4, 25.0),
    (64, 4, 8, 64, 4, 25.0),
    (256, 8, 8, 8, 2, 60.0),
    (256, 8, 8, 16, 4, 60.0),
    (256, 8, 8, 64, 4, 60.0),
    (256, 128, 8, 8, 2, 2000.0),
    (256, 128, 8, 16, 4, 2000.0),
    (256, 128, 8, 64, 4, 2000.0),
]
TOKENS_PER_DEVICE = 4096
EXPERT_BYTES = 8 << 20
#: A dispatch plan is dense, [E, D, D]: beyond this many devices only materialisation is timed.
MOST_DEVICES_TO_DISPATCH = 64


def timed_us(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Median and 95th percentile of `calls` calls, in microseconds, after one that compiles."""
    call()
    seconds = np.empty(calls)
    for i in range(calls):
        start = time.perf_counter()
        call()
        seconds[i] = time.perf_counter() - start
    return {"median_us": float(np.median(seconds) * 1e6), "p95_us": float(np.percentile(seconds, 95) * 1e6)}


def measure(calls: int) -> Iterator[dict[str, Any]]:
    """One record a planner and setting."""
    for experts, nodes, local, degree, budget, goal_us in SETTINGS:
        rng, topology = np.random.default_rng(0), Topology(nodes, local)
        owner_E, share_E = even_owner(experts, nodes * local), rng.dirichlet(np.full(experts, 0.4))
        load_E = share_E * TOKENS_PER_DEVICE * topology.num_devices
        options: dict[str, int] = {"overlap_degree": degree, "budget": budget}
        placement_ED = materialize(owner_E, load_E, topology, **options)
        planners: dict[str, Callable[[], object]] = {
            "materialize": lambda: materialize(owner_E, load_E, topology, **options)  # noqa: B023
        }
        if topology.num_devices <= MOST_DEVICES_TO_DISPATCH:
            tokens_ED = rng.multinomial(TOKENS_PER_DEVICE, share_E, size=topology.num_devices).T.astype(np.int64)
            planners |= {
                "dispatch local-first": lambda: dispatch(tokens_ED, placement_ED, topology),  # noqa: B023
                "dispatch balanced": lambda: dispatch(tokens_ED, placement_ED, topology, rule="balanced"),  # noqa: B023
                "transfers": lambda: transfers(owner_E, placement_ED, topology, expert_bytes=EXPERT_BYTES),  # noqa: B023
                "shard 12 layers": lambda: shard(np.tile(load_E, (12, 1)), topology, overlap_degree=degree),  # noqa: B023
            }
        for planner, call in planners.items():
            yield {
                "planner": planner,
                "experts": experts,
                "devices": topology.num_devices,
                "devices_per_node": local,
                **options,
                "goal_us": goal_us if planner == "materialize" else None,
                **timed_us(call, calls),
            }


def machine() -> dict[str, str | int | None]:
    """What the figures were taken on."""
    return {
        "themis": themis.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def main(arguments: list[str]) -> None:
    """Print the table; write the records where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=200, help="calls a median is taken over")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    records = []
    print(f"{'planner':<22}{'experts':>8}{'devices':>8}{'t':>4}{'m':>3}{'median us':>11}{'p95 us':>9}{'goal us':>9}")
    for record in measure(chosen.calls):
        records.append(record)
        goal = f"{record['goal_us']:.0f}" if record["goal_us"] else "-"
        print(
            f"{record['planner']:<22}{record['experts']:>8}{record['devices']:>8}{record['overlap_degree']:>4}"
            f"{record['budget']:>3}{record['median_us']:>11.1f}{record['p95_us']:>9.1f}{goal:>9}"
        )
    if chosen.out:
        result = {"calls": chosen.calls, "machine": machine(), "records": records}
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
