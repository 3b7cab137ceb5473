"""CUDA: one rank over NCCL; streams, events and device memory."""

import time

import numpy as np
import pytest
import torch

from themis.comm import collectives
from themis.comm.all_to_all import all_to_all
from themis.comm.communicator import Communicator
from themis.comm.launch import Launch
from themis.comm.mesh import Mesh
from themis.comm.sparse import sparse_all_gather, sparse_reduce_scatter
from themis.planning.transfers import transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def mesh(tmp_path):
    device = torch.device("cuda", 0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    mesh = Mesh.create(device=device, timeout_s=30)
    yield mesh
    mesh.close()
    collectives.end_process_group()


def test_the_default_device_is_the_cuda_device(mesh):
    assert Launch.from_environment({}) is None
    assert Mesh.create(timeout_s=30).device == torch.device("cuda", 0)


def test_submitted_work_runs_on_a_stream_of_its_own_and_wait_orders_it(mesh):
    communicator = Communicator(mesh)
    source, target = torch.ones(1 << 22, device=mesh.device), torch.zeros(1 << 22, device=mesh.device)
    streams = []

    def slow_copy():
        streams.append(torch.cuda.current_stream().cuda_stream)
        torch.cuda._sleep(100_000_000)  # cycles: about 50 ms
        target.copy_(source)

    began = time.perf_counter()
    work = communicator.submit("copy", slow_copy)
    issued_s = time.perf_counter() - began
    assert not work.done()
    assert issued_s < 0.02  # issuing does not wait
    work.wait()
    assert target.sum().item() == target.numel()
    assert work.done()
    assert streams[0] != torch.cuda.current_stream().cuda_stream
    assert list(communicator.issued) == ["copy"]
    communicator.close()


def test_collectives_of_a_single_rank(mesh):
    communicator = Communicator(mesh)
    plan = transfers(np.array([0]), np.ones((1, 1), dtype=bool), mesh.topology)
    chunk = torch.arange(8.0, device=mesh.device)
    sparse_all_gather(communicator, plan, {0: chunk}).wait()
    sparse_reduce_scatter(communicator, plan, {0: chunk}).wait()
    rows = torch.ones(3, 2, device=mesh.device, requires_grad=True)
    all_to_all(mesh, rows, [3], [3]).sum().backward()
    assert chunk.tolist() == list(range(8))
    assert rows.grad.tolist() == [[1.0, 1.0]] * 3
    assert collectives.gather_counts(mesh, [4, 5]).tolist() == [[4, 5]]
    assert collectives.all_reduce_sum(mesh, chunk).tolist() == list(range(8))
    communicator.close()


def test_staged_messages_over_nccl_to_oneself(mesh):
    """NCCL's grouped send and receive with itself as the peer: the path that sparse collectives take on CUDA."""
    group = collectives.new_group(mesh.device, 30.0, control=False)
    sent, received = torch.arange(16.0, device=mesh.device), torch.zeros(16, device=mesh.device)
    collectives.grouped([(0, sent)], [(0, received)], group)
    assert torch.equal(sent, received)
    collectives.destroy_group(group)
