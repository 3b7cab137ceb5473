"""The communicator: one queue that fixes the order in which a rank issues its sparse collectives.

Ranks that issue collectives of a group in different orders hang. So nothing issues a sparse collective but this
queue, first in, first out; the executor submits in program order, which is the same on every rank. On the CPU one
worker thread runs the queue, so that transfers overlap the main thread's compute: a transfer mostly blocks in waits
that free the interpreter. On CUDA the operation is issued at once, on a stream of the communicator's own.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch

from themis.comm.beats import Channel
from themis.comm.blame import diagnose
from themis.comm.mesh import Mesh
from themis.core.errors import PeerError, ThemisError

#: How many issued names are kept for tests and traces.
_ISSUED_KEPT = 10_000


@final
class Work:
    """A submitted operation. `wait` before its tensors are used, changed or freed."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        self.name = name
        self._communicator = communicator
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._recorded: Any = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if self._recorded is not None:
            return bool(self._recorded.query())
        return self._finished.is_set()

    def wait(self) -> None:
        """Return once it has ended; on CUDA, make the current stream wait instead.

        Raises what the operation raised; PeerError, naming the ranks at fault, once the mesh's time limit is up.
        """
        if self._recorded is not None:
            torch.cuda.current_stream(self._communicator.mesh.device).wait_event(self._recorded)
            return
        if not self._finished.is_set():
            self._communicator._block_on(self)
        if self._error is not None:
            raise _again(self._error) from self._error


@final
class Communicator:
    """The queue of sparse collectives of one rank. All ranks submit the same operations in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.issued: deque[str] = deque(maxlen=_ISSUED_KEPT)
        #: Seconds that callers of `Work.wait` were blocked: communication that was not hidden. Host time only.
        self.blocked_s = 0.0
        self._state = _State(self.issued)
        self._stream: Any = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._close: Callable[[], object] = lambda: None
        if self._stream is None and mesh.world_size > 1:
            worker = threading.Thread(target=self._state.run, name="themis-communicator", daemon=True)
            worker.start()
            # Also at interpreter exit, and when the communicator is forgotten; never waits longer than the limit.
            self._close = weakref.finalize(self, _shut_down, self._state, worker, mesh.timeout_s)

    def submit(self, name: str, function: Callable[[], None]) -> Work:
        """Queue `function`, which issues one collective, under `name`; it runs after all that was submitted before.

        Once an operation has failed nothing more is issued, and this raises the same error.
        """
        if self._state.failure is not None:
            raise _again(self._state.failure) from self._state.failure
        if self._state.closed:
            raise ThemisError(f"{name} was submitted to a closed communicator")
        work = Work(self, name)
        if self._stream is not None:
            self._issue_on_stream(work, function)
        elif self.mesh.world_size == 1:
            self._state.execute(work, function)
        else:
            self._state.queue.put((work, function))
        return work

    def clear_issued(self) -> None:
        """Forget the names issued so far."""
        self.issued.clear()

    def close(self) -> None:
        """Finish what is queued and end the worker. A second call does nothing."""
        self._close()

    def _issue_on_stream(self, work: Work, function: Callable[[], None]) -> None:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.mesh.device))
        with torch.cuda.stream(self._stream):
            self._state.execute(work, function)
            work._recorded = self._stream.record_event()
        if work._error is not None:
            raise work._error

    def _block_on(self, work: Work) -> None:
        began_s = time.monotonic()
        in_time = work._finished.wait(self.mesh.timeout_s)
        self.blocked_s += time.monotonic() - began_s
        if not in_time:
            assert self.mesh.heartbeat is not None
            error = diagnose(self.mesh.heartbeat, Channel.SPARSE, work.name, "the time limit is up")
            self._state.failure = self._state.failure or error
            raise error


@final
class _State:
    """What the worker thread works on; it knows nothing of the Communicator, which can so be forgotten."""

    def __init__(self, issued: deque[str]) -> None:
        self.queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self.issued = issued
        self.failure: BaseException | None = None
        self.closed = False

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            self.execute(*item)
            del item  # holds no tensors while it waits for the next

    def execute(self, work: Work, function: Callable[[], None]) -> None:
        if self.failure is None:
            self.issued.append(work.name)
            try:
                function()
            except BaseException as error:
                self.failure = error
        work._error = self.failure
        work._finished.set()


def _again(error: BaseException) -> BaseException:
    """The same error to raise once more, without the traceback of where it was raised before."""
    return PeerError(str(error), error.ranks) if isinstance(error, PeerError) else error


def _shut_down(state: _State, worker: threading.Thread, limit_s: float) -> None:
    state.closed = True
    state.queue.put(None)
    worker.join(limit_s)
