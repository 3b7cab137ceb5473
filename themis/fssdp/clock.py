"""How long the attention before a layer takes: the window in which its collectives hide (section 4.2)."""

from __future__ import annotations

import time
from typing import Any, final

import torch


@final
class AttentionClock:
    """Times the way from the block's start to the layer's counts; host time on the CPU, events on CUDA.

    Recomputed passes do not count. `mean_s` is None before the first measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """The block begins."""
        self._began = self._now()

    def stop(self, discard: bool) -> None:
        """The gate is done; `discard` says that this pass does not count."""
        if self._began is not None and not discard:
            self._spans.append((self._began, self._now()))
        self._began = None

    def mean_s(self) -> float | None:
        """Mean seconds of the spans since the last call; None without any."""
        spans, self._spans = self._spans, []
        if not spans:
            return None
        if self._cuda:
            return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000.0 / len(spans)
        return float(sum(end - begin for begin, end in spans)) / len(spans)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
