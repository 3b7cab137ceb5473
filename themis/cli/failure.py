"""From an error to an exit status and the one line that a user reads."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import final

from themis.core.errors import CheckpointError, ConfigError, ThemisError
from themis.train.stopping import RunStopped

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


@final
@dataclass(frozen=True)
class Failure:
    """An exit status and its line."""

    status: int
    line: str

    def encode(self) -> str:
        """One string for the way from a worker to its launcher."""
        return json.dumps([self.status, self.line])

    @staticmethod
    def decode(text: str) -> Failure | None:
        """What `encode` made, None if it is anything else."""
        try:
            status, line = json.loads(text)
            return Failure(int(status), str(line))
        except (ValueError, TypeError):
            return None


def explain(error: BaseException, trace_dir: Path | None = None) -> Failure:
    """What to tell the user about `error`. What nobody foresaw keeps its traceback in a file under `trace_dir`."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(INTERRUPTED, "stopped")
    if isinstance(error, RunStopped):
        return Failure(INTERRUPTED, one_line(error))
    if isinstance(error, ConfigError | CheckpointError):
        return Failure(BAD_INPUT, one_line(error))
    if isinstance(error, ThemisError):
        return Failure(FAILED, one_line(error))
    if isinstance(error, OSError) and error.errno is not None:
        named = f"{str(error.filename)!r}: " if error.filename else ""
        hint = "; free some space and continue with --resume" if error.errno == errno.ENOSPC else ""
        return Failure(BAD_INPUT, f"{named}{error.strerror}{hint}")
    line = f"{type(error).__name__}: {one_line(error)}"
    return Failure(FAILED, line + _keep_traceback(error, trace_dir))


def report(failure: Failure) -> int:
    """Show the line; returns the status."""
    print(f"themis: {failure.line}", file=sys.stderr, flush=True)
    return failure.status


def one_line(error: BaseException) -> str:
    """The text of `error` without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _keep_traceback(error: BaseException, trace_dir: Path | None) -> str:
    if trace_dir is None or not trace_dir.is_dir():
        return ""
    path = trace_dir / f"traceback-rank-{os.environ.get('RANK', '0')}.txt"
    try:
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return ""
    return f" (the traceback is in {path})"
