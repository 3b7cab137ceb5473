"""The full configuration of a run, its checks, and its JSON form."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, final

from themis.core.errors import ConfigError, require
from themis.core.files import replace_text
from themis.core.topology import Link, Topology
from themis.models import GPTMoEConfig, ModelConfig, TransformersConfig
from themis.policies import Policy, make_policy
from themis.train.data import DataConfig

PolicyName = Literal[
    "ep", "uniform", "faster-moe", "smart-moe", "flex-moe", "eplb", "exact-load", "themis", "themis-rm", "themis-joint"
]


@final
@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and the learning rate's course: linear warm-up, then a cosine."""

    lr: float = 3e-4
    """The highest learning rate."""
    final_lr: float = 0.1
    """The learning rate at the end, as a share of lr."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices; biases, norms and embeddings have none."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "max_grad_norm"):
            require(getattr(self, name) > 0, f"optimizer.{name}", getattr(self, name), "above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "at least 0 and below 1")
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "0 or more")
        require(0 <= self.final_lr <= 1, "optimizer.final_lr", self.final_lr, "between 0 and 1")


@final
@dataclass(frozen=True)
class BatchConfig:
    """A step's sequences over all ranks together, and how many micro-batches they are split into."""

    sequences: int = 32
    """Sequences of one step, all ranks together."""
    accumulation: int = 1
    """Micro-batches of one step."""

    def __post_init__(self) -> None:
        require(self.sequences >= 1, "batch.sequences", self.sequences, "1 or more")
        require(
            1 <= self.accumulation <= self.sequences,
            "batch.accumulation",
            self.accumulation,
            f"between 1 and batch.sequences ({self.sequences})",
        )


@final
@dataclass(frozen=True)
class PolicyConfig:
    """Who plans, and how freely. A policy takes the values it has a use for; see the classes of themis.policies."""

    name: PolicyName = "themis"
    """The policy."""
    budget: int = 2
    """m, replicas a device may hold of a layer (themis, themis-rm, themis-joint, eplb, exact-load)."""
    overlap_degree: int | None = None
    """t, experts of a layer that may be replicated; None: as many as attention hides."""
    reshard_interval: int = 100
    """K, iterations between re-shardings; 0: never (themis, themis-rm, themis-joint)."""
    calibration: bool = True
    """Whether replicas may be added after the gate."""
    dispatch_rule: Literal["local-first", "balanced"] = "local-first"
    """How tokens choose among the copies of their expert (themis, themis-rm)."""
    interval: int = 10
    """Iterations between rearrangements (smart-moe, flex-moe)."""
    threshold: float = 1.2
    """Busiest device over the mean that calls for changes (flex-moe)."""
    extra_slots: int = 2
    """Replicas a device keeps beyond its even share of experts (flex-moe)."""
    min_tokens: int = 1024
    """The fewest tokens that a replica is made for (exact-load)."""

    def __post_init__(self) -> None:
        names = typing.get_args(PolicyName)
        require(self.name in names, "policy.name", self.name, f"one of {', '.join(names)}")
        try:
            self.build()
        except ConfigError as error:
            raise ConfigError(f"policy.{error}") from error

    def build(self) -> Policy:
        """The policy itself."""
        return make_policy(self.name, asdict(self))


@final
@dataclass(frozen=True)
class ParallelConfig:
    """The cluster, and the number formats on it."""

    nproc: int = 1
    """Ranks that `themis train` starts; under torchrun, torchrun decides."""
    num_nodes: int | None = None
    """Nodes the ranks are spread over, in order; None: as torchrun says."""
    intra_bytes_per_s: float = 300e9
    """What a device's link inside its node carries, each direction; plans weigh by it."""
    inter_bytes_per_s: float = 50e9
    """What a node's uplink carries, each direction."""
    dense: Literal["replicate", "fully_shard"] = "replicate"
    """Whether each rank keeps all dense parameters or a shard of them."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters; float64 is for exactness."""
    compute: Literal["full", "bf16"] = "full"
    """Type that is computed in: the parameters' own, or bfloat16 with float32 masters."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: CUDA where there is a device for each rank."""
    timeout_s: float = 60.0
    """How long a rank waits for its peers."""

    def __post_init__(self) -> None:
        require(self.nproc >= 1, "parallel.nproc", self.nproc, "1 or more")
        nodes = self.num_nodes
        require(nodes is None or nodes >= 1, "parallel.num_nodes", nodes, "1 or more, or None")
        for name in ("intra_bytes_per_s", "inter_bytes_per_s", "timeout_s"):
            require(getattr(self, name) > 0, f"parallel.{name}", getattr(self, name), "above 0")
        for name, right in (
            ("dense", ("replicate", "fully_shard")),
            ("dtype", ("float32", "float64")),
            ("compute", ("full", "bf16")),
            ("device", ("auto", "cpu", "cuda")),
        ):
            value = getattr(self, name)
            require(value in right, f"parallel.{name}", value, " or ".join(right))
        if self.compute == "bf16" and self.dtype == "float64":
            raise ConfigError("parallel.compute is 'bf16'; with parallel.dtype 'float64' it must be 'full'")

    def topology(self, world_size: int, devices_per_node: int) -> Topology:
        """The cluster of `world_size` ranks; `devices_per_node` is the environment's word where num_nodes is None.

        ConfigError where the ranks do not spread evenly.
        """
        require(world_size >= 1, "nproc", world_size, "1 or more")
        nodes = self.num_nodes or max(1, world_size // devices_per_node)
        if world_size % nodes:
            raise ConfigError(f"parallel.num_nodes is {nodes}; it must divide the {world_size} ranks of this run")
        return Topology(
            nodes,
            world_size // nodes,
            intra=Link(latency_s=10e-6, bytes_per_s=self.intra_bytes_per_s),
            inter=Link(latency_s=20e-6, bytes_per_s=self.inter_bytes_per_s),
        )


@final
@dataclass(frozen=True)
class CheckpointConfig:
    """When to write checkpoints and how many to keep."""

    every: int = 100
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted."""
    asynchronous: bool = True
    """Whether training goes on while a checkpoint is written; takes a copy of the state in host memory."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "0 or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "1 or more")


@final
@dataclass(frozen=True)
class LogConfig:
    """What is measured and how often."""

    every: int = 1
    """Steps between lines of metrics.jsonl."""
    evaluate_every: int = 100
    """Steps between evaluations on held-out text; 0: only at the end."""
    evaluate_sequences: int = 64
    """Held-out sequences of an evaluation."""
    routing_every: int = 10
    """Steps between recordings in routing.npz; 0: none."""
    sample_tokens: int = 200
    """Tokens of sample text at the end."""
    tensorboard: bool | None = None
    """Whether to write TensorBoard logs too; None: where the package is installed."""

    def __post_init__(self) -> None:
        for name in ("every", "evaluate_sequences"):
            require(getattr(self, name) >= 1, f"log.{name}", getattr(self, name), "1 or more")
        for name in ("evaluate_every", "routing_every", "sample_tokens"):
            require(getattr(self, name) >= 0, f"log.{name}", getattr(self, name), "0 or more")


@final
@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run."""

    name: str = "run"
    """What the run is called."""
    steps: int = 1000
    """Optimizer steps."""
    seed: int = 0
    """Seed of initialisation, sampling and noise."""
    model: ModelConfig = field(default_factory=GPTMoEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 4294967295")
        plain = self.name not in ("", ".", "..") and "/" not in self.name
        require(plain, "name", self.name, "a plain name without slashes")


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config` as JSON; the file is replaced whole or not at all."""
    replace_text(path, json.dumps(asdict(config), indent=2) + "\n")


def load_config(path: Path) -> RunConfig:
    """The configuration in `path`; ConfigError where it is missing, not JSON, or not a configuration."""
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}; name a run directory") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    config = from_record(RunConfig, record, "")
    assert isinstance(config, RunConfig)
    return config


def from_record(kind: type[Any], record: object, where: str) -> Any:
    """A value of dataclass `kind` from the plain `record` at `where`; ConfigError for unknown fields, wrong types."""
    require(isinstance(record, dict), where or "the configuration", record, "an object with fields")
    assert isinstance(record, dict)
    known = {item.name for item in fields(kind)}
    if unknown := sorted(set(record) - known):
        raise ConfigError(f"{_join(where, unknown[0])} is no field; {where or 'a run'} has {', '.join(sorted(known))}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, _join(where, name)) for name, value in record.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    if hint == ModelConfig:
        # Only models of transformers name a family.
        named = isinstance(value, dict) and "model_type" in value
        return from_record(TransformersConfig if named else GPTMoEConfig, value, where)
    if typing.get_origin(hint) is dict:
        _, kinds = typing.get_args(hint)
        require(isinstance(value, dict), where, value, "an object with names and values")
        assert isinstance(value, dict)
        return {str(name): _value(kinds, entry, _join(where, name)) for name, entry in value.items()}
    if is_dataclass(hint):
        return from_record(typing.cast("type[Any]", hint), value, where)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        require(value in choices, where, value, f"one of {', '.join(map(str, choices))}")
        return value
    allowed = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if float in allowed and int not in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = type(value) in allowed
    require(fits, where, value, " or ".join("none" if a is type(None) else a.__name__ for a in allowed))
    return value


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
