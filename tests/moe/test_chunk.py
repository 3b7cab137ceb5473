"""Chunks: one contiguous span an expert, whose views share its memory and nothing else."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from themis.moe import GPTExperts, SwiGLUExperts
from themis.moe.chunk import ALIGNMENT, ChunkLayout
from themis.testing.strategies import quick

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@quick(100)
@given(SHAPES)
def test_views_are_aligned_contiguous_and_apart(shapes: list[tuple[int, ...]]) -> None:
    layout = ChunkLayout({f"p{i}": shape for i, shape in enumerate(shapes)})
    chunk = torch.full((layout.numel,), -1.0)
    views = layout.views(chunk)
    assert list(views) == list(layout.shapes)
    written = 0
    for i, (name, view) in enumerate(views.items()):
        assert view.shape == layout.shapes[name]
        assert view.is_contiguous()
        assert view.data_ptr() == chunk.data_ptr() + layout.offsets[name] * chunk.element_size()
        assert layout.offsets[name] % ALIGNMENT == 0
        view.fill_(float(i))
        written += view.numel()
    # Had two views shared an element, a later fill would have taken it from an earlier view.
    assert all((view == float(i)).all() for i, view in enumerate(views.values()))
    assert (chunk == -1.0).sum() == layout.numel - written
    assert layout.numel % ALIGNMENT == 0
    assert layout.numel - written < ALIGNMENT * len(shapes)


@quick(60)
@given(SHAPES, st.integers(0, 99))
def test_round_trip(shapes: list[tuple[int, ...]], seed: int) -> None:
    layout = ChunkLayout({f"p{i}": shape for i, shape in enumerate(shapes)})
    draw = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=draw) for name, shape in layout.shapes.items()}
    chunk = torch.zeros(layout.numel)
    for name, view in layout.views(chunk).items():
        view.copy_(values[name])
    sent = torch.empty_like(chunk).copy_(chunk)
    for name, view in layout.views(sent).items():
        assert torch.equal(view, values[name])


def test_views_carry_gradients_into_the_chunk() -> None:
    layout = ChunkLayout({"w": (3, 5), "b": (5,)})
    chunk = torch.zeros(layout.numel, requires_grad=True)
    views = layout.views(chunk)
    (2.0 * views["w"].sum() + 3.0 * views["b"].sum()).backward()
    assert chunk.grad is not None
    expected = [2.0] * 15 + [0.0] + [3.0] * 5 + [0.0] * 3
    assert chunk.grad.tolist() == expected


def test_layouts_of_the_experts_hold_every_parameter_once() -> None:
    for experts in (GPTExperts(2, 6, 10), GPTExperts(2, 6, 10, bias=False), SwiGLUExperts(2, 6, 10)):
        held = {name: tuple(parameter.shape) for name, parameter in experts.expert(1).items()}
        assert held == dict(experts.layout.shapes)
        assert experts.layout.numel >= sum(prod(shape) for shape in held.values())
        assert all(view.shape == held[n] for n, view in experts.layout.views(torch.zeros(experts.layout.numel)).items())
    names = [name for name, _ in GPTExperts(2, 6, 10).named_parameters()]
    assert sorted(names) == sorted(f"{e}.{n}" for e in range(2) for n in ("w1", "w2", "b1", "b2"))
