"""A compact decoder-only GPT whose feed-forward layers are Mixtures of Experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from themis.core.errors import ConfigError, require
from themis.models.output import LMOutput, with_losses
from themis.moe import Experts, Gate, MoEConfig, MoELayer, MoEOutput


@final
@dataclass(frozen=True)
class GPTMoEConfig:
    """The dimensions of the model; the defaults suit a CPU."""

    vocab_size: int = 256
    """Tokens the model knows."""
    sequence_length: int = 128
    """S, the longest sequence, and the one trained on."""
    width: int = 128
    """M."""
    num_heads: int = 4
    """Attention heads; width must be a multiple."""
    num_layers: int = 4
    """L, each with attention and a Mixture of Experts."""
    num_experts: int = 8
    """E, experts of a layer."""
    top_k: int = 2
    """K, experts of a token."""
    expert_hidden: int = 512
    """H, hidden width of an expert."""
    experts: Literal["gpt", "swiglu"] = "gpt"
    """Two matrices with GELU, or three with SiLU."""
    bias: bool = True
    """Biases in attention and in "gpt" experts."""
    shared_hidden: int = 0
    """Hidden width of a shared expert that every token passes; 0 for none."""
    router_noise: bool = False
    """Learned noise on the router's scores while training."""
    aux_loss_weight: float = 0.001
    """Weight of the load-balancing loss."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss."""
    tie_embeddings: bool = True
    """Whether the output layer shares the embedding's matrix."""
    checkpoint_blocks: bool = False
    """Whether backward recomputes each block instead of keeping its activations."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "width", "num_heads", "num_layers"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        for name in ("aux_loss_weight", "z_loss_weight"):
            require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "0 or more")
        require(
            self.width % self.num_heads == 0,
            "model.width",
            self.width,
            f"a multiple of model.num_heads ({self.num_heads})",
        )
        try:
            self.moe()
        except ConfigError as error:
            raise ConfigError(f"model.{error}") from error

    def moe(self) -> MoEConfig:
        """The configuration of each MoE layer."""
        return MoEConfig(
            width=self.width,
            expert_hidden=self.expert_hidden,
            num_experts=self.num_experts,
            top_k=self.top_k,
            experts=self.experts,
            bias=self.bias,
            shared_hidden=self.shared_hidden,
            noise=self.router_noise,
        )


@final
class CausalAttention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, width: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BSM: Tensor) -> Tensor:
        """[B, S, M] to [B, S, M]."""
        batch, length, width = x_BSM.shape
        if batch == 0:  # the fused kernels want at least one sequence; the graph wants the parameters
            return self.out(self.qkv(x_BSM)[..., :width])  # type: ignore[no-any-return]
        heads = self.qkv(x_BSM).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


@final
class Block(nn.Module):
    """Pre-norm attention, then a pre-norm Mixture of Experts."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config.width, config.num_heads, bias=config.bias)
        self.moe_norm = nn.LayerNorm(config.width)
        self.moe = MoELayer(config.moe())

    def forward(self, x_BSM: Tensor) -> MoEOutput:
        """[B, S, M] to (hidden [B, S, M], aux_loss, z_loss)."""
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM))
        output: MoEOutput = self.moe(self.moe_norm(x_BSM))
        return MoEOutput(x_BSM + output.hidden, output.aux_loss, output.z_loss)


@final
class GPTMoE(nn.Module):
    """The model. It is initialised from torch's global random stream: the same seed, the same weights on every rank."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.initialize_weights()
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """GPT-2's scheme: N(0, 0.02), and what writes to the residual stream is scaled by its 2 L writers.

        Experts come last, so that a rank without any still draws the same dense part.
        """
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm | Gate):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for bank in experts:
            bank.reset_parameters()
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", ".w2", ".w_down")):
                parameter.mul_((2 * self.config.num_layers) ** -0.5)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> LMOutput:
        """Logits of int64 `tokens_BS` [B, S], and the losses where `targets_BS` [B, S] is given. B may be 0."""
        length = tokens_BS.shape[1]
        require(
            length <= self.config.sequence_length,
            "the sequence's length",
            length,
            f"at most {self.config.sequence_length}, the model's sequence_length",
        )
        positions_S = torch.arange(length, device=tokens_BS.device)
        x_BSM = self.token_embedding(tokens_BS) + self.position_embedding(positions_S)
        aux_losses, z_losses = [], []
        for block in self.blocks:
            x_BSM, aux_loss, z_loss = self._run(block, x_BSM)
            aux_losses.append(aux_loss)
            z_losses.append(z_loss)
        logits_BSV = self.head(self.norm(x_BSM))
        if targets_BS is None:
            return LMOutput(logits_BSV)
        return with_losses(
            logits_BSV,
            targets_BS,
            aux_losses,
            z_losses,
            aux_loss_weight=self.config.aux_loss_weight,
            z_loss_weight=self.config.z_loss_weight,
        )

    def _run(self, block: nn.Module, x_BSM: Tensor) -> MoEOutput:
        if self.config.checkpoint_blocks and torch.is_grad_enabled():
            return MoEOutput(*checkpoint(block, x_BSM, use_reentrant=False))
        return MoEOutput(*block(x_BSM))
