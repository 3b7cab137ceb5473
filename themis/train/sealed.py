"""Files of a checkpoint that tell whether they are whole: JSON under a checksum, checksums of others, flushing."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from themis.core.errors import CheckpointError

Record = dict[str, Any]


def write_sealed(path: Path, record: Record) -> None:
    """JSON with the checksum of its content, flushed to disk."""
    text = json.dumps(record, sort_keys=True)
    with path.open("w") as file:
        file.write(f"{zlib.crc32(text.encode()):08x}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def read_sealed(path: Path) -> Record:
    """What `write_sealed` wrote; CheckpointError where that is not what is there."""
    try:
        seal, _, text = path.read_text().rstrip("\n").partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {str(path.parent)!r} is damaged: {path.name} is unreadable") from error
    if seal != f"{zlib.crc32(text.encode()):08x}":
        raise CheckpointError(f"checkpoint {str(path.parent)!r} is damaged: {path.name} is changed")
    record: Record = json.loads(text)
    return record


def crc32(path: Path) -> int:
    """The checksum of a file of any size."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def sync(directory: Path) -> None:
    """Flush the names in `directory` to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
