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

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from themis.comm.beats import Channel
from themis.comm.collectives import default_rank_and_size, share_objects
from themis.comm.mesh import Mesh
from themis.core.errors import CheckpointError
from themis.core.files import replace_text
from themis.train.sealed import Record, crc32, read_sealed, sync, write_sealed
from themis.train.shards import ShardWriter
from themis.train.tokenizer import first_line

_NAME = re.compile(r"step-(\d{6,})")
#: The name of a checkpoint for the moment in which another of the same step takes its place.
_REPLACED = "replaced-"


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
        return read_sealed(self.path / f"rank-{rank:05d}.json")["record"] if rank < self.world_size else None


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    record: Record,
    rank_record: Record,
    *,
    mesh: Mesh,
    keep: int,
) -> Path:
    """Write a checkpoint of `step` into `directory` and delete all but the newest `keep`; a collective.

    tensors: this rank's, by global name; record: the same on all ranks; rank_record: this rank's own. Returns once
    the checkpoint is there under its name. Raises CheckpointError on every rank, and leaves earlier checkpoints as
    they were, when the disk refuses one of them; PeerError. Waits on other ranks have the mesh's limit; the disk's
    own time has none.
    """
    mesh.open(Channel.SAVING)
    final_path = directory / f"step-{step:06d}"
    scratch = directory / f"step-{step:06d}.tmp"
    leads = mesh.rank == 0
    with _together(mesh, final_path, "making room"):
        if leads:
            _clear(directory)
            scratch.mkdir(parents=True)
    with _together(mesh, final_path, "planning"):
        writer = ShardWriter(scratch, tensors, mesh)
    writer.agree()
    with _together(mesh, final_path, "writing"):
        files = {path.name: {"bytes": path.stat().st_size, "crc32": crc32(path)} for path in writer.write()}
        write_sealed(scratch / f"rank-{mesh.rank:05d}.json", {"files": files, "record": rank_record})
    with _together(mesh, final_path, "publishing"):
        if leads:
            write_sealed(scratch / "trainer.json", {"step": step, "world_size": mesh.world_size, **record})
            sync(scratch)
            _publish(scratch, final_path)
    if leads:
        _prune(directory, keep)
    return final_path


def find(directory: Path) -> tuple[Checkpoint, list[str]]:
    """The newest whole checkpoint in `directory`, and a line for each newer one that is damaged.

    Every file is read and compared with its checksum. CheckpointError where there is none to go on from.
    """
    require_any(directory)
    return newest_whole(directory)


def newest_whole(directory: Path) -> tuple[Checkpoint, list[str]]:
    """As `find`, but changes nothing in `directory`, where a run may be at work."""
    damaged: list[str] = []
    for _, path in reversed(_listed(directory)):
        try:
            return check(path), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    raise CheckpointError(f"no whole checkpoint in {str(directory)!r}{': ' + damaged[0] if damaged else ''}")


def require_any(directory: Path) -> None:
    """CheckpointError unless there is a checkpoint in `directory`, whole or not. For one process at a time."""
    _take_back(directory)
    if not _listed(directory):
        raise CheckpointError(f"no checkpoint in {str(directory)!r}; start the run without --resume")


def open_whole(directory: Path, step: int) -> Checkpoint:
    """The checkpoint of `step`, which is known to be whole: only its record is read."""
    path = directory / f"step-{step:06d}"
    record = read_sealed(path / "trainer.json")
    return Checkpoint(path, step, int(record["world_size"]), record)


def check(path: Path) -> Checkpoint:
    """The checkpoint at `path`, all of its files compared with their checksums; else CheckpointError."""
    record = read_sealed(path / "trainer.json")
    for rank in range(int(record["world_size"])):
        for name, wanted in read_sealed(path / f"rank-{rank:05d}.json")["files"].items():
            file = path / name
            if not file.is_file() or file.stat().st_size != wanted["bytes"] or crc32(file) != wanted["crc32"]:
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


def steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in `directory`, whole or not, ascending."""
    return [step for step, _ in _listed(directory)]


def _listed(directory: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in found)


def _take_back(directory: Path) -> None:
    """Give the checkpoint that was being replaced when a run was killed its name again."""
    for aside in directory.glob(f"{_REPLACED}step-*"):
        target = aside.with_name(aside.name.removeprefix(_REPLACED))
        if not target.exists():
            os.replace(aside, target)


def _clear(directory: Path) -> None:
    """Remove what a killed run, or a save that failed, left under scratch names."""
    _take_back(directory)
    for path in (*directory.glob("step-*.tmp"), *directory.glob(f"{_REPLACED}step-*")):
        shutil.rmtree(path)


def _publish(scratch: Path, final_path: Path) -> None:
    """Give `scratch` its name. One of the same step stays whole, aside, until then: it may be the only one."""
    aside = final_path.with_name(_REPLACED + final_path.name)
    if final_path.exists():
        os.replace(final_path, aside)
    os.replace(scratch, final_path)
    replace_text(final_path.parent / "latest", final_path.name + "\n")
    sync(final_path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _prune(directory: Path, keep: int) -> None:
    for _, path in _listed(directory)[:-keep]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {str(path)!r} cannot be deleted: {_cause(error)}") from error


@contextmanager
def _together(mesh: Mesh, path: Path, what: str) -> Iterator[None]:
    """Within it, each rank does its part of the checkpoint at `path`; what the disk refuses one of them fails on all.

    A collective at its end. Raises CheckpointError with the reason, PeerError.
    """
    refusal: OSError | None = None
    try:
        yield
    except OSError as error:
        refusal = error
    told = share_objects(mesh, Channel.SAVING, f"{what} {path.name}", None if refusal is None else _cause(refusal))
    for rank, reason in enumerate(told):
        if reason is not None:
            where = f"rank {rank}: " if mesh.world_size > 1 else ""
            raise CheckpointError(f"checkpoint {str(path)!r} cannot be written: {where}{reason}") from refusal


def _cause(error: OSError | CheckpointException) -> str:
    """The reason of a failure in a line; torch wraps each rank's own error."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {inner.strerror if isinstance(inner, OSError) and inner.strerror else first_line(inner)}"
    return error.strerror or first_line(error)
