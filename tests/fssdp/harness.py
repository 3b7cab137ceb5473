"""Runs the same training on ranks and in one process; what both return can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import themis
from themis.core.placement import shard_only
from themis.core.topology import Topology
from themis.fssdp import MixedPrecision, executor_of, expert_parameters
from themis.moe import MoEConfig
from themis.policies import Policy
from themis.testing.models import ScriptedPolicy, TinyMoE, rank_loss, skew_gates

WIDTH = 12


@dataclass(frozen=True)
class Case:
    """One training to run; `tokens_SD[s][d]` tokens of rank d in micro-batch s."""

    config: MoEConfig
    topology: Topology
    policy: Policy
    tokens_SD: list[list[int]]
    num_layers: int = 2
    accumulate: int = 1
    seed: int = 0
    bias_LE: Any = None
    random_owners: bool = True
    checkpointing: str = "none"
    dtype: torch.dtype = torch.float64
    mixed_precision: MixedPrecision | None = None
    dense: str = "replicate"
    optimizer: str = "adamw"
    evaluate: bool = False
    keep_steps: bool = True  # outputs and gradients of every step
    drift: int = 0  # steps after which another expert of each layer becomes the hot one; 0 for none


def build(case: Case) -> TinyMoE:
    torch.manual_seed(case.seed)
    model = TinyMoE(case.config, case.num_layers, checkpointing=case.checkpointing).to(case.dtype)
    if case.bias_LE is not None:
        skew_gates(model, np.asarray(case.bias_LE))
    return model


def drift_gates(case: Case, model: TinyMoE, step: int) -> None:
    """Have each layer's gate favour one expert, another every `drift` steps."""
    if case.drift:
        experts, hot = case.config.num_experts, step // case.drift
        skew_gates(model, np.stack([3.0 * np.eye(experts)[(hot + 2 * i) % experts] for i in range(case.num_layers)]))


def make_tokens(case: Case, step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * case.seed + 10 * step + rank)
    x_TM = torch.randn(case.tokens_SD[step][rank], WIDTH, generator=draw, dtype=torch.float64)
    x_TM[:, 0] = 1.0
    # Reentrant checkpointing builds a graph only where an input asks for one.
    return x_TM.to(case.dtype).requires_grad_(case.checkpointing == "reentrant")


def make_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if case.optimizer == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_on_rank(rank: int, case: Case) -> dict[str, Any]:
    """Losses, outputs, gradient norms and final gradients and parameters of one rank."""
    model = build(case)
    themis.parallelize(
        model,
        case.topology,
        policy=case.policy,
        mixed_precision=case.mixed_precision,
        dense=case.dense,
        timeout_s=30.0,
    )
    executor = executor_of(model)
    if case.random_owners:
        draw, devices = np.random.default_rng(case.seed), case.topology.num_devices
        owner_LE = draw.integers(0, devices, executor.owner_LE.shape)
        kept_LED = draw.random((*owner_LE.shape, devices)) < getattr(case.policy, "kept", 0.0)
        owned_L = [shard_only(owner_E, devices) for owner_E in owner_LE]
        executor.rearrange([owned.merge(kept_ED) for owned, kept_ED in zip(owned_L, kept_LED, strict=True)])
    optimizer = make_optimizer(case, model)
    result: dict[str, Any] = {"losses": [], "outputs": [], "norms": [], "grads": [], "placements": [], "kept": []}
    for step in range(0, len(case.tokens_SD), case.accumulate):
        optimizer.zero_grad()
        drift_gates(case, model, step)
        for micro in range(step, step + case.accumulate):
            output_TM, losses = model(make_tokens(case, micro, rank))
            loss = rank_loss(output_TM) + losses
            (loss / case.accumulate).backward()
            result["losses"].append(loss.item())
            if case.keep_steps:
                result["outputs"].append(output_TM.detach().double().numpy())
        result["placements"].append([report.placement_ED for report in themis.step_report(model)])
        result["kept"].append(executor.held_L)
        if case.keep_steps:
            result["grads"].append(_named(model, lambda p: p.grad))
        result["norms"].append(themis.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        if case.evaluate:
            model.eval()
            with torch.no_grad():
                model(make_tokens(case, step, rank))
            model.train()
    result["parameters"] = _named(model, lambda p: p)
    owned = {id(p) for p in expert_parameters(model)}
    result["held"] = [id(p) in owned for group in optimizer.param_groups for p in group["params"]].count(True)
    result["owned"] = len(owned)
    result["traffic"] = executor.mesh.traffic.snapshot()
    result["report"] = themis.step_report(model)
    result["observed"] = executor.state_dict()["predictor"]
    result["iteration"] = executor.iteration
    executor.close()
    return result


def train_alone(case: Case) -> dict[str, Any]:
    """The same in one process that holds every expert and all ranks' tokens."""
    model = build(case)
    optimizer = make_optimizer(case, model)
    result: dict[str, Any] = {"losses": [], "outputs": [], "norms": [], "grads": []}
    ranks = range(case.topology.num_devices)
    for step in range(0, len(case.tokens_SD), case.accumulate):
        optimizer.zero_grad()
        drift_gates(case, model, step)
        for micro in range(step, step + case.accumulate):
            parts = [make_tokens(case, micro, rank) for rank in ranks]
            output_TM, losses = model(torch.cat(parts))
            outputs = output_TM.split([part.shape[0] for part in parts])
            loss = torch.stack([rank_loss(output) for output in outputs]).mean() + losses
            (loss / case.accumulate).backward()
            result["losses"].append(loss.item())
            if case.keep_steps:
                result["outputs"].append([output.detach().double().numpy() for output in outputs])
        if case.keep_steps:
            result["grads"].append(_named(model, lambda p: p.grad))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        result["norms"].append(norm.item())
        optimizer.step()
    result["parameters"] = _named(model, lambda p: p)
    return result


def assert_same(case: Case, ranks: list[dict[str, Any]], alone: dict[str, Any], tolerance: float) -> None:
    """Losses, outputs, norms, all gradients and the final parameters agree.

    Each expert is at one rank alone, or, where the policy keeps replicas, the same to the last bit at all that hold it.
    """
    close, keeps = {"rtol": tolerance, "atol": tolerance}, _keeps(case.policy)
    np.testing.assert_allclose(np.mean([r["losses"] for r in ranks], axis=0), alone["losses"], **close)
    for d, result in enumerate(ranks):
        np.testing.assert_allclose(result["norms"], alone["norms"], **close)
        for mine, theirs in zip(result["outputs"], alone["outputs"], strict=True):
            np.testing.assert_allclose(mine, theirs[d], **close)
        assert result["held"] == result["owned"], "the optimizer holds exactly the owned experts' parameters"
    for step in range(len(alone["grads"])):
        _assert_union([r["grads"][step] for r in ranks], alone["grads"][step], close, keeps)
    _assert_union([r["parameters"] for r in ranks], alone["parameters"], close, keeps)


def scripted(seed: int, **changes: Any) -> ScriptedPolicy:
    return ScriptedPolicy(seed, **changes)


def _named(model: torch.nn.Module, pick: Any) -> dict[str, Any]:
    values = {name: pick(parameter) for name, parameter in model.named_parameters()}
    return {n: None if v is None else _whole(v).detach().double().numpy().copy() for n, v in values.items()}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assert_union(parts: list[dict[str, Any]], whole: dict[str, Any], close: dict[str, float], keeps: bool) -> None:
    for name, value in whole.items():
        holders = [part[name] for part in parts if name in part]
        if keeps and ".experts." in name:
            assert all(np.array_equal(held, holders[0]) for held in holders), name
        else:
            assert len(holders) == (1 if ".experts." in name else len(parts)), name
        for held in holders:
            assert (held is None) == (value is None), name
            if value is not None:
                # An entry that is the small difference of large ones is only as exact as they are.
                scale = max(1.0, float(np.abs(value).max(initial=0.0)))
                np.testing.assert_allclose(held / scale, value / scale, err_msg=name, **close)
    assert set(whole) == set().union(*parts)


def _keeps(policy: Policy) -> bool:
    return policy.persistent_replicas_per_device() > 0
