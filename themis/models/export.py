"""A parallelized transformers model as a directory that transformers loads, its tensors as they came."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from themis.comm.collectives import exchange
from themis.comm.mesh import Mesh
from themis.comm.together import work_together
from themis.core.errors import CheckpointError, ThemisError, is_whole, require
from themis.fssdp import executor_of
from themis.fssdp.expert_shard import ExpertShard
from themis.models.directory_writer import DirectoryWriter, require_new
from themis.models.family import floating_type
from themis.models.slots import Slots, family_class, family_root
from themis.models.tensors import dense_tensors
from themis.moe.interface import BANK

#: Tensors by the names that transformers' model gives them, experts stacked.
Piece = Mapping[str, Tensor]

MAX_FILE_BYTES = 5_000_000_000


def export(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    drop: Sequence[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `model`, a parallelized transformers model, into the new directory `path`; a collective.

    Rank 0 writes config.json and safetensors with the keys that transformers writes; a model from `from_pretrained`
    gives the keys, shapes and bytes that were read. dtype: what floating-point tensors are cast to, by default none;
    drop: shell-style patterns of the parameters and buffers that may be left out, having no slot in transformers'
    model. Rank 0 holds the dense part, a file's tensors and one layer's experts at a time. ConfigError where a tensor
    has no slot, the model is none of transformers', or `path` exists; CheckpointError where the disk refuses. The
    directory is there whole or not at all.
    """
    mesh = executor_of(model).mesh
    dtype = floating_type("dtype", dtype)
    require(isinstance(path, str | Path) and "\0" not in str(path), "path", path, "the path of a new directory")
    require(is_whole(max_file_bytes, 1), "max_file_bytes", max_file_bytes, "a whole number of bytes above zero")
    path = Path(path)
    _on_rank_0(mesh, path, lambda: require_new(path))
    prefix, root = family_root(model)
    slots = Slots(root, dtype)
    banks = {name: module for name, module in root.named_modules() if BANK in module._modules}
    dense = dense_tensors(model, [prefix + name for name in banks])
    stacks = [f"{prefix}{name}.{p}" for name, module in banks.items() for p in module.owned.layout.shapes]
    slots.check(prefix, [*dense, *stacks], drop)
    shards = {id(layer.shard.experts): layer.shard for layer in executor_of(model).layers}

    def pieces() -> Iterator[Piece]:
        own = {n.removeprefix(prefix): t for n, t in dense.items() if n.startswith(prefix)}
        whole = {name: _gather_dense(tensor, mesh) for name, tensor in own.items()}
        yield {name: tensor for name, tensor in whole.items() if tensor is not None}
        for name, module in banks.items():
            stacked = _gather_layer(shards[id(module.owned)], mesh)
            yield {f"{name}.{parameter}": tensor for parameter, tensor in stacked.items()}

    write_pieces(root, slots, pieces(), path, mesh, dtype=dtype, max_file_bytes=max_file_bytes)


def write_pieces(
    root: Any,
    slots: Slots,
    pieces: Iterator[Piece],
    path: Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int = MAX_FILE_BYTES,
    beside: Callable[[Path], object] | None = None,
) -> None:
    """Write `pieces`, which all ranks make together, on rank 0, under the keys that transformers writes for `root`.

    `beside` is called with the directory before it gets its name, to write further files.
    """
    from transformers.core_model_loading import revert_weight_conversion  # optional, as all of transformers

    writer: list[DirectoryWriter] = []

    def begin() -> None:
        # First what a disk or a configuration may refuse, last what takes long.
        writer.append(DirectoryWriter(path, max_file_bytes))
        if root.can_generate():
            root.generation_config.save_pretrained(writer[0].scratch())
        if beside is not None:
            beside(writer[0].scratch())

    def add(piece: Piece) -> None:
        fitting = {name: slot for name, t in piece.items() if (slot := slots.fit(name, t)) is not None}
        writer[0].add(revert_weight_conversion(root, fitting))

    def finish() -> None:
        config = copy.deepcopy(root.config)
        config.dtype = dtype or root.dtype
        config.architectures = [family_class(root).__name__]
        config.save_pretrained(writer[0].scratch())
        writer[0].finish()

    try:
        _on_rank_0(mesh, path, begin)
        for piece in pieces:
            _on_rank_0(mesh, path, lambda: add(piece))  # noqa: B023 - called at once
        _on_rank_0(mesh, path, finish)
    except BaseException:
        for begun in writer:
            begun.abandon()
        raise


def _on_rank_0(mesh: Mesh, path: Path, action: Callable[[], None]) -> None:
    """Run `action` on rank 0, however long a disk takes; where it fails, every rank raises."""

    def act() -> None:
        try:
            with torch.no_grad():
                action()
        except ThemisError:
            raise
        except (OSError, SafetensorError, ValueError) as error:  # a configuration may be one that is not saved
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise CheckpointError(f"{str(path)!r} cannot be written: {reason}") from error

    if work_together(mesh, act if mesh.rank == 0 else None):
        raise CheckpointError(f"rank 0 could not write {str(path)!r}")


@torch.no_grad()
def _gather_dense(tensor: Tensor, mesh: Mesh) -> Tensor | None:
    """`tensor` whole: on every rank where it is so already, else on rank 0 alone. A collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    receives: list[tuple[int, Tensor]] = []
    whole = None
    if mesh.rank == 0:
        whole = local.new_empty(tensor.shape)
        # fully_shard deals out rows as torch.chunk does; the last ranks may have none.
        receives = list(enumerate(whole.chunk(mesh.world_size)))
    exchange(mesh, [(0, local.contiguous())] if local.numel() else [], receives)
    return whole


@torch.no_grad()
def _gather_layer(shard: ExpertShard, mesh: Mesh) -> dict[str, Tensor]:
    """On rank 0, each parameter of all experts, stacked [E, ...]; elsewhere nothing. A collective."""
    layout, num_experts = shard.layout, shard.owner_E.size
    receives: list[tuple[int, Tensor]] = []
    stacked: dict[str, Tensor] = {}
    if mesh.rank == 0:
        whole = torch.empty(num_experts, layout.numel, dtype=shard.master_dtype, device=shard.device)
        receives = [(int(owner), whole[e]) for e, owner in enumerate(shard.owner_E)]
        for name, view in layout.views(whole[0]).items():
            start = layout.offsets[name]
            stacked[name] = whole[:, start : start + view.numel()].view(num_experts, *view.shape)
    exchange(mesh, [(0, shard.chunk(e)) for e in shard.owned], receives)
    return stacked
