"""What a launcher and its ranks say to each other, over sockets: there may be no disk left to write on.

A rank tells why it fails; the launcher, that the run shall stop. A connection that breaks says that the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, final

from themis.cli.failure import Failure

#: Set for the workers of `themis train --nproc`: the port of their launcher's mailbox.
_PORT = "THEMIS_MAILBOX"
_LIMIT_S = 5.0
_LIMIT_BYTES = 1 << 20
_STOP = b"stop"


@final
class Mailbox:
    """The launcher's side; within it, the processes that this one starts find the box through the environment.

    Nobody listens while they run: the kernel keeps what each of the `places` ranks leaves.
    """

    def __init__(self, places: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=places)
        self._socket.setblocking(False)
        self._ranks: list[socket.socket] = []

    def __enter__(self) -> Self:
        os.environ[_PORT] = str(self._socket.getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; a rank that is still there ends."""
        del os.environ[_PORT]
        for connection in (self._socket, *self._ranks):
            connection.close()

    def ask_to_stop(self) -> bool:
        """Ask every rank that has come up to stop; whether there is any."""
        self._accept()
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.sendall(_STOP)
        return bool(self._ranks)

    def letters(self) -> dict[int, Failure]:
        """What ranks have left, by rank; for a time when all of them have ended."""
        self._accept()
        found: dict[int, Failure] = {}
        for connection in self._ranks:
            rank, _, text = _read(connection).partition(" ")
            failure = Failure.decode(text)
            if failure is not None and rank.isdigit():
                found[int(rank)] = failure
        return found

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(_LIMIT_S)
                self._ranks.append(connection)


@final
class Launcher:
    """A rank's side."""

    def __init__(self, port: int) -> None:
        """OSError where the launcher is gone."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
        self._socket.settimeout(None)

    @staticmethod
    def from_environment() -> Launcher | None:
        """The launcher of ours that has started this process, None where there is none."""
        port = os.environ.get(_PORT, "")
        return Launcher(int(port)) if port.isdigit() else None

    def watch(self, stop: Callable[[], None], gone: Callable[[], None]) -> None:
        """Call `stop` when the launcher asks for that, and `gone` when it has ended, however; from a thread."""

        def listen() -> None:
            with contextlib.suppress(OSError):
                while self._socket.recv(len(_STOP)):
                    stop()
            gone()

        threading.Thread(target=listen, name="themis-launcher-watch", daemon=True).start()

    def tell(self, failure: Failure) -> None:
        """Leave `failure`, which the launcher will show."""
        with contextlib.suppress(OSError):
            self._socket.sendall(f"{os.environ.get('RANK', '0')} {failure.encode()}".encode())


def _read(connection: socket.socket) -> str:
    content = b""
    with contextlib.suppress(OSError):
        while len(content) < _LIMIT_BYTES and (part := connection.recv(1 << 16)):
            content += part
    return content.decode(errors="replace")
