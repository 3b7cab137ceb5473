"""Configurations: their JSON form, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from themis.core.errors import ConfigError
from themis.policies import EP, Themis
from themis.train.config import ParallelConfig, PolicyConfig, RunConfig, from_record, load_config, save_config
from themis.train.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_survive_json(tmp_path, name):
    config = recipe(name)
    assert config.name == name
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_the_papers_dimensions():
    small, large = recipe("gpt-s-moe").model, recipe("gpt-l-moe").model
    assert (small.width, small.expert_hidden, small.sequence_length, small.num_layers) == (768, 3072, 2048, 12)
    assert (large.width, large.expert_hidden, large.sequence_length, large.num_layers) == (1536, 6144, 2048, 12)
    assert small.top_k == large.top_k == 2
    assert small.num_experts == large.num_experts == 64  # two a device on 32 devices
    assert small.aux_loss_weight == 0.001


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "stepz is no field; a run has batch, checkpoint"),
        ({"model": {"wide": 3}}, "model.wide is no field; model has aux_loss_weight"),
        ({"steps": "many"}, "steps is 'many'; it must be int"),
        ({"steps": True}, "steps is True; it must be int"),
        ({"steps": 0}, "steps is 0; it must be 1 or more"),
        ({"model": 3}, "model is 3; it must be an object with fields"),
        ({"policy": {"name": "best"}}, "policy.name is 'best'; it must be one of ep, uniform, .*themis, themis-rm"),
        ({"policy": {"overlap_degree": "all"}}, "policy.overlap_degree is 'all'; it must be int or none"),
        ({"policy": {"budget": -1}}, "policy.budget is -1; it must be .*0 or more"),
        ({"model": {"top_k": 9}}, r"model.top_k is 9; it must be at most num_experts \(8\)"),
        ({"model": {"width": 130}}, r"model.width is 130; it must be a multiple of model.num_heads \(4\)"),
        ({"model": {"num_layers": -2}}, "model.num_layers is -2; it must be 1 or more"),
        ({"batch": {"accumulation": 99}}, "batch.accumulation is 99; it must be between 1 and"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2 is 1.0; it must be at least 0 and below 1"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr is -1.0; it must be above 0"),
        ({"parallel": {"dtype": "int8"}}, "parallel.dtype is 'int8'; it must be one of float32, float64"),
        ({"data": {"held_out": 1.5}}, "data.held_out is 1.5; it must be above 0 and below 1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0; it must be 1 or more"),
        ({"name": "a/b"}, "name is 'a/b'; it must be a plain name"),
        ({"seed": -1}, "seed is -1; it must be between 0"),
    ],
)
def test_wrong_records_are_told_in_a_line(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_record(RunConfig, change, "")
    assert "\n" not in str(caught.value)


def test_bf16_does_not_go_with_float64():
    with pytest.raises(ConfigError, match=r"parallel\.compute is 'bf16'; with parallel\.dtype 'float64'"):
        ParallelConfig(dtype="float64", compute="bf16")


def test_whole_numbers_do_for_fractions():
    record = asdict(RunConfig())
    record["parallel"]["timeout_s"] = 30
    assert from_record(RunConfig, json.loads(json.dumps(record)), "").parallel.timeout_s == 30.0


def test_policies_are_built():
    assert PolicyConfig(name="ep").build() == EP()
    assert PolicyConfig(name="uniform").build() == EP(uniform=True)
    assert PolicyConfig(name="themis-rm", budget=3).build() == Themis(budget=3, rematerialize=True)
    assert PolicyConfig().build() == Themis()


def test_topologies():
    config = ParallelConfig()
    assert config.topology(8, 4).num_nodes == 2
    assert config.topology(3, 3).num_nodes == 1
    assert replace(config, num_nodes=4).topology(8, 8).devices_per_node == 2
    with pytest.raises(ConfigError, match=r"parallel\.num_nodes is 3; it must divide the 8 ranks"):
        replace(config, num_nodes=3).topology(8, 8)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), (None, "cannot be read"), ("[]", "is \\[\\]")])
def test_unreadable_files(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)
