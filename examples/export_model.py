"""From the meta device to a directory for transformers: torchrun --nproc-per-node 2 examples/export_model.py"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import themis

SIZES = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


def main() -> None:
    """Start a model that no rank ever holds whole, write it, and load it with transformers alone."""
    if Path("exported").exists():
        sys.exit("exported/ exists, and the model is to be written there: move it away first")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **EXPERTS, **LAYERS))
    themis.parallelize(model)
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    themis.export(model, "exported", dtype=torch.float32)
    if dist.get_rank() == 0:
        loaded = AutoModelForCausalLM.from_pretrained("exported")
        with torch.no_grad():
            difference = (loaded(input_ids=tokens).logits - logits).abs().max().item()
        print(f"largest difference of logits {difference:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
