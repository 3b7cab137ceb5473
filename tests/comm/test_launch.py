"""torchrun's environment: read, checked, and each fault told in one line."""

import socket

import pytest
import torch

from themis.comm.collectives import end_process_group, init_process_group
from themis.comm.launch import Launch
from themis.core.errors import ConfigError

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_good_environment():
    assert Launch.from_environment(GOOD) == Launch(1, 4, 1, "127.0.0.1", 29500)
    assert Launch.from_environment({}) is None
    without_local = {name: value for name, value in GOOD.items() if name != "LOCAL_RANK"}
    assert Launch.from_environment(without_local) == Launch(1, 4, 1, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_PORT": ""}, "sets RANK, WORLD_SIZE, MASTER_ADDR but not MASTER_PORT; start with torchrun"),
        ({"RANK": ""}, "but not RANK"),
        ({"RANK": "x"}, "RANK is 'x'; it must be a whole number"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; RANK must be below WORLD_SIZE"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK must be below WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; it must be a port"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
    ],
)
def test_bad_environments(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Launch.from_environment(GOOD | change)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = Launch(0, 2, 0, "127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"port {port} is in use; set MASTER_PORT to a free one"):
            init_process_group(launch, device=torch.device("cpu"), timeout_s=2)


def test_peers_that_never_come_are_told():
    launch = Launch(1, 2, 1, "127.0.0.1", _free_port())
    with pytest.raises(ConfigError, match=r"rank 1 of 2 could not meet its peers at 127.0.0.1:\d+ ") as caught:
        init_process_group(launch, device=torch.device("cpu"), timeout_s=1)
    assert "\n" not in str(caught.value)


def test_a_group_of_one_starts_and_ends():
    init_process_group(Launch(0, 1, 0, "127.0.0.1", _free_port()), device=torch.device("cpu"), timeout_s=5)
    assert torch.distributed.get_world_size() == 1
    end_process_group()
    assert not torch.distributed.is_initialized()
    end_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
