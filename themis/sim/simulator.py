"""A policy's iterations on a cluster: asks the policy what the runtime asks, and prices the plans it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError
from themis.core.placement import Placement, even_owner, shard_only
from themis.planning import LoadPredictor, added_transfers, transfers
from themis.policies import LayerContext, Policy
from themis.sim.memory import OPTIMIZER_BYTES, memory_use, moved_bytes
from themis.sim.results import PricedLayer, Result, Totals
from themis.sim.routing import Routing
from themis.sim.timeline import NOTHING, Fixed, LaneTime, LayerTimes, Timeline, all_reduce_time, lane_time
from themis.sim.traffic import LinkLoads, local_first_loads, route_loads, transfer_loads
from themis.sim.workload import Workload

#: Dispatch plans [E, D, D] of more entries than this (half a GB) are not made.
_MOST_ENTRIES = 1 << 26


@final
class Simulator:
    """Runs `policy` on `workload` with counts from `routing`. Deterministic: same arguments, same numbers.

    On clusters so large that a dispatch plan [E, D, D] fits no memory, calibration, which tries such plans, is off, and
    policies that are not local-first are refused.
    """

    def __init__(self, workload: Workload, policy: Policy, routing: Routing) -> None:
        model, cluster = workload.model, workload.cluster
        self.workload, self.routing = workload, routing
        self.policy = _without_large_plans(policy, workload)
        self.context = LayerContext(cluster.topology, workload.cost, workload.window_s)
        even = shard_only(even_owner(model.num_experts, cluster.num_devices), cluster.num_devices)
        self._held_L: Sequence[Placement] = [even] * model.num_layers
        self._predictor = LoadPredictor(self.policy.prediction_window)
        self._sources = [LoadPredictor(self.policy.prediction_window) for _ in range(model.num_layers)]
        self._placed_L: list[Placement | None] = [None] * model.num_layers
        self._iteration = 0
        self._forced_ED = _forced(workload, policy)
        self._dense = all_reduce_time(model.layer_parameters * model.element_bytes, cluster)
        self._head = all_reduce_time(2 * model.vocabulary * model.width * model.element_bytes, cluster)
        self._sync: dict[int, tuple[Placement, LinkLoads]] = {}

    def run(self, iterations: int, warmup: int = 0) -> Result:
        """Simulate `warmup` iterations unmeasured, then `iterations`."""
        for _ in range(warmup):
            self.step(None)
        totals = Totals()
        for _ in range(iterations):
            self.step(totals)
        work = self.workload
        memory = memory_use(work, self.policy, totals.peak)
        tokens = work.tokens * work.cluster.num_devices
        return totals.result(self.policy.name, tokens, memory, work.cluster.device.memory_bytes)

    def step(self, totals: Totals | None, *, record: bool = False) -> Timeline:
        """One iteration; adds to `totals` if given; with `record`, `Timeline.events` has what every lane did."""
        if self._iteration > 0:
            self.routing.advance()
        load_LE = self._predictor.predict()
        moves = self._rearrange(load_LE)
        layers, observed = [], []
        for layer in range(self.workload.model.num_layers):
            tokens_ED = self.routing.tokens_ED(layer) if self._forced_ED is None else self._forced_ED
            observed.append(tokens_ED.sum(axis=1))
            layers.append(self._price(layer, None if load_LE is None else load_LE[layer], tokens_ED))
            if self.policy.plans_by_source:
                self._sources[layer].observe(tokens_ED)
        self._predictor.observe(np.stack(observed))
        timeline = Timeline(self.workload.cluster, record=record)
        timeline.run([layer.times for layer in layers], self._fixed(moves))
        self._iteration += 1
        if totals is not None:
            totals.add(timeline, moves, layers)
        return timeline

    def _rearrange(self, load_LE: NDArray[np.float64] | None) -> LaneTime:
        """Ask for new persistent placements; what a device newly holds travels with its optimizer state."""
        held_L = self.policy.rearrange(self._iteration, load_LE, self._held_L, self.context)
        size = moved_bytes(self.workload.model)
        moved = [self._added(old, new, size) for old, new in zip(self._held_L, held_L, strict=True) if new is not old]
        self._held_L = held_L
        return self._time(_sum(moved))

    def _price(self, layer: int, load_E: NDArray[np.float64] | None, tokens_ED: NDArray[np.int64]) -> PricedLayer:
        workload, policy, held = self.workload, self.policy, self._held_L[layer]
        context = replace(self.context, predicted_ED=self._sources[layer].predict(), previous=self._placed_L[layer])
        model, size = workload.model, workload.model.expert_bytes
        placed = policy.place(held, load_E, context)
        final = policy.calibrate(placed, tokens_ED, context)
        loads = dispatch_loads(policy, final, tokens_ED, context)
        crossing = loads.scaled(model.token_bytes)
        self._placed_L[layer] = final
        before, after = self._added(held, placed, size), self._added(placed, final, size)
        home = before if final is placed else self._added(held, final, size)
        sync = self._synchronised(layer, held)
        again = policy.rematerialize and layer < model.num_layers - 1
        times = LayerTimes(
            attention_s=workload.window_s,
            attention_backward_s=workload.window_backward_s,
            counts_s=workload.counts_s,
            plan_s=workload.cluster.plan_s,
            all_to_all=lane_time(crossing, workload.cluster),
            experts_D=loads.computed_D * workload.expert_s_per_token,
            gather=self._time(before),
            added=self._time(after),
            regather=self._time(home) if again else NOTHING,
            reduce=self._time(home),
            sync=self._time(sync) + self._time(sync),
            dense=self._dense,
        )
        gathered = _sum([before, after, home if again else None])
        moved = {"all_to_all": crossing.scaled(4), "gather": gathered, "reduce": home}
        moved["sync"] = None if sync is None else sync.scaled(2)
        replicas_D = final.placement_ED.sum(axis=0) - held.placement_ED.sum(axis=0)
        return PricedLayer(times, loads.computed_D, replicas_D, moved)

    def _added(self, old: Placement, new: Placement, num_bytes: int) -> LinkLoads | None:
        """Bytes that cross links when `new`'s additions to `old` travel, chunks of `num_bytes`; None for none."""
        if new is old or not (new.placement_ED & ~old.placement_ED).any():
            return None
        topology = self.context.topology
        plan = added_transfers(old, new.placement_ED, topology, expert_bytes=num_bytes)
        return transfer_loads(plan, num_bytes, topology)

    def _synchronised(self, layer: int, held: Placement) -> LinkLoads | None:
        """Persistent replicas' gradients: reduced to the owner along the transfer plan, and broadcast back by it."""
        known = self._sync.get(layer)
        if known is None or known[0] is not held:
            topology, size = self.context.topology, self.workload.model.expert_bytes
            plan = transfers(held.owner_E, held.placement_ED, topology, expert_bytes=size)
            known = self._sync[layer] = (held, transfer_loads(plan, size, topology))
        return known[1] if known[1].computed_D.any() else None

    def _time(self, loads: LinkLoads | None) -> LaneTime:
        return NOTHING if loads is None else lane_time(loads, self.workload.cluster)

    def _fixed(self, moves: LaneTime) -> Fixed:
        workload, model = self.workload, self.workload.model
        held_D = np.sum([held.placement_ED.sum(axis=0) for held in self._held_L], axis=0)
        stepped = model.dense_parameters + float(held_D.max()) * model.expert_parameters
        # Adam reads and writes its three values, reads a gradient and writes a parameter.
        step_bytes = 2 * OPTIMIZER_BYTES + 2 * model.element_bytes
        optimizer_s = stepped * step_bytes / workload.cluster.device.memory_bytes_per_s
        return Fixed(workload.head_s, 2 * workload.head_s, self._head, optimizer_s, moves)


def dispatch_loads(
    policy: Policy, placement: Placement, tokens_ED: NDArray[np.int64], context: LayerContext
) -> LinkLoads:
    """Loads, in tokens, of the policy's dispatch plan; summed without it where the policy is surely local-first."""
    if policy.dispatch_rule == "local-first":
        return local_first_loads(tokens_ED, placement.placement_ED, context.topology)
    return route_loads(policy.route(placement, tokens_ED, context), context.topology)


def _without_large_plans(policy: Policy, workload: Workload) -> Policy:
    devices = workload.cluster.num_devices
    entries = workload.model.num_experts * devices * devices
    if entries <= _MOST_ENTRIES:
        return policy
    if policy.dispatch_rule != "local-first":
        raise ConfigError(
            f"policy {policy.name!r} needs dispatch plans of {entries * 8 / 1e9:.0f} GB for {devices} devices; "
            f"at this size only local-first policies can be simulated"
        )
    options: Any = policy
    return replace(options, calibration=False) if hasattr(policy, "calibration") else policy


def _forced(workload: Workload, policy: Policy) -> NDArray[np.int64] | None:
    """int64 [E, D]: the counts of a policy that forces the gate, each device alike; None where the gate is free."""
    model = workload.model
    forced_TK = policy.force(workload.tokens, model.top_k, model.num_experts)
    if forced_TK is None:
        return None
    forced_E = np.bincount(forced_TK.ravel(), minlength=model.num_experts)
    return np.repeat(forced_E[:, None], workload.cluster.num_devices, axis=1)


def _sum(parts: Sequence[LinkLoads | None]) -> LinkLoads | None:
    there = [part for part in parts if part is not None]
    if not there:
        return None
    total = there[0]
    for part in there[1:]:
        total = total + part
    return total
