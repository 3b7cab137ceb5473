"""Which optimizers step the model: they mark the iterations, and their states move with the experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from themis.core.errors import ConfigError


@final
class OptimizerWatch:
    """Notices each step of an optimizer that holds parameters of `model`, and calls `on_step` after it.

    torch offers such a hook for all optimizers of the process alone; the watch keeps a weak hold on what it sees, and
    `close` takes the hook away. Optimizers are numbered in the order of their first step, the same on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self._model = weakref.ref(model)
        self._seen: list[weakref.ref[torch.optim.Optimizer]] = []
        self._foreign: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._moved = WeakIdKeyDictionary()
        watch = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            alive = watch()
            if alive is not None and alive._concerns(optimizer):
                alive.on_step()

        self._handle = register_optimizer_step_post_hook(after_step)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers seen so far and still alive, in order."""
        return [optimizer for ref in self._seen if (optimizer := ref()) is not None]

    def moved_away(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters have left for another rank; the optimizers seen so far have let go of them."""
        for parameter in parameters:
            self._moved[parameter] = True

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if any(ref() is optimizer for ref in self._seen):
            return True
        model = self._model()
        if model is None or optimizer in self._foreign:
            return False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = {id(parameter) for parameter in parameters}
        # One without parameters is the part, on a rank without experts, of an optimizer for experts alone.
        if held and not any(id(parameter) in held for parameter in model.parameters()):
            self._foreign.add(optimizer)
            return False
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "the optimizer is LBFGS, which needs all parameters in one place; here each rank has experts of its "
                "own, so use an optimizer that updates each parameter by itself, such as AdamW, SGD or Muon"
            )
        if any(parameter in self._moved for parameter in parameters):
            raise ConfigError(
                "an optimizer steps for the first time with parameters of experts that have left the model since it "
                "was built; build it after themis.parallelize, and step it once before experts move"
            )
        self._seen.append(weakref.ref(optimizer))
        return True
