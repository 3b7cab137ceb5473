"""An own loop that saves and goes on: torchrun --nproc-per-node 2 examples/save_and_resume.py

Each start trains 20 steps on top of the newest folder under saved/; start it again, on any number of ranks.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import MixtralConfig, MixtralForCausalLM

import themis
from themis.fssdp import executor_of

STEPS, BATCH, LENGTH = 20, 8, 64
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Resume if there is something to, train on this file's own bytes, save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **LAYERS))
    themis.parallelize(model, policy=themis.Themis(budget=1, overlap_degree=2))
    saved = max(Path("saved").glob("step-*/executor.json"), default=None)  # written last: its folder is whole
    done = int(saved.parent.name.removeprefix("step-")) if saved else 0
    if saved:  # owners first, so that the optimizer is built over the experts this rank will hold
        executor_of(model).load_state_dict(json.loads(saved.read_text()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if saved:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=saved.parent)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(done, done + STEPS):
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draw)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        themis.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    folder = Path(f"saved/step-{done + STEPS:06d}")
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / "executor.json").write_text(json.dumps(executor_of(model).state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
