"""Figures 15 and 16: prediction of loads, and how much skew and top-K matter."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.planning import LoadPredictor, materialize
from themis.report.assumptions import (
    MODELS,
    PLACES,
    QWEN_STD,
    QWEN_STD_NO_LOSS,
    QWEN_STD_STRONG_LOSS,
    common_batch,
    policy_options,
    standard_job,
)
from themis.report.claims import Ordering
from themis.report.jobs import Job, Results, make_simulator
from themis.report.page import Page, Study, TableData
from themis.report.plots import label, legend, lines, tidy
from themis.report.studies.end_to_end import claim
from themis.sim.routing import GeneratedRouting, Skew, prediction_r2, scaled_std, score_scale

_MODEL = "qwen1.5-moe"
_SKEWS = (QWEN_STD_NO_LOSS, 0.043, 0.040, 0.037, QWEN_STD_STRONG_LOSS)
_SENSITIVE = ("ep", "faster-moe", "flex-moe", "themis", "themis-rm")
_TOP_K = (2, 3, 4, 5)


@final
class Prediction(Study):
    """Figure 15: the five-iteration mean against what came, Qwen1.5-MoE on A; and the planners' time."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig15"

    def jobs(self) -> list[Job]:
        """None: it needs loads alone."""
        return []

    def page(self, results: Results) -> Page:
        """See Study."""
        del results
        actual_ILE, predicted_ILE = _loads(300)
        windows = (1, 2, 5, 10, 20)
        flat_IX = actual_ILE.reshape(actual_ILE.shape[0], -1)
        r2 = {window: prediction_r2(flat_IX, window) for window in windows}
        expert = int(np.argsort(actual_ILE[:, 0].std(axis=0))[-3])

        def draw(canvas: Any) -> None:
            left, right = canvas.subplots(1, 2)
            left.plot(actual_ILE[:, 0, expert], color="#999999", linewidth=1, label="actual")
            left.plot(predicted_ILE[:, 0, expert], color="#D55E00", linewidth=1, label="predicted")
            tidy(left, x="iteration", y="share of tokens", title=f"(a) layer 0, expert {expert}")
            legend(left)
            right.scatter(predicted_ILE[::20].ravel(), actual_ILE[::20].ravel(), s=3, color="#0072B2")
            most = float(actual_ILE.max())
            right.plot([0, most], [0, most], color="black", linewidth=0.8)
            tidy(right, x="predicted share", y="actual share", title=f"(b) all experts and layers, R² {r2[5]:.3f}")

        median_s, late_s = _plan_times()
        claims = [
            claim("r2", "R² of the prediction", 0.99, r2[5], counted=False),
            claim("plan_low", "Median time of a plan, fastest model, µs", 24, 1e6 * min(median_s)),
            claim("plan_high", "Median time of a plan, slowest model, µs", 51, 1e6 * max(median_s)),
            claim("plan_p95", "95th percentile of a plan's time, µs", 67, 1e6 * max(late_s)),
        ]
        rows = [[str(window), f"{value:.4f}"] for window, value in r2.items()]
        table = TableData("R² by window", ["iterations averaged", "R²"], rows)
        note = (
            "Drift is an input: the generator is set to R² 0.99. Plan times are of `materialize`, on this machine, "
            "over figure 9's ten settings."
        )
        return Page(self.key, "Figure 15. Load prediction", [table], claims, (), [note], draw, (9.0, 4.0))


def _loads(iterations: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(actual, predicted) shares [iteration, L, E] from the fifth iteration on."""
    work = standard_job(_MODEL, "a", "ep", 1).workload()
    model = work.model
    routing = GeneratedRouting.for_workload(work, Skew(QWEN_STD), 0)
    predictor, actual, predicted = LoadPredictor(), [], []
    for _ in range(iterations):
        load_LE = np.stack([routing.tokens_ED(layer).sum(axis=1) for layer in range(model.num_layers)]).astype(float)
        load_LE /= load_LE.sum(axis=1, keepdims=True)
        guess_LE = predictor.predict()
        predicted.append(load_LE if guess_LE is None else guess_LE)
        actual.append(load_LE)
        predictor.observe(load_LE)
        routing.advance()
    return np.stack(actual[5:]), np.stack(predicted[5:])


def _plan_times() -> tuple[list[float], list[float]]:
    """(medians, 95th percentiles) over ten settings, seconds a layer."""
    medians, late = [], []
    for place in PLACES:
        for model in MODELS:
            job = standard_job(model, place, "themis", common_batch(model, place))
            work = job.workload()
            simulator = make_simulator(job, work)
            tokens_ED = simulator.routing.tokens_ED(0)
            topology, budget = work.cluster.topology, dict(policy_options(model, place, "themis"))["budget"]
            load_E = tokens_ED.sum(axis=1).astype(float)
            owner_E = np.arange(load_E.size) * work.cluster.num_devices // load_E.size
            degree = int(work.window_s * topology.ingress_bytes_per_s / work.model.expert_bytes)
            spent = []
            for _ in range(200):
                start_s = time.perf_counter()
                materialize(owner_E, load_E, topology, overlap_degree=degree, budget=budget)
                spent.append(time.perf_counter() - start_s)
            medians.append(float(np.median(spent)))
            late.append(float(np.percentile(spent, 95)))
    return medians, late


@final
class Imbalance(Study):
    """Figure 16a: Qwen1.5-MoE on B as the auxiliary loss evens the routing out."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig16a"

    def jobs(self) -> list[Job]:
        """Five skews between the paper's two."""
        batch = common_batch(_MODEL, "b")
        jobs = [standard_job(_MODEL, "b", policy, batch) for policy in _SENSITIVE]
        return [replace(job, share_std=std, iterations=60, warmup=45) for job in jobs for std in _SKEWS]

    def page(self, results: Results) -> Page:
        """See Study."""
        time_s = {(job.policy, job.share_std): results[job].iteration_s for job in self.jobs()}
        first, last = _SKEWS[0], _SKEWS[-1]
        gain = {s: 100 * (1 - time_s[s, last] / time_s[s, first]) for s in _SENSITIVE}

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            lines(axes, _SKEWS, {s: [1e3 * time_s[s, std] for std in _SKEWS] for s in _SENSITIVE})
            axes.invert_xaxis()
            axes.set_ylim(bottom=0)
            tidy(axes, x="standard deviation of expert shares", y="ms an iteration", title="Qwen1.5-MoE, cluster B")
            legend(axes)

        apart = [time_s["flex-moe", std] / time_s["faster-moe", std] for std in (first, last)]
        papers = {"ep": 16.5, "faster-moe": 19.2, "flex-moe": 30.0, "themis": 15.4}
        claims = [claim(f"skew_{s}", f"{label(s)} gains from evener routing, %", papers[s], gain[s]) for s in papers]
        claims += [
            claim("skew_apart", "FlexMoE's time over FasterMoE's, high skew", 1.346, apart[0]),
            claim("skew_near", "FlexMoE's time over FasterMoE's, lower skew", 1.167, apart[1]),
        ]
        shown = ", ".join(f"{label(s)} {gain[s]:.1f} %" for s in _SENSITIVE)
        orderings = [
            Ordering("skew_all", "Every system gains from evener routing", min(gain.values()) > 0, shown),
            Ordering(
                "skew_least",
                "Themis and Themis-RM gain least",
                max(gain["themis"], gain["themis-rm"]) < min(gain[s] for s in ("ep", "faster-moe", "flex-moe")),
                shown,
            ),
            Ordering("skew_gap", "FlexMoE's distance to FasterMoE shrinks", apart[1] < apart[0]),
        ]
        rows = [[label(s), *(f"{1e3 * time_s[s, std]:.1f}" for std in _SKEWS), f"{gain[s]:.1f}"] for s in _SENSITIVE]
        table = TableData("ms an iteration by skew", ["system", *map(str, _SKEWS), "gain, %"], rows)
        return Page(self.key, "Figure 16a. Routing skew", [table], claims, orderings, draw=draw)


@final
class TopK(Study):
    """Figure 16b: Qwen1.5-MoE on B with two to five experts a token."""

    @property
    def key(self) -> str:
        """See Study."""
        return "fig16b"

    def jobs(self) -> list[Job]:
        """Experts are as popular as at K = 4: scores keep their scale, while no share can exceed 1/K."""
        scale = score_scale(QWEN_STD, 64, 4)
        batch = common_batch(_MODEL, "b")
        jobs = [standard_job(_MODEL, "b", policy, batch) for policy in _SENSITIVE]
        return [
            replace(job, top_k=k, share_std=scaled_std(scale, 64, k), iterations=60, warmup=45)
            for job in jobs
            for k in _TOP_K
        ]

    def page(self, results: Results) -> Page:
        """See Study."""
        time_s = {(job.policy, job.top_k): results[job].iteration_s for job in self.jobs()}
        growth = {s: 100 * (time_s[s, 5] / time_s[s, 2] - 1) for s in _SENSITIVE}

        def draw(canvas: Any) -> None:
            axes = canvas.subplots()
            lines(axes, _TOP_K, {s: [1e3 * time_s[s, k] for k in _TOP_K] for s in _SENSITIVE})
            axes.set_xticks(_TOP_K)
            axes.set_ylim(bottom=0)
            tidy(axes, x="K", y="ms an iteration", title="Qwen1.5-MoE, cluster B")
            legend(axes)

        claims = [
            claim("k_themis", "Themis's time from K = 2 to 5, % more", 21.2, growth["themis"]),
            claim("k_ep", "EP's time from K = 2 to 5, % more", 63.6, growth["ep"]),
        ]
        flat = Ordering(
            "k_flat",
            "Themis grows least",
            growth["themis"] <= min(growth[s] for s in ("ep", "faster-moe", "flex-moe")),
            ", ".join(f"{label(s)} {growth[s]:.1f} %" for s in _SENSITIVE),
        )
        rows = [[label(s), *(f"{1e3 * time_s[s, k]:.1f}" for k in _TOP_K), f"{growth[s]:.1f}"] for s in _SENSITIVE]
        table = TableData("ms an iteration by K", ["system", *(f"K = {k}" for k in _TOP_K), "growth, %"], rows)
        return Page(self.key, "Figure 16b. Experts a token", [table], claims, [flat], draw=draw)
