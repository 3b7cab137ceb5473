"""What `themis simulate` shows: a row a policy, so that all of them fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from themis.cli.units import format_bytes
from themis.sim.results import Result
from themis.sim.timeline import KINDS
from themis.sim.workload import Workload

_SHORT = {
    "all_to_all": "A2A",
    "gather": "SpAG",
    "reduce": "SpRS",
    "all_reduce": "AllR.",
    "rearrangement": "moves",
    "optimizer": "step",
    "attention": "attn.",
    "waiting": "waits",
    "experts": "exp.",
}
_GB = 1e9


def show(workload: Workload, results: Sequence[Result]) -> None:
    """Print speed, where the time goes, and memory. Speedups are over the first of `results`."""
    cluster, model = workload.cluster, workload.model
    console = Console()
    console.print(
        f"{model.name}: {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}; cluster "
        f"{cluster.name}, {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}, "
        f"batch {workload.batch}"
    )
    for table in (_speed(results), _time(results), _memory(results, cluster.device.memory_bytes)):
        console.print()
        console.print(table)


def _speed(results: Sequence[Result]) -> Table:
    base = results[0]
    table = _table("iteration", ["ms", f"over {base.policy}", "tokens/s", "imbalance", "GB in nodes", "GB between"])
    for result in results:
        moved = [sum(v for k, v in result.bytes_moved.items() if k.endswith(link)) for link in ("intra", "inter")]
        table.add_row(
            result.policy,
            f"{1e3 * result.iteration_s:.1f}",
            f"{base.iteration_s / result.iteration_s:.2f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.imbalance:.2f}",
            *(f"{num_bytes / _GB:.1f}" for num_bytes in moved),
        )
    return table


def _time(results: Sequence[Result]) -> Table:
    """Of SpAG, SpRS and AllReduce, what nothing hides."""
    kinds = [kind for kind in KINDS if any(result.spent_s[kind] > 0 for result in results)]
    table = _table("ms", [_SHORT.get(kind, kind) for kind in kinds])
    for result in results:
        table.add_row(result.policy, *(f"{1e3 * result.spent_s[kind]:.1f}" for kind in kinds))
    return table


def _memory(results: Sequence[Result], limit: float) -> Table:
    table = _table("GB", ["dense", "experts", "replicas", "activations", f"of {format_bytes(limit)}", ""])
    for result in results:
        use = result.memory
        parts = (
            use.dense_parameters + use.dense_gradients + use.dense_optimizer,
            use.expert_parameters + use.expert_gradients + use.expert_optimizer,
            use.replica_parameters + use.replica_gradients,
            use.activations,
            use.total,
        )
        table.add_row(result.policy, *(f"{part / _GB:.1f}" for part in parts), "OUT" if result.out_of_memory else "")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column(title, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
