"""How a rank tells its launcher why it fails: over a socket, as there may be no disk left to write on."""

from __future__ import annotations

import contextlib
import os
import socket
from types import TracebackType
from typing import Self, final

from themis.cli.failure import Failure

#: Set for the workers of `themis train --nproc`: the port of their launcher's mailbox.
_PORT = "THEMIS_MAILBOX"
_LIMIT_S = 5.0
_LIMIT_BYTES = 1 << 20


@final
class Mailbox:
    """The launcher's side; within it, the processes that this one starts find the box through the environment.

    Nobody listens while they run: the kernel keeps what each of the `places` senders leaves.
    """

    def __init__(self, places: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=places)

    def __enter__(self) -> Self:
        os.environ[_PORT] = str(self._socket.getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        del os.environ[_PORT]
        self._socket.close()

    def letters(self) -> dict[int, Failure]:
        """What ranks have left, by rank; for a time when all of them have ended."""
        found: dict[int, Failure] = {}
        self._socket.setblocking(False)
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return found
            with connection:
                rank, _, text = _read(connection).partition(" ")
            failure = Failure.decode(text)
            if failure is not None and rank.isdigit():
                found[int(rank)] = failure


def hand_over(failure: Failure) -> bool:
    """Leave `failure` in the launcher's mailbox; whether there is a launcher of ours that will show it."""
    port = os.environ.get(_PORT, "")
    if not port.isdigit():
        return False
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=_LIMIT_S) as connection:
            connection.sendall(f"{os.environ.get('RANK', '0')} {failure.encode()}".encode())
    except OSError:
        return False
    return True


def _read(connection: socket.socket) -> str:
    connection.settimeout(_LIMIT_S)
    content = b""
    with contextlib.suppress(OSError):
        while len(content) < _LIMIT_BYTES and (part := connection.recv(1 << 16)):
            content += part
    return content.decode(errors="replace")
