"""Whatever is wrong with an invocation, a user reads one line and the status is 2."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from themis.cli.main import main

_SMALL = (
    "--model.sequence-length 16 --model.width 16 --model.num-heads 2 --model.num-layers 1 --model.num-experts 4 "
    "--model.expert-hidden 16 --batch.sequences 4 --steps 2 --log.evaluate-sequences 2 --log.sample-tokens 0"
)
TINY = _SMALL.split()


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with files of all kinds of wrongness, current for the test; no torchrun around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    write = {
        "text.txt": "some text to train on, and on. " * 40,
        "empty.txt": "",
        "short.txt": "too short",
        "broken.jsonl": '{"text": "fine"}\n{"text": \n',
        "other.jsonl": '{"body": "fine"}\n',
        "nothing.jsonl": "\n\n",
        "tokenizer.json": '{"not": "a tokenizer"}',
        "loads.json": "[1, 2, 3]",
        "negative.json": "[1, -2, 3]",
        "zero.json": "[0, 0, 0]",
        "words.json": '["a", "b"]',
        "cut.json": "[1, 2",
        "loads.csv": "1,2",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\0\0" * 50)
    (tmp_path / "folder").mkdir()
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "headless.bin")
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "odd.bin")
    (tmp_path / "odd.json").write_text('{"dtype": "complex64"}')
    np.save(tmp_path / "square.npy", np.zeros((4, 4), dtype=np.uint16))
    np.save(tmp_path / "large.npy", np.full(1000, 999, dtype=np.uint16))
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\0v\0{'descr'")
    np.savez(tmp_path / "wrong.npz", other=np.zeros(3))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.json").write_text("{}")
    mangled = tmp_path / "mangled"
    mangled.mkdir()
    (mangled / "config.json").write_text('{"model": {"widht": 3}}')
    return tmp_path


def read_failure(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 2) -> str:
    """The one line that a failed command leaves."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("themis: ")
    assert "Traceback" not in captured.out + captured.err
    return lines[0]


CASES = [
    # the command line itself
    ("fly", "'fly' is no command; there are train, plan, simulate, reproduce, export, info"),
    ("train", "no recipe is named; there are tiny, gpt-s-moe, gpt-l-moe"),
    ("train huge", "recipe 'huge' is unknown; there are tiny, gpt-s-moe, gpt-l-moe"),
    ("train tiny --speed 9", "Unrecognized options: --speed, 9"),
    ("train tiny --steps many", "Error parsing --steps"),
    ("train tiny --model.experts dense", "invalid choice 'dense'"),
    ("train tiny --policy best", "invalid choice 'best' for argument '--policy.name'"),
    ("train tiny --steps", "Missing value for argument '--steps'"),
    ("train tiny extra", "Unrecognized options: extra"),
    # sizes
    ("train tiny --nproc 0", "parallel.nproc is 0; it must be 1 or more"),
    ("train tiny --nproc -2", "parallel.nproc is -2"),
    ("train tiny --steps -5", "steps is -5; it must be 1 or more"),
    ("train tiny --model.num-experts 1", "model.top_k is 2; it must be at most num_experts (1)"),
    ("train tiny --model.width 130", "model.width is 130; it must be a multiple of model.num_heads (4)"),
    ("train tiny --model.num-layers 0", "model.num_layers is 0"),
    ("train tiny --batch.sequences -1", "batch.sequences is -1"),
    ("train tiny --batch.accumulation 99", "batch.accumulation is 99"),
    ("train tiny --policy.budget -1", "policy.budget is -1"),
    ("train tiny --optimizer.lr 0", "optimizer.lr is 0.0; it must be above 0"),
    ("train tiny --seed -1", "seed is -1"),
    ("train tiny --nproc 4 --parallel.num-nodes 3", "parallel.num_nodes is 3; it must divide the 4 ranks"),
    ("train tiny --nproc 64 --parallel.device cuda", "parallel.device is 'cuda' with 64 rank(s) here"),
    # data
    ("train tiny --data missing.txt", "data source 'missing.txt' does not exist"),
    ("train tiny --data missing.npy", "data source 'missing.npy' does not exist"),
    ("train tiny --data empty.txt", "data source 'empty.txt' is empty"),
    ("train tiny --data folder", "data source 'folder' is empty"),
    ("train tiny --data nothing.jsonl", "data source 'nothing.jsonl' is empty"),
    ("train tiny --data short.txt", "part of the data has"),
    ("train tiny --data binary.txt", "data source 'binary.txt' is not UTF-8 text"),
    ("train tiny --data broken.jsonl", "broken.jsonl:2 is not JSON"),
    ("train tiny --data other.jsonl", "other.jsonl:1 has no text under 'text'; name the field with data.text_key"),
    ("train tiny --data headless.bin", "lacks its header 'headless.json'"),
    ("train tiny --data odd.bin", "has dtype 'complex64'; it must be one of uint8, uint16, uint32"),
    ("train tiny --data square.npy", "holds uint16 of shape (4, 4); tokens must be whole numbers of shape [T]"),
    ("train tiny --data cut.npy", "data source 'cut.npy' cannot be read as tokens"),
    ("train tiny --data large.npy", "the data has token 999; with model.vocab_size 256"),
    ("train tiny --data text.txt --data.held-out 2", "data.held_out is 2.0"),
    ("train tiny --data text.txt --model.vocab-size 99", "model.vocab_size is 99; the tokenizer has 256 tokens"),
    # tokenizers
    ("train tiny --data text.txt --data.tokenizer missing.json", "tokenizer is 'missing.json', and there is no such"),
    ("train tiny --data text.txt --data.tokenizer tokenizer.json", "'tokenizer.json' is not a tokenizer.json file"),
    # run directories and checkpoints
    ("train tiny --data text.txt --run-dir taken", "run directory 'taken' holds a run; --resume it or name another"),
    ("train tiny --data text.txt --run-dir text.txt", "'text.txt': File exists"),
    ("train", "type for example: themis train tiny --nproc 2"),
    ("train tiny --resume", "there is no run of 'tiny' under 'runs'; name its directory, --resume RUN, or start one"),
    ("train --resume", "there is no run under 'runs'; name its directory, --resume RUN, or start one: themis train"),
    ("train --resume taken --run-dir other", "leave it out with --resume"),
    ("train --resume nowhere", "'nowhere/config.json' cannot be read: No such file or directory"),
    ("train --resume mangled", "model.widht is no field; model has aux_loss_weight"),
    ("train --resume taken", "no checkpoint in 'taken/checkpoints'"),
    # plan
    ("plan", "loads"),
    ("plan missing.npy", "load file 'missing.npy' does not exist"),
    ("plan loads.csv", "is of no known kind"),
    ("plan cut.json", "load file 'cut.json' cannot be read"),
    ("plan cut.npy", "load file 'cut.npy' cannot be read"),
    ("plan wrong.npz", "load file 'wrong.npz' has other; it must have `load`"),
    ("plan words.json", "loads are numbers"),
    ("plan negative.json", "finite and not negative"),
    ("plan zero.json", "the sum of the loads in 'zero.json' is 0.0; it must be above zero"),
    ("plan loads.json --nodes 0", "num_nodes is 0"),
    ("plan loads.json --rule fair", "fair"),
    ("plan loads.json --budget -1", "budget is -1"),
    # info
    ("info --nproc 2", "no recipe is named; there are tiny, gpt-s-moe, "),
    ("info huge", "recipe 'huge' is unknown"),
    ("info tiny --nproc 0", "world_size is 0"),
]


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_one_line_and_status_2(workplace, capsys, command, message):
    arguments = command.split()
    small = TINY if arguments[:2] == ["train", "tiny"] and "--data" in arguments else []
    before = sorted(path.name for path in workplace.iterdir())
    assert message in read_failure(capsys, arguments[:2] + small + arguments[2:])
    after = {path.name for path in workplace.iterdir()} - {"runs"}
    assert sorted(after) == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "the environment sets WORLD_SIZE but not RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK must be below"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_wrong_torchrun_environments(workplace, capsys, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in read_failure(capsys, ["train", "tiny", *TINY])


def test_mismatched_topology_under_torchrun(workplace, capsys, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = read_failure(capsys, ["train", "tiny", *TINY, "--parallel.num-nodes", "3"])
    assert "parallel.num_nodes is 3; it must divide the 4 ranks" in line


def test_a_port_in_use(workplace, capsys, monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        line = read_failure(capsys, ["train", "tiny", *TINY, "--data", "text.txt"])
    assert f"port {port} is in use" in line


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit: the nearest thing to a full disk that needs no privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_no_space_for_a_checkpoint(workplace, capsys):
    arguments = ["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"]
    with small_files(20_000):
        line = read_failure(capsys, arguments)
    assert "checkpoint 'run/checkpoints/step-000002' cannot be written: " in line
    assert "File too large" in line


def test_no_space_for_the_data(workplace, capsys):
    (workplace / "big.txt").write_text("words and words. " * 4000)
    with small_files(20_000):
        line = read_failure(capsys, ["train", "tiny", *TINY, "--data", "big.txt", "--run-dir", "run"])
    assert "File too large" in line
    assert not (workplace / "run").exists()


def test_a_full_disk_under_the_metrics(workplace, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")

    monkeypatch.setattr("themis.train.metrics.MetricsLog.write", refuse)
    line = read_failure(capsys, ["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"])
    assert "'run/metrics.jsonl': No space left on device; free some space and continue with --resume" in line


@pytest.mark.parametrize("damage", ["all", "record", "shape"])
def test_checkpoints_that_cannot_be_used(workplace, capsys, damage):
    arguments = ["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"]
    assert main(arguments) == 0
    capsys.readouterr()
    checkpoint = workplace / "run/checkpoints/step-000002"
    resume = ["train", "--resume", "run"]
    if damage == "all":
        for path in checkpoint.iterdir():
            path.write_bytes(b"")
        expected = "no whole checkpoint in 'run/checkpoints'"
    elif damage == "record":
        (checkpoint / "rank-00000.json").unlink()
        expected = "rank-00000.json is unreadable"
    else:
        resume += ["--model.expert-hidden", "24", "--steps", "4"]
        expected = "does not fit the model"
    before = (workplace / "run/config.json").read_text()
    assert expected in read_failure(capsys, resume)
    assert (workplace / "run/config.json").read_text() == before, "a resume that is refused changes no settings"


def test_a_runtime_failure_is_one_line_and_status_1(workplace, capsys):
    line = read_failure(
        capsys,
        [
            "train",
            "tiny",
            *TINY,
            "--data",
            "text.txt",
            "--run-dir",
            "run",
            "--optimizer.eps",
            "1e-300",
            "--optimizer.lr",
            "1e300",
            "--optimizer.warmup-steps",
            "0",
            "--steps",
            "4",
        ],
        status=1,
    )
    assert "the gradient norm is nan at step" in line or "the gradient norm is inf at step" in line


def test_what_nobody_foresaw_is_one_line_too(workplace, capsys, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("a bug\nof ours")

    monkeypatch.setattr("themis.cli.train.work", fail)
    line = read_failure(capsys, ["train", "tiny", *TINY, "--data", "text.txt", "--run-dir", "run"], status=1)
    assert "ZeroDivisionError: a bug of ours" in line
    trace = next((workplace / "run").glob("traceback-rank-*.txt")).read_text()
    assert "Traceback" in trace
    assert json.loads((workplace / "run/config.json").read_text())["steps"] == 2
