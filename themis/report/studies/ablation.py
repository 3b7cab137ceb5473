"""Figure 14, and the two trade-offs of rearrangement that the introduction measures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

from themis.report.assumptions import common_batch, policy_options, standard_job
from themis.report.claims import Ordering
from themis.report.jobs import Fields, Job, Results, workload
from themis.report.page import Page, Study, TableData
from themis.report.plots import tidy
from themis.report.studies.end_to_end import claim, standard
from themis.sim.memory import OPTIMIZER_BYTES

_MODEL, _PLACE = "phi-3.5-moe", "a"
_INTERVALS = (10, 25, 50, 100)
_GAINS = {10: 1.05, 25: 1.03, 50: 1.08, 100: 1.08}


def _variant(policy: str, model: str = _MODEL, place: str = _PLACE, **options: Any) -> Job:
    job = standard_job(model, place, policy, common_batch(model, place))
    kept: Fields = tuple((key, value) for key, value in job.options if key not in options)
    return replace(job, options=(*kept, *options.items()), iterations=100, warmup=101)


@final
class Components(Study):
    """Figure 14: heterogeneous sharding and materialisation, alone and together; Phi-3.5-MoE, cluster A assumed."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig14"

    def _named(self) -> dict[str, Job]:
        jobs = {
            "ep": _variant("ep"),
            "mat": _variant("themis", reshard_interval=0),
            "both": _variant("themis"),
        }
        return jobs | {f"shard{k}": _variant("themis", budget=0, reshard_interval=k) for k in _INTERVALS}

    def jobs(self) -> list[Job]:
        """EP, materialisation alone, both, and sharding alone at four intervals."""
        return list(self._named().values())

    def page(self, results: Results) -> Page:
        """See Study."""
        time = {name: results[job].iteration_s for name, job in self._named().items()}
        gain = {name: time["ep"] / seconds for name, seconds in time.items()}
        bars = {"EP": 1.0, "Sharding": gain["shard100"], "Mat.": gain["mat"], "both": gain["both"]}

        def draw(canvas: Any) -> None:
            left, right = canvas.subplots(1, 2)
            left.bar(list(bars), list(bars.values()), color="#D55E00")
            tidy(left, y="speedup over EP", title="(a) components")
            right.bar([str(k) for k in _INTERVALS], [gain[f"shard{k}"] for k in _INTERVALS], color="#0072B2")
            right.axhline(1.0, color="#999999", linewidth=0.8)
            tidy(right, x="re-sharding interval", y="speedup over EP", title="(b) sharding alone")

        claims = [
            claim(f"shard_{k}", f"Sharding alone over EP, interval {k}", _GAINS[k], gain[f"shard{k}"])
            for k in _INTERVALS
        ]
        claims += [
            claim("both_shard", "Both over sharding alone", 2.88, gain["both"] / gain["shard100"]),
            claim("both_mat", "Both over materialisation alone", 1.11, gain["both"] / gain["mat"]),
        ]
        spread = [gain[f"shard{k}"] for k in _INTERVALS]
        orderings = [
            Ordering(
                "components",
                "Together they beat either alone",
                gain["both"] > max(gain["mat"], gain["shard100"]),
                ", ".join(f"{name} {value:.2f}" for name, value in bars.items()),
            ),
            Ordering(
                "interval",
                "Sharding helps at every interval, by amounts within 10 %",
                min(spread) > 1 and max(spread) / min(spread) < 1.1,
            ),
        ]
        rows = [[name, f"{1e3 * time[name]:.1f}", f"{gain[name]:.3f}"] for name in time]
        table = TableData("Phi-3.5-MoE on cluster A", ["variant", "ms", "over EP"], rows)
        return Page(
            self.key, "Figure 14. Components, and the interval of re-sharding", [table], claims, orderings, draw=draw
        )


@final
class Rearrangement(Study):
    """Section 1's challenges: SmartMoE's interval, FlexMoE's reserve, and what moving an expert costs.

    SmartMoE on Qwen1.5-MoE: a model of one expert a device has nothing that a permutation could balance.
    """

    @property
    def key(self) -> str:
        """See Study."""
        return "rearrangement"

    def _named(self) -> dict[str, Job]:
        slots = dict(policy_options(_MODEL, _PLACE, "flex-moe"))
        least = {key: max(1, value // 3) for key, value in slots.items()}
        return {
            "SmartMoE, every 10": _variant("smart-moe", "qwen1.5-moe", interval=10),
            "SmartMoE, every 25": _variant("smart-moe", "qwen1.5-moe", interval=25),
            "ep": standard(_MODEL, _PLACE, "ep"),
            "FlexMoE, a third of the slots": _variant("flex-moe", **least),
            "FlexMoE": _variant("flex-moe"),
        }

    def jobs(self) -> list[Job]:
        """Two intervals of SmartMoE, two reserves of FlexMoE."""
        return list(self._named().values())

    def page(self, results: Results) -> Page:
        """See Study."""
        found = {name: results[job] for name, job in self._named().items()}
        often, seldom = found["SmartMoE, every 10"], found["SmartMoE, every 25"]
        shape = workload(_MODEL, _PLACE, 1).model
        parameters, state = 32 * shape.expert_bytes, 32 * shape.expert_parameters * OPTIMIZER_BYTES
        claims = [
            claim(
                "smart_quiet",
                "SmartMoE, interval 10 against 25: other iterations' time",
                0.971,
                often.quiet_s / seldom.quiet_s,
            ),
            claim(
                "smart_total",
                "SmartMoE, interval 10 against 25: time end to end",
                1.102,
                often.iteration_s / seldom.iteration_s,
            ),
            claim("move_param", "An expert a layer of Phi-3.5-MoE: GB of parameters", 5.0, parameters / 1e9),
            claim("move_state", "An expert a layer of Phi-3.5-MoE: GB of optimizer state", 30.2, state / 1e9),
            claim("move_s", "Moving it at 400 Gb/s, seconds", 0.7, (parameters + state) / 50e9),
        ]
        rows = [
            [
                name,
                f"{1e3 * r.iteration_s:.1f}",
                f"{1e3 * r.quiet_s:.1f}",
                f"{1e3 * r.spent_s['rearrangement']:.1f}",
                f"{r.imbalance:.2f}",
            ]
            for name, r in found.items()
        ]
        more = Ordering(
            "flex_reserve",
            "FlexMoE gains from a larger reserve",
            found["FlexMoE"].iteration_s < found["FlexMoE, a third of the slots"].iteration_s,
        )
        header = ["variant", "ms", "ms without rearrangement", "ms of rearrangement", "imbalance"]
        table = TableData("Cluster A: SmartMoE on Qwen1.5-MoE, the others on Phi-3.5-MoE", header, rows)
        return Page(self.key, "Rearrangement's trade-offs (sections 1 and 2.3)", [table], claims, [more])
