"""Every number about hardware that the simulator uses, each with its source. None is tuned to a figure.

Peaks are the vendors'; what programs reach of them is what others have measured and published.
"""

from __future__ import annotations

from themis.core.topology import Link
from themis.sim.hardware import Cluster, Device

#: What a Megatron-LM block reaches of the peak, norms, launches and all. A100: Narayanan et al., "Efficient Large-Scale
#: Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), table 1, the 1.7-billion model, 137 of
#: 312 TFLOP/s. Hopper: Megatron-LM's README, weak scaling on H100, 41 % for the smallest model. The paper's systems run
#: in Megatron-LM; kernels by themselves reach more (GEMMs 0.87 on A100, 0.80 on H100), see docs/reproduction.md.
A100_BLOCK, H200_BLOCK = 0.44, 0.41
#: Grouped GEMMs of experts against dense ones: MegaBlocks (arXiv 2211.15841), section 6.3, 98.6 % on average on A100.
GROUPED = 0.986
#: Streaming from device memory: BabelStream reaches 0.85 to 0.92 of the datasheet's bandwidth on A100 and Hopper.
STREAM = 0.88
#: NVSwitch: nccl-tests' bus bandwidth of large messages, about 230 of 300 GB/s a direction on A100 nodes, and the same
#: share on Hopper; DeepEP's README, 153 to 158 of the 200 GB/s an H800 has.
NVLINK = 0.77
#: Between nodes: DeepEP's README, AlltoAll of experts over RDMA, 43 of 50 GB/s a card with 16 devices.
UPLINK = 0.86
#: A collective of next to no bytes, nccl-tests over EFA: 104 to 122 µs (bottlerocket-kernel-kit, pull request 313);
#: inside a node about 20 µs (nccl-tests on NVSwitch nodes).
INTER_LATENCY_S, INTRA_LATENCY_S = 100e-6, 20e-6
#: What CUDA's context, NCCL's buffers and the allocator's fragments leave of a device's memory: PyTorch's own
#: memory-estimation guides count on one tenth.
USABLE_MEMORY = 0.90
#: The planners' time a layer that nothing hides, on one CPU core with 32 devices and 64 experts (docs/reproduction.md).
PLAN_S = 50e-6

#: Bandwidths of uplinks: the instances' pages (p4de.24xlarge 400 Gb/s, p5en.48xlarge 3,200 Gb/s).
CLUSTER_A = Cluster(
    name="a",
    num_nodes=4,
    devices_per_node=8,
    device=Device(
        name="A100-80G",
        flops_per_s=312e12 * A100_BLOCK,
        grouped_flops_per_s=312e12 * A100_BLOCK * GROUPED,
        memory_bytes=int(80e9 * USABLE_MEMORY),
        memory_bytes_per_s=2.039e12 * STREAM,
    ),
    intra=Link(INTRA_LATENCY_S, 300e9 * NVLINK),
    inter=Link(INTER_LATENCY_S, 50e9 * UPLINK),
    plan_s=PLAN_S,
)
CLUSTER_B = Cluster(
    name="b",
    num_nodes=4,
    devices_per_node=8,
    device=Device(
        name="H200-141G",
        flops_per_s=989e12 * H200_BLOCK,
        grouped_flops_per_s=989e12 * H200_BLOCK * GROUPED,
        memory_bytes=int(141e9 * USABLE_MEMORY),
        memory_bytes_per_s=4.8e12 * STREAM,
    ),
    intra=Link(INTRA_LATENCY_S, 450e9 * NVLINK),
    inter=Link(INTER_LATENCY_S, 400e9 * UPLINK),
    plan_s=PLAN_S,
)
CLUSTERS = {"a": CLUSTER_A, "b": CLUSTER_B}
