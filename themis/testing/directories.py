"""A model directory read on several ranks and written again, against what was there."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from themis.fssdp import executor_of
from themis.models.export import export
from themis.models.hub import from_pretrained


def round_trip(rank: int, source: Path, target: Path) -> None:  # noqa: ARG001 - run_ranks gives it
    """Read `source` and write `target`, which will be of several files; for each rank to call."""
    model = from_pretrained(source)
    export(model, target, max_file_bytes=50_000)
    executor_of(model).close()


def stored_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the directory, by name."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def first_difference(source: Path, target: Path) -> str | None:
    """What the directories' tensors differ in first, of names, types, shapes and bytes; None where in nothing."""
    before, after = stored_tensors(source), stored_tensors(target)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            return f"{name} is only in {'the first' if name in before else 'the second'}"
        ours, theirs = before[name], after[name]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{name} is {ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
        if not torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            return f"{name} differs in value"
    return None
