"""A local model directory as transformers writes it: config.json and safetensors files, one or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from themis.core.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: safetensors' names of the types that models are of.
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: A file is opened anew after so much was read of it: pages of an open one count as this process's memory.
_REOPEN_BYTES = 32 << 20


@final
class ModelDirectory:
    """The tensors under `path` by name. ConfigError where it is no such directory, or is quantised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ConfigError(f"model directory {str(path)!r} is no directory here; name a local directory of a model")
        self.config = _read_json(path / "config.json")
        if (kind := _quantization(self.config)) is not None:
            raise ConfigError(
                f"model directory {str(path)!r} holds quantised weights ({kind}); give an unquantised copy"
            )
        self._file_of = self._locate()
        self._open: tuple[str, Any] | None = None
        self._read_bytes = 0

    @property
    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point tensor of the first file, as transformers has it; float32 without."""
        first = min(self._file_of.values(), default="")
        for key in sorted(key for key, file in self._file_of.items() if file == first):
            dtype = _FLOATING.get(self._handle(key).get_slice(key).get_dtype())
            if dtype is not None:
                return dtype
        return torch.float32

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of tensor `key`."""
        return tuple(self._handle(key).get_slice(key).get_shape())

    def read(self, key: str, row: int | None = None) -> Tensor:
        """Tensor `key`, or [1, ...] of its `row`; it may share memory with the file, so copy it soon."""
        handle = self._handle(key)
        tensor: Tensor = handle.get_tensor(key) if row is None else handle.get_slice(key)[row : row + 1]
        self._read_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Let go of the file that is open."""
        self._open = None

    def _handle(self, key: str) -> Any:
        name = self._file_of[key]
        if self._open is None or self._open[0] != name or self._read_bytes > _REOPEN_BYTES:
            self._open = None
            self._open = name, _open(self.path / name)
            self._read_bytes = 0
        return self._open[1]

    def _locate(self) -> dict[str, str]:
        """The file of each tensor, every file there and every tensor in it."""
        if (self.path / WEIGHTS).is_file():  # which transformers, too, prefers
            return dict.fromkeys(_open(self.path / WEIGHTS).keys(), WEIGHTS)
        if not (self.path / INDEX).is_file():
            raise ConfigError(f"model directory {str(self.path)!r} has neither {WEIGHTS} nor {INDEX}")
        weight_map = _read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_plain(name) for name in weight_map.values()):
            raise ConfigError(f"{str(self.path / INDEX)!r} has no weight_map from tensors to files beside it")
        for name in sorted(set(weight_map.values())):
            there = set(_open(self.path / name).keys())
            lost = [key for key, file in weight_map.items() if file == name and key not in there]
            if lost:
                raise ConfigError(f"{str(self.path / name)!r} lacks {lost[0]}, which {INDEX} says is there")
        return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{str(path)!r} is not a whole safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}; name a directory of a model") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object")
    return record


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _quantization(config: dict[str, Any]) -> str | None:
    """The kind of quantisation that `config`, or a part of it such as text_config, names; None for none."""
    entry = config.get("quantization_config")
    if entry is not None:
        return str(entry.get("quant_method", "of an unknown kind")) if isinstance(entry, dict) else "of an unknown kind"
    parts = (_quantization(part) for part in config.values() if isinstance(part, dict))
    return next((kind for kind in parts if kind is not None), None)
