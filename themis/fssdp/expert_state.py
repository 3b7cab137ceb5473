"""An expert on the move: parameters, gradients and optimizer state as one span of bytes.

A header in JSON says what follows; the tensors follow byte by byte. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.core.errors import ConfigError
from themis.fssdp.expert_shard import ExpertShard

_LENGTH_BYTES = 8


def pack_expert(shard: ExpertShard, e: int, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """uint8 [bytes] on the shard's device: all that belongs to the kept expert `e`."""
    tensors = [shard.chunk(e)]
    header: dict[str, Any] = {}
    for name, parameter in shard.parameters(e).items():
        entry: dict[str, Any] = {
            "place": _find(parameter, optimizers),
            "trained": parameter.requires_grad,
            "gradient": parameter.grad is not None,
        }
        if parameter.grad is not None:
            tensors.append(parameter.grad)
        if entry["place"] is not None:
            state = optimizers[entry["place"][0]].state.get(parameter, {})
            entry["state"] = [_describe(key, value, name, tensors) for key, value in state.items()]
        header[name] = entry
    text = json.dumps(header).encode()
    length = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8)
    parts = [torch.from_numpy(np.concatenate([length, np.frombuffer(text, dtype=np.uint8)])).to(shard.device)]
    parts += [_as_bytes(tensor).to(shard.device) for tensor in tensors]
    return torch.cat(parts)


def unpack_expert(shard: ExpertShard, e: int, data: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Have `shard` keep expert `e` from `pack_expert`'s bytes, entered in the same optimizers and groups."""
    start = _LENGTH_BYTES
    length = int.from_bytes(data[:start].cpu().numpy().tobytes(), "little")
    header = json.loads(data[start : start + length].cpu().numpy().tobytes())
    reader = _Reader(data, start + length)
    chunk = reader.tensor(shard.master_dtype, (shard.layout.numel,), shard.device)
    parameters = shard.take(e, chunk)
    for name, entry in header.items():
        parameter = parameters[name].requires_grad_(entry["trained"])
        if entry["gradient"]:
            parameter.grad = reader.tensor(parameter.dtype, tuple(parameter.shape), shard.device)
        if entry["place"] is not None:
            optimizer, group = _place(entry["place"], optimizers)
            group["params"].append(parameter)
            state = {item["key"]: reader.value(item, shard.device) for item in entry["state"]}
            if state:
                optimizer.state[parameter] = state


def _describe(key: str, value: object, name: str, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        tensors.append(value)
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return {"key": key, "dtype": dtype, "shape": shape, "on_host": value.device.type == "cpu"}
    if value is None or isinstance(value, bool | int | float | str):
        return {"key": key, "value": value}
    raise ConfigError(
        f"the optimizer's state {key!r} of parameter {name!r} is a {type(value).__name__}; "
        "re-sharding moves tensors and plain numbers, so use such an optimizer or reshard_interval=0"
    )


def _find(parameter: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, int] | None:
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            if any(held is parameter for held in group["params"]):
                return o, g
    return None


def _place(
    place: Sequence[int], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    o, g = place
    if o >= len(optimizers) or g >= len(optimizers[o].param_groups):
        raise ConfigError(
            f"an expert arrives from optimizer {o}, parameter group {g}, which this rank lacks; "
            "build the same optimizers with the same groups on every rank, even where a group is empty"
        )
    return optimizers[o], optimizers[o].param_groups[g]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _Reader:
    """Takes tensors off a span of bytes, one after another."""

    def __init__(self, data: Tensor, start: int) -> None:
        self._data = data
        self._position = start

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The next tensor, in memory of its own."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        span = self._data[self._position : self._position + count]
        self._position += count
        # A copy starts at an aligned address, as a view in another type needs.
        return span.clone().view(dtype).reshape(shape).to(device)

    def value(self, item: dict[str, Any], device: torch.device) -> object:
        """The next value of an optimizer's state."""
        if "dtype" not in item:
            return item["value"]
        target = torch.device("cpu") if item["on_host"] else device
        return self.tensor(getattr(torch, item["dtype"]), tuple(item["shape"]), target)
