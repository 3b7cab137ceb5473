"""Held-out loss, and text that the model writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.comm.collectives import all_reduce_sum
from themis.comm.mesh import Mesh
from themis.core.errors import ConfigError, require
from themis.train.config import RunConfig
from themis.train.data import Corpus
from themis.train.sampling import split

#: Sampling draws from the most likely tokens that together have this share of the probability.
_TOP_P = 0.9


def compute_context(config: RunConfig, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for the dense part where the run computes in bfloat16."""
    if config.parallel.compute == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def inputs_and_targets(windows: NDArray[np.int64], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and the tokens after them [B, S], from `windows` int64 [B, S + 1].

    ConfigError for a token that the model does not know.
    """
    smallest, largest = int(windows.min(initial=0)), int(windows.max(initial=0))
    if smallest < 0:
        raise ConfigError(f"the data has token {smallest}; tokens must be 0 or more")
    if largest >= vocab_size:
        raise ConfigError(f"the data has token {largest}; with model.vocab_size {vocab_size} tokens must be below that")
    tokens = torch.as_tensor(windows, device=device)
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, config: RunConfig, mesh: Mesh) -> float:
    """Mean cross-entropy in nats a token over the evaluation windows, the same number on every rank. A collective.

    Each forward takes as many sequences, over all ranks, as a training micro-batch.
    """
    length = config.model.sequence_length
    blocks = corpus.held_out_blocks(config.log.evaluate_sequences, length)
    size = -(-config.batch.sequences // config.batch.accumulation)
    total = torch.zeros(1, dtype=torch.float64)
    model.eval()
    for start in range(0, blocks, size):
        mine = split(min(size, blocks - start), mesh.world_size, mesh.rank)
        windows = corpus.held_out_batch((start + row for row in mine), blocks, length)
        tokens_BS, targets_BS = inputs_and_targets(windows, config.model.vocab_size, mesh.device)
        with compute_context(config, mesh.device):
            output = model(tokens_BS, targets_BS)
        total += output.cross_entropy.item() * len(mine)
    model.train()
    return all_reduce_sum(mesh, total).item() / blocks


@torch.no_grad()
def sample_text(model: nn.Module, corpus: Corpus, config: RunConfig, mesh: Mesh) -> tuple[str, str]:
    """A prompt from the held-out part, and what the model continues it with on rank 0 ("" elsewhere). A collective.

    All ranks run every forward, as the experts are spread over them; only rank 0 brings a sequence.
    """
    require(config.log.sample_tokens >= 1, "log.sample_tokens", config.log.sample_tokens, "1 or more")
    length = config.model.sequence_length
    prompt = [int(token) for token in corpus.held_out_T[: max(1, min(length // 4, 64))]]
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(config.seed)
    model.eval()
    for _ in range(config.log.sample_tokens):
        window = torch.tensor([tokens[-length:]], device=mesh.device)
        with compute_context(config, mesh.device):
            logits_BSV = model(window[: 1 if mesh.rank == 0 else 0]).logits
        if mesh.rank == 0:
            probs_V = logits_BSV[0, -1, : corpus.tokenizer.vocab_size].float().softmax(0).cpu()
            tokens.append(_draw(probs_V, generator))
    model.train()
    return corpus.tokenizer.decode(prompt), corpus.tokenizer.decode(tokens[len(prompt) :])


def _draw(probs_V: Tensor, generator: torch.Generator) -> int:
    """A token from the nucleus of `probs_V`."""
    sorted_V, order_V = probs_V.sort(descending=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = torch.where(before_V < _TOP_P, sorted_V, torch.zeros_like(sorted_V))
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])
