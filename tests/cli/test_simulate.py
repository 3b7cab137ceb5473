"""`themis simulate`, in this process."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from themis.cli.main import main
from themis.policies import POLICIES
from themis.sim.efficiency import CLUSTERS
from themis.train.config import save_config
from themis.train.recipes import recipe

FEW = ["--iterations", "2", "--warmup", "1", "--layers", "2"]


def run_json(capsys, *arguments: str):
    assert main(["simulate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_every_policy_on_a_model_of_the_paper(capsys):
    facts = run_json(capsys, "qwen1.5-moe", "--policy", "all", "--batch", "1", *FEW)
    assert [row["policy"] for row in facts["policies"]] == list(POLICIES)
    assert (facts["cluster"], facts["devices"], facts["model"]["num_experts"]) == ("b", 32, 64)
    by_name = {row["policy"]: row for row in facts["policies"]}
    assert by_name["ep"]["speedup_over_ep"] == 1.0
    assert by_name["themis"]["speedup_over_ep"] > 1.0
    for row in facts["policies"]:
        assert sum(row["spent_s"].values()) == pytest.approx(row["iteration_s"])
        assert row["memory"]["total"] == pytest.approx(sum(v for k, v in row["memory"].items() if k != "total"))
        assert row["out_of_memory"] is (row["memory"]["total"] > row["memory_limit"])
        assert len(row["layer_s"]) == 2


def test_tables_for_people(capsys):
    assert main(["simulate", "gpt-s-moe", "--cluster", "a", "--nodes", "1", *FEW]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in ("over ep", "attn. exp. A2A", "tokens/s", "activations", "1 x 8 A100-80G"):
        assert part in out


def test_a_config_on_a_profile_with_recorded_routing(tmp_path, capsys):
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    host = {**asdict(CLUSTERS["a"]), "name": "host", "num_nodes": 2, "devices_per_node": 2}
    (tmp_path / "host.json").write_text(json.dumps(host))
    tokens_ILED = np.random.default_rng(0).integers(0, 100, (3, 2, 8, 4))
    np.savez(tmp_path / "routing.npz", tokens=tokens_ILED)
    facts = run_json(
        capsys,
        str(tmp_path / "config.json"),
        *("--cluster", str(tmp_path / "host.json"), "--trace", str(tmp_path / "routing.npz")),
        *("--sequence", "100", "--policy", "themis", "--budget", "1", "--iterations", "3"),
    )
    assert (facts["cluster"], facts["devices"], facts["model"]["width"]) == ("host", 4, 64)
    assert list(facts["prediction_r2"]) == ["1", "2"]


def test_a_trace_for_perfetto(tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert main(["simulate", "phi-3.5-moe", "--policy", "themis-rm", "--chrome-trace", str(path), *FEW]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"attention", "experts", "dispatch", "SpAG", "SpRS", "optimizer"}
    assert {event["pid"] for event in events} == set(range(32))
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-5"], "model 'gpt-5' is unknown"),
        (["gpt-s-moe", "--cluster", "c"], "profile 'c' does not exist; give a cluster (a, b)"),
        (["gpt-s-moe", "--policy", "best"], "policy 'best' is unknown; there are ep"),
        (["gpt-s-moe", "--batch", "0"], "batch is 0"),
        (["gpt-s-moe", "--iterations", "0"], "iterations is 0"),
        (["gpt-s-moe", "--warmup", "-1"], "warmup is -1"),
        (["gpt-s-moe", "--share-std", "0.4"], "share_std is 0.4; it must be at most"),
        (["gpt-s-moe", "--nodes", "-1"], "nodes is -1"),
        (["gpt-s-moe", "--layers", "-1"], "layers is -1"),
        (["gpt-s-moe", "--budget", "-2"], "budget is -2"),
        (["missing/config.json"], "model 'missing/config.json' does not exist"),
        (["gpt-s-moe", "--trace", "none.npz"], "trace 'none.npz' does not exist"),
        (["gpt-s-moe", "--chrome-trace", "no/dir/t.json", *FEW], "cannot be written"),
        ([], "see themis simulate MODEL --help"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_trace_of_another_size_is_refused(tmp_path, capsys):
    np.savez(tmp_path / "routing.npz", tokens=np.ones((3, 2, 8, 4), dtype=int))
    assert main(["simulate", "gpt-s-moe", "--trace", str(tmp_path / "routing.npz")]) == 2
    assert "has 2 layers, 8 experts and 4 ranks; the model on this cluster has 12, 64 and 32" in capsys.readouterr().err


def test_a_recorded_run_is_predicted(tmp_path, capsys):
    save_config(recipe("tiny"), tmp_path / "config.json")
    np.savez(tmp_path / "routing.npz", tokens=np.full((9, 4, 8, 8), 32), iteration=np.arange(9))
    (tmp_path / "metrics.jsonl").write_text('{"step_s": 0.5}\n' * 9)
    arguments = [str(tmp_path), "--replay", "--cluster", "a", "--nodes", "1"]
    facts = run_json(capsys, *arguments)
    assert (facts["recorded_s"], facts["policy"]) == (0.5, "themis")
    assert facts["ratio"] == pytest.approx(facts["predicted_s"] / 0.5)
    assert main(["simulate", *arguments]) == 0
    assert "predicted over recorded" in capsys.readouterr().out
