"""The token AlltoAll against its reference, forwards and backwards, with idle ranks and several types."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from themis.comm.all_to_all import all_to_all
from themis.comm.collectives import all_to_all_rows
from themis.comm.mesh import Mesh
from themis.comm.reference import all_to_all_reference
from themis.core.topology import Topology
from themis.testing.ranks import run_ranks

WIDTH = 3


def _rows(rank, num_rows):
    return np.arange(num_rows * WIDTH, dtype=np.float64).reshape(num_rows, WIDTH) + 1000 * rank


def _weights(rank, num_rows):
    return np.arange(num_rows * WIDTH, dtype=np.float64).reshape(num_rows, WIDTH) * (rank + 2)


def _run(rank, topology, cases):
    mesh = Mesh.create(topology, timeout_s=20)
    results = []
    for send_DD in cases:
        send_D, receive_D = send_DD[rank].tolist(), send_DD[:, rank].tolist()
        rows = torch.from_numpy(_rows(rank, sum(send_D))).requires_grad_()
        mesh.traffic.reset()
        received = all_to_all(mesh, rows, send_D, receive_D)
        sent = mesh.traffic.snapshot()["all_to_all"]
        (received * torch.from_numpy(_weights(rank, sum(receive_D)))).sum().backward()
        results.append((received.detach().numpy(), rows.grad.numpy(), sent))
    mesh.close()
    return results


@st.composite
def _cases(draw, size):
    count = st.integers(0, 5)
    matrix = st.lists(st.lists(count, min_size=size, max_size=size), min_size=size, max_size=size)
    cases = [np.array(m, dtype=np.int64) for m in draw(st.lists(matrix, min_size=5, max_size=10))]
    return [np.zeros((size, size), dtype=np.int64), *cases]


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (2, 1), (2, 2)])
@settings(max_examples=4, derandomize=True, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_rows_and_gradients_against_the_reference(nodes, local, data):
    topology = Topology(nodes, local)
    size = topology.num_devices
    cases = data.draw(_cases(size))
    results_D = run_ranks(size, _run, topology, cases)
    for i, send_DD in enumerate(cases):
        rows_D = [_rows(rank, int(send_DD[rank].sum())) for rank in range(size)]
        expected_D = all_to_all_reference(rows_D, send_DD)
        gradient_D = all_to_all_reference([_weights(r, int(send_DD[:, r].sum())) for r in range(size)], send_DD.T)
        crosses_DD = topology.node_of_D[:, None] != topology.node_of_D
        for rank in range(size):
            received, gradient, sent = results_D[rank][i]
            assert np.array_equal(received, expected_D[rank])
            assert np.array_equal(gradient, gradient_D[rank])
            inter = int(send_DD[rank, crosses_DD[rank]].sum())
            away = int(send_DD[rank].sum() - send_DD[rank, rank])
            assert sent == {"intra": (away - inter) * WIDTH * 8, "inter": inter * WIDTH * 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.bool])
def test_every_type_and_shape_travels(dtype):
    def swap(rank):
        mesh = Mesh.create(timeout_s=10)
        shapes = [(2,), (2, 4), (2, 2, 3)]
        sent = [torch.arange(torch.Size(shape).numel()).reshape(shape).add(rank).to(dtype) for shape in shapes]
        received = [all_to_all_rows(mesh, rows, [1, 1], [1, 1]) for rows in sent]
        mesh.close()
        return [rows.to(torch.float64).numpy() for rows in sent], [rows.to(torch.float64).numpy() for rows in received]

    (sent_0, received_0), (sent_1, received_1) = run_ranks(2, swap)
    for i in range(3):
        assert np.array_equal(received_0[i], np.stack([sent_0[i][0], sent_1[i][0]]))
        assert np.array_equal(received_1[i], np.stack([sent_0[i][1], sent_1[i][1]]))


def test_no_gradient_without_need():
    def plain(rank):
        mesh = Mesh.create(timeout_s=10)
        rows = all_to_all(mesh, torch.ones(2, 1), [1, 1], [1, 1])
        mesh.close()
        return rows.requires_grad

    assert run_ranks(2, plain) == [False, False]


def test_strided_rows_and_gradients():
    def swap(rank):
        mesh = Mesh.create(timeout_s=10)
        rows = torch.arange(4.0).reshape(2, 2).t().requires_grad_()
        received = all_to_all(mesh, rows, [1, 1], [1, 1])
        received.sum().backward()  # the gradient of a sum is an expanded scalar, without storage of its own
        mesh.close()
        return received.tolist(), rows.grad.tolist()

    (received_0, grad), (received_1, _) = run_ranks(2, swap)
    assert received_0 == [[0.0, 2.0]] * 2
    assert received_1 == [[1.0, 3.0]] * 2
    assert grad == [[1.0, 1.0]] * 2
