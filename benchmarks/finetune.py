"""Fine-tuning a tiny Qwen MoE for 100 steps: Themis and EP on two ranks, and transformers alone in one process.

A model of the shape of Qwen1.5-MoE, scaled down, is first trained for a while on the standard library's sources and
saved by transformers; then each way reads that directory and goes on training on English text, the project's own
documents and the licences at hand, byte by byte. Same data, same seed, same optimizer. In float64 the loss curves are
compared; in float32 memory and speed are taken, in fresh processes, three times in turn, medians: memory is the
kernel's count of resident memory beyond what was there before the model was read (its peak), speed is tokens of all
ranks a second over the last 80 steps. Two ranks of one thread each stand beside one process of one thread, and of two.

    python -m benchmarks.finetune [--steps 100] [--repeats 3] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

import themis
from benchmarks.loading import reset_peak, resident_bytes
from themis.fssdp import executor_of
from themis.policies import EP, Policy, Themis
from themis.testing.ranks import run_ranks
from themis.train.sources import documents

LENGTH, BATCH, WARM_UP = 128, 16, 20
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 88,
    "shared_expert_intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "max_position_embeddings": LENGTH,
}
WAYS = ("one process, one thread", "one process, two threads", "EP, two ranks", "Themis, two ranks")


def text(kind: str) -> torch.Tensor:
    """Real bytes [T]: the standard library's sources, or the documents at hand."""
    if kind == "sources":
        parts: list[str] = []
        for document in documents("", "text"):
            parts.append(document)
            if sum(map(len, parts)) > 4_000_000:
                break
    else:
        root = Path(__file__).parents[1]
        parts = [path.read_text() for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md"), root / "LICENSE"])]
    return torch.tensor(list("\n".join(parts).encode()), dtype=torch.uint8)


def batch(data: torch.Tensor, step: int, rows: slice) -> torch.Tensor:
    """`rows` of the tokens [B, S] of a step, the same for every number of ranks."""
    starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + LENGTH] for start in starts[rows]]).long()


def train(model: Any, data: torch.Tensor, steps: int, rows: slice, *, lr: float = 1e-4) -> tuple[list[float], float]:
    """The loss of each step over all ranks, and the tokens a second of all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, began_s = [], 0.0
    for step in range(steps):
        if step == min(WARM_UP, steps - 1):
            began_s = time.perf_counter()
        tokens = batch(data, step, rows)
        logits = model(input_ids=tokens).logits  # transformers' own loss is in float32 whatever the model is in
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if dist.get_world_size() > 1:
            themis.clip_grad_norm_(model, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    timed = steps - min(WARM_UP, steps - 1)
    return losses, timed * BATCH * LENGTH / (time.perf_counter() - began_s)


def pretrain(rank: int, path: Path, steps: int) -> float:
    """Make the directory, and the documents beside it, which may change meanwhile; returns the last loss."""
    del rank
    path.mkdir()
    (path / "documents").write_bytes(bytes(text("documents").tolist()))
    torch.manual_seed(0)
    model: Any = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SHAPE))
    losses, _ = train(model, text("sources"), steps, slice(None), lr=2e-3)
    model.save_pretrained(path)
    return losses[-1]


def finetune(rank: int, path: Path, way: str, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """One run of a way on this rank."""
    data = torch.tensor(list((path / "documents").read_bytes()), dtype=torch.uint8)
    torch.set_num_threads(2 if way.endswith("two threads") else 1)
    torch.mm(torch.ones(8, 8), torch.ones(8, 8)).sum()  # what torch allocates once is no one's
    before = reset_peak()
    if way.startswith("one"):
        load = transformers.Qwen2MoeForCausalLM.from_pretrained
        kernel = "eager" if dtype == torch.float64 else "grouped_mm"  # transformers' default, for 32 bits at most
        model: Any = load(path, dtype=dtype, experts_implementation=kernel).train()
        rows = slice(None)
    else:
        policy: Policy = EP() if way.startswith("EP") else Themis(budget=2, overlap_degree=4, reshard_interval=50)
        model = themis.from_pretrained(path, dtype=dtype, policy=policy)
        rows = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    losses, tokens_per_s = train(model, data, steps, rows)
    peak = resident_bytes("VmHWM") - before
    imbalance = None
    if not way.startswith("one"):
        imbalance = statistics.mean(report.imbalance_after for report in themis.step_report(model))
        executor_of(model).close()
    return {"losses": losses, "tokens_per_s": tokens_per_s, "peak_bytes": peak, "imbalance": imbalance}


def measure(path: Path, steps: int, repeats: int) -> dict[str, Any]:
    """All runs."""
    ranks = {way: 2 if way.endswith("ranks") else 1 for way in WAYS}
    curves = {
        way: run_ranks(ranks[way], finetune, path, way, torch.float64, steps, timeout_s=900)[0]["losses"]
        for way in WAYS
    }
    reference = curves[WAYS[0]]
    differences = {
        way: max(abs(a - b) / b for a, b in zip(curve, reference, strict=True)) for way, curve in curves.items()
    }
    print("float64, largest relative difference from one process's loss:", differences, flush=True)
    runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS:
            runs[way].append(run_ranks(ranks[way], finetune, path, way, torch.float32, steps, timeout_s=900))
            print(f"{repeat + 1}/{repeats} {way}: {runs[way][-1][0]['tokens_per_s']:.0f} tokens/s", flush=True)
    first = runs[WAYS[0]][0][0]["losses"]
    return {
        "loss_float64": {"first": reference[0], "last": reference[-1]},
        "loss_difference_float64": differences,
        "float32": [
            {
                "way": way,
                "tokens_per_s": round(statistics.median(run[0]["tokens_per_s"] for run in runs[way])),
                "peak_bytes_a_rank": round(
                    statistics.median(max(one["peak_bytes"] for one in run) for run in runs[way])
                ),
                "imbalance": runs[way][0][0]["imbalance"],
                "loss_difference": max(abs(a - b) / b for a, b in zip(runs[way][0][0]["losses"], first, strict=True)),
            }
            for way in WAYS
        ],
    }


def main() -> None:
    """Measure and print; write JSON where `--out` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "qwen"
        (loss,) = run_ranks(1, pretrain, path, 2 * arguments.steps, timeout_s=900)
        print(f"trained at first to a loss of {loss:.2f}", flush=True)
        result = {
            "versions": {
                "themis": themis.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "machine": f"{platform.system()} {platform.machine()}, two cores",
            "steps": arguments.steps,
            **measure(path, arguments.steps, arguments.repeats),
        }
    print(json.dumps(result["float32"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
