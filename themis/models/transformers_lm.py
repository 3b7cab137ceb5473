"""A transformers model as a language model of `themis train`: losses over all ranks, empty batches, router biases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.models.family import build_on_meta, causal_lm_class
from themis.models.output import LMOutput, with_losses
from themis.models.router_probe import find_probes
from themis.models.transformers_config import TransformersConfig
from themis.moe.losses import load_balancing_loss, router_z_loss


@final
class TransformersLM(nn.Module):
    """The causal language model of a family, on the meta device at first, its parameters of type `dtype`.

    Router losses are Themis' own, of the probabilities softmax(router logits), whatever the family would compute.
    """

    def __init__(self, config: TransformersConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        family = config.family()
        builder = causal_lm_class(family)
        if builder is None:
            raise ConfigError(f"model.model_type is {config.model_type!r}, which has no causal language model")
        self.config = config
        self.model: Any = build_on_meta(builder, family, dtype).train()
        if config.checkpoint_blocks:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._probes = find_probes(self.model)
        biased = bool(self._probes) and all(probe.has_bias for probe in self._probes)
        if config.bias_update_rate and not biased:
            raise ConfigError(
                f"model.bias_update_rate is {config.bias_update_rate}; routers of {config.model_type} have no bias "
                "that balances them, so it must be 0"
            )

    def initialize_weights(self) -> None:
        """The family's own initialisation."""
        self.model.initialize_weights()

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> LMOutput:
        """Logits of int64 `tokens_BS` [B, S], and the losses where `targets_BS` [B, S] is given. B may be 0."""
        empty = tokens_BS.shape[0] == 0
        # Attention wants a sequence; experts see none of its tokens.
        shown_BS = tokens_BS.new_zeros(1, tokens_BS.shape[1]) if empty else tokens_BS
        with self._recording(empty=empty):
            logits_BSV = self.model(input_ids=shown_BS, use_cache=False).logits[: tokens_BS.shape[0]]
        calls = [call for probe in self._probes for call in probe.calls]
        if targets_BS is None:
            return LMOutput(logits_BSV)
        aux_losses, z_losses = [], []
        for logits_TE, tokens_ED in calls:
            wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
            aux_losses.append(load_balancing_loss(wide_TE.softmax(dim=1), tokens_ED, self.config.top_k))
            z_losses.append(router_z_loss(wide_TE, tokens_ED, self.config.top_k))
        return with_losses(
            logits_BSV,
            targets_BS,
            aux_losses,
            z_losses,
            aux_loss_weight=self.config.aux_loss_weight,
            z_loss_weight=self.config.z_loss_weight,
        )

    def update_router_biases(self) -> None:
        """After a step: move the routers' biases by `bias_update_rate` against the loads of the step's tokens."""
        if self.config.bias_update_rate:
            for probe in self._probes:
                probe.move_bias(self.config.bias_update_rate)

    @contextmanager
    def _recording(self, *, empty: bool) -> Iterator[None]:
        """Within it the probes take down the passes; recomputation in the backward comes after it and is not.

        `empty` holds until the next forward, for a block may be recomputed until then.
        """
        for probe in self._probes:
            probe.recording, probe.empty, probe.calls = True, empty, []
        try:
            yield
        finally:
            for probe in self._probes:
                probe.recording = False
