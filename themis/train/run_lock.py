"""One process at a time writes into a run directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from themis.core.errors import ConfigError


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Within it, no other process is in `run_dir`; ConfigError where one is. Ends with the process, however it ends."""
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run directory {str(run_dir)!r} is in use by another process; wait for it, or name another directory"
            ) from error
        yield
    finally:
        os.close(directory)
