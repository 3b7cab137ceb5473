"""How even each dispatch rule leaves the devices on recorded routing, and how many tokens change nodes for it.

    python benchmarks/dispatch_balance.py routing.npz --nodes 4 --devices-per-node 4

The file holds `tokens`, int [iteration, layer, expert, device], as runs of `themis train` record them. Placements come
from `materialize` on the mean of the five records before, owners are even; "optimum" is the best balance that any
split over the same placement reaches, by linear program.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from themis.core.cost import LayerCost
from themis.core.load import device_load, imbalance
from themis.core.placement import even_owner, owner_mask
from themis.core.topology import Topology
from themis.planning import LoadPredictor, dispatch, materialize
from themis.planning.balance_reference import optimal_layer_s

WINDOW = 5


def steps(
    tokens_ILED: NDArray[np.int64], topology: Topology, overlap_degree: int, budget: int, exact: bool
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
    """(iteration, tokens_ED, placement_ED) of each layer and iteration that has WINDOW records before it."""
    owner_E = even_owner(tokens_ILED.shape[2], topology.num_devices)
    predictor = LoadPredictor(WINDOW)
    for iteration, tokens_LED in enumerate(tokens_ILED):
        actual_LE = tokens_LED.sum(axis=2)
        predicted_LE = actual_LE if exact else predictor.predict()
        if iteration >= WINDOW and predicted_LE is not None:
            for tokens_ED, load_E in zip(tokens_LED, predicted_LE, strict=True):
                options = {"overlap_degree": overlap_degree, "budget": budget}
                yield iteration, tokens_ED, materialize(owner_E, load_E, topology, **options)
        predictor.observe(actual_LE)


def judge(route_EDD: NDArray[np.int64], topology: Topology) -> tuple[float, float]:
    """(imbalance of the devices, share of the tokens that change nodes) of a dispatch plan."""
    traffic_DD = route_EDD.sum(axis=0)
    crosses_DD = topology.node_of_D[:, None] != topology.node_of_D[None, :]
    return imbalance(device_load(route_EDD)), float(traffic_DD[crosses_DD].sum() / max(1, traffic_DD.sum()))


def best_balance(tokens_ED: NDArray[np.int64], placement_ED: NDArray[np.bool_], topology: Topology) -> float:
    """The least imbalance of any split over `placement_ED`; where tokens come from does not matter for it."""
    merged_ED = np.zeros_like(tokens_ED)
    merged_ED[:, 0] = tokens_ED.sum(axis=1)
    mean = tokens_ED.sum() / topology.num_devices
    return optimal_layer_s(merged_ED, placement_ED, topology, LayerCost(1 / mean, 0, 1))


def main(arguments: list[str]) -> None:
    """Print mean, 95th percentile and worst of each rule; write them where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="npz file with `tokens`")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--devices-per-node", type=int, default=4)
    parser.add_argument("--overlap-degree", type=int, default=6)
    parser.add_argument("--budget", type=int, default=2)
    parser.add_argument("--skip", type=int, default=WINDOW, help="first iteration (of the file) that counts")
    parser.add_argument("--exact", action="store_true", help="place by the loads that come, not by predicted ones")
    parser.add_argument("--optimum-every", type=int, default=17, help="solve the linear program for each so many steps")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    if not chosen.trace.is_file():
        parser.error(f"trace is {str(chosen.trace)!r}; it must be an npz file that exists")
    tokens_ILED = np.load(chosen.trace)["tokens"].astype(np.int64)
    topology = Topology(chosen.nodes, chosen.devices_per_node)
    if tokens_ILED.ndim != 4 or tokens_ILED.shape[3] != topology.num_devices:
        parser.error(f"tokens has shape {tokens_ILED.shape}; its last size must be {topology.num_devices} devices")
    figures: dict[str, list[tuple[float, float]]] = {"EP": [], "local-first": [], "balanced": [], "optimum": []}
    num_experts = tokens_ILED.shape[2]
    own_ED = owner_mask(even_owner(num_experts, topology.num_devices), topology.num_devices)
    counted = 0
    for iteration, tokens_ED, placement_ED in steps(
        tokens_ILED, topology, chosen.overlap_degree, chosen.budget, chosen.exact
    ):
        if iteration < chosen.skip:
            continue
        figures["EP"].append(judge(dispatch(tokens_ED, own_ED, topology), topology))
        for rule in ("local-first", "balanced"):
            figures[rule].append(judge(dispatch(tokens_ED, placement_ED, topology, rule=rule), topology))
        if counted % chosen.optimum_every == 0:
            figures["optimum"].append((best_balance(tokens_ED, placement_ED, topology), float("nan")))
        counted += 1
    report(figures, chosen.out)


def report(figures: dict[str, list[tuple[float, float]]], out: Path | None) -> None:
    """Print the table of `figures`, (imbalance, share between nodes) by rule; write it to `out` as JSON."""
    print(f"{'rule':<13}{'steps':>6}{'imbalance':>26}{'share between nodes':>28}")
    print(f"{'':<19}{'mean':>8}{'median':>8}{'p95':>8}{'worst':>8}{'mean':>8}{'p95':>8}{'worst':>8}")
    result = {}
    for rule, pairs in figures.items():
        even, crossing = np.array(pairs).T
        row = [even.mean(), np.median(even), np.percentile(even, 95), even.max()]
        row += [crossing.mean(), np.percentile(crossing, 95), crossing.max()]
        print(f"{rule:<13}{len(pairs):>6}" + "".join(f"{value:>8.3f}" for value in row))
        names = ("imbalance_mean", "imbalance_median", "imbalance_p95", "imbalance_worst")
        names += ("crossing_mean", "crossing_p95", "crossing_worst")
        values = [None if np.isnan(value) else float(value) for value in row]
        result[rule] = {"steps": len(pairs)} | dict(zip(names, values, strict=True))
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
