"""How far figure 9's speedups move with each choice that the paper does not state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from themis.policies import POLICIES
from themis.report.assumptions import MODELS, PLACES, common_batch, standard_job
from themis.report.jobs import Job, Results
from themis.report.page import Page, Study, TableData
from themis.report.plots import label
from themis.sim.efficiency import CLUSTERS, UPLINK
from themis.sim.routing import most_share_std

#: What Themis is compared with, as far as it is built.
_OVER = tuple(policy for policy in ("ep", "faster-moe", "uniform") if policy in POLICIES)


@final
@dataclass(frozen=True)
class Variation:
    """A choice made otherwise: what it is called, and how it changes a job."""

    name: str
    change: Callable[[Job], Job]


def _batch(factor: float) -> Callable[[Job], Job]:
    return lambda job: replace(job, batch=max(1, int(job.batch * factor)))


def _skew(factor: float) -> Callable[[Job], Job]:
    def change(job: Job) -> Job:
        shape = job.workload().model
        return replace(
            job, share_std=min(factor * job.share_std, 0.95 * most_share_std(shape.num_experts, shape.top_k))
        )

    return change


def _compute(factor: float) -> Callable[[Job], Job]:
    def change(job: Job) -> Job:
        device = CLUSTERS[job.cluster].device
        speeds = ("flops_per_s", "grouped_flops_per_s")
        return replace(job, hardware=tuple((f"device.{name}", factor * getattr(device, name)) for name in speeds))

    return change


def _link(name: str, *, bandwidth: float = 1.0, latency: float = 1.0) -> Callable[[Job], Job]:
    def change(job: Job) -> Job:
        link = getattr(CLUSTERS[job.cluster], name)
        link = replace(link, bytes_per_s=bandwidth * link.bytes_per_s, latency_s=latency * link.latency_s)
        return replace(job, hardware=((name, link),))

    return change


def _budget(factor: float) -> Callable[[Job], Job]:
    def change(job: Job) -> Job:
        options = tuple((key, int(factor * value) if key == "budget" else value) for key, value in job.options)
        return replace(job, options=options)

    return change


def _option(name: str, value: object) -> Callable[[Job], Job]:
    return lambda job: replace(job, options=(*job.options, (name, value)))


VARIATIONS = (
    Variation("as chosen", lambda job: job),
    Variation("half the batch", _batch(0.5)),
    Variation("twice the batch, memory aside", _batch(2.0)),
    Variation("skew x 0.8", _skew(0.8)),
    Variation("skew x 1.25", _skew(1.25)),
    Variation("R² 0.95", lambda job: replace(job, r2=0.95)),
    Variation("R² 0.999", lambda job: replace(job, r2=0.999)),
    Variation("devices alike", lambda job: replace(job, device_spread=0.0)),
    Variation("devices vary twice as much", lambda job: replace(job, device_spread=0.4)),
    Variation("layers alike", lambda job: replace(job, layer_spread=0.0)),
    Variation("layers vary by 30 %", lambda job: replace(job, layer_spread=0.3)),
    Variation("compute x 0.75", _compute(0.75)),
    Variation("compute x 1.5", _compute(1.5)),
    Variation("compute x 1.97, bare kernels' speed", _compute(1.97)),
    Variation("uplinks x 0.7", _link("inter", bandwidth=0.7)),
    Variation("uplinks at their nominal speed", _link("inter", bandwidth=1 / UPLINK)),
    Variation(
        "each device its own part of the uplink", lambda job: replace(job, hardware=(("devices_per_uplink", 1),))
    ),
    Variation("NVSwitch x 0.7", _link("intra", bandwidth=0.7)),
    Variation("latency between nodes / 5", _link("inter", latency=0.2)),
    Variation("half the replicas", _budget(0.5)),
    Variation("twice the replicas", _budget(2.0)),
    Variation("any number of replicated experts, hidden or not", _option("overlap_degree", 1024)),
    Variation("tokens dispatched by the balanced rule", _option("dispatch_rule", "balanced")),
    Variation("another seed", lambda job: replace(job, seed=1)),
)


@final
class Sensitivity(Study):
    """Every variation alone, on figure 9's ten settings, fewer iterations."""

    @property
    def key(self) -> str:
        """See Study."""
        return "sensitivity"

    def _job(self, variation: Variation, place: str, model: str, policy: str) -> Job:
        job = standard_job(model, place, policy, common_batch(model, place))
        return replace(variation.change(job), iterations=5, warmup=8)

    def jobs(self) -> list[Job]:
        """All of them."""
        return [
            self._job(variation, place, model, policy)
            for variation in VARIATIONS
            for place in PLACES
            for model in MODELS
            for policy in (*_OVER, "themis")
        ]

    def page(self, results: Results) -> Page:
        """See Study."""
        rows = []
        for variation in VARIATIONS:
            cells = []
            for over in _OVER:
                for place in PLACES:
                    gains = [
                        results[self._job(variation, place, model, over)].iteration_s
                        / results[self._job(variation, place, model, "themis")].iteration_s
                        for model in MODELS
                    ]
                    cells.append(f"{np.mean(gains):.2f}")
            rows.append([variation.name, *cells])
        header = ["choice", *(f"over {label(o)}, {p.upper()}" for o in _OVER for p in PLACES)]
        table = TableData("Themis's mean speedup over five models", header, rows)
        return Page(self.key, "How far results move with what the paper does not state", [table])
