"""The straggler effect on two ranks: one MoE layer under a skewed gate, by policy, and against the bare GEMM time.

Two forked ranks of one thread each (Gloo); width 512, hidden 2048, 8 experts, top-2, 2,048 tokens a rank, float32.
The gate is biased so that one expert gets half of the assignments; a second setting is even. A step is the forward
and backward of the layer; with --attention a dense layer of width 512 stands before it, for transfers to hide under.
The bound is torch.mm of the experts' FLOPs, forward and backward, on both ranks at once. Everything is interleaved
step by step in one run, so that a slow moment of the machine meets all alike, and ratios are medians of the steps'.

    python -m benchmarks.straggler [--steps 12] [--attention] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import themis
from themis.comm.collectives import all_reduce_max, barrier
from themis.fssdp import executor_of
from themis.moe import MoEConfig, MoELayer
from themis.moe.host_memory import keep_host_memory
from themis.policies import EP, Policy, Themis, ThemisRM, Uniform
from themis.testing.ranks import run_ranks

WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 2048, 8, 2, 2048


def policies() -> dict[str, Policy]:
    """The policies compared; re-sharding is left out, as a step is what is timed."""
    return {
        "ep": EP(),
        "uniform": Uniform(),
        "themis": Themis(budget=2, overlap_degree=4, reshard_interval=0),
        "themis, balanced split": Themis(budget=2, overlap_degree=4, reshard_interval=0, dispatch_rule="balanced"),
        "themis-rm": ThemisRM(budget=2, overlap_degree=4, reshard_interval=0),
    }


class Block(nn.Module):
    """A dense layer in attention's place, or nothing, then the MoE layer."""

    def __init__(self, kind: str, attention: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH) if attention else None
        if self.dense is not None:  # feature 0, which carries the gate's bias, stays as it is
            nn.init.zeros_(self.dense.weight[0])
            nn.init.zeros_(self.dense.bias)
        self.moe = MoELayer(MoEConfig(WIDTH, HIDDEN, EXPERTS, TOP_K, experts=kind, bias=False))

    def forward(self, x_TM: Tensor) -> Tensor:
        """[T, M] to [T, M]."""
        if self.dense is not None:
            x_TM = x_TM + self.dense(x_TM)
        return self.moe(x_TM).hidden


class Model(nn.Module):
    """One block, so that what is timed is the layer."""

    def __init__(self, kind: str, attention: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(kind, attention)])

    def forward(self, x_TM: Tensor) -> Tensor:
        """[T, M] to [T, M]."""
        return self.blocks[0](x_TM)


def skew(gate_weight: Tensor, skewed: bool) -> None:
    """Feature 0 is 1 for every token, so the weight on it is a bias: all tokens choose expert 0 with one of K = 2."""
    with torch.no_grad():
        gate_weight[:, 0] = 0.0
        if skewed:
            gate_weight[0, 0] = 8.0


class Timed:
    """A policy's model and the seconds of its steps."""

    def __init__(self, policy: Policy, kind: str, skewed: bool, attention: bool) -> None:
        torch.manual_seed(0)
        self.model = Model(kind, attention)
        skew(self.model.blocks[0].moe.gate.weight, skewed)
        themis.parallelize(self.model, policy=policy)
        self.mesh = executor_of(self.model).mesh
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.gradient_TM = torch.full((TOKENS, WIDTH), 1e-3)
        self.seconds: list[float] = []

    def step(self, x_TM: Tensor, count: bool) -> None:
        """One step; its time is the slowest rank's."""
        barrier(self.mesh)
        began_s = time.perf_counter()
        self.model(x_TM).backward(self.gradient_TM)
        # No rank's step is over before the slowest rank's.
        spent_s = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
        all_reduce_max(self.mesh, spent_s)
        if count:
            self.seconds.append(spent_s.item())
        self.optimizer.step()
        self.optimizer.zero_grad()


def bare_gemm_s(mesh: Any, rows: int, kind: str) -> float:
    """Forward and backward GEMMs of `rows` assignments as one group, slowest rank."""
    x_AM, h_AH = torch.randn(rows, WIDTH), torch.randn(rows, HIDDEN)
    w1, w2 = torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)
    wide = 2 if kind == "swiglu" else 1
    barrier(mesh)
    began_s = time.perf_counter()
    for _ in range(wide):
        torch.mm(x_AM, w1), torch.mm(h_AH, w1.t()), torch.mm(x_AM.t(), h_AH)
    torch.mm(h_AH, w2), torch.mm(x_AM, w2.t()), torch.mm(h_AH.t(), x_AM)
    spent_s = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
    return float(all_reduce_max(mesh, spent_s).item())


def measure(rank: int, kind: str, skewed: bool, attention: bool, steps: int) -> dict[str, Any]:
    """Seconds of each policy's steps and of the bare GEMMs, interleaved."""
    keep_host_memory()
    timed = {name: Timed(policy, kind, skewed, attention) for name, policy in policies().items()}
    mesh = timed["ep"].mesh
    x_TM = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    x_TM[:, 0] = 1.0
    x_TM.requires_grad_()  # as in a model, the layer's backward reaches its input
    rows = TOKENS * TOP_K
    bound = []
    for step in range(steps + 3):
        for one in timed.values():
            one.step(x_TM, step >= 3)
        seconds = bare_gemm_s(mesh, rows, kind)
        if step >= 3:
            bound.append(seconds)
    reports = {name: themis.step_report(one.model)[0] for name, one in timed.items()}
    result = {
        "bound_s": bound,
        "seconds": {name: one.seconds for name, one in timed.items()},
        "share_of_busiest_expert": float(reports["ep"].load_E.max() / reports["ep"].load_E.sum()),
        "imbalance": {name: report.imbalance_after for name, report in reports.items()},
        "blocked_s": {name: executor_of(one.model).communicator.blocked_s / (steps + 3) for name, one in timed.items()},
    }
    for one in timed.values():
        executor_of(one.model).close()
    return result


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 2 ranks of one thread",
        "steps": arguments.steps,
        "attention": arguments.attention,
    }
    for kind in ("gpt", "swiglu"):
        for routing in ("even", "skewed"):
            result = run_ranks(
                2, measure, kind, routing == "skewed", arguments.attention, arguments.steps, timeout_s=1200.0
            )[0]
            results[f"{kind}, {routing}"] = result
            show(kind, routing, result)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def show(kind: str, routing: str, result: dict[str, Any]) -> None:
    """One table; ratios are medians of step-by-step ratios."""
    bound, uniform = np.array(result["bound_s"]), np.array(result["seconds"]["uniform"])
    share = result["share_of_busiest_expert"]
    print(f"\n{kind}, {routing} routing (busiest expert {share:.0%}); bare GEMM {np.median(bound) * 1e3:.0f} ms")
    print(f"{'policy':24}{'ms':>8}{'to Uniform':>12}{'to GEMM':>10}{'imbalance':>11}{'waiting ms':>12}")
    for name, seconds in result["seconds"].items():
        times = np.array(seconds)
        ratios = np.median(times / uniform), np.median(times / bound)
        waiting = result["blocked_s"][name] * 1e3
        row = f"{name:24}{np.median(times) * 1e3:8.0f}{ratios[0]:12.2f}{ratios[1]:10.2f}"
        print(f"{row}{result['imbalance'][name]:11.2f}{waiting:12.1f}")


if __name__ == "__main__":
    main()
