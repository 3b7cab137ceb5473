"""The verbs of the runtime, in the manner of FSDP2: they work on a model in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.comm.together import work_together
from themis.core.cost import LayerCost
from themis.core.errors import ConfigError, PeerError, require
from themis.core.placement import even_owner, shard_only
from themis.core.topology import Topology
from themis.fssdp.adapters import MoESite, find_sites
from themis.fssdp.dense import parallelize_dense
from themis.fssdp.executor import Executor, SparseDispatcher
from themis.fssdp.expert_shard import ExpertShard
from themis.fssdp.grad_norm import total_gradient_norm
from themis.fssdp.optimizers import OptimizerWatch
from themis.fssdp.precision import MixedPrecision
from themis.fssdp.sharded_layer import ShardedLayer
from themis.fssdp.step_report import LayerReport, report_layer
from themis.fssdp.trained import Dense, TrainedParameters, agree_on_trained, refuse_copy
from themis.fssdp.weights import FreshWeights, WeightSource, give_values, is_meta
from themis.moe.interface import InterfaceLayer
from themis.policies import Policy, Themis

#: Nominal speeds that calibration prices experts with, FLOP/s by device type: a 2-core CPU share, a data-centre GPU.
NOMINAL_FLOPS_PER_S = {"cpu": 50e9, "cuda": 400e12}

_ATTRIBUTE = "_themis_executor"


def parallelize(
    model: nn.Module,
    topology: Topology | None = None,
    *,
    policy: Policy | None = None,
    mixed_precision: MixedPrecision | None = None,
    dense: Dense = "replicate",
    weights: WeightSource | None = None,
    device: torch.device | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    flops_per_s: float | None = None,
    timeout_s: float = 60.0,
) -> nn.Module:
    """Train `model` with Fully Sharded Sparse Data Parallelism over all ranks; returns it, changed in place.

    The model has MoE layers of Themis' own, or is a transformers model whose experts go through its experts interface;
    there, each expert's parameters get names of their own, `<experts>.owned.<e>.<name>`.

    Call it on every rank, on the device the model is to train on, after torch.distributed is initialised (without,
    it is a world of one), and build the optimizer afterwards. Each rank keeps the parameters of the experts it owns,
    under their old names; the others leave the model. Gradients are averaged over ranks, experts' and dense alike.

    A model that was built under `torch.device("meta")` gets memory here for its dense part and the experts that
    this rank owns alone, so it may be larger than one rank's memory: on `device`, by default this process's CUDA device
    or else the CPU, with values from `weights`, by default the model's own initialisation.

    What trains is settled here and in the first forward: dense parameters that are added or unfrozen later are refused,
    and expert parameters that are unfrozen after this call. `prepare` is called with the model once it has its values
    and before its dense parameters are taken up: the place for adapters (PEFT) on a model from the meta device.

    topology: nodes and devices, by default read from torchrun's environment; policy: who holds which expert when, by
    default the paper's; mixed_precision: types in which experts compute and reduce; dense: what becomes of all other
    parameters: torch's replicate (DDP) or fully_shard, or none (their gradients are the caller's); flops_per_s: a
    device's speed, for calibration; timeout_s: the most seconds any wait on a peer may take before PeerError.
    What waits in DDP's own backward raises torch's RuntimeError instead, without naming a rank.
    Raises ConfigError on a model without MoE layers, or a topology that does not fit the world.
    """
    _check_arguments(model, topology, policy, mixed_precision, dense)
    require(flops_per_s is None or flops_per_s > 0, "flops_per_s", flops_per_s, "above zero")
    require(weights is None or isinstance(weights, WeightSource), "weights", weights, "a themis WeightSource")
    sites = find_sites(model)
    meta = is_meta(model)
    require(meta or weights is None, "weights", weights, "None with a model that has its values already")
    chosen = policy if policy is not None else Themis()
    precision = mixed_precision if mixed_precision is not None else MixedPrecision()
    require(meta or device is None, "device", device, "None with a model that is on a device already")
    require(prepare is None or callable(prepare), "prepare", prepare, "a function of the model")
    real = device is None or (isinstance(device, torch.device) and device.type != "meta")
    require(real, "device", device, "a torch.device with memory")
    place = device if meta else next(model.parameters()).device
    mesh = Mesh.create(topology, device=place, timeout_s=timeout_s)
    speed = flops_per_s if flops_per_s is not None else NOMINAL_FLOPS_PER_S.get(mesh.device.type, 50e9)
    watch, communicator = OptimizerWatch(model), Communicator(mesh)
    try:
        _take_parameters(model, sites, watch, whole=meta)
        shards = [_shard(site, mesh, precision) for site in sites]
        if meta:
            source = weights if weights is not None else FreshWeights()
            if failed := work_together(mesh, lambda: give_values(model, sites, mesh.device, source)):
                raise PeerError(f"rank {failed[0]} could not give the model its values", failed)
        if prepare is not None:
            prepare(model)
            agree_on_trained(shards, mesh)
        layers = [
            ShardedLayer(i, shard, chosen, mesh, communicator, _cost(shard, site.layer.width, speed))
            for i, (shard, site) in enumerate(zip(shards, sites, strict=True))
        ]
        executor = Executor(mesh, communicator, chosen, layers, watch)
        watch.on_step = executor.end_iteration
        _install(model, sites, executor)
        parallelize_dense(model, sites, mesh, dense, precision)
        TrainedParameters(model, shards, dense, mesh)
    except BaseException:
        watch.close()
        communicator.close()
        mesh.close()
        raise
    # Not submodules, and not saved with the model.
    object.__setattr__(model, _ATTRIBUTE, executor)
    if hasattr(type(model), "_init_weights") and hasattr(type(model), "save_pretrained"):
        object.__setattr__(model, "save_pretrained", _refuse_saving)
    return model


def _take_parameters(model: nn.Module, sites: list[MoESite], watch: OptimizerWatch, *, whole: bool) -> None:
    """Have foreign experts' stacks make way for single experts; an optimizer that holds what leaves is refused.

    `whole`: all parameters of the model will be replaced.
    """
    if whole:
        watch.moved_away(model.parameters())
    for site in sites:
        if isinstance(site.layer, InterfaceLayer):
            watch.moved_away(site.layer.install())


def _check_arguments(model: nn.Module, topology: object, policy: object, mixed_precision: object, dense: str) -> None:
    choices = get_args(Dense)
    require(dense in choices, "dense", dense, "one of " + ", ".join(choices))
    require(
        topology is None or isinstance(topology, Topology), "topology", topology, "a themis Topology(nodes, devices)"
    )
    known = policy is None or isinstance(policy, Policy)
    require(known, "policy", policy, "a policy such as themis.Themis() or themis.EP()")
    typed = mixed_precision is None or isinstance(mixed_precision, MixedPrecision)
    require(typed, "mixed_precision", mixed_precision, "a themis.MixedPrecision(param_dtype, reduce_dtype)")
    if torch.get_default_device().type == "meta":
        raise ConfigError('under torch.device("meta") build the model alone; call Themis after the `with` block')
    if hasattr(model, _ATTRIBUTE):
        raise ConfigError("the model has been parallelized before; build a new one")


def executor_of(model: nn.Module) -> Executor:
    """The executor of a parallelized model."""
    executor = getattr(model, _ATTRIBUTE, None)
    if not isinstance(executor, Executor):
        raise ConfigError(
            f"the model ({type(model).__name__}) is not parallelized; call themis.parallelize(model) first"
        )
    return executor


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the experts that this rank keeps: its own, and those of persistent replicas."""
    return [p for layer in executor_of(model).layers for p in layer.shard.experts.parameters()]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of `model` so that their norm over all experts and dense parameters is at most `max_norm`.

    Returns the norm before, the one that a single process would have found; the same on all ranks. A collective.
    """
    kept = expert_parameters(model)
    ids = {id(parameter) for parameter in kept}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    executor = executor_of(model)
    owned = [p for layer in executor.layers for e in layer.shard.owned for p in layer.shard.parameters(e).values()]
    total_norm = total_gradient_norm(dense, owned, executor.mesh, norm_type)
    # Apart: sharded dense gradients (DTensor) and experts' plain ones cannot be scaled in one call.
    for parameters in (dense, kept):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


def step_report(model: nn.Module) -> list[LayerReport]:
    """One LayerReport a layer on its last training pass; empty before the first. No communication."""
    reports = [report_layer(layer) for layer in executor_of(model).layers]
    return [report for report in reports if report is not None]


def _shard(site: MoESite, mesh: Mesh, precision: MixedPrecision) -> ExpertShard:
    experts = site.layer.experts
    held = shard_only(even_owner(experts.num_experts, mesh.world_size), mesh.world_size)
    return ExpertShard(experts, held, mesh.rank, precision, mesh.device)


def _cost(shard: ExpertShard, width: int, flops_per_s: float) -> LayerCost:
    # A token meets each weight of its expert once in forward and twice in backward, two operations each.
    return LayerCost(
        expert_s_per_token=6 * shard.layout.numel / flops_per_s,
        token_bytes=width * shard.param_dtype.itemsize,
        expert_bytes=shard.expert_bytes,
    )


def _install(model: nn.Module, sites: list[MoESite], executor: Executor) -> None:
    # The hooks hold the executor weakly: model -> executor -> model would keep its threads past the model's life.
    ref = weakref.ref(executor)

    model.register_forward_pre_hook(_StartForward(ref), prepend=True)
    for site, layer in zip(sites, executor.layers, strict=True):
        site.layer.dispatcher = SparseDispatcher(executor, layer)
        if site.block is not None:
            site.block.register_forward_pre_hook(_prefetch_hook(ref, layer), with_kwargs=True, prepend=True)


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "save_pretrained would write the experts of one rank alone; the model is still in memory as it was trained: "
        "call themis.export(model, path) on every rank, and under transformers' Trainer use "
        "themis.train.transformers_trainer.ThemisTrainer, whose save_model does so"
    )


def _refuse_averaged_experts(executor: Executor) -> None:
    """Refuse DistributedDataParallel over experts: each rank owns others, which it would overwrite and average."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    averaged = {id(parameter) for parameter in wrapper._module_parameters}
    if any(id(p) in averaged for layer in executor.layers for p in layer.shard.experts.parameters()):
        raise ConfigError(
            "the model runs inside DistributedDataParallel, which averages experts that differ between ranks, and has "
            "overwritten them; Themis averages gradients itself: build the model anew and call it as it is, under "
            "transformers' Trainer through themis.train.transformers_trainer.ThemisTrainer"
        )


@final
class _StartForward:
    """The root's hook; the first thing that a copy of the model would copy, so it refuses for all."""

    def __init__(self, ref: weakref.ref[Executor]) -> None:
        self._ref = ref

    @torch.compiler.disable
    def __call__(self, module: nn.Module, _: object) -> None:
        executor = self._ref()
        assert executor is not None
        _refuse_averaged_experts(executor)
        executor.begin_forward(module.training)

    def __deepcopy__(self, _: object) -> NoReturn:
        refuse_copy()


def _prefetch_hook(
    ref: weakref.ref[Executor], layer: ShardedLayer
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def start_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = ref()
        assert alive is not None
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        alive.begin_block(layer, _identity(tensors[0]) if tensors else None)

    hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] = torch.compiler.disable(start_block)
    return hook


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """What a tensor has in common with its aliases alone: a checkpointed block is recomputed from those of its forward.

    The storage itself, not its address, for that is the same for all empty tensors.
    """
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)
