"""Ctrl-C: the first asks the run to stop with a checkpoint, the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def gentle_interrupt(ask_to_stop: Callable[[], bool], end: Callable[[], None]) -> Iterator[None]:
    """Within it, the first SIGINT calls `ask_to_stop`; a second one, or one that nobody can heed, calls `end`.

    ask_to_stop: whether there is somebody who will stop. Signals reach the main thread; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        nonlocal asked
        if asked or not ask_to_stop():
            end()
            return
        asked = True
        print("\nthemis: finishing the step and saving; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
