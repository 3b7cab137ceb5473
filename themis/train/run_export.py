"""A run's checkpoint as a directory that transformers loads; one process, no ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from themis.comm.mesh import Mesh
from themis.core.errors import CheckpointError, ConfigError
from themis.fssdp.adapters import MoESite, find_sites
from themis.models import TransformersConfig, build
from themis.models.export import Piece, write_pieces
from themis.models.slots import Slots, family_root
from themis.models.tensors import stacked_shapes
from themis.moe.interface import BANK
from themis.train import checkpoint as checkpoints
from themis.train.checkpoint import Checkpoint
from themis.train.config import load_config
from themis.train.tokenizer import BYTES


def export_run(
    run_dir: Path, path: Path, *, step: int | None = None, dtype: torch.dtype | None = None, drop: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Write the model of `run_dir`'s checkpoint of `step`, by default the newest whole one, into `path`.

    dtype, drop: as in `themis.export`. Returns the step, and a line for each newer checkpoint that is damaged. A
    tokenizer.json that the run has used is copied along. Memory: the dense part, a layer's experts and a file's
    tensors at a time. ConfigError for a run of another model than transformers', CheckpointError.
    """
    config = load_config(run_dir / "config.json")
    if not isinstance(config.model, TransformersConfig):
        raise ConfigError(
            f"{str(run_dir)!r} is a run of {config.name!r}, whose model is none of transformers', so there is no form "
            "in which transformers would load it; export runs of recipes such as mixtral-tiny"
        )
    found, damaged = _find(run_dir / "checkpoints", step)
    model = build(config.model, getattr(torch, config.parallel.dtype))
    prefix, root = family_root(model)
    slots = Slots(root, dtype)
    stored = checkpoints.stored(found)
    sites = find_sites(root)
    names = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    dense = {name for name in names if f".{BANK}." not in name}
    slots.check(prefix, [*sorted(dense), *(prefix + name for name in stacked_shapes(sites))], drop)

    def pieces() -> Iterator[Piece]:
        yield _read(found, stored, {name.removeprefix(prefix): f"model.{name}" for name in sorted(dense)})
        for site in sites:
            yield _read_layer(found, stored, site, prefix)

    write_pieces(root, slots, pieces(), path, Mesh.create(), dtype=dtype)
    if config.data.tokenizer != BYTES and Path(config.data.tokenizer).is_file():
        shutil.copyfile(config.data.tokenizer, path / "tokenizer.json")
    return found.step, damaged


def _find(directory: Path, step: int | None) -> tuple[Checkpoint, list[str]]:
    there = sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*[0-9]"))
    if not there:
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r} to export")
    if step is None:
        return checkpoints.find(directory)
    if step not in there:
        raise CheckpointError(f"there is no checkpoint of step {step} in {str(directory)!r}; there are {there}")
    return checkpoints.check(directory / f"step-{step:06d}"), []


def _read(found: Checkpoint, stored: dict[str, Any], name_of: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of the checkpoint by `name_of` ours the checkpoint's."""
    tensors = {
        name: torch.empty(stored[full].size, dtype=stored[full].properties.dtype) for name, full in name_of.items()
    }
    checkpoints.load(found, {name_of[name]: tensor for name, tensor in tensors.items()})
    return tensors


def _read_layer(found: Checkpoint, stored: dict[str, Any], site: MoESite, prefix: str) -> dict[str, Tensor]:
    """All experts of `site`, stacked."""
    bank = site.layer.experts
    first = f"model.{prefix}{site.name}.{BANK}.0"
    stacked: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for name, shape in bank.layout.shapes.items():
        dtype = stored[f"{first}.{name}"].properties.dtype
        stacked[f"{site.name}.{name}"] = whole = torch.empty((bank.num_experts, *shape), dtype=dtype)
        rows |= {f"model.{prefix}{site.name}.{BANK}.{e}.{name}": whole[e] for e in range(bank.num_experts)}
    checkpoints.load(found, rows)
    return stacked
