"""Text to token ids and back: bytes by default, or a `tokenizer.json` file."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError

#: The name that selects the built-in byte tokenizer.
BYTES = "bytes"


class Tokenizer(ABC):
    """Text to token ids and back; `separator` is the id that ends a document, None where there is no such token."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    @abstractmethod
    def separator(self) -> int | None:
        """The id put after each document."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint32]:
        """The ids of `text`, uint32 [T]."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; what is no valid text shows as a replacement character."""


@final
class ByteTokenizer(Tokenizer):
    """One token a UTF-8 byte; a NUL byte, which text does not contain, ends a document."""

    @property
    def vocab_size(self) -> int:
        """256."""
        return 256

    @property
    def separator(self) -> int | None:
        """NUL."""
        return 0

    def encode(self, text: str) -> NDArray[np.uint32]:
        """The UTF-8 bytes of `text`, uint32 [T]."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes `ids` read as UTF-8; what is no byte shows as a question mark."""
        return bytes(i if 0 <= i < 256 else ord("?") for i in ids).decode("utf-8", errors="replace")


@final
class FileTokenizer(Tokenizer):
    """A `tokenizer.json` file, read by the `tokenizers` package."""

    _END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError(f"tokenizer {str(path)!r} needs the package `tokenizers`: pip install 'themis-moe[hf]'")
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(f"tokenizer {str(path)!r} is not a tokenizer.json file: {first_line(error)}") from error

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, added tokens included."""
        return int(self._backend.get_vocab_size())

    @property
    def separator(self) -> int | None:
        """The id of the first end-of-text token that the vocabulary knows."""
        ids = (self._backend.token_to_id(token) for token in self._END_TOKENS)
        return next((int(i) for i in ids if i is not None), None)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """The ids of `text` without special tokens, uint32 [T]."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""
        return str(self._backend.decode(list(ids)))


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", or the path of a `tokenizer.json` file; else ConfigError."""
    if spec == BYTES:
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer is {spec!r}, and there is no such file; give 'bytes' or a tokenizer.json file")
    return FileTokenizer(path)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
