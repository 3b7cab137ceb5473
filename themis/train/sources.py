"""Where training text comes from: files, folders, JSONL, or the Python standard library's own sources."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError

#: Folders of the standard library that hold other people's code, tests of every length, or generated tables.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib-dynload"}

_TOKEN_DTYPES = ("uint8", "uint16", "uint32")


def is_token_file(source: str) -> bool:
    """Whether `source` names tokens rather than text."""
    return source.endswith((".bin", ".npy"))


def documents(source: str, text_key: str) -> Iterator[str]:
    """The documents of `source`, in an order that is the same everywhere.

    "" is the standard library's .py files; a folder gives its text files, sorted by path; `.jsonl` the field
    `text_key` of each line; any other file is one document. ConfigError for what is missing or unreadable.
    """
    path = Path(source)
    if source == "":
        yield from _standard_library()
    elif not path.exists():
        raise ConfigError(f"data source {source!r} does not exist; name a text file, folder, .jsonl, .bin or .npy file")
    elif path.is_dir():
        yield from _folder(path)
    elif path.suffix == ".jsonl":
        yield from _jsonl(path, text_key)
    else:
        text = _read(path)
        if text is None:
            raise ConfigError(f"data source {source!r} is not UTF-8 text; give text, .jsonl, .bin or .npy")
        yield text


def token_array(source: str) -> NDArray[np.unsignedinteger]:
    """The tokens [T] of a `.npy` file, or of a `.bin` file with `{"dtype": …}` in a `.json` file beside it, mapped."""
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"data source {source!r} does not exist; name a .bin or .npy file of tokens")
    try:
        tokens_T = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, _dtype(path), mode="r")
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"data source {source!r} cannot be read as tokens: {error}") from error
    if tokens_T.ndim != 1 or tokens_T.dtype.kind not in "iu":
        raise ConfigError(
            f"data source {source!r} holds {tokens_T.dtype} of shape {tokens_T.shape}; "
            "tokens must be whole numbers of shape [T]"
        )
    return tokens_T


def _dtype(path: Path) -> np.dtype[np.unsignedinteger]:
    header = path.with_suffix(".json")
    if not header.is_file():
        raise ConfigError(f'data source {str(path)!r} lacks its header {header.name!r}: {{"dtype": "uint16"}}')
    try:
        name = str(json.loads(header.read_text())["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'header {str(header)!r} must hold {{"dtype": "uint16"}} as JSON') from error
    if name not in _TOKEN_DTYPES:
        raise ConfigError(f"header {str(header)!r} has dtype {name!r}; it must be one of {', '.join(_TOKEN_DTYPES)}")
    dtype: np.dtype[np.unsignedinteger] = np.dtype(name)
    return dtype


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts) and (text := _read(path)):
            yield text


def _folder(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if not hidden and path.is_file() and (text := _read(path)):
            yield text


def _jsonl(path: Path, text_key: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _field(line, text_key, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data source {str(path)!r} is not UTF-8 text: {error}") from error


def _field(line: str, text_key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        raise ConfigError(f"{where} has no text under {text_key!r}; name the field with data.text_key")
    return str(record[text_key])


def _read(path: Path) -> str | None:
    """The text of a file, or None if it is not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return None if "\0" in text else text
