"""Go on training a model of a local directory: torchrun --nproc-per-node 2 examples/continue_from_directory.py [DIR]

Each rank reads the experts it owns and the dense part. Without DIR, a small Mixtral is made first.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import themis

STEPS, BATCH, LENGTH = 30, 8, 64
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Train on this file's own bytes, then write a directory that transformers loads."""
    if Path("continued").exists():
        sys.exit("continued/ exists, and what is trained is to be written there: move it away first")
    dist.init_process_group("gloo")
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "small-mixtral")
    if dist.get_rank() == 0 and not directory.exists():
        MixtralForCausalLM(MixtralConfig(**SIZES, **LAYERS)).save_pretrained(directory)
    dist.barrier()
    model = themis.from_pretrained(directory, dtype=torch.float32, policy=themis.Themis(budget=1, overlap_degree=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draw)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        themis.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    themis.export(model, "continued")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
