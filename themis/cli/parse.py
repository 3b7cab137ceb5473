"""Command lines to dataclasses with tyro, its error boxes to one line."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Sequence
from typing import TypeVar

import tyro

from themis.core.errors import ConfigError

T = TypeVar("T")

_RULE = "───"


def parse(kind: type[T], arguments: Sequence[str], prog: str, default: T | None = None, note: str = "") -> T:
    """An instance of dataclass `kind` from `arguments`; ConfigError in one line where they are wrong.

    `--help` prints and exits, as usual; it shows `note` after the description of `kind`.
    """
    description = inspect.cleandoc(kind.__doc__ or "") + note
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            if default is None:
                return tyro.cli(kind, args=list(arguments), prog=prog, description=description)
            return tyro.cli(kind, args=list(arguments), prog=prog, description=description, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(f"{_first_paragraph(messages.getvalue())}; see {prog} --help") from None


def _first_paragraph(box: str) -> str:
    """The text of a message box up to its first rule, its frame removed."""
    lines = [line.strip("│ ").rstrip() for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    kept: list[str] = []
    for line in lines:
        if line.startswith(_RULE):
            break
        if line:
            kept.append(line)
    return " ".join(kept).rstrip(".") or "the arguments cannot be read"
