"""Heartbeats: each rank tells the others, through the rendezvous store, that it lives and what it is doing.

A collective that fails or runs out of time knows only that something is wrong, not who. So a thread of every rank
writes a small record about once a second; `blame.py` reads them when something has failed, and names the rank.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, final


class Channel(Enum):
    """A sequence of operations that all ranks issue in the same order; one process group each."""

    TOKENS = "tokens"
    SPARSE = "sparse"
    DENSE = "dense"
    CONTROL = "control"
    #: Checkpoints in the background, under all of the others; has a group once `Mesh.open` was called.
    SAVING = "saving"


@final
@dataclass(frozen=True)
class Operation:
    """The latest operation of a channel: its number in that channel, its name, and whether it still runs."""

    number: int
    name: str
    running: bool

    def __str__(self) -> str:
        return f"{'in' if self.running else 'after'} {self.name} (number {self.number})"


@final
@dataclass(frozen=True)
class Beat:
    """One record of a rank. `count` grows with every beat; `wall_s` is the writer's clock, seconds since the epoch."""

    count: int
    wall_s: float
    operations: dict[Channel, Operation] = field(default_factory=dict)
    accused: tuple[int, ...] = ()
    left: bool = False

    def latest(self) -> str:
        """Where this rank was, in words: a running operation before a finished one."""
        if not self.operations:
            return "before its first operation"
        running = [operation for operation in self.operations.values() if operation.running]
        return str(running[0]) if running else str(max(self.operations.values(), key=lambda item: item.number))

    def encode(self) -> str:
        """The record as text."""
        operations = {channel.value: asdict(operation) for channel, operation in self.operations.items()}
        return json.dumps([self.count, self.wall_s, operations, list(self.accused), self.left])

    @staticmethod
    def decode(text: bytes | str) -> Beat:
        """The record back from its text."""
        count, wall_s, operations, accused, left = json.loads(text)
        by_channel = {Channel(name): Operation(**values) for name, values in operations.items()}
        return Beat(count, wall_s, by_channel, tuple(accused), left)


@final
class Heartbeat:
    """The writer thread of one rank, and the reader of everybody's records.

    `store` is the rendezvous store under a prefix of this mesh; writer and reader use clones of their own, for a
    client that waits for a dead host must not keep the other from working.
    """

    def __init__(self, store: Any, rank: int, world_size: int, beat_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.beat_s = beat_s
        self._write_store, self._read_store = store.clone(), store.clone()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._operations: dict[Channel, Operation] = {}
        self._accused: tuple[int, ...] = ()
        self._count = 0
        self._left = False
        self._ending = False
        self._write()
        self._thread = threading.Thread(target=self._beat, name="themis-heartbeat", daemon=True)
        self._thread.start()
        # Python ends a thread that comes back from torch after it has shut down, and that aborts the process.
        atexit.register(self._end)

    def begin(self, channel: Channel, name: str) -> int:
        """Note that the next operation of `channel` begins; returns its number."""
        with self._lock:
            previous = self._operations.get(channel)
            number = previous.number + 1 if previous else 1
            self._operations[channel] = Operation(number, name, running=True)
            return number

    def end(self, channel: Channel) -> None:
        """Note that the current operation of `channel` has ended."""
        with self._lock:
            operation = self._operations[channel]
            self._operations[channel] = Operation(operation.number, operation.name, running=False)

    def accuse(self, ranks: tuple[int, ...]) -> None:
        """Tell the others at once whom this rank holds responsible, so that they do not blame its own end."""
        with self._lock:
            self._accused = ranks
        self._wake.set()

    def read(self) -> dict[int, Beat]:
        """The latest record of every rank that has ever written one; errors of the store pass through."""
        beats: dict[int, Beat] = {}
        for rank in range(self.world_size):
            if self._read_store.check([str(rank)]):
                beats[rank] = Beat.decode(self._read_store.get(str(rank)))
        return beats

    def stop(self) -> None:
        """Write a last record that says this rank has left, and end the thread."""
        with self._lock:
            self._left = True
        self._end()
        atexit.unregister(self._end)

    def _end(self) -> None:
        """Have the thread write what it knows once more, and end."""
        self._ending = True
        self._wake.set()
        self._thread.join(2 * self.beat_s)

    def _beat(self) -> None:
        while True:
            self._wake.wait(self.beat_s)
            self._wake.clear()
            ending = self._ending  # before the record, which must hold all that was noted until then
            try:
                self._write()
            except RuntimeError:
                return  # the store is gone; whoever waits on a peer will find that out and say so
            if ending:
                return

    def _write(self) -> None:
        with self._lock:
            self._count += 1
            beat = Beat(self._count, time.time(), dict(self._operations), self._accused, self._left)
        self._write_store.set(str(self.rank), beat.encode())
