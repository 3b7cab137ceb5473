"""A rank's tensors as safetensors files, by the planner and the writer of torch's distributed checkpoint.

What torch's own `save` does, with the exchange of plans over our process groups: its waits have the mesh's limit and
name the rank, and a rank that writes for long is not taken for one that waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan

from themis.comm.beats import Channel
from themis.comm.collectives import gather_objects, scatter_objects
from themis.comm.mesh import Mesh


@final
class ShardWriter:
    """Writes the tensors of all ranks into `folder`, which exists: a tensor that several ranks hold is written once.

    Three steps, in this order and each on every rank: the constructor, `agree`, `write`.
    """

    def __init__(self, folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
        """`tensors`: this rank's by global name; sharded ones as DTensor. OSError."""
        self._folder = folder
        self._mesh = mesh
        self._planner = DefaultSavePlanner()
        self._writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), mesh.rank == 0)
        self._writer.set_up_storage_writer(mesh.rank == 0)
        self._plan: SavePlan = self._writer.prepare_local_plan(self._planner.create_local_plan())

    def agree(self) -> None:
        """Decide who writes what. A collective; PeerError."""
        plans = gather_objects(self._mesh, Channel.SAVING, "gathering plans", self._plan)
        if plans is not None:
            plans = self._writer.prepare_global_plan(self._planner.create_global_plan(plans)[0])
        self._plan = self._planner.finish_plan(scatter_objects(self._mesh, Channel.SAVING, "scattering plans", plans))

    def write(self) -> list[Path]:
        """Write this rank's part, flushed to disk; returns its files, none where others write all it has. OSError."""
        self._writer.write_data(self._plan, self._planner).wait()
        return sorted(self._folder.glob(f"shard-{self._mesh.rank + 1:05d}-*.safetensors"))
