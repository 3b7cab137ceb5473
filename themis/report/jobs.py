"""Simulations that figures ask for: described as values, run once each, on several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, final

from themis.policies import make_policy
from themis.sim.efficiency import CLUSTERS
from themis.sim.hardware import Cluster
from themis.sim.results import Result
from themis.sim.routing import GeneratedRouting, Skew
from themis.sim.simulator import Simulator
from themis.sim.workload import Workload, paper_model

Fields = tuple[tuple[str, Any], ...]


@final
@dataclass(frozen=True)
class Job:
    """One simulation: a model of the paper on a cluster under a policy with some fields of its own.

    nodes: 0 for the cluster's; top_k and layers: 0 for the model's; share_std, r2, device_spread, layer_spread: of the
    generated routing (`Skew`); hardware: fields of the cluster that differ, those of its device as "device.NAME".
    """

    model: str
    cluster: str
    policy: str
    batch: int
    share_std: float
    options: Fields = ()
    nodes: int = 0
    top_k: int = 0
    layers: int = 0
    r2: float = 0.99
    device_spread: float = 0.2
    layer_spread: float = 0.12
    iterations: int = 100
    warmup: int = 50
    seed: int = 0
    hardware: Fields = ()

    def workload(self) -> Workload:
        """What is simulated."""
        return workload(self.model, self.cluster, self.batch, self.nodes, self.top_k, self.layers, self.hardware)


Results = Mapping[Job, Result]


def workload(
    model: str, cluster: str, batch: int, nodes: int = 0, top_k: int = 0, layers: int = 0, hardware: Fields = ()
) -> Workload:
    """A model of the paper on one of its clusters; `hardware` changes the cluster's fields, `device.` its device's."""
    where = _changed(CLUSTERS[cluster], hardware)
    where = where.of_nodes(nodes) if nodes else where
    shape = paper_model(model, where, top_k=top_k or None)
    return Workload(replace(shape, num_layers=layers) if layers else shape, where, batch)


def simulate(job: Job) -> Result:
    """Run one job."""
    work = job.workload()
    return make_simulator(job, work).run(job.iterations, job.warmup)


def make_simulator(job: Job, work: Workload) -> Simulator:
    """The job's simulator before its first iteration."""
    skew = Skew(job.share_std, job.r2, job.device_spread, job.layer_spread)
    routing = GeneratedRouting.for_workload(work, skew, job.seed)
    return Simulator(work, make_policy(job.policy, dict(job.options)), routing)


def run_jobs(jobs: Iterable[Job], processes: int, tell: Callable[[int, int], None]) -> dict[Job, Result]:
    """All of `jobs`, each once, on `processes` processes; `tell(done, all)` after each."""
    wanted = sorted(set(jobs), key=lambda job: (-_weight(job), repr(job)))
    results: dict[Job, Result] = {}
    if processes <= 1:
        for done, job in enumerate(wanted):
            results[job] = simulate(job)
            tell(done + 1, len(wanted))
        return results
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, (job, result) in enumerate(zip(wanted, pool.map(simulate, wanted), strict=True)):
            results[job] = result
            tell(done + 1, len(wanted))
    return results


def _weight(job: Job) -> float:
    """About how long a job takes: the long ones go first."""
    work = job.workload()
    cells = work.model.num_layers * work.model.num_experts * work.cluster.num_devices
    return cells * (job.iterations + job.warmup) * (3.0 if job.policy.startswith("themis") else 1.0)


def _changed(cluster: Cluster, hardware: Fields) -> Cluster:
    outer = {key: value for key, value in hardware if "." not in key}
    device = {key.split(".")[1]: value for key, value in hardware if "." in key}
    if device:
        outer["device"] = replace(cluster.device, **device)
    return replace(cluster, **outer)
