"""`themis export`: what a run has trained, transformers loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.harness import small_config, train_on_ranks, write_text
from tests.train.test_transformers_session import DEEPSEEK
from themis.cli.main import main
from themis.models.directory_writer import DirectoryWriter
from themis.train.config import load_config, save_config
from themis.train.run_export import export_run
from themis.train.run_lock import exclusive

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from themis.testing.directories import stored_tensors


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export")
    config = small_config(write_text(directory), model=DEEPSEEK)
    train_on_ranks(2, config, directory / "run")
    return directory / "run"


def test_transformers_loads_what_was_trained(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["notes"]) == (8, [])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = stored_tensors(run_dir / "checkpoints/step-000008")
    for name, tensor in model.state_dict().items():
        module, _, parameter = name.rpartition(".")
        if f"model.model.{module}.owned.0.{parameter}" in trained:
            whole = torch.stack([trained[f"model.model.{module}.owned.{e}.{parameter}"] for e in range(6)])
        else:
            whole = trained[f"model.model.{name}"]
        assert torch.equal(tensor, whole), name
    text = model.float().generate(torch.arange(3, 8)[None], max_new_tokens=4, do_sample=False)
    assert text.shape == (1, 9)


def test_an_earlier_step_in_another_type(run_dir: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(run_dir), out, "--step", "4", "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.gate.e_score_correction_bias.dtype == torch.float32


def test_a_damaged_newest_checkpoint_is_passed_over(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    next((tmp_path / "run/checkpoints/step-000008").glob("*.safetensors")).write_bytes(b"x")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "is damaged" in printed
    assert "wrote the model of step 4" in printed


def test_a_run_under_way_keeps_all_it_has_and_its_tokenizer_goes_along(run_dir: Path, tmp_path: Path) -> None:
    run, tokenizer = tmp_path / "run", tmp_path / "mine.json"
    shutil.copytree(run_dir, run)
    (run / "checkpoints/step-x9").mkdir()
    (run / "checkpoints/replaced-step-000012").mkdir()
    config = load_config(run / "config.json")
    save_config(replace(config, data=replace(config.data, tokenizer=str(tokenizer))), run / "config.json")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    _, (note,) = export_run(run, tmp_path / "without")
    assert "mine.json' is not there; no tokenizer.json goes along" in note
    tokenizer.write_text("{}")
    with exclusive(run):
        assert export_run(run, tmp_path / "with") == (8, [])
    assert (tmp_path / "with/tokenizer.json").read_text() == "{}"
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_what_cannot_be_exported_is_told_in_a_line(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    save_config(small_config(tmp_path / "text.txt"), gpt / "config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    save_config(replace(small_config(tmp_path / "text.txt"), model=DEEPSEEK), empty / "config.json")
    DirectoryWriter(tmp_path / "model", 10**9).finish()
    (tmp_path / "model/config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "model/model.safetensors").touch()
    (empty / "checkpoints/step-x9").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    for arguments, message in [
        ([tmp_path / "none", tmp_path / "out"], "cannot be read"),
        ([gpt, tmp_path / "out"], "whose model is none of transformers'"),
        ([empty, tmp_path / "out"], "there is no checkpoint in"),
        ([run_dir, tmp_path / "out", "--step", "5"], "no checkpoint of step 5"),
        ([run_dir, tmp_path / "there"], "exists; name a new directory"),
        ([tmp_path / "model", tmp_path / "out"], "is a model's directory, not a run's"),
        ([run_dir, tmp_path / "out", "--drop", "nope*"], "drop is 'nope*', which matches none"),
        ([run_dir, tmp_path / "out", "--dtype", "int8"], "dtype"),
        ([run_dir], "out"),
    ]:
        assert main(["export", *map(str, arguments)]) == 2, message
        line = capsys.readouterr().err.strip()
        assert message in line.lower() or message in line
        assert "\n" not in line
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.tmp*"))
