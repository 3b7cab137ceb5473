"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path`, which keeps its old content until all of the new is written."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(text)
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
