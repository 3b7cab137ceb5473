"""Figure 13b, weak scaling as in the paper, and on to thousands of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

from themis.report.assumptions import QWEN_STD, SYSTEMS, share_std, standard_job
from themis.report.claims import Ordering
from themis.report.jobs import Job, Results, workload
from themis.report.page import Page, Study, TableData
from themis.report.plots import label, legend, lines, tidy
from themis.report.studies.end_to_end import claim

_NODES = (2, 4, 8)
_MANY_NODES = (8, 32, 128, 512)
_FEW = ("ep", "uniform", "themis", "themis-rm")


def _job(model: str, place: str, policy: str, nodes: int, batch: int) -> Job:
    shape = workload(model, place, 1, nodes).model
    skew = share_std(model, shape.num_experts, shape.top_k)
    return replace(standard_job(model, place, policy, batch), nodes=nodes, share_std=skew)


@final
class WeakScaling(Study):
    """Figure 13b: DeepSeek-V3 on A, four experts a device."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig13b"

    def jobs(self) -> list[Job]:
        """16, 32 and 64 devices, one sequence each."""
        return [_job("deepseek-v3", "a", policy, nodes, 1) for nodes in _NODES for policy in SYSTEMS]

    def page(self, results: Results) -> Page:
        """See Study."""
        found = {(job.policy, job.nodes): results[job].iteration_s for job in self.jobs()}
        gain = {(s, n): found["ep", n] / found[s, n] for s in SYSTEMS for n in _NODES}
        devices = [8 * nodes for nodes in _NODES]
        rows = [
            [label(s), *(f"{1e3 * found[s, n]:.0f}" for n in _NODES), *(f"{gain[s, n]:.2f}" for n in _NODES)]
            for s in SYSTEMS
        ]

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            lines(axes, devices, {s: [1e3 * found[s, n] for n in _NODES] for s in SYSTEMS})
            axes.set_xticks(devices)
            axes.set_ylim(bottom=0)
            tidy(axes, x="devices", y="ms an iteration", title="DeepSeek-V3, cluster A, 4 experts a device")
            legend(axes)

        growth = {s: found[s, 8] / found[s, 2] for s in SYSTEMS}
        claims = [
            claim("weak_16", "Themis over EP at 16 devices", 1.48, gain["themis", 2]),
            claim("weak_64", "Themis over EP at 64 devices", 3.35, gain["themis", 8]),
        ]
        orderings = [
            Ordering(
                "weak_gap",
                "Themis's lead over EP grows with devices",
                gain["themis", 2] < gain["themis", 4] < gain["themis", 8],
            ),
            Ordering(
                "weak_flat",
                "Themis's time grows least",
                growth["themis"] < min(growth[s] for s in ("ep", "faster-moe", "smart-moe", "flex-moe")),
                ", ".join(f"{label(s)} x{growth[s]:.2f}" for s in SYSTEMS),
            ),
        ]
        header = ["system", *(f"ms at {d}" for d in devices), *(f"over EP at {d}" for d in devices)]
        table = TableData("Weak scaling", header, rows)
        title = "Figure 13b. Weak scaling of DeepSeek-V3 on cluster A"
        return Page(self.key, title, [table], claims, orderings, draw=draw)


@final
class FarScaling(Study):
    """Beyond the paper: Qwen1.5-MoE on B's nodes, two experts a device, 64 to 4,096 devices."""

    @property
    def key(self) -> str:
        """See Study."""
        return "scaling"

    def jobs(self) -> list[Job]:
        """Few iterations and two layers: a layer's time does not depend on how many there are. Without calibration,
        which the simulator cannot try at the larger sizes."""
        jobs = [
            replace(_job("qwen1.5-moe", "b", policy, nodes, 2), share_std=QWEN_STD * 64 / (16 * nodes))
            for nodes in _MANY_NODES
            for policy in _FEW
        ]
        return [
            replace(job, options=(*job.options, ("calibration", False)), iterations=2, warmup=2, layers=2)
            for job in jobs
        ]

    def page(self, results: Results) -> Page:
        """See Study."""
        found = {(job.policy, job.nodes): results[job] for job in self.jobs()}
        time = {key: result.iteration_s for key, result in found.items()}
        devices = [8 * nodes for nodes in _MANY_NODES]
        rows = []
        for s in _FEW:
            milliseconds = [f"{1e3 * time[s, n]:.0f}" for n in _MANY_NODES]
            rows.append([label(s), *milliseconds, *(f"{found[s, n].imbalance:.1f}" for n in _MANY_NODES)])

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            lines(axes, devices, {s: [1e3 * time[s, n] for n in _MANY_NODES] for s in _FEW})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(devices, [str(d) for d in devices])
            tidy(axes, x="devices", y="ms an iteration", title="Qwen1.5-MoE (2 layers), cluster B's nodes")
            legend(axes)

        ahead = Ordering(
            "far", "Themis is faster than EP at every size", all(time["themis", n] < time["ep", n] for n in _MANY_NODES)
        )
        header = ["system", *(f"ms at {d}" for d in devices), *(f"imbalance at {d}" for d in devices)]
        table = TableData("Weak scaling, two experts a device", header, rows)
        note = (
            "Skew is Qwen1.5-MoE's: shares' standard deviation stays in proportion to their mean as experts grow in "
            "number. Calibration is off."
        )
        return Page(self.key, "Beyond the paper: 64 to 4,096 devices", [table], (), [ahead], [note], draw)
