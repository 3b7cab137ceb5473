"""The sparse collectives against their references, with their bytes, on drawn placements."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from themis.comm.communicator import Communicator
from themis.comm.mesh import Mesh
from themis.comm.reference import sparse_all_gather_reference, sparse_reduce_scatter_reference
from themis.comm.sparse import sparse_all_gather, sparse_reduce_scatter
from themis.core.errors import ConfigError
from themis.core.placement import Placement
from themis.core.plan import TransferPlan
from themis.core.topology import LinkClass, Topology
from themis.planning.transfers import transfers
from themis.testing.ranks import run_ranks

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int32]
LINKS = {"intra": LinkClass.INTRA, "inter": LinkClass.INTER}


def _content(expert, device, numel):
    """Small whole numbers, so that sums over holders are exact in every type."""
    return ((np.arange(numel) * (expert + 3) + 7 * device + expert) % 31).astype(np.float64)


def _chunks(owner_E, placement_ED, numel):
    num_experts, num_devices = placement_ED.shape
    return [{e: _content(e, d, numel) for e in range(num_experts) if placement_ED[e, d]} for d in range(num_devices)]


def _run(rank, topology, cases):
    """For each case: what SpAG and SpRS leave on this rank, the bytes it sent in each, and whether autograd noticed."""
    mesh = Mesh.create(topology, timeout_s=20)
    communicator = Communicator(mesh)
    results = []
    for owner_E, placement_ED, numel, piece_bytes, dtype in cases:
        plan = _plan(topology, owner_E, placement_ED, numel, piece_bytes, dtype)
        own = _chunks(owner_E, placement_ED, numel)[rank]
        gathered = {
            e: torch.tensor(c if owner_E[e] == rank else np.full(numel, 99.0), dtype=dtype) for e, c in own.items()
        }
        summed = {e: torch.tensor(c, dtype=dtype) for e, c in own.items()}
        versions = [t._version for t in (*gathered.values(), *summed.values())]
        mesh.traffic.reset()
        works = [sparse_all_gather(communicator, plan, gathered), sparse_reduce_scatter(communicator, plan, summed)]
        for work in works:
            work.wait()
        unnoticed = versions == [t._version for t in (*gathered.values(), *summed.values())]
        results.append((_arrays(gathered), _arrays(summed), mesh.traffic.snapshot(), unnoticed))
    communicator.close()
    mesh.close()
    return results


def _arrays(chunks):
    return {e: chunk.to(torch.float64).numpy() for e, chunk in chunks.items()}


def _plan(topology, owner_E, placement_ED, numel, piece_bytes, dtype):
    expert_bytes = numel * dtype.itemsize
    return transfers(owner_E, placement_ED, topology, expert_bytes=expert_bytes, piece_bytes=piece_bytes)


@st.composite
def _cases(draw, topology):
    cases = []
    for _ in range(8):
        num_experts = draw(st.integers(1, 6))
        devices = st.integers(0, topology.num_devices - 1)
        owner_E = np.array(draw(st.lists(devices, min_size=num_experts, max_size=num_experts)), dtype=np.int64)
        bits = st.lists(st.booleans(), min_size=topology.num_devices, max_size=topology.num_devices)
        placement_ED = np.array(draw(st.lists(bits, min_size=num_experts, max_size=num_experts)), dtype=bool)
        placement_ED[np.arange(num_experts), owner_E] = True
        numel, piece_bytes = draw(st.sampled_from([1, 2, 7, 300])), draw(st.sampled_from([1, 64, 10_000]))
        cases.append((owner_E, placement_ED, numel, piece_bytes, draw(st.sampled_from(TYPES))))
    return cases


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
@settings(max_examples=6, derandomize=True, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_results_and_bytes_on_drawn_placements(nodes, local, data):
    topology = Topology(nodes, local)
    cases = data.draw(_cases(topology))
    results_D = run_ranks(topology.num_devices, _run, topology, cases)
    for i, case in enumerate(cases):
        results = [results_D[rank][i] for rank in range(topology.num_devices)]
        _check_values(case, results)
        _check_bytes(topology, case, results)


def _check_values(case, results):
    owner_E, placement_ED, numel, _, _ = case
    chunks_D = _chunks(owner_E, placement_ED, numel)
    gathered_D = sparse_all_gather_reference(owner_E, placement_ED, chunks_D)
    summed_D = sparse_reduce_scatter_reference(owner_E, placement_ED, chunks_D)
    for rank, (gathered, summed, _, unnoticed) in enumerate(results):
        assert unnoticed
        assert gathered.keys() == gathered_D[rank].keys()
        assert all(np.array_equal(gathered[e], chunk) for e, chunk in gathered_D[rank].items())
        assert all(np.array_equal(summed[e], chunk) for e, chunk in summed_D[rank].items())


def _check_bytes(topology, case, results):
    owner_E, placement_ED, numel, piece_bytes, dtype = case
    expert_bytes = numel * dtype.itemsize
    replicas = int(Placement(owner_E, placement_ED).replicas_ED.sum())
    held_EN = placement_ED.reshape(len(owner_E), topology.num_nodes, -1).any(axis=2)
    entered = int(held_EN.sum()) - len(owner_E)  # nodes that hold a copy, but for the owner's
    planned = _plan(topology, owner_E, placement_ED, numel, piece_bytes, dtype).bytes_by_link(
        topology, numel, dtype.itemsize
    )
    for collective in ("sparse_all_gather", "sparse_reduce_scatter"):
        sent = {name: sum(traffic[collective][name] for _, _, traffic, _ in results) for name in LINKS}
        assert sent == {name: planned[link] for name, link in LINKS.items()}
        assert sent["inter"] == entered * expert_bytes
        assert sent["intra"] + sent["inter"] == replicas * expert_bytes


def _chain():
    """Expert 0 of rank 0 goes through rank 1 and rank 2 to rank 3, in two pieces."""
    rows = [(stage, piece) for stage in range(3) for piece in range(2)]
    stage_X, piece_X = np.array(rows).T
    return TransferPlan(4, [0], [2], stage_X, np.zeros(6), piece_X, stage_X, stage_X + 1)


def test_a_hand_made_chain():
    def run(rank):
        mesh = Mesh.create(timeout_s=10)
        communicator = Communicator(mesh)
        chunk = torch.arange(5.0) if rank == 0 else torch.zeros(5)
        sparse_all_gather(communicator, _chain(), {0: chunk}).wait()
        arrived = chunk.tolist()
        chunk.add_(rank)
        sparse_reduce_scatter(communicator, _chain(), {0: chunk}, name="gradients").wait()
        sent = {name: bytes_["intra"] for name, bytes_ in mesh.traffic.snapshot().items() if name.startswith("sparse")}
        issued = list(communicator.issued)
        communicator.close()
        mesh.close()
        return arrived, chunk.tolist(), sent, issued

    results = run_ranks(4, run)
    assert [arrived for arrived, *_ in results] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
    assert results[0][1] == [4.0 * i + 0 + 1 + 2 + 3 for i in range(5)]
    assert [sent["sparse_all_gather"] for _, _, sent, _ in results] == [20, 20, 20, 0]
    assert [sent["sparse_reduce_scatter"] for _, _, sent, _ in results] == [0, 20, 20, 20]
    assert {tuple(issued) for *_, issued in results} == {("sparse_all_gather", "gradients")}


def test_gradient_sums_are_the_same_every_time():
    """Floating-point sums depend on their order; the plan fixes it, whatever arrives first."""

    def run(rank):
        mesh = Mesh.create(timeout_s=10)
        communicator = Communicator(mesh)
        plan = transfers(np.array([0]), np.ones((1, 4), dtype=bool), mesh.topology, expert_bytes=4000, piece_bytes=100)
        sums = []
        for _ in range(5):
            chunk = torch.from_numpy(np.random.default_rng(rank).standard_normal(1000).astype(np.float32))
            sparse_reduce_scatter(communicator, plan, {0: chunk}).wait()
            sums.append(chunk.numpy())
        communicator.close()
        mesh.close()
        return sums

    first, *others = run_ranks(4, run)[0]
    assert all(np.array_equal(first, other) for other in others)
    exact = sum(
        np.random.default_rng(rank).standard_normal(1000).astype(np.float32).astype(np.float64) for rank in range(4)
    )
    np.testing.assert_allclose(first, exact, rtol=0, atol=2e-6)


def test_the_receiving_tensor_may_need_gradients():
    def run(rank):
        mesh = Mesh.create(timeout_s=10)
        communicator = Communicator(mesh)
        chunk = torch.full((4,), float(rank), requires_grad=True)
        product = (chunk * chunk).sum()  # keeps the chunk for its backward
        plan = transfers(np.array([1]), np.ones((1, 2), dtype=bool), mesh.topology)
        sparse_all_gather(communicator, plan, {0: chunk}).wait()
        product.backward()
        communicator.close()
        mesh.close()
        return chunk.tolist(), chunk.grad.tolist()

    assert run_ranks(2, run) == [([1.0] * 4, [2.0] * 4)] * 2


@pytest.mark.parametrize(
    ("devices", "chunks", "message"),
    [
        (4, {}, r"plan is for 4 device\(s\); the mesh has 2 rank\(s\)"),
        (2, {5: torch.zeros(4)}, r"chunks lacks expert 0, which this rank sends or receives; it has \[5\]"),
        (2, {0: torch.zeros(2, 2)}, r"chunks\[0\] has shape \(2, 2\); it must be flat and contiguous"),
        (2, {0: torch.zeros(8)[::2]}, r"chunks\[0\] has shape \(4,\); it must be flat and contiguous"),
    ],
)
def test_chunks_are_checked_before_anything_is_issued(devices, chunks, message):
    def run(rank):
        mesh = Mesh.create(timeout_s=10)
        communicator = Communicator(mesh)
        plan = transfers(np.array([0]), np.ones((1, devices), dtype=bool), Topology(1, devices))
        for collective in (sparse_all_gather, sparse_reduce_scatter):
            with pytest.raises(ConfigError, match=message):
                collective(communicator, plan, chunks)
        issued = list(communicator.issued)
        communicator.close()
        mesh.close()
        return issued

    assert run_ranks(2, run) == [[], []]
