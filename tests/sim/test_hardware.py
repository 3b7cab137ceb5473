"""Clusters by name and by profile file; whatever is wrong with a profile is told in one line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.sim.efficiency import CLUSTERS
from themis.sim.hardware import read_profile


def profile(**changes) -> dict:
    raw = asdict(CLUSTERS["a"])
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = raw
        for name in outer:
            place = place[name]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return raw


def test_a_profile_is_read_back(tmp_path):
    path = tmp_path / "host.json"
    path.write_text(json.dumps(profile()))
    assert read_profile(path) == CLUSTERS["a"]
    path.write_text(json.dumps(profile(plan_s=None, devices_per_uplink=None)))
    assert read_profile(path) == replace(CLUSTERS["a"], plan_s=0.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("[1]", "is list; it must be an object"),
        ("{", "is no JSON file"),
        (profile(intra=None), "lacks intra"),
        (profile(device__memory_bytes=None), "device lacks memory_bytes"),
        (profile(colour="red"), "has colour, which nothing reads"),
        (profile(device__flops_per_s=-1), "device.flops_per_s is -1"),
        (profile(device__flops_per_s="fast"), "device.flops_per_s is 'fast'"),
        (profile(inter__bytes_per_s="fast"), "inter, bytes_per_s is 'fast'; it must be a number"),
        (profile(inter__bytes_per_s=0), "bytes_per_s is 0"),
        (profile(num_nodes=0), "num_nodes is 0"),
        (profile(num_nodes="four"), "num_nodes is 'four'"),
        (profile(devices_per_uplink=3), "devices_per_uplink is 3"),
        (profile(plan_s="long"), "plan_s is 'long'"),
        (profile(plan_s=-1.0), "plan_s is -1.0"),
    ],
)
def test_bad_profiles_are_refused_in_a_line(tmp_path, raw, message):
    path = tmp_path / "host.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


def test_a_missing_profile_names_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; give a cluster \(a, b\)"):
        read_profile(tmp_path / "none.json")


def test_uplinks_are_shared_or_split():
    cluster = replace(CLUSTERS["a"], num_nodes=2, devices_per_node=4)
    bytes_D = np.array([4.0, 0, 0, 0, 1, 1, 1, 0]) * cluster.inter.bytes_per_s
    assert cluster.uplink_s(bytes_D) == pytest.approx(4.0)
    assert replace(cluster, devices_per_uplink=2).uplink_s(bytes_D) == pytest.approx(8.0)
    assert replace(cluster, devices_per_uplink=1).uplink_s(bytes_D) == pytest.approx(16.0)


def test_the_papers_clusters():
    for cluster, gigabits in ((CLUSTERS["a"], 400), (CLUSTERS["b"], 3200)):
        assert cluster.num_devices == 32
        assert 0.5 < cluster.inter.bytes_per_s / (gigabits / 8 * 1e9) <= 1
        assert cluster.of_nodes(8).num_devices == 64
        assert cluster.topology.ingress_bytes_per_s <= cluster.inter.bytes_per_s
