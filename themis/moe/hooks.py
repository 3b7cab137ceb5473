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
        self._functions: dict[str, dict[object, Hook]] = {name: {} for name in HOOK_NAMES}

    def add(self, name: str, function: Hook) -> Callable[[], None]:
        """Append `function` to the hook `name`; returns a function that removes it again, and does no harm twice."""
        require(name in self._functions, "name", name, f"one of {', '.join(HOOK_NAMES)}")
        key = object()  # the same function may be added twice
        self._functions[name][key] = function

        def remove() -> None:
            self._functions[name].pop(key, None)

        return remove

    def run(self, name: str, tensor: Tensor) -> Tensor:
        """Pass `tensor` through the functions of `name`."""
        for function in tuple(self._functions[name].values()):
            result = function(tensor)
            tensor = tensor if result is None else result
        return tensor
