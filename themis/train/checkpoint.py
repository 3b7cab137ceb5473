"""Checkpoints that are whole or absent: torch's distributed checkpoint in safetensors files, sealed by checksums.

A checkpoint is a folder `checkpoints/step-000100` with
- `shard-*.safetensors`: one file a rank, tensors under `model.<name>` and `optim.<name>.<key>`; dense tensors once,
  each expert by its owner; no name depends on the number of ranks;
- `rank-*.json`: each rank's random streams, and the size and checksum of its tensor file;
- `trainer.json`: step, configuration, the executor's state (owners, predictor).
It is written under a scratch name, flushed to disk, and renamed once every rank is done: a run killed at any moment
finds the newest whole one. Nothing in it is code (no pickle).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from themis.comm.collectives import default_rank_and_size
from themis.core.errors import CheckpointError
from themis.train.files import replace_text
from themis.train.tokenizer import first_line

Record = dict[str, Any]

_NAME = re.compile(r"step-(\d{6,})")


@final
@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: where it is, and what its `trainer.json` says."""

    path: Path
    step: int
    world_size: int
    record: Record

    def rank_record(self, rank: int) -> Record | None:
        """What `rank` saved of its own, None where the run had fewer ranks."""
        return _read_sealed(self.path / f"rank-{rank:05d}.json")["record"] if rank < self.world_size else None


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    record: Record,
    rank_record: Record,
    *,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    keep: int,
) -> Path:
    """Write a checkpoint of `step` into `directory` and delete all but the newest `keep`; every rank calls this.

    tensors: this rank's, by global name; record: the same on all ranks; rank_record: this rank's own. Raises
    CheckpointError, and leaves earlier checkpoints as they were, when the disk refuses.
    """
    final_path = directory / f"step-{step:06d}"
    scratch = directory / f"step-{step:06d}.tmp"
    try:
        if rank == 0:
            _clear(directory)
            scratch.mkdir(parents=True)
        barrier()
        writer = HuggingFaceStorageWriter(str(scratch), save_distributed=True)
        with _no_warnings():
            save_distributed(dict(tensors), storage_writer=writer, no_dist=world_size == 1)
        shards = sorted(scratch.glob(f"shard-{rank + 1:05d}-*.safetensors"))
        files = {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in shards}
        _write_sealed(scratch / f"rank-{rank:05d}.json", {"files": files, "record": rank_record})
        barrier()
        if rank == 0:
            _write_sealed(scratch / "trainer.json", {"step": step, "world_size": world_size, **record})
            _sync(scratch)
            _publish(scratch, final_path)
            _prune(directory, keep)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {str(final_path)!r} cannot be written: {_cause(error)}") from error
    return final_path


def find(directory: Path) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint in `directory`, and a line for each newer one that is damaged.

    Every file is read and compared with its checksum. CheckpointError where there is none to go on from.
    """
    require_any(directory)
    damaged: list[str] = []
    for _, path in reversed(_listed(directory)):
        try:
            return check(path), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    raise CheckpointError(f"no whole checkpoint in {str(directory)!r}: {damaged[0]}")


def require_any(directory: Path) -> None:
    """CheckpointError unless there is a checkpoint in `directory`, whole or not."""
    if not _listed(directory):
        raise CheckpointError(f"no checkpoint in {str(directory)!r}; start the run without --resume")


def open_whole(directory: Path, step: int) -> Checkpoint:
    """The checkpoint of `step`, which is known to be whole: only its record is read."""
    path = directory / f"step-{step:06d}"
    record = _read_sealed(path / "trainer.json")
    return Checkpoint(path, step, int(record["world_size"]), record)


def check(path: Path) -> Checkpoint:
    """The checkpoint at `path`, all of its files compared with their checksums; else CheckpointError."""
    record = _read_sealed(path / "trainer.json")
    for rank in range(int(record["world_size"])):
        for name, wanted in _read_sealed(path / f"rank-{rank:05d}.json")["files"].items():
            file = path / name
            if not file.is_file() or file.stat().st_size != wanted["bytes"] or _crc32(file) != wanted["crc32"]:
                raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {name} is missing or changed")
    return Checkpoint(path, int(record["step"]), int(record["world_size"]), record)


def set_aside(directory: Path, step: int) -> None:
    """Rename the checkpoints after `step`, which are damaged, so that none of them is taken for the newest again."""
    for number, path in _listed(directory):
        if number > step:
            target = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(path, target)


def stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """What tensors the checkpoint holds: name to torch's TensorStorageMetadata."""
    try:
        return dict(HuggingFaceStorageReader(str(checkpoint.path)).read_metadata().state_dict_metadata)
    except Exception as error:  # safetensors raises errors of its own
        raise CheckpointError(f"checkpoint {str(checkpoint.path)!r} is unreadable: {first_line(error)}") from error


def load(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, by global name, from the checkpoint; every rank calls this with its own.

    Raises CheckpointError where a name is missing or a shape differs.
    """
    on_disk = stored(checkpoint)
    for name, tensor in tensors.items():
        if name not in on_disk:
            raise CheckpointError(f"checkpoint {str(checkpoint.path)!r} does not fit the model: it lacks {name}")
        if on_disk[name].size != tensor.shape:
            raise CheckpointError(
                f"checkpoint {str(checkpoint.path)!r} does not fit the model: "
                f"{name} is {list(on_disk[name].size)} there and {list(tensor.shape)} here"
            )
    try:
        reader = HuggingFaceStorageReader(str(checkpoint.path))
        with _no_warnings():
            load_distributed(dict(tensors), storage_reader=reader, no_dist=default_rank_and_size()[1] == 1)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {str(checkpoint.path)!r} is unreadable: {_cause(error)}") from error


@contextmanager
def _no_warnings() -> Iterator[None]:
    """torch warns of a single process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _listed(directory: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in found)


def _clear(directory: Path) -> None:
    """Remove what a killed run left under scratch names."""
    for path in directory.glob("step-*.tmp"):
        shutil.rmtree(path)


def _publish(scratch: Path, final_path: Path) -> None:
    if final_path.exists():  # of a run that was continued from an earlier step
        shutil.rmtree(final_path)
    os.replace(scratch, final_path)
    replace_text(final_path.parent / "latest", final_path.name + "\n")
    _sync(final_path.parent)


def _prune(directory: Path, keep: int) -> None:
    for _, path in _listed(directory)[:-keep]:
        shutil.rmtree(path)


def _write_sealed(path: Path, record: Record) -> None:
    """JSON with the checksum of its content, flushed to disk."""
    text = json.dumps(record, sort_keys=True)
    with path.open("w") as file:
        file.write(f"{zlib.crc32(text.encode()):08x}\n{text}\n")
        file.flush()
        os.fsync(file.fileno())


def _read_sealed(path: Path) -> Record:
    try:
        seal, _, text = path.read_text().rstrip("\n").partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {str(path.parent)!r} is damaged: {path.name} is unreadable") from error
    if seal != f"{zlib.crc32(text.encode()):08x}":
        raise CheckpointError(f"checkpoint {str(path.parent)!r} is damaged: {path.name} is changed")
    record: Record = json.loads(text)
    return record


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: OSError | CheckpointException) -> str:
    """The reason of a failure in a line; torch wraps each rank's own error."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {inner.strerror if isinstance(inner, OSError) and inner.strerror else first_line(inner)}"
    return error.strerror or first_line(error)
