"""`themis plan`: recorded loads in, placements and what they gain out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, final

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from themis.cli.parse import parse
from themis.core.cost import LayerCost
from themis.core.errors import ConfigError, require
from themis.core.load import check_load, device_load, imbalance, owner_load
from themis.core.placement import Placement, even_owner
from themis.core.topology import Link, LinkClass, Topology
from themis.planning import dispatch, materialize, shard, transfers

#: Tokens that a load without a scale is turned into, a device.
_TOKENS_PER_DEVICE = 1 << 16


@final
@dataclass(frozen=True)
class PlanOptions:
    """Plan one iteration's placement from expert loads, and predict what it gains over plain expert parallelism."""

    loads: Annotated[Path, tyro.conf.Positional]
    """.npy, .npz (`load`, or `tokens` as in routing.npz) or .json file of loads [E], [L, E], or tokens [I, L, E, D]."""
    nodes: int = 1
    """Nodes."""
    devices_per_node: int = 8
    """Devices of a node."""
    overlap_degree: int = 8
    """t, experts of a layer that may be replicated."""
    budget: int = 2
    """m, replicas a device may hold of a layer."""
    rule: str = "local-first"
    """How tokens choose among copies: local-first or balanced."""
    expert_bytes: int = 0
    """Bytes of one expert; with it the transfers are priced in seconds."""
    intra_bytes_per_s: float = 300e9
    """A device's link inside its node."""
    inter_bytes_per_s: float = 50e9
    """A node's uplink."""
    json: bool = False
    """Print JSON."""


@final
@dataclass(frozen=True)
class LayerPlan:
    """One layer's plan. Imbalances are busiest over mean device; gain is their ratio, the most that experts' time wins.

    owner_E [E]; copies_E: for each expert, the devices that hold it; ep: each expert at an evenly dealt owner alone.
    """

    layer: int
    owner_E: list[int]
    copies_E: list[list[int]]
    ep_imbalance: float
    imbalance: float
    gain: float
    replicas: int
    inter_node_copies: int
    transfer_s: float | None


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(PlanOptions, arguments, "themis plan LOADFILE")
    load_LE = read_loads(options.loads)
    topology = Topology(
        options.nodes,
        options.devices_per_node,
        intra=Link(10e-6, options.intra_bytes_per_s),
        inter=Link(20e-6, options.inter_bytes_per_s),
    )
    plans = plan_layers(load_LE, topology, options)
    if options.json:
        print(json.dumps({"layers": [asdict(plan) for plan in plans]}))
        return 0
    Console().print(_table(plans, topology))
    return 0


def read_loads(path: Path) -> NDArray[np.float64]:
    """float64 [L, E] from a file; ConfigError for what is missing, unreadable or no load."""
    if not path.is_file():
        raise ConfigError(f"load file {str(path)!r} does not exist; give a .npy, .npz or .json file")
    try:
        array = _read(path)
    except ConfigError:
        raise
    except Exception as error:  # NumPy, zipfile and json each have their own
        raise ConfigError(f"load file {str(path)!r} cannot be read: {error}") from error
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"load file {str(path)!r} holds {array.dtype}; loads are numbers")
    if array.ndim == 4:  # recorded routing: every iteration and source
        array = array.sum(axis=(0, 3))
    load_LE = check_load(array[None] if array.ndim == 1 else array, f"the load in {str(path)!r}", 2)
    total = float(load_LE.sum())
    require(total > 0, f"the sum of the loads in {str(path)!r}", total, "above zero")
    return load_LE


def plan_layers(load_LE: NDArray[np.float64], topology: Topology, options: PlanOptions) -> list[LayerPlan]:
    """Owners by Algorithm 2, replicas by Algorithm 1, tokens by Algorithm 3, for every layer of `load_LE` [L, E]."""
    owner_LE = shard(load_LE, topology, overlap_degree=options.overlap_degree)
    return [_plan_layer(layer, load_LE[layer], owner_LE[layer], topology, options) for layer in range(load_LE.shape[0])]


def _plan_layer(
    layer: int, load_E: NDArray[np.float64], owner_E: NDArray[np.int64], topology: Topology, options: PlanOptions
) -> LayerPlan:
    devices = topology.num_devices
    placement_ED = materialize(owner_E, load_E, topology, overlap_degree=options.overlap_degree, budget=options.budget)
    # Every device brings the same tokens: a load says nothing of where they come from.
    scale = _TOKENS_PER_DEVICE / max(float(load_E.sum()), np.finfo(np.float64).tiny)
    tokens_ED = np.repeat(np.rint(load_E * scale).astype(np.int64)[:, None], devices, axis=1)
    cost = LayerCost(expert_s_per_token=1e-6, token_bytes=1, expert_bytes=max(1, options.expert_bytes))
    route_EDD = dispatch(tokens_ED, placement_ED, topology, rule=options.rule, cost=cost)
    before = imbalance(owner_load(load_E, even_owner(load_E.size, devices), devices))
    after = imbalance(device_load(route_EDD))
    placement = Placement(owner_E, placement_ED)
    moves = transfers(owner_E, placement_ED, topology, expert_bytes=max(1, options.expert_bytes))
    return LayerPlan(
        layer=layer,
        owner_E=owner_E.tolist(),
        copies_E=[np.flatnonzero(held_D).tolist() for held_D in placement_ED],
        ep_imbalance=before,
        imbalance=after,
        gain=before / after,
        replicas=int(placement.replicas_ED.sum()),
        inter_node_copies=moves.bytes_by_link(topology, 1 << 20, 1)[LinkClass.INTER] >> 20,
        transfer_s=cost.transfer_s(moves, topology) if options.expert_bytes else None,
    )


def _table(plans: list[LayerPlan], topology: Topology) -> Table:
    title = (
        f"{topology.num_nodes} x {topology.devices_per_node} devices; busiest over mean device, "
        "planned and judged on the same load, spread evenly over the devices"
    )
    priced = any(plan.transfer_s is not None for plan in plans)
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for name in (
        "layer",
        "EP",
        "Themis",
        "gain",
        "replicas",
        "copies between nodes",
        *(["transfer"] if priced else []),
    ):
        table.add_column(name, justify="right")
    for plan in plans:
        table.add_row(
            str(plan.layer),
            f"{plan.ep_imbalance:.2f}",
            f"{plan.imbalance:.2f}",
            f"{plan.gain:.2f}x",
            str(plan.replicas),
            str(plan.inter_node_copies),
            *([f"{1e3 * plan.transfer_s:.3g} ms"] if plan.transfer_s is not None else []),
        )
    return table


def _read(path: Path) -> NDArray[np.generic]:
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix == ".npy":
        return np.asarray(np.load(path))
    if path.suffix == ".json":
        return np.asarray(json.loads(path.read_text()))
    raise ConfigError(f"load file {str(path)!r} is of no known kind; give a .npy, .npz or .json file")


def _read_npz(path: Path) -> NDArray[np.generic]:
    with np.load(path) as stored:
        for name in ("load", "load_LE", "load_E", "tokens"):
            if name in stored:
                return np.asarray(stored[name])
        raise ConfigError(f"load file {str(path)!r} has {', '.join(stored.files) or 'nothing'}; it must have `load`")
