"""`themis train --nproc 2` as a user starts it: its own processes, killed in every way."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from themis.cli.failure import Failure
from themis.cli.launch import root_cause
from themis.cli.mailbox import Launcher, Mailbox

ROOT = Path(__file__).parents[2]
STEPS = 24
RUN = (
    "train tiny --nproc 2 --data text.txt --model.sequence-length 16 --model.width 16 --model.num-heads 2 "
    "--model.num-layers 2 --model.num-experts 4 --model.expert-hidden 16 --batch.sequences 4 "
    "--log.evaluate-sequences 2 --log.sample-tokens 0 --checkpoint.every 2 --policy.overlap-degree 2 "
    f"--policy.no-calibration --policy.reshard-interval 5 --optimizer.warmup-steps 3 --steps {STEPS} --run-dir"
).split()


def start(directory: Path, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    (directory / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    (directory / "text.txt").write_text("".join(f"{n} and {n + 1}. " for n in range(500)))
    command = [*prefix, sys.executable, "-m", "themis.cli.main", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def wait_for_step(run_dir: Path, step: int) -> None:
    """Return once `step` is in the metrics."""
    deadline = time.monotonic() + 60
    path = run_dir / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.01)


def workers_of(launcher: int) -> list[int]:
    """The processes that `launcher` started for its ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            command = path.joinpath("cmdline").read_text()
        except (OSError, IndexError):
            continue
        if parent == launcher and "themis.cli.worker" in command:
            found.append(int(path.name))
    return sorted(found)


def gone(process: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


def metrics(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[tuple[int, float, float]]:
    directory = tmp_path_factory.mktemp("whole")
    status, out, err = finish(start(directory, *RUN, "run"))
    assert (status, err) == (0, "")
    assert "held-out loss" in out
    assert sorted(path.name for path in directory.iterdir()) == ["run", "text.txt", "tmp"]
    assert not list((directory / "tmp").iterdir())
    return metrics(directory / "run")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_at_random_steps_and_resumed(uninterrupted, tmp_path):
    """SIGKILL to a rank, or to the launcher, at random moments; a checkpoint is written every other step."""
    generator = random.Random(3)
    process = start(tmp_path, *RUN, "run")
    for number, step in enumerate((5, 14)):
        wait_for_step(tmp_path / "run", step)
        time.sleep(generator.uniform(0, 0.2))
        workers = workers_of(process.pid)
        assert len(workers) == 2
        if number == 0:
            victim = generator.choice(workers)
            os.kill(victim, signal.SIGKILL)
            status, _, err = finish(process)
            assert status == 1
            assert err.splitlines() == [err.strip()]
            assert "was killed by SIGKILL; continue with --resume run" in err
        else:
            process.kill()
            finish(process)
        deadline = time.monotonic() + 10
        while not all(map(gone, workers)):
            assert time.monotonic() < deadline, "a rank outlived its launcher"
            time.sleep(0.05)
        process = start(tmp_path, "train", "--resume", "run")
    status, _, err = finish(process)
    assert (status, err) == (0, "")
    assert metrics(tmp_path / "run") == uninterrupted
    assert not list((tmp_path / "tmp").iterdir()), "a killed launcher left files outside the run directory"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("every", "hint"), [("0", "no checkpoint was written yet, so start it again"), ("1", "continue with --resume run")]
)
def test_a_stop_signal_reaches_every_rank(tmp_path, every, hint):
    process = start(tmp_path, *RUN, "run", "--steps", "1000", "--checkpoint.every", every)
    wait_for_step(tmp_path / "run", 2)
    deadline = time.monotonic() + 60  # the first checkpoint is written in the background
    while every == "1" and not (tmp_path / "run/checkpoints/latest").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 130
    assert err.strip() == f"themis: stopped by SIGTERM; {hint}"
    assert all(map(gone, workers))


def test_what_ranks_say_is_one_line(tmp_path):
    """The data fits no window of the model: every rank finds out, one line is shown."""
    import numpy as np

    np.save(tmp_path / "tokens.npy", np.full(5000, 400, dtype=np.uint16))
    status, _, err = finish(start(tmp_path, *RUN, "run", "--data", "tokens.npy"))
    assert status == 2
    assert err == "themis: the data has token 400; with model.vocab_size 256 tokens must be below that\n"


def test_under_torchrun(uninterrupted, tmp_path):
    """A whole run; resumed, it is finished, which is said once."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "themis.cli.main"]
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1}. " for n in range(500)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = []
    # torchrun takes --nproc for its own
    for arguments in ([*RUN[:2], *RUN[4:], "run"], ["train", "--resume", "run"]):
        command = [sys.executable, *launcher, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert metrics(tmp_path / "run") == uninterrupted
    assert said[1] == f"run has done its {STEPS} steps already; to train on: themis train --resume run --steps 48\n"
    assert not (tmp_path / "run/resumed.json").exists()


def ended(exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")


@pytest.mark.parametrize(
    ("failures", "told", "expected"),
    [
        ({0: ended(1), 1: ended(-9)}, {0: Failure(1, "lost rank 1")}, (1, "rank 1 was killed by SIGKILL; ")),
        ({0: ended(-15), 1: ended(2)}, {1: Failure(2, "bad data")}, (2, "bad data")),
        ({1: ended(1), 0: ended(2)}, {1: Failure(1, "later"), 0: Failure(2, "first")}, (2, "first")),
        ({1: ended(3)}, {}, (1, "rank 1 ended with status 3; ")),
        ({1: ended(-15)}, {}, (1, "rank 1 was stopped; ")),
    ],
)
def test_the_root_cause_is_told(failures, told, expected):
    cause = root_cause(failures, told, Path("run"))
    assert (cause.status, cause.line[: len(expected[1])]) == expected


def test_a_mailbox_keeps_what_ranks_leave(monkeypatch):
    """Of ranks that are gone, without a file; what is no letter is passed over. A rank hears of both kinds of end."""
    assert Launcher.from_environment() is None
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Mailbox(3) as box:
        assert not box.ask_to_stop()
        ranks = [Launcher.from_environment() for _ in range(2)]
        for number, rank in enumerate(ranks):
            monkeypatch.setenv("RANK", str(number))
            rank.tell(Failure(2, "long " * 20_000))
            rank._socket.shutdown(socket.SHUT_WR)  # as when its process ends
        ranks[0].watch(lambda: told.put("stop"), lambda: told.put("gone"))
        assert box.ask_to_stop()
        assert told.get(timeout=10) == "stop"
        socket.create_connection(("127.0.0.1", int(os.environ["THEMIS_MAILBOX"]))).close()
        assert box.letters() == dict.fromkeys((0, 1), Failure(2, "long " * 20_000))
    assert told.get(timeout=10) == "gone"


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_an_interrupt_saves_and_the_run_goes_on(tmp_path, nproc, uninterrupted):
    process = start(tmp_path, *RUN, "run", "--checkpoint.every", "0", "--nproc", nproc)
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    step = len(metrics(tmp_path / "run"))
    assert (status, 5 <= step < STEPS) == (130, True)
    assert err.splitlines() == [
        "",
        "themis: finishing the step and saving; Ctrl-C again ends at once",
        f"themis: stopped after step {step}, which is saved; continue with --resume run",
    ]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{step:06d}"]
    assert finish(start(tmp_path, "train", "--resume", "run"))[0] == 0
    assert [line[0] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    if nproc == "2":
        assert metrics(tmp_path / "run") == uninterrupted


def test_a_second_interrupt_ends_at_once(tmp_path):
    process = start(tmp_path, *RUN, "run", "--steps", "100000", "--checkpoint.every", "0")
    wait_for_step(tmp_path / "run", 2)
    workers = workers_of(process.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # so that the step does not end
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    status, _, err = finish(process)
    assert status == 130
    assert "themis: stopped" in err.splitlines()[-1]
    assert all(map(gone, workers))


@pytest.mark.skipif(sys.platform != "linux", reason="makes a small file system in a namespace of its own")
def test_a_full_disk_is_told_in_a_line(tmp_path):
    """Under everything that the run writes, temporary files included; the data and the settings fit, no more."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=60k none disk && export TMPDIR="$PWD/disk" && exec "$@"'
    prefix = [*namespace, "sh", "-c", script, "sh"]
    status, out, err = finish(start(tmp_path, *RUN, "disk/run", "--log.tensorboard", "False", prefix=prefix))
    assert (status, err.splitlines()) == (2, [err.strip()]), out + err
    assert "disk/run/checkpoints/step-000002' cannot be written: " in err
    assert "No space left on device" in err
