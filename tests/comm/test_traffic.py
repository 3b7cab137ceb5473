"""Byte counters."""

import threading

import pytest

from themis.comm.traffic import COLLECTIVES, Traffic
from themis.core.errors import ConfigError
from themis.core.topology import LinkClass


def test_counts_by_collective_and_link_and_not_what_stays():
    traffic = Traffic()
    traffic.add("all_to_all", LinkClass.INTRA, 5)
    traffic.add("all_to_all", LinkClass.INTRA, 6)
    traffic.add("reshard", LinkClass.INTER, 7)
    traffic.add("counts", LinkClass.LOCAL, 100)
    expected = {name: {"intra": 0, "inter": 0} for name in COLLECTIVES}
    expected["all_to_all"]["intra"] = 11
    expected["reshard"]["inter"] = 7
    assert traffic.snapshot() == expected
    traffic.reset()
    assert traffic.snapshot() == {name: {"intra": 0, "inter": 0} for name in COLLECTIVES}


def test_threads_lose_no_count():
    traffic = Traffic()

    def count():
        for _ in range(5_000):
            traffic.add("counts", LinkClass.INTRA, 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traffic.snapshot()["counts"]["intra"] == 20_000


def test_an_unknown_collective_is_refused():
    with pytest.raises(ConfigError, match="name is 'broadcast'; it must be one of all_to_all"):
        Traffic().add("broadcast", LinkClass.INTRA, 1)
