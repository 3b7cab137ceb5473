"""CUDA: one rank; the engine gives on the device what it gives on the CPU, and bf16 takes torch's grouped GEMM."""

from __future__ import annotations

import pytest
import torch

import themis
from themis.fssdp import MixedPrecision, executor_of
from themis.moe import MoEConfig
from themis.moe.grouped import grouped_linear
from themis.policies import ThemisRM
from themis.testing.models import TinyMoE, rank_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _losses(device: str, precision: MixedPrecision | None = None) -> list[float]:
    torch.manual_seed(0)
    model = TinyMoE(MoEConfig(64, 128, 8, 2, experts="swiglu"), 2).to(device)
    themis.parallelize(model, policy=ThemisRM(2, 3, 2), mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        x_TM = torch.randn(96, 64, generator=torch.Generator().manual_seed(step)).to(device)
        output_TM, routing = model(x_TM)
        loss = rank_loss(output_TM) + routing
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    executor_of(model).close()
    return losses


def test_training_on_cuda_follows_the_cpu() -> None:
    assert _losses("cuda") == pytest.approx(_losses("cpu"), rel=1e-3)


def test_bf16_training_follows_float32() -> None:
    bf16 = MixedPrecision(torch.bfloat16, torch.float32)
    assert _losses("cuda", bf16) == pytest.approx(_losses("cuda"), rel=3e-2)


def test_the_grouped_kernel_equals_a_loop_over_experts() -> None:
    counts = [64, 0, 17, 47]
    stack_SMN = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows_AM = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grouped_AN = grouped_linear(rows_AM, counts, list(stack_SMN.unbind(0)))
    parts = [rows @ weight for rows, weight in zip(rows_AM.split(counts), stack_SMN, strict=True)]
    torch.testing.assert_close(grouped_AN, torch.cat(parts), rtol=2e-2, atol=2e-2)
    gradient_AN = torch.randn_like(grouped_AN)
    got = torch.autograd.grad(grouped_AN, [rows_AM, stack_SMN], gradient_AN)
    wanted = torch.autograd.grad(torch.cat(parts), [rows_AM, stack_SMN], gradient_AN)
    torch.testing.assert_close(got, wanted, rtol=3e-2, atol=0.3)
