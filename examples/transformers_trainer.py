"""The same under transformers' Trainer: torchrun --nproc-per-node 2 examples/transformers_trainer.py"""

import sys
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

import themis
from themis.train.transformers_trainer import ThemisTrainer

LENGTH = 64
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Train on this file's own bytes."""
    if Path("trained").exists():
        sys.exit("trained/ exists, and the model is to be written there: move it away first")
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        max_steps=30,
        learning_rate=3e-3,
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **LAYERS))
    themis.parallelize(model, policy=themis.Themis(budget=1, overlap_degree=2))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    data = [{"input_ids": window, "labels": window} for window in windows]
    trainer = ThemisTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model("trained")  # a directory that transformers loads


if __name__ == "__main__":
    main()
