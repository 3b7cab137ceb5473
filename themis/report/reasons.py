"""Why a claim of the paper does not come out here, by the claim's key: the likeliest reason, found by trying."""

from __future__ import annotations

from collections.abc import Mapping

_WINDOW = (
    "over a 400 Gb/s uplink our attention hides the gathers of 4 of 64 experts (GPT-L-MoE) and 7 of 32 (Phi-3.5-MoE)"
)
_BATCH = (
    "the paper's activations take about 2.3 times our bytes a sequence, all systems alike; score matrices, "
    "which fused attention does not keep, would add 4 GB a sequence"
)
_EVEN = "on B hardly a sixth of Themis's time here is AlltoAll or waiting, so evener routing has little to win"

_FLEX = (
    "FlexMoE looks every 10 iterations here and makes all changes that pay; looking every 100 it is 1.21 (Qwen1.5-MoE, "
    "B), 1.18 (Phi-3.5-MoE, A), 1.14 (GPT-L-MoE, A) times EP, below FasterMoE; its all-reduce runs along transfer plans"
)

REASONS: Mapping[str, str] = {
    "themis_flex_max": _FLEX,
    "skew_flex-moe": f"on a balanced system there is little to win; {_FLEX}",
    "skew_apart": _FLEX,
    "skew_near": _FLEX,
    "a2a": f"{_WINDOW}; with all 32 experts replicable, 8 copies a device, it is 14 here, at 253 ms of exposed gathers",
    "themis_ep_max": "Qwen1.5-MoE on A, whose skew is figure 16a's and whose shared experts widen the window 2.4 times",
    "themis_uniform_min": f"{_WINDOW}; others stay stragglers, and twice the batch lifts every ratio",
    "themis_uniform_max": f"batches are smaller than the paper's in our memory model; {_WINDOW}",
    "layer_min": "layers differ by 12 % in skew here; where they differ by 30 %, it is 2.5",
    "layer_max": "a node's devices share its uplink here; where four or two share a part of it, it is 6.7 or 8.2",
    "oom_flex-moe": _BATCH,
    "oom_ep": _BATCH,
    "oom_smart-moe": _BATCH,
    "oom_faster-moe": _BATCH,
    "weak_16": "one node's share of experts is half of all on two nodes; the skew of so few experts is not known",
    "weak_64": "skew and batch of DeepSeek-V3 are not known",
    "both_shard": f"materialisation gains less on A than in the paper: {_WINDOW}",
    "plan_low": "ours is faster: compiled, on one core",
    "plan_high": "ours is faster: compiled, on one core",
    "plan_p95": "ours is faster: compiled, on one core",
    "skew_themis": _EVEN,
    "k_themis": "Themis's time at K = 2 is mostly attention and experts here, and experts grow with K",
    "k_ep": "shares are cut at 1/K, so EP's heaviest expert weighs less as K grows",
}
