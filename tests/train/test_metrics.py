"""Metrics and routing on disk, and the summary drawn from them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from themis.train.metrics import MetricsLog, RoutingLog, StepMetrics, cut_back, read_lines, summarise


def line(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 2.0,
        "cross_entropy": 5.0 / step,
        "aux_loss": 1.0,
        "z_loss": 0.5,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 100,
        "tokens_per_s": 100.0 * step,
        "step_s": 2.0,
        "exposed_s": {"all_to_all": 0.5, "counts": 0.1},
        "imbalance_before_L": [2.0, 4.0],
        "imbalance_after_L": [1.0, 1.5],
        "replicas_L": [1, 0],
        "bytes_sent": {"all_to_all": {"intra": 10, "inter": step}},
    }
    return StepMetrics(**{**values, **changes})


def test_a_resumed_log_is_cut_back(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    for step in (1, 2, 3):
        log.write(line(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the kill came in the middle of a line
    log = MetricsLog(tmp_path, 2, tensorboard=False)
    log.write(line(3, loss=7.0))
    log.close()
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(1, 2.0), (2, 2.0), (3, 7.0)]


@pytest.mark.parametrize("damage", [b"5\n", b'{"step": 2}\n', b"\xff\xfe\n", b"null\n"])
def test_what_is_no_line_of_metrics_ends_the_log(tmp_path, damage):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write(line(1))
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    MetricsLog(tmp_path, 3, tensorboard=False).close()
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write(line(1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == read_lines(tmp_path / "metrics.jsonl")[0]
    log.close()


def test_cutting_back_nothing(tmp_path):
    cut_back(tmp_path / "metrics.jsonl", 5)
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_summary():
    records = [vars(line(step)) for step in (1, 2, 3)]
    records[1]["held_out_loss"] = 3.0
    summary = summarise(records, "runs/x")
    assert (summary.steps, summary.first_loss, summary.last_loss) == (3, 5.0, 5.0 / 3)
    assert summary.held_out_loss == 3.0
    assert (summary.imbalance_before, summary.imbalance_after) == (3.0, 1.25)
    assert summary.tokens_per_s == 200.0
    assert summary.exposed_share == pytest.approx({"all_to_all": 0.25, "counts": 0.05})
    assert summary.bytes_sent == {"all_to_all": {"intra": 30, "inter": 6}}


def test_routing_goes_on_after_a_resume(tmp_path):
    log = RoutingLog(tmp_path, 0, world_size=2)
    log.write()
    assert not (tmp_path / "routing.npz").exists()
    for step in (10, 20, 30):
        log.add(step, np.full((3, 4, 2), step))
    log.write()
    log = RoutingLog(tmp_path, 20, world_size=2)
    log.add(30, np.full((3, 4, 2), 31))
    log.write()
    with np.load(tmp_path / "routing.npz") as stored:
        assert stored["iteration"].tolist() == [10, 20, 30]
        assert stored["tokens"].dtype == np.int32
        assert stored["tokens"][:, 0, 0, 0].tolist() == [10, 20, 31]


def test_routing_of_another_number_of_ranks_is_set_aside(tmp_path):
    log = RoutingLog(tmp_path, 0, world_size=2)
    log.add(10, np.zeros((3, 4, 2), dtype=np.int64))
    log.write()
    log = RoutingLog(tmp_path, 10, world_size=4)
    log.add(20, np.zeros((3, 4, 4), dtype=np.int64))
    log.write()
    with np.load(tmp_path / "routing.npz") as new, np.load(tmp_path / "routing-before-11.npz") as old:
        assert (new["tokens"].shape[-1], old["tokens"].shape[-1]) == (4, 2)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"PK\x03\x04"])
def test_damaged_routing_is_set_aside(tmp_path, damage):
    (tmp_path / "routing.npz").write_bytes(damage)
    log = RoutingLog(tmp_path, 10, world_size=2)
    log.add(20, np.zeros((3, 4, 2), dtype=np.int64))
    log.write()
    assert (tmp_path / "routing-before-11.npz").read_bytes() == damage
    with np.load(tmp_path / "routing.npz") as new:
        assert new["iteration"].tolist() == [20]


def test_tensorboard_gets_every_scalar(tmp_path):
    pytest.importorskip("tensorboard")
    log = MetricsLog(tmp_path, 0, tensorboard=True)
    log.write(line(1))
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss", "lr", "imbalance_before/layer_1", "imbalance_after/layer_0"} <= set(tags)
    assert events.Scalars("imbalance_before/layer_1")[0].value == 4.0
