"""A plain training loop on several ranks: torchrun --nproc-per-node 2 examples/train_loop.py

Trains a small byte-level GPT with MoE layers on this file's own text, and prints what each layer did.
"""

from pathlib import Path

import torch
import torch.distributed as dist

import themis
from themis.models import GPTMoE, GPTMoEConfig

STEPS, BATCH, LENGTH = 30, 8, 64


def main() -> None:
    """Train, then report."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPTMoE(GPTMoEConfig(vocab_size=256, sequence_length=LENGTH, width=64, num_heads=4, num_layers=2))
    themis.parallelize(model, policy=themis.Themis(budget=1, overlap_degree=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw)
        windows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = model(windows[:, :-1], windows[:, 1:]).loss
        loss.backward()
        themis.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    if dist.get_rank() == 0:
        for layer in themis.step_report(model):
            print(f"layer {layer.layer}: imbalance {layer.imbalance_before:.2f} -> {layer.imbalance_after:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
