"""transformers' Trainer for a parallelized model: it trains as it is, without a second data parallelism over it."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from themis.core.errors import ConfigError
from themis.fssdp import clip_grad_norm_, executor_of
from themis.models.export import export


@final
class ThemisTrainer(Trainer):
    """transformers' Trainer over a model that `themis.parallelize` or `themis.from_pretrained` has made.

    The model averages gradients itself, so it gets no DistributedDataParallel; the gradient norm is that over all
    ranks' experts; `save_model` writes what transformers loads, see `themis.export`. The optimizer's state is spread
    over the ranks, which Trainer's own checkpoints do not know: give save_strategy="no". Build TrainingArguments
    first, as they make the process group. ConfigError for a model that is not parallelized, or another save_strategy.
    """

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        executor_of(model)
        self._parallelized: nn.Module = model
        super().__init__(model=model, args=args, **options)
        strategy = str(getattr(self.args.save_strategy, "value", self.args.save_strategy))
        if strategy != "no":
            raise ConfigError(
                f"save_strategy is {strategy!r}; Trainer's checkpoints hold one rank's part of the optimizer only: "
                'give "no", and save_model() for the model'
            )
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model into the new directory `output_dir`; a collective."""
        del _internal_call  # what Trainer passes from its own checkpoints
        export(self._parallelized, str(output_dir or self.args.output_dir))

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip by the norm over all ranks; Trainer's own would count this rank's experts alone."""
        del model  # the one that was parallelized
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """The norm that is logged."""
        del model
        norm = self._clip(float("inf")) if grad_norm is None else grad_norm
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _clip(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._parallelized, max_norm).to(torch.float32)
