"""A transformers model, unchanged, on several ranks: torchrun --nproc-per-node 2 examples/transformers_loop.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import themis

STEPS, BATCH, LENGTH = 30, 8, 64
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Train on this file's own bytes."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **LAYERS))
    themis.parallelize(model, policy=themis.Themis(budget=1, overlap_degree=2))
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
