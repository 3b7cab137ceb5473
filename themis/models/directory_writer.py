"""Writes a local model directory as transformers does: whole, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import final
from uuid import uuid4

from safetensors.torch import save_file
from torch import Tensor

from themis.core.errors import ConfigError
from themis.models.model_directory import INDEX, WEIGHTS


def require_new(path: Path) -> None:
    """ConfigError unless `path` can become a directory: nothing is there, or an empty one."""
    if path.is_symlink():
        raise ConfigError(f"{str(path)!r} is a link; name a new directory to write the model to")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{str(path)!r} exists; name a new directory to write the model to")
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be made: {str(parent)!r} is no directory")


@final
class DirectoryWriter:
    """Takes tensors in pieces and writes them to safetensors files of at most `max_file_bytes`, where tensors allow it.

    All goes into a new directory beside `path`, which becomes `path` at the end. ConfigError as `require_new`.
    """

    def __init__(self, path: Path, max_file_bytes: int) -> None:
        require_new(path)
        self.path = path = path.absolute()
        self._scratch = path.with_name(f"{path.name}.tmp-{uuid4().hex[:8]}")
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0
        self._scratch.mkdir(parents=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors`, or keep them until a file is full."""
        for name, tensor in tensors.items():
            if self._waiting and self._waiting_bytes + tensor.nbytes > self._max_file_bytes:
                self._flush()
            self._waiting[name] = tensor.detach().cpu().contiguous()
            self._waiting_bytes += tensor.nbytes
            self._total_bytes += tensor.nbytes

    def scratch(self) -> Path:
        """Where further files go before `finish`."""
        return self._scratch

    def finish(self) -> None:
        """Write what is left and the index, and give the directory its name."""
        self._flush()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            target = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            os.replace(self._part(number), self._scratch / target)
            weight_map |= dict.fromkeys(names, target)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if self.path.exists():
            self.path.rmdir()
        os.replace(self._scratch, self.path)

    def abandon(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._files.append(list(self._waiting))
        save_file(self._waiting, self._part(len(self._files)), metadata={"format": "pt"})
        self._waiting, self._waiting_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._scratch / f"part-{number:05d}.safetensors"
