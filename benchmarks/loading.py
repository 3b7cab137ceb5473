"""Reading a 2-GB model directory on two ranks: time, and each rank's peak memory against its own part of the model.

A Qwen2-MoE of 1.03 billion parameters (bfloat16, 64 experts in 12 layers) is made once and read three ways, each in
fresh processes: per-expert tensors in one file, the same in files of 300 MB, and one stacked tensor a layer. The peak
is the kernel's count of resident memory from the moment before reading (VmHWM, reset), less what was resident then:
so pages of the files and of libraries that are loaded on the way count too. Beside it transformers' own
from_pretrained in one process, which holds the whole model, followed by the same for themis.export.

    python -m benchmarks.loading [--directory /tmp] [--out results.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import themis
from themis.fssdp import executor_of
from themis.testing.ranks import run_ranks

RANKS = 2
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 832,
    "shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
}


def make(rank: int, parent: Path) -> dict[str, Path]:
    """The three directories, by what is in them."""
    del rank
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(**SIZES)
    model: Any = transformers.Qwen2MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(parent / "one", max_shard_size="50GB")
    model.save_pretrained(parent / "many", max_shard_size="300MB")
    (parent / "stacked").mkdir()
    config.save_pretrained(parent / "stacked")
    record = json.loads((parent / "one/config.json").read_text())
    (parent / "stacked/config.json").write_text(json.dumps(record))
    stacked = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(stacked, parent / "stacked/model.safetensors", metadata={"format": "pt"})
    return {
        "a tensor an expert, one file": parent / "one",
        "a tensor an expert, files of 300 MB": parent / "many",
        "a stacked tensor a layer": parent / "stacked",
    }


def resident_bytes(name: str) -> int:
    """This process's resident memory now (VmRSS) or at its peak (VmHWM), as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> int:
    """Count the peak from now on; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def _peak_bytes(action: Callable[[], Any]) -> tuple[Any, int, float]:
    """What `action` returns, the most memory it took beyond what was there, and its seconds."""
    before, began_s = reset_peak(), time.perf_counter()
    result = action()
    return result, resident_bytes("VmHWM") - before, time.perf_counter() - began_s


def _tensors_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def read(rank: int, path: Path, out: Path) -> dict[str, float]:
    """One rank's figures."""
    import_module("transformers.models.qwen2_moe.modeling_qwen2_moe")  # its code is not what is measured
    model, peak, seconds = _peak_bytes(lambda: themis.from_pretrained(path, timeout_s=300))
    own = _tensors_bytes(model)
    _, export_peak, export_s = _peak_bytes(lambda: themis.export(model, out, max_file_bytes=300_000_000))
    executor_of(model).close()
    return {
        "rank": rank,
        "own_bytes": own,
        "peak_bytes": peak,
        "peak_over_own": round(peak / own, 4),
        "read_s": round(seconds, 2),
        "export_peak_bytes": export_peak,
        "export_s": round(export_s, 2),
    }


def read_whole(rank: int, path: Path) -> dict[str, float]:
    """transformers' own loader in one process."""
    del rank
    load = transformers.Qwen2MoeForCausalLM.from_pretrained
    model, peak, seconds = _peak_bytes(lambda: load(path, dtype=torch.bfloat16))
    own = _tensors_bytes(model)
    return {"own_bytes": own, "peak_bytes": peak, "peak_over_own": round(peak / own, 4), "read_s": round(seconds, 2)}


def main() -> None:
    """Measure all and print them; write JSON where `--out` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where 9 GB may lie for the while")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    records = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as parent:
        print("making the directories", flush=True)
        (directories,) = run_ranks(1, make, Path(parent), timeout_s=600)
        size = sum(file.stat().st_size for file in directories["a tensor an expert, one file"].iterdir())
        for label, path in directories.items():
            ranks = run_ranks(RANKS, read, path, path.with_suffix(".out"), timeout_s=600)
            records.append({"directory": label, "ranks": ranks})
            print(label, *ranks, sep="\n  ", flush=True)
        (whole,) = run_ranks(1, read_whole, directories["a tensor an expert, one file"], timeout_s=600)
        print("transformers, one process\n ", whole)
    result = {
        "versions": {
            "themis": themis.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.system()} {platform.machine()}, {RANKS} ranks of one thread",
        "directory_bytes": size,
        "records": records,
        "transformers_one_process": whole,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
