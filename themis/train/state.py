"""A model's and an optimizer's state as tensors under names that do not depend on ranks, and random streams as text."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer


def reshard(model: nn.Module) -> None:
    """Have dense parameters under `fully_shard` show their shards, which a forward without backward leaves gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model.<name>` of every parameter and saved buffer that this rank holds, detached."""
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in saved)]
    return {f"model.{name}": tensor.detach() for name, tensor in named}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`optim.<name>.<key>` of the state of every parameter that this rank holds; parameters show their shards."""
    held = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in held for parameter in optimizer.state), "state of a parameter the model does not show"
    return {
        f"optim.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def allocate_optimizer_state(model: nn.Module, optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Give each parameter of this rank empty state of the names, shapes and types that a checkpoint has `stored`."""
    keys_of: dict[str, list[str]] = {}
    for full in stored:
        kind, _, rest = full.partition(".")
        if kind == "optim":
            name, _, key = rest.rpartition(".")
            keys_of.setdefault(name, []).append(key)
    for name, parameter in model.named_parameters():
        for key in keys_of.get(name, []):
            entry = stored[f"optim.{name}.{key}"]
            dtype = entry.properties.dtype
            like = entry.size == parameter.shape and parameter.dim() > 0
            # State of the parameter's shape lives where, and as, the parameter does; counters live on the host.
            value = torch.empty_like(parameter, dtype=dtype) if like else torch.empty(entry.size, dtype=dtype)
            optimizer.state[parameter][key] = value.detach()


@final
class HostCopies:
    """Copies of tensors in host memory, pinned for a CUDA device's; the memory is kept from one time to the next."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each of `tensors`, complete on return. It overwrites the copies of the time before.

        A sharded tensor's copy is sharded likewise.
        """
        self._held = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._held)

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            return held
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def random_record(device: torch.device) -> dict[str, str]:
    """This rank's random streams, as hexadecimal text."""
    record = {"cpu": _hex(torch.get_rng_state())}
    if device.type == "cuda":
        record["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return record


def restore_random(record: dict[str, str], device: torch.device) -> None:
    """Continue the random streams of `random_record`."""
    torch.set_rng_state(_unhex(record["cpu"]))
    if device.type == "cuda" and "cuda" in record:
        torch.cuda.set_rng_state(_unhex(record["cuda"]), device)


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
