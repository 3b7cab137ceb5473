"""Watches a transformers model's routers: their logits, where tokens went, and batches without tokens."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.moe.interface import interface_layer, is_interface_experts

#: What balances DeepSeek-V3's router without a loss: added to the scores that choose, not to those that weigh.
_BIAS = "e_score_correction_bias"


@final
class RouterProbe:
    """One layer's router and experts; `calls` are the logits [T, E] and tokens [E, D] of each pass while `recording`.

    While `empty`, the experts see none of the tokens that pass the layer: a rank without a batch still takes part in
    every exchange.
    """

    def __init__(self, router: nn.Module, experts: nn.Module, logits_index: int) -> None:
        self.router, self.experts = router, experts
        self.recording = self.empty = False
        self.calls: list[tuple[Tensor, NDArray[np.int64]]] = []
        self._load_E: NDArray[np.int64] | None = None
        self._logits_index = logits_index
        self._logits_TE: Tensor | None = None
        self._hidden: Tensor | None = None
        self._route = router.forward
        router.forward = self._in_own_type
        router.register_forward_hook(self._after_router)
        experts.register_forward_pre_hook(self._before_experts, with_kwargs=True)
        experts.register_forward_hook(self._after_experts)

    @property
    def has_bias(self) -> bool:
        """Whether the router has a bias that balances it."""
        return isinstance(getattr(self.router, _BIAS, None), Tensor)

    @torch.no_grad()
    def move_bias(self, rate: float) -> None:
        """Move the bias by `rate` towards the experts with fewer tokens than the mean since the last call.

        DeepSeek-V3, section 2.1.2. The same on all ranks, as tokens are counted over all of them.
        """
        if self._load_E is None:
            return
        bias_E: Tensor = getattr(self.router, _BIAS)
        sign_E = np.sign(self._load_E.mean() - self._load_E)
        bias_E += torch.as_tensor(rate * sign_E, dtype=bias_E.dtype, device=bias_E.device)
        self._load_E = None

    def _in_own_type(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The router's forward in the type of its parameters: autocast would round its scores to bfloat16."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._route(hidden.to(next(self.router.parameters()).dtype), *args, **kwargs)

    def _after_router(self, _: nn.Module, __: object, output: Any) -> None:
        if self.recording:
            logits_TE = output[self._logits_index] if isinstance(output, tuple | list) else output
            logits_TE = logits_TE.reshape(-1, logits_TE.shape[-1])
            self._logits_TE = logits_TE[:0] if self.empty else logits_TE

    def _before_experts(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.empty:
            return None
        self._hidden = args[0] if args else kwargs["hidden_states"]

        def none_of(value: Any) -> Any:
            return value[:0] if isinstance(value, Tensor) else value

        return tuple(map(none_of, args)), {name: none_of(value) for name, value in kwargs.items()}

    def _after_experts(self, module: nn.Module, _: object, output: Tensor) -> Tensor | None:
        if self.recording:
            layer = interface_layer(module)
            assert layer is not None, "a model of `themis train` is parallelized"
            assert self._logits_TE is not None, "its router ran before its experts"
            self.calls.append((self._logits_TE, layer.tokens_ED))
            if module.training and torch.is_grad_enabled():
                load_E = layer.tokens_ED.sum(axis=1)
                self._load_E = load_E if self._load_E is None else self._load_E + load_E
        if not self.empty:
            return None
        assert self._hidden is not None
        hidden, self._hidden = self._hidden, None
        # Behind the experts' output of no rows, so that the backward, too, takes part in every exchange.
        return torch.cat([output, torch.zeros_like(hidden)])


def find_probes(model: nn.Module) -> list[RouterProbe]:
    """A probe for each experts module of `model`, in order. ConfigError where the family does not show its routers."""
    modules = dict(model.named_modules())
    shown = [recorder for m in modules.values() for recorder in _recorders(m)]
    probes = []
    for name, experts in modules.items():
        if not is_interface_experts(experts):
            continue
        block = modules[name.rpartition(".")[0]]
        found = [(m, index) for m in block.modules() for kind, index in shown if isinstance(m, kind)]
        if not found:
            raise ConfigError(
                f"the router of {name!r} in a {type(model).__name__} is not among the outputs that transformers "
                "records, so its losses cannot be computed; train the model in a script of your own"
            )
        probes.append(RouterProbe(found[0][0], experts, found[0][1]))
    return probes


def _recorders(module: nn.Module) -> list[tuple[Any, int]]:
    """The classes of routers that a family records, and where the logits stand in their outputs."""
    entry = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits")
    entries = entry if isinstance(entry, list | tuple) else [] if entry is None else [entry]
    return [(getattr(e, "target_class", e), int(getattr(e, "index", 0))) for e in entries]
