"""Tiny iterations worked out by hand, to the nanosecond, and what must hold of any."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from themis.core.topology import Link
from themis.sim.hardware import Cluster, Device
from themis.sim.timeline import KINDS, NOTHING, Fixed, LaneTime, LayerTimes, Timeline, all_reduce_time, lane_time
from themis.sim.trace import trace_events
from themis.sim.traffic import LinkLoads

NS = 1e-9


def cluster(nodes: int = 2, local: int = 2, **more) -> Cluster:
    """Links of 1 byte a ns inside and 0.5 between nodes, latencies 3 ns and 7 ns."""
    device = Device("toy", 1e9, 1e9, 1000, 1e9)
    return Cluster("toy", nodes, local, device, Link(3 * NS, 1e9), Link(7 * NS, 0.5e9), **more)


def loads(intra=(0, 0, 0, 0), inter=(0, 0, 0, 0)) -> LinkLoads:
    intra_D, inter_D = np.array(intra, dtype=float), np.array(inter, dtype=float)
    return LinkLoads(intra_D, intra_D[::-1].copy(), inter_D, inter_D[::-1].copy(), intra_D + inter_D)


def layer(**more) -> LayerTimes:
    base = {
        "attention_s": 100 * NS,
        "attention_backward_s": 200 * NS,
        "counts_s": 10 * NS,
        "plan_s": 5 * NS,
        "all_to_all": LaneTime(30 * NS, 40 * NS),
        "experts_D": np.array([50.0, 70.0, 60.0, 60.0]) * NS,
    }
    return LayerTimes(**{**base, **more})


def run(layers, fixed=None, record=False) -> Timeline:
    timeline = Timeline(cluster(), record=record)
    timeline.run(layers, fixed or Fixed())
    assert sum(timeline.spent_s.values()) == pytest.approx(timeline.now_s, abs=1e-15)
    return timeline


def ns(timeline: Timeline) -> dict[str, float]:
    return {kind: round(seconds / NS, 6) for kind, seconds in timeline.spent_s.items() if seconds}


def test_plain_expert_parallelism():
    # forward 100 + 10 + 5 + 40 + 70 + 40 = 265; backward 40 + 140 + 40 + 200 = 420
    timeline = run([layer()])
    assert timeline.now_s == pytest.approx(685 * NS, abs=1e-15)
    parts = {"attention": 300, "experts": 180, "all_to_all": 160, "waiting": 30, "plan": 5, "counts": 10}
    assert ns(timeline) == parts
    assert timeline.layer_s == pytest.approx([685 * NS])


def test_replicas_hide_under_attention_and_the_rest_is_exposed():
    # SpAG 130 against 100 of attention: 30 exposed. SpRS 130 hides under 200.
    timeline = run([layer(gather=LaneTime(20 * NS, 130 * NS), reduce=LaneTime(20 * NS, 130 * NS))])
    assert ns(timeline)["gather"] == 30
    assert "reduce" not in ns(timeline)
    assert timeline.now_s == pytest.approx(715 * NS, abs=1e-15)
    assert timeline.sparse_s == pytest.approx(260 * NS)


def test_what_comes_after_the_gate_is_exposed_whole():
    assert ns(run([layer(gather=LaneTime(50 * NS), added=LaneTime(11 * NS, 4 * NS))]))["gather"] == 11


def test_rematerialization_shares_the_backward_window():
    # Layer 1's backward: SpAG of layer 0 takes inter 150, its own SpRS inter 90 and intra 220: 240 of inter against
    # 200 of window, 40 exposed, all of it SpRS's. Layer 0's backward has its SpRS alone, 90.
    reduce = LaneTime(220 * NS, 90 * NS)
    timeline = run([layer(regather=LaneTime(0, 150 * NS), reduce=LaneTime(0, 90 * NS)), layer(reduce=reduce)])
    assert ns(timeline)["reduce"] == 40
    assert "gather" not in ns(timeline)
    # Were it 230 of SpAG: 30 exposed as SpAG, and 90 more as SpRS.
    timeline = run([layer(regather=LaneTime(0, 230 * NS)), layer(reduce=reduce)])
    assert (ns(timeline)["gather"], ns(timeline)["reduce"]) == (30, 90)


def test_dense_gradients_use_idle_lanes_only():
    # Head's debt 150 of inter drains under experts' backward (140), then under attention's. The layer's own, 300 after
    # its backward, has nothing left to hide under.
    fixed = Fixed(head=LaneTime(0, 150 * NS))
    timeline = run([layer(dense=LaneTime(10 * NS, 300 * NS))], fixed)
    assert ns(timeline)["all_reduce"] == 300
    # SpRS keeps the lane for 190 of the attention's 200, so of 200 of debt 140 drain under the experts and 10 there.
    timeline = run([layer(reduce=LaneTime(0, 190 * NS))], Fixed(head=LaneTime(0, 200 * NS)))
    assert ns(timeline)["all_reduce"] == 50


def test_persistent_replicas_are_synchronised_in_the_open():
    timeline = run([layer(sync=LaneTime(30 * NS, 100 * NS))])
    assert ns(timeline)["all_reduce"] == 100
    assert timeline.now_s == pytest.approx(785 * NS, abs=1e-15)


def test_rearrangement_and_optimizer_are_exposed_whole():
    fixed = Fixed(10 * NS, 20 * NS, NOTHING, 33 * NS, LaneTime(400 * NS, 90 * NS))
    spent = ns(run([layer()], fixed))
    assert (spent["rearrangement"], spent["optimizer"], spent["attention"]) == (400, 33, 330)


def test_lanes_take_their_busiest_link():
    # intra: 40 bytes out of device 1, 3 + 40; inter: node 0 sends 30 + 10 at 0.5 a ns, 7 + 80.
    time = lane_time(loads(intra=(20, 40, 0, 0), inter=(30, 10, 0, 0)), cluster())
    assert (time.intra_s, time.inter_s) == pytest.approx((43 * NS, 87 * NS), abs=1e-15)
    assert lane_time(loads(), cluster()) == NOTHING
    # Each device an uplink of its own: 30 bytes at a quarter byte a ns.
    alone = lane_time(loads(inter=(30, 10, 0, 0)), cluster(devices_per_uplink=1))
    assert alone.inter_s == pytest.approx((7 + 120) * NS, abs=1e-15)


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (4, 1), (2, 2), (1, 1)])
def test_all_reduce_is_a_ring(nodes, local):
    time = all_reduce_time(1000, cluster(nodes, local))
    intra = 3 + 2000 * (local - 1) / local if local > 1 else 0
    inter = 7 + 4000 * (nodes - 1) / nodes if nodes > 1 else 0
    assert (time.intra_s, time.inter_s) == pytest.approx((intra * NS, inter * NS), abs=1e-15)


def test_recording_changes_no_time_and_lanes_never_run_twice():
    layers = [
        layer(gather=LaneTime(50 * NS, 60 * NS), reduce=LaneTime(10 * NS), dense=LaneTime(5 * NS)) for _ in range(3)
    ]
    plain, recorded = run(layers), run(layers, record=True)
    assert plain.now_s == recorded.now_s
    assert not plain.events
    for device in range(4):
        spans = sorted(
            (event.start_s, event.start_s + event.seconds_D[device])
            for event in recorded.events
            if event.lane == "compute" and event.seconds_D[device] > 0
        )
        assert all(end <= start + 1e-15 for (_, end), (start, _) in pairwise(spans))
    assert max(event.start_s + event.seconds_D.max() for event in recorded.events) == pytest.approx(recorded.now_s)


def test_perfetto_reads_the_events():
    timeline = run([layer(gather=lane_time(loads(intra=(20, 40, 0, 0)), cluster()))], record=True)
    rows = trace_events(timeline.events, 4, 2)
    names = [row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "process_name"]
    assert names == ["device 0 (node 0)", "device 1 (node 0)", "device 2 (node 1)", "device 3 (node 1)"]
    gathers = [row for row in rows if row["name"] == "SpAG"]
    assert [(row["pid"], row["tid"], row["ts"], round(row["dur"], 6)) for row in gathers] == [
        (0, 1, 0.0, 0.02),
        (1, 1, 0.0, 0.04),
        (2, 1, 0.0, 0.04),
        (3, 1, 0.0, 0.02),
    ]
    assert {row["ph"] for row in rows} == {"M", "X"}


def test_kinds_are_what_a_timeline_spends():
    assert tuple(run([layer()]).spent_s) == KINDS
