"""The corpus of a run: tokens on disk, mapped into memory, with a part held out for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError, require
from themis.core.files import replace_text
from themis.train.sampling import window_starts
from themis.train.sources import documents, is_token_file, token_array
from themis.train.tokenizer import BYTES, Tokenizer, load_tokenizer

#: With this many documents or more, whole documents are held out; with fewer, the tail of each.
_MANY_DOCUMENTS = 50


@final
@dataclass(frozen=True)
class DataConfig:
    """What a run trains on."""

    source: str = ""
    """Text file, folder, .jsonl, .bin or .npy file; empty: the Python standard library's own sources."""
    text_key: str = "text"
    """The field of a JSONL line that holds the text."""
    tokenizer: str = BYTES
    """"bytes", or the path of a tokenizer.json file."""
    held_out: float = 0.02
    """The share of the data kept for evaluation."""

    def __post_init__(self) -> None:
        require(0.0 < self.held_out < 1.0, "data.held_out", self.held_out, "above 0 and below 1")
        require(self.text_key != "", "data.text_key", self.text_key, "the name of a field")
        require(self.tokenizer != "", "data.tokenizer", self.tokenizer, "'bytes' or a tokenizer.json file")


@final
@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out tokens [T], mapped from files, and what turns them back into text."""

    train_T: NDArray[np.unsignedinteger]
    held_out_T: NDArray[np.unsignedinteger]
    tokenizer: Tokenizer

    def batch(self, rows: Iterable[int], step: int, global_batch: int, length: int, seed: int) -> NDArray[np.int64]:
        """int64 [B, length + 1]: the windows of samples `rows` of step `step`; inputs and targets overlap.

        Depends on nothing else, so that a resumed run and a run on another number of ranks see the same samples.
        """
        sample_B = step * global_batch + np.fromiter(rows, dtype=np.int64)
        start_B = window_starts(sample_B, self.train_T.size, length, seed)
        return _windows(self.train_T, start_B, length)

    def held_out_batch(self, rows: Iterable[int], blocks: int, length: int) -> NDArray[np.int64]:
        """int64 [B, length + 1]: evaluation windows `rows` of `blocks`, spread evenly over the held-out part."""
        available = (self.held_out_T.size - 1) // length
        row_B = np.fromiter(rows, dtype=np.int64)
        return _windows(self.held_out_T, row_B * available // blocks * length, length)

    def held_out_blocks(self, wanted: int, length: int) -> int:
        """How many whole windows evaluation can use, at most `wanted`."""
        return min(wanted, (self.held_out_T.size - 1) // length)

    def check(self, length: int, vocab_size: int) -> None:
        """ConfigError unless both parts hold a window of `length` and the model knows every token of the tokenizer."""
        for name, size in (("train", self.train_T.size), ("held-out", self.held_out_T.size)):
            if size <= length:
                raise ConfigError(
                    f"the {name} part of the data has {size} tokens; with sequences of {length} it must have more: "
                    "give more data, shorter sequences or another data.held_out"
                )
        if self.tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"model.vocab_size is {vocab_size}; the tokenizer has {self.tokenizer.vocab_size} tokens, "
                "and the model must know them all"
            )


def prepare(config: DataConfig, directory: Path) -> None:
    """Tokenise the source of `config` into `directory`, unless that was done before; token files stay where they are.

    The files come into being whole or not at all. ConfigError for missing, empty or unreadable data.
    """
    if is_token_file(config.source):
        token_array(config.source)
    if is_prepared(config, directory):
        return
    tokenizer = load_tokenizer(config.tokenizer)
    dtype = np.dtype(_smallest(tokenizer.vocab_size))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "train.bin").open("wb") as train, (directory / "held_out.bin").open("wb") as held_out:
        found = _write(documents(config.source, config.text_key), tokenizer, dtype, config.held_out, train, held_out)
    if not found:
        raise ConfigError(f"data source {config.source!r} is empty; it must hold text")
    for name in ("train", "held_out"):
        (directory / f"{name}.json").write_text(json.dumps({"dtype": dtype.name}))
    replace_text(directory / "corpus.json", json.dumps(asdict(config)))


def is_prepared(config: DataConfig, directory: Path) -> bool:
    """Whether `prepare` is done, or there is nothing to prepare."""
    if is_token_file(config.source):
        return True
    try:
        return bool(json.loads((directory / "corpus.json").read_text()) == asdict(config))
    except (OSError, ValueError):
        return False


def open_corpus(config: DataConfig, directory: Path) -> Corpus:
    """The corpus that `prepare` left in `directory`, mapped into memory."""
    tokenizer = load_tokenizer(config.tokenizer)
    if is_token_file(config.source):
        tokens_T = token_array(config.source)
        require(tokens_T.size > 0, "data source", config.source, "a file with tokens in it")
        cut = tokens_T.size - int(tokens_T.size * config.held_out)
        return Corpus(tokens_T[:cut], tokens_T[cut:], tokenizer)
    return Corpus(_mapped(directory / "train.bin"), _mapped(directory / "held_out.bin"), tokenizer)


def _mapped(path: Path) -> NDArray[np.unsignedinteger]:
    return token_array(str(path)) if path.stat().st_size else np.zeros(0, dtype=np.uint8)


def _write(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    dtype: np.dtype[np.unsignedinteger],
    share: float,
    train: BinaryIO,
    held_out: BinaryIO,
) -> int:
    """Write the tokens of `texts` to the two files; returns how many tokens there were.

    The first documents wait until it is known whether there are many.
    """
    count, waiting = 0, list[NDArray[np.unsignedinteger]]()
    for number, text in enumerate(text for text in texts if text):
        tokens_T = _with_separator(tokenizer.encode(text), tokenizer.separator).astype(dtype)
        count += tokens_T.size
        waiting.append(tokens_T)
        if number + 1 >= _MANY_DOCUMENTS:
            first = number + 1 - len(waiting)
            for index, document_T in enumerate(waiting, start=first):
                kept_out = int((index + 1) * share) > int(index * share)
                (held_out if kept_out else train).write(document_T.tobytes())
            waiting.clear()
    for document_T in waiting:
        cut = document_T.size - int(document_T.size * share)
        train.write(document_T[:cut].tobytes())
        held_out.write(document_T[cut:].tobytes())
    return count


def _with_separator(tokens_T: NDArray[np.uint32], separator: int | None) -> NDArray[np.uint32]:
    return tokens_T if separator is None else np.append(tokens_T, np.uint32(separator))


def _smallest(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


def _windows(tokens_T: NDArray[np.unsignedinteger], start_B: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    rows = [np.asarray(tokens_T[start : start + length + 1], dtype=np.int64) for start in start_B.tolist()]
    return np.stack(rows) if rows else np.zeros((0, length + 1), dtype=np.int64)
