"""Two ranks on this machine, recorded and replayed: measure the host, train, and compare step times.

python -m benchmarks.replay OUT: writes OUT/host.json, a profile for `themis simulate`, trains under EP and Themis
with every step's routing recorded, and prints predicted over recorded seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from themis.cli.main import main as themis
from themis.models.gpt_moe import Block, GPTMoEConfig
from themis.sim.hardware import read_profile
from themis.sim.replay import read_run, replay
from themis.testing.ranks import run_ranks

WIDTH, HIDDEN, EXPERTS, LAYERS, SEQUENCE, SEQUENCES, RANKS = 256, 512, 8, 4, 128, 16, 2
TOKENS = SEQUENCE * SEQUENCES // RANKS
STEPS = 40


def median_s(work: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of `work`, both ranks at it at once."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return sorted(seconds)[repeats // 2]


def measure(rank: int) -> dict[str, float]:
    """What one of two ranks reaches: attention, a layer of experts with all around its GEMMs, AlltoAll, AdamW."""
    del rank
    torch.set_num_threads(1)
    config = GPTMoEConfig(width=WIDTH, num_heads=4, expert_hidden=HIDDEN, num_experts=EXPERTS, sequence_length=SEQUENCE)
    block = Block(config)
    x_BSM = torch.randn(TOKENS // SEQUENCE, SEQUENCE, WIDTH, requires_grad=True)

    def attention() -> None:
        (x_BSM + block.attention(block.attention_norm(x_BSM))).sum().backward()

    def experts() -> None:
        block.moe(block.moe_norm(x_BSM)).hidden.sum().backward()

    values = [nn.Parameter(torch.randn(1_000_000)) for _ in range(4)]
    optimizer = torch.optim.AdamW(values)
    for value in values:
        value.grad = torch.randn_like(value)

    def exchange(numel: int) -> Callable[[], None]:
        sent, got = torch.randn(numel), torch.empty(numel)
        return lambda: dist.all_to_all_single(got, sent)

    flops = 3 * (2 * 4 * WIDTH**2 * TOKENS + 4 * WIDTH * TOKENS * SEQUENCE / 2)
    small_s, large_s = median_s(exchange(64), 31), median_s(exchange(4_000_000))
    return {
        "flops_per_s": flops / median_s(attention),
        "grouped_flops_per_s": 3 * 2 * 2 * WIDTH * HIDDEN * 2 * TOKENS / median_s(experts),
        "latency_s": small_s,
        "bytes_per_s": 2_000_000 * 4 / (large_s - small_s),
        "memory_bytes_per_s": 4_000_000 * 32 / median_s(optimizer.step),
    }


def profile() -> dict[str, Any]:
    """The host as a profile: the slower rank's speeds."""
    ranks = run_ranks(RANKS, measure, timeout_s=120)
    speed = {key: (max if key == "latency_s" else min)(rank[key] for rank in ranks) for key in ranks[0]}
    link = {"latency_s": speed.pop("latency_s"), "bytes_per_s": speed.pop("bytes_per_s")}
    device = {"name": "one CPU core", "memory_bytes": 4_000_000_000, **speed}
    return {"name": "host", "num_nodes": 1, "devices_per_node": RANKS, "device": device, "intra": link, "inter": link}


def main(out: Path) -> None:
    """Measure, train, replay."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    host = out / "host.json"
    host.write_text(json.dumps(profile(), indent=2))
    print(host.read_text())
    for policy in ("ep", "themis"):
        run = out / policy
        sizes = {"width": WIDTH, "expert-hidden": HIDDEN, "num-experts": EXPERTS, "num-layers": LAYERS}
        flags = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
        flags += ["--batch.sequences", str(SEQUENCES), "--log.routing-every", "1", "--log.evaluate-every", "0"]
        flags += ["--log.sample-tokens", "0", "--checkpoint.every", "0", "--steps", str(STEPS)]
        code = themis(["train", "tiny", "--nproc", str(RANKS), "--policy", policy, "--run-dir", str(run), *flags])
        assert code == 0, policy
        told = replay(read_run(run, read_profile(host)))
        spent = {kind: round(1e3 * seconds, 2) for kind, seconds in told.result.spent_s.items()}
        print(f"{policy}: {told.result.iteration_s:.4f} of {told.recorded_s:.4f} s, {told.ratio:.2f}; ms {spent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
