"""The commands, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_bad_input import TINY
from themis import __version__
from themis.cli.main import main
from themis.cli.resume import newest_run, take_resume
from themis.cli.units import format_bytes, format_count
from themis.core.errors import ConfigError
from themis.train.config import load_config
from themis.train.memory import count, rank_memory
from themis.train.recipes import RECIPES, recipe


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to train on, and on. " * 40)
    return tmp_path


def run_json(capsys, *arguments: str):
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(capsys, arguments):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}" in out for name in ("train", "plan", "info"))


@pytest.mark.parametrize("command", ["train", "plan", "info"])
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"usage: themis {command}" in capsys.readouterr().out


def test_train_writes_a_run_and_resumes_it(workplace, capsys):
    arguments = ["train", "tiny", *TINY, "--data", "text.txt", "--policy", "themis-rm"]
    first = run_json(capsys, *arguments, "--json")
    assert (first["steps"], first["held_out_loss"] > 0) == (2, True)
    run_dir = Path(first["run_dir"])
    assert run_dir.parent == Path("runs")
    config = load_config(run_dir / "config.json")
    assert (config.policy.name, config.data.source, config.model.width) == ("themis-rm", "text.txt", 16)
    again = run_json(capsys, "train", "tiny", "--resume", "--steps", "4", "--json")
    assert (again["steps"], again["run_dir"]) == (4, first["run_dir"])
    assert again["first_loss"] == first["first_loss"]
    assert load_config(run_dir / "config.json").steps == 4


def test_train_tells_what_it_did(workplace, capsys):
    sample = ["--log.sample-tokens", "5"]
    assert main(["train", "tiny", *TINY, *sample, "--data=text.txt", "--run-dir", "run"]) == 0
    out = capsys.readouterr().out
    began = [line for line in out.splitlines() if line.startswith("preparing: ")]
    assert began == [
        "preparing: tokenising text.txt",
        "preparing: building the model",
        "preparing: opening the data",
        "preparing: the first step, which loads what is compiled",
    ]
    for part in ("training loss", "held-out loss", "imbalance", "bytes moved", "tokens/s", "sample", "run"):
        assert part in out


def test_resume_takes_an_optional_value():
    assert take_resume(["tiny", "--resume"]) == (["tiny"], "")
    assert take_resume(["--resume", "runs/x", "--steps", "3"]) == (["--steps", "3"], "runs/x")
    assert take_resume(["tiny", "--resume", "--steps", "3"]) == (["tiny", "--steps", "3"], "")
    assert take_resume(["--resume=runs/x"]) == ([], "runs/x")
    assert take_resume(["tiny"]) == (["tiny"], None)


@pytest.mark.parametrize("steps", ["2", "many"])
def test_a_terminal_is_told_what_goes_on_and_given_back(workplace, capsys, monkeypatch, steps):
    """Whether a run ends well or not: the cursor is there again."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def fail(*_):
        raise ConfigError("no")

    if steps == "many":
        monkeypatch.setattr("themis.train.trainer.Trainer.step", fail)
    status = main(["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"])
    assert status == (0 if steps == "2" else 2)
    out = capsys.readouterr().out
    assert "building the model" in out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") > 0


def test_a_finished_run_is_left_as_it_is(workplace, capsys):
    arguments = ["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"]
    summary = run_json(capsys, *arguments, "--json")

    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in (workplace / "run").rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    for extra in ([], ["--steps", "1"], ["--optimizer.lr", "1", "--data", "other.txt"]):
        assert main(["train", "--resume", "run", *extra]) == 0
        told = "run has done its 2 steps already; to train on: themis train --resume run --steps 4\n"
        assert capsys.readouterr() == (told, "")
    again = run_json(capsys, "train", "--resume", "run", "--json")
    assert (again["steps"], again["last_loss"]) == (2, summary["last_loss"])
    assert state() == before
    (workplace / "run/summary.json").unlink()  # as if it had ended before its summary: that is made up for
    assert run_json(capsys, "train", "--resume", "run", "--json")["last_loss"] == summary["last_loss"]


def test_the_newest_run_is_the_last_that_began(tmp_path):
    begun = ["tiny-20260101-000000", "tiny-20260301-000000-2", "tiny-20260301-000000-10", "tiny-tiny-20260401-000000"]
    for name in (*begun, "my-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "tiny-20280101-000000").mkdir()  # no run
    assert newest_run("tiny", tmp_path).name == "tiny-20260301-000000-10"
    assert newest_run(None, tmp_path).name == "tiny-tiny-20260401-000000"
    with pytest.raises(ConfigError, match="there is no run of 'big'"):
        newest_run("big", tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_runs_are_named_after_their_recipe(name):
    assert recipe(name).name == name


@pytest.mark.parametrize("kind", ["npy", "npz", "json", "routing"])
def test_plan_reads_every_kind_of_load(tmp_path, capsys, kind):
    load_LE = np.array([[8.0, 1, 1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 1, 1, 1, 1]])
    path = tmp_path / f"loads.{'npz' if kind == 'routing' else kind}"
    if kind == "npy":
        np.save(path, load_LE)
    elif kind == "npz":
        np.savez(path, load=load_LE)
    elif kind == "json":
        path.write_text(json.dumps(load_LE.tolist()))
    else:  # [iteration, layer, expert, rank]
        np.savez(path, tokens=np.repeat(load_LE[None, :, :, None] * 10, 4, axis=3).astype(np.int32))
    flags = ["--nodes", "2", "--devices-per-node", "2", "--expert-bytes", "1000000"]
    layers = run_json(capsys, "plan", str(path), *flags, "--json")["layers"]
    skewed, even = layers
    assert skewed["ep_imbalance"] == pytest.approx(9 / 4)
    assert 1.0 <= skewed["imbalance"] < 1.4
    assert skewed["gain"] == pytest.approx(skewed["ep_imbalance"] / skewed["imbalance"])
    assert sum(map(len, skewed["copies_E"])) == 8 + skewed["replicas"]
    assert all(owner in copies for owner, copies in zip(skewed["owner_E"], skewed["copies_E"], strict=True))
    assert skewed["transfer_s"] > 0
    assert even["ep_imbalance"] == 1.0


def test_plan_draws_a_table(tmp_path, capsys):
    (tmp_path / "loads.json").write_text("[9, 1, 1, 1]")
    assert main(["plan", str(tmp_path / "loads.json"), "--devices-per-node", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 x 2 devices" in out
    assert "1.67" in out  # (9 + 1) of 12 on one device of two


def test_info_is_the_arithmetic(capsys):
    facts = run_json(capsys, "info", "gpt-s-moe", "--nproc", "8", "--policy.budget", "1", "--json")
    config = recipe("gpt-s-moe")
    assert facts["parameters"]["total"] == count(config.model).total
    expected = rank_memory(config, 8)
    assert facts["memory_per_rank_bytes"]["optimizer_bytes"] == expected.optimizer_bytes
    assert facts["memory_per_rank_bytes"]["replicas_bytes"] * 2 == expected.replicas_bytes
    assert facts["environment"]["packages"]["torch"] is not None
    assert facts["model"]["experts_per_layer"] == config.model.num_experts
    assert main(["info", "tiny"]) == 0
    out = capsys.readouterr().out
    for part in ("memory a rank, optimizer", "experts per layer", "the owned experts once more"):
        assert part in out


@pytest.mark.parametrize("command", [["info"], ["info", "--help"], ["train", "--help"]])
def test_recipes_are_listed(capsys, command):
    assert main(command) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in f"\n{out}" for name in RECIPES)
    assert "themis info tiny --nproc 2" in out or command[-1] == "--help"


def test_help_shows_the_defaults_of_the_recipe(capsys):
    assert main(["train", "tiny", "--help"]) == 0
    assert f"(default: {recipe('tiny').steps})" in capsys.readouterr().out


def test_numbers_for_people():
    assert [format_bytes(n) for n in (0, 999, 1_500, 2_000_000, 3.5e9, 7e12)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2 MB",
        "3.5 GB",
        "7 TB",
    ]
    assert [format_count(n) for n in (7, 1_500, 2.5e6, 1.47e10)] == ["7", "1.5 k", "2.5 M", "14.7 B"]
