"""Every number about hardware that the simulator uses, each with its source. None is tuned to a figure.

Peaks are the vendors'; what programs reach of them is what others have measured and published.
"""

from __future__ import annotations

from themis.sim.hardware import Cluster, Device, Network

#: bf16 GEMMs. "Maximum achievable matmul FLOPS", S. Bekman, Machine Learning Engineering (open book), chapter
#: accelerators: A100 SXM 271 of 312 TFLOPS, H100 SXM 792 of 989 (H200 has H100's compute).
A100_GEMM, H200_GEMM = 0.87, 0.80
#: Grouped GEMMs of experts against cuBLAS: MegaBlocks (arXiv 2211.15841), section 6.3, 98.6 % on average on A100.
GROUPED = 0.986
#: Fused attention. A100: FlashAttention-2 (arXiv 2307.08691), up to 73 % of peak forwards and 63 % backwards. Hopper:
#: FlashAttention-3 (arXiv 2407.08608), figure 5, causal, head dimension 128, 4k tokens: near 550 forwards and 450
#: backwards of 989 TFLOPS; the container's cuDNN attention is near these.
A100_ATTENTION, A100_ATTENTION_BACKWARD = 0.73, 0.63
H200_ATTENTION, H200_ATTENTION_BACKWARD = 0.55, 0.45
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
        gemm_flops_per_s=312e12 * A100_GEMM,
        grouped_flops_per_s=312e12 * A100_GEMM * GROUPED,
        attention_flops_per_s=312e12 * A100_ATTENTION,
        attention_backward_flops_per_s=312e12 * A100_ATTENTION_BACKWARD,
        memory_bytes=int(80e9 * USABLE_MEMORY),
        memory_bytes_per_s=2.039e12 * STREAM,
    ),
    intra=Network(INTRA_LATENCY_S, 300e9 * NVLINK),
    inter=Network(INTER_LATENCY_S, 50e9 * UPLINK),
    plan_s=PLAN_S,
)
CLUSTER_B = Cluster(
    name="b",
    num_nodes=4,
    devices_per_node=8,
    device=Device(
        name="H200-141G",
        gemm_flops_per_s=989e12 * H200_GEMM,
        grouped_flops_per_s=989e12 * H200_GEMM * GROUPED,
        attention_flops_per_s=989e12 * H200_ATTENTION,
        attention_backward_flops_per_s=989e12 * H200_ATTENTION_BACKWARD,
        memory_bytes=int(141e9 * USABLE_MEMORY),
        memory_bytes_per_s=4.8e12 * STREAM,
    ),
    intra=Network(INTRA_LATENCY_S, 450e9 * NVLINK),
    inter=Network(INTER_LATENCY_S, 400e9 * UPLINK),
    plan_s=PLAN_S,
)
CLUSTERS = {"a": CLUSTER_A, "b": CLUSTER_B}
