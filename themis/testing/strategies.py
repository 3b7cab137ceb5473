"""Hypothesis strategies for the values that planners take, shipped so that users can test policies of their own.

Needs `hypothesis`, which is in the extra `dev`.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from themis.core.topology import Link, Topology


def quick(max_examples: int = 60) -> settings:
    """Settings for tests that any machine repeats exactly: no random seed, no deadline."""
    return settings(derandomize=True, deadline=None, max_examples=max_examples)


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 5, max_devices_per_node: int = 4) -> Topology:
    """Topologies of any small shape, one node and one device a node among them; either link may be the slower."""
    bandwidths = st.sampled_from([1e6, 5e7, 1e9, 3e11])
    latencies = st.sampled_from([0.0, 1e-5, 1e-2])
    return Topology(
        draw(st.integers(1, max_nodes)),
        draw(st.integers(1, max_devices_per_node)),
        intra=Link(draw(latencies), draw(bandwidths)),
        inter=Link(draw(latencies), draw(bandwidths)),
    )


@st.composite
def owners(draw: st.DrawFn, num_experts: int, num_devices: int) -> NDArray[np.int64]:
    """int64 [E]: any owners, so that some devices may own nothing and others all."""
    devices = st.integers(0, num_devices - 1)
    return np.array(draw(st.lists(devices, min_size=num_experts, max_size=num_experts)), dtype=np.int64)


@st.composite
def loads(draw: st.DrawFn, num_experts: int) -> NDArray[np.float64]:
    """float64 [E]: loads with zeros and ties, or skewed ones of any scale."""
    small = st.integers(0, 4).map(float)
    skewed = st.floats(0.0, 1e6, allow_subnormal=False)
    values = draw(st.sampled_from([small, skewed]))
    return np.array(draw(st.lists(values, min_size=num_experts, max_size=num_experts)))


@st.composite
def tokens(draw: st.DrawFn, num_experts: int, num_devices: int, most: int = 60) -> NDArray[np.int64]:
    """int64 [E, D]: tokens by expert and source, with idle experts and idle devices among them."""
    cells = num_experts * num_devices
    flat = draw(st.lists(st.integers(0, most), min_size=cells, max_size=cells))
    tokens_ED = np.array(flat, dtype=np.int64).reshape(num_experts, num_devices)
    tokens_ED[draw(st.lists(st.integers(0, num_experts - 1), max_size=num_experts // 2)), :] = 0
    tokens_ED[:, draw(st.lists(st.integers(0, num_devices - 1), max_size=num_devices // 2))] = 0
    return tokens_ED


@st.composite
def placements(draw: st.DrawFn, owner_E: NDArray[np.int64], num_devices: int) -> NDArray[np.bool_]:
    """bool [E, D]: any placement that contains the owners, bound by no budget."""
    cells = owner_E.size * num_devices
    often = draw(st.integers(1, 6))
    flat = draw(st.lists(st.integers(0, often), min_size=cells, max_size=cells))
    placement_ED: NDArray[np.bool_] = np.array(flat).reshape(owner_E.size, num_devices) == 0
    placement_ED[np.arange(owner_E.size), owner_E] = True
    return placement_ED


def drifting_tokens(
    seed: int, *, iterations: int, num_layers: int, num_experts: int, num_devices: int, tokens_per_device: int
) -> NDArray[np.int64]:
    """int64 [iteration, L, E, D]: routing such as training records it, skewed, drifting, and different by device."""
    rng = np.random.default_rng(seed)
    shape = (iterations, num_layers, num_experts, num_devices)
    tokens_ILED = np.empty(shape, dtype=np.int64)
    score_LE = rng.normal(0.0, 1.2, (num_layers, num_experts))
    taste_LED = rng.normal(0.0, 0.3, shape[1:])
    for iteration in range(iterations):
        score_LE = 0.97 * score_LE + rng.normal(0.0, 0.15, score_LE.shape)
        share_LED = np.exp(score_LE[:, :, None] + taste_LED)
        share_LED /= share_LED.sum(axis=1, keepdims=True)
        for layer in range(num_layers):
            for device in range(num_devices):
                tokens_ILED[iteration, layer, :, device] = rng.multinomial(
                    tokens_per_device, share_LED[layer, :, device]
                )
    return tokens_ILED
