"""`themis simulate`: what policies would do for a model on a cluster that need not be here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, final

import tyro
from rich.console import Console
from rich.table import Table

from themis.cli.parse import parse
from themis.cli.simulate_tables import show
from themis.core.errors import ConfigError, require
from themis.policies import POLICIES, Policy, make_policy
from themis.sim import replay
from themis.sim.efficiency import CLUSTERS
from themis.sim.hardware import Cluster, read_profile
from themis.sim.results import Result
from themis.sim.routing import GeneratedRouting, Routing, Skew, read_routing, typical_share_std
from themis.sim.simulator import Simulator
from themis.sim.trace import write_trace
from themis.sim.workload import PAPER_MODELS, ModelShape, Workload, from_config, paper_model

#: Windows of the load prediction whose R² is shown for a trace.
_WINDOWS = (1, 2, 5, 10, 20)


@final
@dataclass(frozen=True)
class SimulateOptions:
    """Simulate training iterations of MODEL on a cluster: a model of the paper, a transformers config.json, or, with
    --replay, the run directory of a recorded run, whose step time is predicted."""

    model: Annotated[str, tyro.conf.Positional]
    """gpt-s-moe, gpt-l-moe, phi-3.5-moe, qwen1.5-moe, deepseek-v3, or a path to a config.json or a run."""
    cluster: str = "b"
    """a, b (the paper's), or a JSON profile file."""
    nodes: int = 0
    """Nodes; 0 for as many as the cluster has."""
    policy: str = "ep,themis"
    """Policies, separated by commas, or all. EP is simulated besides them, as the others' measure."""
    batch: int = 4
    """Sequences a device and iteration."""
    sequence: int = 0
    """Tokens of a sequence; 0 for the model's (4096 with a config.json)."""
    layers: int = 0
    """MoE layers; 0 for the model's."""
    iterations: int = 20
    """Iterations to average over."""
    warmup: int = 10
    """Iterations before these."""
    budget: int = -1
    """Replicas a device and layer, for policies that have a budget; -1 for each one's own."""
    share_std: float = -1.0
    """Skew: standard deviation of the experts' shares; -1 for a typical one."""
    r2: float = 0.99
    """Drift: R² of the mean of five loads as the prediction of the next."""
    trace: Path | None = None
    """A recorded routing.npz, scaled to the batch, instead of generated routing; layers, experts, ranks must fit."""
    chrome_trace: Path | None = None
    """Write the last policy's last iteration for Perfetto (chrome://tracing)."""
    seed: int = 0
    """Of the generated routing."""
    replay: bool = False
    """MODEL is a run directory of themis train: predict its steps' time on --cluster, where it ran."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(SimulateOptions, arguments, "themis simulate MODEL")
    require(options.iterations >= 1, "iterations", options.iterations, "1 or more")
    require(options.warmup >= 0, "warmup", options.warmup, "0 or more")
    cluster = find_cluster(options.cluster, options.nodes)
    if options.replay:
        return _replay(options, cluster)
    workload = Workload(find_model(options, cluster), cluster, options.batch)
    routing = _routing(options, workload)
    results = []
    for policy in find_policies(options.policy, options.budget):
        simulator = Simulator(workload, policy, routing())
        results.append(simulator.run(options.iterations, options.warmup))
        if options.chrome_trace is not None:
            events = simulator.step(None, record=True).events
            write_trace(options.chrome_trace, events, cluster.num_devices, cluster.devices_per_node)
    r2 = read_routing(options.trace).prediction_r2(_WINDOWS) if options.trace is not None else {}
    if options.json:
        print(json.dumps({**describe(workload, results), "prediction_r2": r2}))
        return 0
    show(workload, results)
    if r2:
        told = ", ".join(f"{window} iterations {value:.3f}" for window, value in r2.items())
        print(f"R² of the predicted load in the trace, by the iterations averaged: {told}")
    return 0


def _replay(options: SimulateOptions, cluster: Cluster) -> int:
    told = replay.replay(replay.read_run(Path(options.model), cluster))
    facts = {"recorded_s": told.recorded_s, "predicted_s": told.result.iteration_s, "ratio": told.ratio}
    if options.json:
        print(json.dumps({**facts, "policy": told.result.policy, "spent_s": told.result.spent_s}))
        return 0
    table = Table(title=f"{options.model}: {told.result.policy} on {cluster.name}", title_justify="left")
    table.add_column("ms a step")
    table.add_column("", justify="right")
    table.add_row("recorded, median", f"{1e3 * told.recorded_s:.2f}")
    table.add_row("predicted", f"{1e3 * told.result.iteration_s:.2f}")
    table.add_row("predicted over recorded", f"{told.ratio:.2f}")
    for kind, seconds in told.result.spent_s.items():
        table.add_row(f"  {kind.replace('_', ' ')}", f"{1e3 * seconds:.2f}")
    Console().print(table)
    return 0


def find_cluster(name: str, nodes: int) -> Cluster:
    """A cluster by name or profile file, with `nodes` nodes unless 0."""
    cluster = CLUSTERS.get(name) or read_profile(Path(name))
    require(nodes >= 0, "nodes", nodes, "0 for the cluster's own, or 1 or more")
    return cluster.of_nodes(nodes) if nodes else cluster


def find_model(options: SimulateOptions, cluster: Cluster) -> ModelShape:
    """The model that the options name, with their sequence and layers."""
    path = Path(options.model)
    if options.model in PAPER_MODELS or not (path.suffix == ".json" or path.exists()):
        shape = paper_model(options.model, cluster)
    else:
        shape = from_config(_read_config(path), sequence=options.sequence or 4096, name=path.parent.name or path.stem)
    require(options.sequence >= 0, "sequence", options.sequence, "0 for the model's own, or 1 or more tokens")
    require(options.layers >= 0, "layers", options.layers, "0 for the model's own, or 1 or more")
    shape = replace(shape, sequence=options.sequence) if options.sequence else shape
    return replace(shape, num_layers=options.layers) if options.layers else shape


def find_policies(names: str, budget: int) -> list[Policy]:
    """EP first, then the named ones, each once."""
    wanted = list(POLICIES) if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is unknown; there are {', '.join(POLICIES)}, or all")
    require(budget >= -1, "budget", budget, "-1 for each policy's own, or 0 or more replicas a device and layer")
    values = {"budget": budget} if budget >= 0 else {}
    return [make_policy(name, values) for name in dict.fromkeys(["ep", *wanted])]


def _routing(options: SimulateOptions, workload: Workload) -> Callable[[], Routing]:
    model, devices = workload.model, workload.cluster.num_devices
    if options.trace is not None:
        path = options.trace
        recorded = read_routing(path).scaled_to(workload.tokens * model.top_k)
        shape = recorded.shape
        if shape != (model.num_layers, model.num_experts, devices):
            raise ConfigError(
                f"trace {str(path)!r} has {shape[0]} layers, {shape[1]} experts and {shape[2]} ranks; "
                f"the model on this cluster has {model.num_layers}, {model.num_experts} and {devices}"
            )
        return recorded.from_start
    share_std = options.share_std if options.share_std >= 0 else typical_share_std(model.num_experts, model.top_k)
    skew = Skew(share_std, options.r2)
    return lambda: GeneratedRouting.for_workload(workload, skew, options.seed)


def describe(workload: Workload, results: list[Result]) -> dict[str, Any]:
    """All that the command shows, JSON-able; seconds, bytes, and ratios to the first policy."""
    cluster, model = workload.cluster, workload.model
    rows = []
    for result in results:
        row = asdict(result)
        row["layer_s"] = result.layer_s.tolist()
        row["memory"]["total"] = result.memory.total
        row["speedup_over_ep"] = results[0].iteration_s / result.iteration_s
        row["out_of_memory"] = result.out_of_memory
        rows.append(row)
    size = {"nodes": cluster.num_nodes, "devices": cluster.num_devices, "batch": workload.batch}
    return {"model": asdict(model), "cluster": cluster.name, **size, "policies": rows}


def _read_config(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model {str(path)!r} does not exist; give {', '.join(PAPER_MODELS)} or a config.json")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is no JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r} is {type(values).__name__}; it must be a transformers config, an object")
    return values
