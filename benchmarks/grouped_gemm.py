"""bf16 on one CUDA device: tokens/s of an MoE layer with torch's grouped GEMM, and with a loop over experts.

Both run in one process and take turns. Where there is no CUDA device it says so, and ends with status 2.

    python -m benchmarks.grouped_gemm [--experts 64] [--tokens 16384] [--steps 20] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch

import themis
from themis.fssdp import MixedPrecision
from themis.moe import MoEConfig, MoELayer, grouped


def step_s(layer: MoELayer, x_TM: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    layer(x_TM).hidden.float().square().mean().backward()
    end.record()
    end.synchronize()
    layer.zero_grad(set_to_none=True)
    return begin.elapsed_time(end) / 1e3


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("grouped_gemm needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    layer = MoELayer(MoEConfig(2048, 1408, given.experts, 4, experts="swiglu")).cuda()
    themis.parallelize(layer, policy=themis.EP(), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    x_TM = torch.randn(given.tokens, 2048, device="cuda", dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {"grouped": [], "loop": []}
    for step in range(given.steps + 3):
        for name, times in seconds.items():
            # Without a stack to be found, the layer falls back to its loop.
            with mock.patch.object(grouped, "_as_stack", grouped._as_stack if name == "grouped" else lambda _: None):
                spent_s = step_s(layer, x_TM)
            if step >= 3:
                times.append(spent_s)
    rates = {name: given.tokens / statistics.median(times) for name, times in seconds.items()}
    print("  ".join(f"{name}: {rate:,.0f} tokens/s" for name, rate in rates.items()))
    if given.out:
        record = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            **vars(given),
            "tokens_per_s": rates,
        }
        given.out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
