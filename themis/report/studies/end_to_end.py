"""Figures 9, 10 and 11: speedups, layers, and what the critical path is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from themis.report.assumptions import BASELINES, MODELS, PLACES, RIVALS, SYSTEMS, common_batch, standard_job
from themis.report.claims import Claim, Ordering
from themis.report.jobs import Job, Results
from themis.report.page import Page, Study, TableData
from themis.report.plots import grouped_bars, label, legend, stacked_bars, tidy
from themis.report.reasons import REASONS
from themis.sim.results import Result

_CONFIGURATIONS = [(place, model) for place in PLACES for model in MODELS]


def standard(model: str, place: str, policy: str) -> Job:
    """Figure 9's job at the common batch."""
    return standard_job(model, place, policy, common_batch(model, place))


def claim(key: str, text: str, paper: float, ours: float, *, counted: bool = True) -> Claim:
    """A claim, with the reason that is on record for it."""
    return Claim(key, text, paper, ours, REASONS.get(key, ""), counted)


@final
class EndToEnd(Study):
    """Figure 9."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig9"

    def jobs(self) -> list[Job]:
        """Every system, and today's rivals, on every model and cluster."""
        return [standard(m, p, policy) for p, m in _CONFIGURATIONS for policy in (*SYSTEMS, *RIVALS)]

    def page(self, results: Results) -> Page:
        """See Study."""
        policies = (*SYSTEMS, *RIVALS)
        gain = {(p, m, policy): _speedup(results, m, p, policy) for p, m in _CONFIGURATIONS for policy in policies}
        rows = []
        for place, model in _CONFIGURATIONS:
            values = [f"{gain[place, model, policy]:.2f}" for policy in policies]
            rows.append([place.upper(), model, str(common_batch(model, place)), *values])
        header = ["cluster", "model", "batch", *map(label, policies)]

        def draw(canvas: Any) -> None:
            panels = canvas.subplots(2, 1, sharey=True)
            for axes, place in zip(panels, PLACES, strict=True):
                series = {s: [gain[place, m, s] for m in MODELS] for s in SYSTEMS if s != "uniform"}
                grouped_bars(axes, MODELS, series)
                for index, model in enumerate(MODELS):
                    uniform = gain[place, model, "uniform"]
                    axes.hlines(uniform, index - 0.45, index + 0.45, colors="black", linestyles="--", linewidth=1)
                axes.axhline(1.0, color="#999999", linewidth=0.8)
                tidy(axes, y="speedup over EP", title=f"Cluster {place.upper()} (dashed: Uniform)")
            canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)

        table = TableData("Speedup over EP", header, rows)
        return Page(
            self.key,
            "Figure 9. End-to-end speedups over EP",
            [table],
            _end_to_end_claims(gain),
            _end_to_end_orderings(gain),
            draw=draw,
            size=(9.0, 6.5),
        )


def _speedup(results: Results, model: str, place: str, policy: str) -> float:
    ep, other = results[standard(model, place, "ep")], results[standard(model, place, policy)]
    return ep.iteration_s / other.iteration_s


def _end_to_end_claims(gain: dict[tuple[str, str, str], float]) -> list[Claim]:
    def ratios(over: str, policies: Sequence[str] = ("themis",)) -> list[float]:
        return [gain[p, m, policy] / gain[p, m, over] for p, m in _CONFIGURATIONS for policy in policies]

    uniform = [gain[p, m, "uniform"] for p, m in _CONFIGURATIONS]
    mean = {place: float(np.mean([gain[place, m, "themis"] for m in MODELS])) for place in PLACES}
    over_uniform = ratios("uniform", ("themis", "themis-rm"))
    faster = ratios("faster-moe")
    return [
        claim("uniform_min", "EP slower than Uniform, least", 1.48, min(uniform), counted=False),
        claim("uniform_max", "EP slower than Uniform, most", 2.87, max(uniform), counted=False),
        claim("themis_ep_max", "Themis over EP, most", 3.68, max(ratios("ep"))),
        claim("themis_ep_a", "Themis over EP, mean on A", 2.41, mean["a"]),
        claim("themis_ep_b", "Themis over EP, mean on B", 2.60, mean["b"]),
        claim("themis_faster_min", "Themis over FasterMoE, least", 1.26, min(faster)),
        claim("themis_faster_max", "Themis over FasterMoE, most", 2.37, max(faster)),
        claim("themis_smart_max", "Themis over SmartMoE, most", 3.27, max(ratios("smart-moe"))),
        claim("themis_flex_max", "Themis over FlexMoE, most", 2.92, max(ratios("flex-moe"))),
        claim("themis_uniform_min", "Themis and Themis-RM over Uniform, least", 1.07, min(over_uniform)),
        claim("themis_uniform_max", "Themis and Themis-RM over Uniform, most", 2.27, max(over_uniform)),
    ]


def _end_to_end_orderings(gain: dict[tuple[str, str, str], float]) -> list[Ordering]:
    def compare(key: str, text: str, better: Sequence[str], worse: Sequence[str]) -> Ordering:
        failing = [
            f"{p.upper()} {m}: {label(w)} {gain[p, m, w]:.2f}, {label(b)} {gain[p, m, b]:.2f}"
            for p, m in _CONFIGURATIONS
            for b in better
            for w in worse
            if gain[p, m, b] < gain[p, m, w]
        ]
        return Ordering(key, text, not failing, "; ".join(failing))

    ours = ("themis", "themis-rm")
    more = sum(gain[p, m, "themis-rm"] > gain[p, m, "themis"] for p, m in _CONFIGURATIONS)
    return [
        compare("ours_baselines", "Themis and Themis-RM beat every baseline everywhere", ours, BASELINES),
        compare(
            "faster", "FasterMoE beats SmartMoE and FlexMoE everywhere", ("faster-moe",), ("smart-moe", "flex-moe")
        ),
        compare("uniform", "Themis and Themis-RM beat Uniform everywhere", ours, ("uniform",)),
        Ordering("rm", "Themis-RM is faster than Themis in most settings", more > 5, f"in {more} of 10"),
    ]


@final
class Layers(Study):
    """Figure 10."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig10"

    def jobs(self) -> list[Job]:
        """EP and Themis, Qwen1.5-MoE on B."""
        return [standard("qwen1.5-moe", "b", policy) for policy in ("ep", "themis")]

    def page(self, results: Results) -> Page:
        """See Study."""
        ep, ours = (results[job] for job in self.jobs())
        gain_L = ep.layer_s / ours.layer_s
        rows = [[str(layer), f"{gain:.2f}"] for layer, gain in enumerate(gain_L)]

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            axes.bar(range(gain_L.size), gain_L, color="#D55E00")
            axes.axhline(1.0, color="#999999", linewidth=0.8)
            tidy(axes, x="MoE layer", y="speedup over EP", title="Qwen1.5-MoE, cluster B")

        claims = [
            claim("layer_min", "Speedup of a layer, least", 2.1, float(gain_L.min())),
            claim("layer_max", "Speedup of a layer, most", 8.1, float(gain_L.max())),
        ]
        every = Ordering("layers", "Themis is faster in every layer", bool((gain_L > 1).all()))
        table = TableData("Speedup over EP", ["layer", "speedup"], rows)
        return Page(self.key, "Figure 10. Layers of Qwen1.5-MoE on cluster B", [table], claims, [every], draw=draw)


@final
class Breakdown(Study):
    """Figure 11."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig11"

    def jobs(self) -> list[Job]:
        """Every system, Phi-3.5-MoE on A."""
        return [standard("phi-3.5-moe", "a", policy) for policy in SYSTEMS]

    def page(self, results: Results) -> Page:
        """See Study."""
        found = {job.policy: results[job] for job in self.jobs()}
        parts = {name: [1e3 * _part(found[s], kinds) for s in SYSTEMS] for name, kinds in _PARTS.items()}
        rows = [[name, *(f"{value:.1f}" for value in values)] for name, values in parts.items()]
        total = [f"{1e3 * found[s].iteration_s:.1f}" for s in SYSTEMS]
        waiting = [f"{1e3 * found[s].spent_s['waiting']:.1f}" for s in SYSTEMS]
        hidden = [f"{1e3 * found[s].sparse_s:.1f}" for s in SYSTEMS]
        rows += [["iteration", *total], ["of A2A, waiting for the slowest device", *waiting]]
        rows += [["sparse collectives, hidden or not", *hidden]]

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            stacked_bars(axes, [label(s) for s in SYSTEMS], parts)
            tidy(axes, y="ms an iteration", title="Phi-3.5-MoE, cluster A: critical path")
            legend(axes, ncols=2)

        a2a = {s: _part(found[s], ("all_to_all", "waiting")) for s in SYSTEMS}
        best = min(found[s].iteration_s for s in BASELINES)
        claims = [
            claim("a2a", "A2A time of EP over Themis", 13.0, a2a["ep"] / a2a["themis"]),
            claim(
                "rm_sparse",
                "Sparse collectives of Themis-RM over Themis",
                1.333,
                found["themis-rm"].sparse_s / found["themis"].sparse_s,
            ),
            claim("rm_baselines", "Themis-RM over the best baseline", 1.27, best / found["themis-rm"].iteration_s),
        ]
        lowest = Ordering(
            "a2a_lowest", "Themis's A2A time is below every baseline's", a2a["themis"] < min(a2a[s] for s in BASELINES)
        )
        most = Ordering(
            "a2a_most", "A2A, waiting included, is most of EP's time", a2a["ep"] > found["ep"].iteration_s / 2
        )
        table = TableData("ms an iteration", ["", *map(label, SYSTEMS)], rows)
        title = "Figure 11. Critical path of Phi-3.5-MoE on cluster A"
        return Page(self.key, title, [table], claims, [lowest, most], draw=draw)


_PARTS = {
    "A2A": ("all_to_all", "waiting"),
    "Comp": ("attention", "experts"),
    "SpAG/SpRS": ("gather", "reduce"),
    "AR": ("all_reduce",),
    "Rearr": ("rearrangement",),
    "Opt": ("optimizer",),
    "Plan": ("plan",),
}


def _part(result: Result, kinds: Sequence[str]) -> float:
    return sum(result.spent_s[kind] for kind in kinds)
