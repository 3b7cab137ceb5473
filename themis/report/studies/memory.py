"""Figures 12 and 13a: memory of model states, and the batch at which each system runs out."""

from __future__ import annotations

from typing import Any, final

from themis.report.assumptions import SYSTEMS, common_batch, standard_job
from themis.report.claims import Ordering
from themis.report.jobs import Job, Results
from themis.report.page import Page, Study, TableData
from themis.report.plots import colour, label, legend, stacked_bars, tidy
from themis.report.studies.end_to_end import claim, standard
from themis.sim.memory import activation_bytes
from themis.sim.results import Result

_SHOWN = tuple(system for system in SYSTEMS if system != "uniform")


@final
class ModelStates(Study):
    """Figure 12, which does not say of which model: Phi-3.5-MoE on B, the MoE layers' states."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig12"

    def jobs(self) -> list[Job]:
        """Every system but Uniform."""
        return [standard("phi-3.5-moe", "b", policy) for policy in _SHOWN]

    def page(self, results: Results) -> Page:
        """See Study."""
        use = {job.policy: results[job].memory for job in self.jobs()}
        parts = {
            "Opt": [use[s].expert_optimizer / 1e9 for s in _SHOWN],
            "Grad": [(use[s].expert_gradients + use[s].replica_gradients) / 1e9 for s in _SHOWN],
            "Param": [use[s].parameters / 1e9 for s in _SHOWN],
        }
        rows = [[name, *(f"{value:.2f}" for value in values)] for name, values in parts.items()]
        rows.append(["total", *(f"{use[s].model_states / 1e9:.2f}" for s in _SHOWN)])
        dense = [
            f"{(use[s].dense_parameters + use[s].dense_gradients + use[s].dense_optimizer) / 1e9:.2f}" for s in _SHOWN
        ]
        rows.append(["besides, the dense part", *dense])

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            stacked_bars(axes, [label(s) for s in _SHOWN], parts)
            tidy(axes, y="GB a device", title="Phi-3.5-MoE, cluster B: model states of the MoE layers")
            legend(axes)

        ep, themis, rm, flex = (use[s] for s in ("ep", "themis", "themis-rm", "flex-moe"))
        claims = [
            claim(
                "memory_flex",
                "States of FlexMoE over Themis",
                3.0,
                flex.model_states / themis.model_states,
                counted=False,
            ),
            claim(
                "memory_param", "Parameters of Themis over EP", 3.1, themis.parameters / ep.parameters, counted=False
            ),
            claim("memory_total", "States of Themis over EP", 1.356, themis.model_states / ep.model_states),
            claim(
                "memory_rm_param",
                "Parameters of Themis-RM over Themis",
                0.546,
                rm.parameters / themis.parameters,
                counted=False,
            ),
            claim("memory_rm_total", "States of Themis-RM over EP", 1.178, rm.model_states / ep.model_states),
        ]
        orderings = [
            Ordering(
                "memory",
                "FlexMoE needs most, then Themis, then Themis-RM, then EP",
                flex.model_states > themis.model_states > rm.model_states > ep.model_states,
            )
        ]
        table = TableData("GB a device", ["", *map(label, _SHOWN)], rows)
        return Page(self.key, "Figure 12. Memory of model states", [table], claims, orderings, draw=draw)


@final
class OutOfMemory(Study):
    """Figure 13a: GPT-L-MoE on B under growing batches."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig13a"

    def jobs(self) -> list[Job]:
        """Every system but Uniform, at the common batch; what a batch needs grows in proportion."""
        batch = common_batch("gpt-l-moe", "b")
        return [standard_job("gpt-l-moe", "b", policy, batch) for policy in _SHOWN]

    def page(self, results: Results) -> Page:
        """See Study."""
        found = {job.policy: (job, results[job]) for job in self.jobs()}
        fails = {policy: _first_failing(job, result) for policy, (job, result) in found.items()}
        rows = [
            [
                label(s),
                str(fails[s]),
                f"{found[s][1].memory.total / 1e9:.1f}",
                f"{found[s][1].memory.activations / 1e9:.1f}",
            ]
            for s in _SHOWN
        ]
        first = min(fails.values())
        last = max(fails.values())

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            for index, system in enumerate(_SHOWN):
                job, result = found[system]
                batches = range(max(1, first - 4), last + 2)
                used = [_at_batch(job, result, batch) / 1e9 for batch in batches]
                axes.plot(batches, used, color=colour(system, index), label=label(system))
            axes.axhline(found["ep"][1].memory_limit / 1e9, color="black", linestyle="--", linewidth=1)
            tidy(axes, x="batch, sequences a device", y="GB on the fullest device", title="GPT-L-MoE, cluster B")
            legend(axes)

        names = {"flex-moe": 9, "ep": 10, "smart-moe": 10, "faster-moe": 12}
        claims = [
            claim(f"oom_{policy}", f"First batch at which {label(policy)} runs out", paper, fails[policy])
            for policy, paper in names.items()
        ]
        order = [fails[policy] for policy in ("flex-moe", "ep", "smart-moe", "faster-moe")]
        themis = min(fails["themis"], fails["themis-rm"])
        failing = ", ".join(f"{label(s)} {fails[s]}" for s in _SHOWN)
        orderings = [
            Ordering("oom_first", "FlexMoE runs out first", order[0] < min(order[1:]), failing),
            Ordering("oom_middle", "EP and SmartMoE run out before FasterMoE", max(order[1:3]) < order[3], failing),
            Ordering("oom_last", "Themis and Themis-RM run out last", themis > max(order), failing),
        ]
        header = ["system", "first failing batch", f"GB at batch {found['ep'][0].batch}", "of these activations"]
        table = TableData("Fullest device", header, rows)
        title = "Figure 13a. Memory of GPT-L-MoE on cluster B"
        return Page(self.key, title, [table], claims, orderings, draw=draw)


def _at_batch(job: Job, result: Result, batch: int) -> float:
    """Bytes on the fullest device at another batch: states stay, activations grow in proportion."""
    per_sequence = activation_bytes(job.workload(), result.peak) / job.batch
    return result.memory.total - result.memory.activations + per_sequence * batch


def _first_failing(job: Job, result: Result) -> int:
    batch = 1
    while _at_batch(job, result, batch) <= result.memory_limit:
        batch += 1
    return batch
