"""Load prediction (section 4.2): the mean of the latest observed loads."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from themis.core.errors import ConfigError, reject
from themis.core.load import check_load
from themis.planning.compiled import whole


@final
class LoadPredictor:
    """Predicts the next iteration's expert loads as the mean of the last `window` observations.

    Works for the loads of one layer, [E], and for those of all layers together, [L, E]; all observations share one
    shape. Observe the global loads once an iteration: what evaluation, recomputation or one part of an accumulated
    batch sees is no observation of its own.
    """

    def __init__(self, window: int = 5) -> None:
        self._window = whole(window, "window", 1)
        self._loads: deque[NDArray[np.float64]] = deque(maxlen=self._window)

    @property
    def window(self) -> int:
        """How many observations the mean is taken over."""
        return self._window

    def observe(self, load: ArrayLike) -> None:
        """Remember `load`, [E] or [L, E]; ConfigError if negative, not finite, or of another shape than before."""
        array = np.array(load, dtype=np.float64)
        if array.ndim not in (1, 2):
            reject("load", f"of shape {array.shape}", "of shape [E] or [L, E]")
        array = check_load(array, "load", array.ndim)
        if self._loads and self._loads[-1].shape != array.shape:
            reject("load", f"of shape {array.shape}", f"of shape {self._loads[-1].shape}, as observed before")
        self._loads.append(array)

    def predict(self) -> NDArray[np.float64] | None:
        """float64 of the observed shape, the mean of the remembered loads; None before the first observation."""
        if not self._loads:
            return None
        return np.mean(np.stack(self._loads), axis=0)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly: {"window": int, "loads": nested lists}, fit for JSON."""
        return {"window": self._window, "loads": [load.tolist() for load in self._loads]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; a shorter window keeps the latest. ConfigError if a key is missing."""
        if not isinstance(state, dict) or "loads" not in state:
            raise ConfigError("state has no key 'loads'; it must be what LoadPredictor.state_dict() returned")
        restored = LoadPredictor(self._window)
        for load in state["loads"]:
            restored.observe(load)
        self._loads = restored._loads
