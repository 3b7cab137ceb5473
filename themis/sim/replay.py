"""Recorded runs, priced: what a run directory of `themis train` says, and what the simulator makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from themis.core.errors import ConfigError
from themis.policies import Policy, make_policy
from themis.sim.hardware import Cluster
from themis.sim.results import Result
from themis.sim.routing import RecordedRouting, read_routing
from themis.sim.simulator import Simulator
from themis.sim.workload import ModelShape, Workload

#: The first steps warm kernels and caches up and are no part of a recorded step time.
_WARMUP_STEPS = 5


@final
@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run: what it trained, on which cluster, under which policy, its routing, and its steps' median seconds."""

    workload: Workload
    policy: Policy
    routing: RecordedRouting
    step_s: float


@final
@dataclass(frozen=True, eq=False)
class Replay:
    """A run's step time as recorded and as predicted."""

    recorded_s: float
    result: Result

    @property
    def ratio(self) -> float:
        """Predicted over recorded."""
        return self.result.iteration_s / self.recorded_s


def read_run(directory: Path, cluster: Cluster) -> RecordedRun:
    """The run in `directory`, as if on `cluster`, whose number of devices must be the run's.

    It needs config.json, routing.npz (log.routing_every 1 for every step) and metrics.jsonl. ConfigError in one line
    for what is missing or does not fit.
    """
    config = _read_json(directory / "config.json")
    routing = read_routing(directory / "routing.npz")
    layers, experts, devices = routing.shape
    if devices != cluster.num_devices:
        raise ConfigError(
            f"run {str(directory)!r} had {devices} ranks; cluster {cluster.name!r} has {cluster.num_devices} devices"
        )
    try:
        model, batch, policy = config["model"], config["batch"], config["policy"]
        shape = _shape(model, layers, experts)
        workload = Workload(shape, cluster, max(1, round(int(batch["sequences"]) / devices)))
        made = make_policy(policy["name"], policy)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{str(directory / 'config.json')!r} is no gpt run's configuration: {error!r}") from None
    return RecordedRun(workload, made, routing, _median_step(directory / "metrics.jsonl"))


def replay(run: RecordedRun) -> Replay:
    """Simulate the recorded iterations under the run's own policy."""
    simulator = Simulator(run.workload, run.policy, run.routing)
    warmup = min(_WARMUP_STEPS, run.routing.num_iterations - 1)
    return Replay(run.step_s, simulator.run(run.routing.num_iterations - warmup, warmup))


def _shape(model: Mapping[str, Any], layers: int, experts: int) -> ModelShape:
    width = int(model["width"])
    return ModelShape(
        name="recorded",
        width=width,
        expert_hidden=int(model["expert_hidden"]),
        num_experts=experts,
        top_k=int(model["top_k"]),
        sequence=int(model["sequence_length"]),
        num_layers=layers,
        gated=model.get("experts") == "swiglu",
        attention_parameters=4 * width * width,
        score_width=width,
        cache_width=3 * width,
        vocabulary=int(model["vocab_size"]),
        shared_hidden=int(model.get("shared_hidden", 0)),
        element_bytes=4,
    )


def _median_step(path: Path) -> float:
    try:
        seconds = [float(json.loads(line)["step_s"]) for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; it must be a run's metrics.jsonl") from None
    if len(seconds) <= _WARMUP_STEPS:
        raise ConfigError(f"{str(path)!r} has {len(seconds)} steps; there must be more than {_WARMUP_STEPS}")
    return float(np.median(seconds[_WARMUP_STEPS:]))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; name a run directory of `themis train`") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r} is {type(values).__name__}; it must be a run's configuration, an object")
    return values
