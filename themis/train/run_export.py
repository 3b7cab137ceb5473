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
from themis.models.directory_writer import require_new
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

    dtype, drop: as in `themis.export`. The run may be under way; nothing in it is changed. Returns the step and what
    there is to tell, a line each: newer checkpoints that are damaged, a tokenizer.json that the run has used and
    that is no longer there; one that is goes along. Memory: the dense part, a layer's experts and a file's tensors at
    a time. ConfigError for a run of another model than transformers', CheckpointError.
    """
    require_new(path)
    if not (run_dir / "checkpoints").exists() and any(run_dir.glob("*.safetensors")):
        raise ConfigError(
            f"{str(run_dir)!r} is a model's directory, not a run's; name the directory of a run of `themis train`, or "
            "read the model with themis.from_pretrained and write it with themis.export"
        )
    config = load_config(run_dir / "config.json")
    if not isinstance(config.model, TransformersConfig):
        raise ConfigError(
            f"{str(run_dir)!r} is a run of {config.name!r}, whose model is none of transformers', so there is no form "
            "in which transformers would load it; export runs of recipes such as mixtral-tiny"
        )
    found, notes = _find(run_dir / "checkpoints", step)
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

    def copy_tokenizer(directory: Path) -> None:
        shutil.copyfile(config.data.tokenizer, directory / "tokenizer.json")

    has_tokenizer = Path(config.data.tokenizer).is_file()
    if not has_tokenizer and config.data.tokenizer != BYTES:
        notes = [*notes, f"tokenizer {config.data.tokenizer!r} is not there; no tokenizer.json goes along"]
    beside = copy_tokenizer if has_tokenizer and config.data.tokenizer != BYTES else None
    write_pieces(root, slots, pieces(), path, Mesh.create(), dtype=dtype, beside=beside)
    return found.step, notes


def _find(directory: Path, step: int | None) -> tuple[Checkpoint, list[str]]:
    there = checkpoints.steps(directory)
    if not there:
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r} to export")
    if step is None:
        return checkpoints.newest_whole(directory)
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
