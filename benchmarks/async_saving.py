"""How long training waits for a checkpoint on two ranks: saved on its own thread, and in the background.

A GPT with MoE layers and its AdamW state, 108 MB over two forked ranks of one thread each (Gloo, float32). A round
is, for each way of saving in turn, one save and the steps after it, until the save is on disk; and as many steps
without a save. So a slow moment of the machine meets all alike. A time is the slowest rank's; figures are medians over
rounds. "waits" is what the call of a save takes; "costs" is what the round took longer than its steps without a save,
with the share of the processors that writing in the background takes from training.

    python -m benchmarks.async_saving [--rounds 12] [--steps 6] [--directory /tmp] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import themis
from themis.comm.collectives import all_reduce_max, all_reduce_sum, barrier
from themis.comm.mesh import Mesh
from themis.fssdp import executor_of
from themis.models import GPTMoE, GPTMoEConfig
from themis.moe.host_memory import keep_host_memory
from themis.testing.ranks import run_ranks
from themis.train.saver import Saver
from themis.train.state import model_tensors, optimizer_tensors

MODEL = GPTMoEConfig(
    sequence_length=128, width=256, num_heads=4, num_layers=2, num_experts=8, top_k=2, expert_hidden=1024
)
SEQUENCES = 8
WAYS = ("synchronous", "asynchronous")


class Training:
    """The model, its optimizer, and a batch that stays the same."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = GPTMoE(MODEL)
        themis.parallelize(self.model, policy=themis.Themis(overlap_degree=2, calibration=False, reshard_interval=0))
        self.mesh: Mesh = executor_of(self.model).mesh
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        draw = torch.Generator().manual_seed(rank)
        self.tokens_BS = torch.randint(256, (SEQUENCES, MODEL.sequence_length), generator=draw)

    def steps(self, count: int) -> None:
        """Train `count` steps."""
        for _ in range(count):
            self.model(self.tokens_BS, self.tokens_BS).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is saved."""
        return {**model_tensors(self.model), **optimizer_tensors(self.model, self.optimizer)}


def slowest(mesh: Mesh, seconds: float) -> float:
    """The largest of all ranks' `seconds`."""
    return float(all_reduce_max(mesh, torch.tensor([seconds], dtype=torch.float64)).item())


def whole_bytes(training: Training) -> int:
    """Bytes of a checkpoint: experts and their states of all ranks, everything else once."""
    own = sum(value.nbytes for name, value in training.tensors().items() if ".experts." in name)
    dense = sum(value.nbytes for name, value in training.tensors().items() if ".experts." not in name)
    return int(all_reduce_sum(training.mesh, torch.tensor([own])).item()) + dense


def measure(rank: int, directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of each way, a round each; two rounds before them warm up."""
    keep_host_memory()
    training = Training(rank)
    mesh = training.mesh
    training.steps(2)
    savers = {way: Saver(directory / way, mesh, keep=2, asynchronous=way == WAYS[1]) for way in WAYS}
    seconds: dict[str, list[float]] = {"steps alone": []}
    for number in range(rounds + 2):
        for way, saver in [("steps alone", None), *savers.items()]:
            barrier(mesh)
            began_s = time.perf_counter()
            waited_s = 0.0
            if saver is not None:
                saver.save(number, training.tensors(), {}, {})
                waited_s = slowest(mesh, time.perf_counter() - began_s)
            training.steps(steps)
            stepped_s = slowest(mesh, time.perf_counter() - began_s)
            if saver is not None:
                saver.wait()
            round_s = slowest(mesh, time.perf_counter() - began_s)
            if number >= 2:
                if saver is None:
                    seconds[way].append(round_s)
                else:
                    for name, value in (("waits", waited_s), ("steps", stepped_s), ("round", round_s)):
                        seconds.setdefault(f"{way} {name}", []).append(value)
        if rank == 0:
            print(f"round {number + 1} of {rounds + 2}", flush=True)
    size = whole_bytes(training)
    executor_of(training.model).close()
    return {"checkpoint_bytes": size, "seconds": seconds}


def summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians: of the waits, and of what a round took longer than the same round's steps alone."""
    alone = seconds["steps alone"]
    figures = {"steps_alone_s": statistics.median(alone)}
    for way in WAYS:
        figures[f"{way}_waits_s"] = statistics.median(seconds[f"{way} waits"])
        costs = [with_s - without_s for with_s, without_s in zip(seconds[f"{way} round"], alone, strict=True)]
        figures[f"{way}_costs_s"] = statistics.median(costs)
        rest = [end_s - step_s for end_s, step_s in zip(seconds[f"{way} round"], seconds[f"{way} steps"], strict=True)]
        figures[f"{way}_rest_after_steps_s"] = statistics.median(rest)
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="steps after each save")
    parser.add_argument("--directory", type=Path, help="where 500 MB may lie for the while")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as parent:
        result = run_ranks(2, measure, Path(parent), arguments.rounds, arguments.steps, timeout_s=1200.0)[0]
    figures = summary(result["seconds"])
    print(f"checkpoint of {result['checkpoint_bytes'] / 1e6:.0f} MB, {arguments.steps} steps after each")
    print(*(f"{name:40}{value:9.3f}" for name, value in figures.items()), sep="\n")
    record = {
        "versions": {
            "themis": themis.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 2 ranks of one thread",
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "medians": figures,
        **result,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
