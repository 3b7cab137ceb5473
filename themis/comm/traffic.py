"""Counters of the bytes this rank sends, by collective and by the class of link they cross."""

from __future__ import annotations

import threading
from collections import Counter
from typing import final

from themis.core.errors import require
from themis.core.topology import LinkClass

#: Every collective that is counted, by the name under which step reports and metrics show it.
COLLECTIVES = ("all_to_all", "sparse_all_gather", "sparse_reduce_scatter", "all_reduce", "counts", "reshard")
_CROSSED = (LinkClass.INTRA, LinkClass.INTER)


@final
class Traffic:
    """Bytes that this rank sent to other ranks; what stays on the rank is not counted. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, LinkClass]] = Counter()

    def add(self, name: str, link: LinkClass, num_bytes: int) -> None:
        """Count `num_bytes` sent by the collective `name` over links of class `link`."""
        require(name in COLLECTIVES, "name", name, "one of " + ", ".join(COLLECTIVES))
        if link is not LinkClass.LOCAL and num_bytes:
            with self._lock:
                self._bytes[name, link] += int(num_bytes)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Bytes sent so far: {collective: {"intra": bytes, "inter": bytes}}, with every collective present."""
        with self._lock:
            return {name: {link.value: self._bytes[name, link] for link in _CROSSED} for name in COLLECTIVES}

    def reset(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._bytes.clear()
