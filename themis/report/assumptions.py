"""What the paper leaves open and its evaluation needs, in one place; docs/reproduction.md has the ranges tried."""

from __future__ import annotations

from functools import cache

from themis.policies import POLICIES
from themis.report.jobs import Fields, Job, make_simulator, workload
from themis.sim.memory import activation_bytes
from themis.sim.routing import typical_share_std

MODELS = ("gpt-s-moe", "gpt-l-moe", "phi-3.5-moe", "qwen1.5-moe", "deepseek-v3")
PLACES = ("a", "b")
#: Systems of figure 9, in its order, and today's rivals that the paper does not have.
SYSTEMS = ("ep", "faster-moe", "smart-moe", "flex-moe", "themis", "themis-rm", "uniform")
RIVALS = ("eplb", "exact-load")
BASELINES = ("faster-moe", "smart-moe", "flex-moe")

#: Figure 16a: standard deviation of expert shares of Qwen1.5-MoE at auxiliary weight 0 and 0.1; the default weight,
#: 0.001, lies next to 0 on any scale.
QWEN_STD_NO_LOSS, QWEN_STD_STRONG_LOSS = 0.046, 0.034
QWEN_STD = 0.0455


def share_std(model: str, num_experts: int, top_k: int) -> float:
    """The skew of a model: measured in figure 16a for Qwen1.5-MoE, a typical one for the others, which have none."""
    return QWEN_STD if model == "qwen1.5-moe" and num_experts == 64 else typical_share_std(num_experts, top_k)


def policy_options(model: str, cluster: str, policy: str) -> Fields:
    """Slots by policy. Figure 12: Themis's parameters are 3.1 of EP's, so twice as many replicas as owned experts;
    Themis-RM half as many again, as its replicas live two layers at a time; FlexMoE's states are 3.0 of Themis's, so
    three persistent slots for each owned expert."""
    work = workload(model, cluster, 1)
    owned = work.model.num_experts // work.cluster.num_devices
    if policy == "themis":
        return (("budget", 2 * owned),)
    if policy == "themis-rm":
        return (("budget", 3 * owned),)
    if policy == "smart-moe":
        return (("interval", 25),)  # the best in the authors' tests
    if policy == "flex-moe":
        return (("extra_slots", 3 * owned),)
    return ()


def standard_job(model: str, cluster: str, policy: str, batch: int) -> Job:
    """The setting of figure 9."""
    shape = workload(model, cluster, 1).model
    skew = share_std(model, shape.num_experts, shape.top_k)
    return Job(model, cluster, policy, batch, skew, policy_options(model, cluster, policy))


@cache
def largest_batch(model: str, cluster: str, policy: str) -> int:
    """The largest batch that fits in memory under `policy`, by what 12 iterations see (section 5.1)."""
    job = standard_job(model, cluster, policy, 1)
    work = job.workload()
    result = make_simulator(job, work).run(6, 6)
    fixed = result.memory.total - result.memory.activations
    per_sequence = activation_bytes(work, result.peak)
    return max(0, int((result.memory_limit - fixed) / per_sequence))


@cache
def common_batch(model: str, cluster: str) -> int:
    """The largest batch that every system of figure 9 runs, those that are not built left out (section 5.1)."""
    return max(1, min(largest_batch(model, cluster, policy) for policy in SYSTEMS if policy in POLICIES))
