"""What the simulator asks of a policy, and how it asks one that still answers `reshard` for owners alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, final

import numpy as np
from numpy.typing import NDArray

from themis.core.placement import Placement, shard_only
from themis.planning.predict import LoadPredictor
from themis.policies import LayerContext, Policy


class Planner(Protocol):
    """A policy whose persistent placements may have replicas; see `Policy` for what the two share.

    prediction_window: iterations that predicted loads average over; persistent_replicas_per_device: slots that are
    reserved, optimizer states included.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def rematerialize(self) -> bool: ...  # noqa: D102
    @property
    def prediction_window(self) -> int: ...  # noqa: D102
    def persistent_replicas_per_device(self) -> int: ...  # noqa: D102
    def rearrange(  # noqa: D102
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]: ...
    def place(  # noqa: D102
        self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext
    ) -> Placement: ...
    def force(self, num_tokens: int, top_k: int, num_experts: int) -> NDArray[np.int64] | None: ...  # noqa: D102
    def calibrate(  # noqa: D102
        self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext
    ) -> Placement: ...
    def route(  # noqa: D102
        self, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext
    ) -> NDArray[np.int64]: ...


def asked(policy: Policy | Planner) -> Planner:
    """`policy` itself if it rearranges whole placements, else an adapter around it."""
    if hasattr(policy, "rearrange"):
        return cast(Planner, policy)
    return cast(Planner, _OwnersOnly(policy))


@final
class _OwnersOnly:
    """Answers `rearrange` with `reshard`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def prediction_window(self) -> int:
        return LoadPredictor().window

    def persistent_replicas_per_device(self) -> int:
        return 0

    def rearrange(
        self, iteration: int, load_LE: NDArray[np.float64] | None, held_L: Sequence[Placement], context: LayerContext
    ) -> Sequence[Placement]:
        owner_LE = np.stack([held.owner_E for held in held_L])
        new_LE = self._policy.reshard(iteration, load_LE, owner_LE, context)
        if new_LE is owner_LE:
            return held_L
        return [
            held if np.array_equal(held.owner_E, owner_E) else shard_only(owner_E, held.num_devices)
            for held, owner_E in zip(held_L, new_LE, strict=True)
        ]

    def place(self, held: Placement, load_E: NDArray[np.float64] | None, context: LayerContext) -> Placement:
        return self._policy.place(held.owner_E, load_E, context)
