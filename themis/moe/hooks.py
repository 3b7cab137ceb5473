"""The six hooks of a layer (FSMoE, section 3.1): places where a user may look at or replace the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from themis.core.errors import require

HOOK_NAMES = (
    "before_moe_start",
    "before_dispatch",
    "after_dispatch",
    "before_combine",
    "after_combine",
    "before_moe_end",
)

Hook = Callable[[Tensor], Tensor | None]


@final
class Hooks:
    """Functions by hook name; each gets the tensor that passes and may return another in its place.

    Where a hook compresses rows before dispatch, another must restore them after it; rows may not change in number.
    """

    def __init__(self) -> None:
        self._functions: dict[str, list[Hook]] = {name: [] for name in HOOK_NAMES}

    def add(self, name: str, function: Hook) -> Callable[[], None]:
        """Append `function` to the hook `name`; returns a function that removes it again."""
        require(name in self._functions, "name", name, f"one of {', '.join(HOOK_NAMES)}")
        self._functions[name].append(function)
        return lambda: self._functions[name].remove(function)

    def run(self, name: str, tensor: Tensor) -> Tensor:
        """Pass `tensor` through the functions of `name`."""
        for function in self._functions[name]:
            result = function(tensor)
            tensor = tensor if result is None else result
        return tensor
