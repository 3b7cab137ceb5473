"""A run that is killed again and again while it saves: can it always go on, with the losses of one never killed?

`themis train tiny` on two ranks (float64, plans that do not depend on time) saves after every step, turn by turn in
the background and on the training's own thread. It is sent SIGKILL at a random moment of a save: rank 0, rank 1, both
ranks, or both and their launcher. After each kill the newest checkpoint must be whole and no older than what was there
before; then the run is resumed from it. In the end its losses are compared with those of a run in one go.

    python -m benchmarks.kill_saving [--kills 20] [--seed 0] [--out benchmarks/results/kill_saving.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import themis
from themis.train import checkpoint

VICTIMS = {"rank 0": (0,), "rank 1": (1,), "both ranks": (0, 1), "both ranks and the launcher": (0, 1, None)}
SETTINGS = [
    *("--nproc", "2", "--checkpoint.every", "1", "--batch.sequences", "8", "--parallel.dtype", "float64"),
    *("--policy.overlap-degree", "2", "--policy.no-calibration", "--policy.reshard-interval", "10"),
    *("--log.evaluate-every", "0", "--log.evaluate-sequences", "2", "--log.sample-tokens", "0"),
]
LIMIT_S = 180.0
_POLL_S = 0.002


class Attempt:
    """One start of the run, until it ends or is killed."""

    def __init__(self, run_dir: Path, steps: int, *, resume: bool, asynchronous: bool) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoints"
        mode = "--checkpoint.asynchronous" if asynchronous else "--checkpoint.no-asynchronous"
        where = [f"--resume={run_dir}"] if resume else ["tiny", "--run-dir", str(run_dir)]
        command = [str(Path(sys.executable).with_name("themis")), "train", *where, "--steps", str(steps), mode]
        self.log = run_dir.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command + SETTINGS, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(LIMIT_S)

    def went_on_after(self, step: int) -> bool:
        """Whether it says that it was resumed from the checkpoint of `step`."""
        return f"going on after step {step}\n" in self.log.read_text()

    def kill_while_saving(self, draw: random.Random, victim: str) -> dict[str, Any]:
        """Kill `victim` at a random moment of a save; what was known before and how the command ended."""
        published, seconds = self._watch_a_save()
        self._wait_for_a_save()
        ranks = self._ranks()
        time.sleep(draw.uniform(0, 1.1 * seconds))
        for rank in VICTIMS[victim]:
            os.kill(self.process.pid if rank is None else ranks[rank], signal.SIGKILL)
        began_s = time.monotonic()
        status = self.end()
        while any(_alive(pid) for pid in ranks.values()):
            _pause(began_s, "the ranks to end")
        return {
            "victim": victim,
            "published_before": published,
            "status": status,
            "seconds_to_end": round(time.monotonic() - began_s, 2),
        }

    def _watch_a_save(self) -> tuple[int, float]:
        """The step of a save that is seen from its beginning to its end, and its seconds."""
        scratch = self._wait_for_a_save()
        began_s = time.monotonic()
        while scratch.exists():
            _pause(began_s, "a save to end", self.process)
        return int(scratch.stem.removeprefix("step-")), time.monotonic() - began_s

    def _wait_for_a_save(self) -> Path:
        """The scratch folder of a save that begins now."""
        began_s = time.monotonic()
        before = set(self.directory.glob("step-*.tmp"))
        while not (new := set(self.directory.glob("step-*.tmp")) - before):
            before &= set(self.directory.glob("step-*.tmp"))
            _pause(began_s, "a save", self.process)
        return new.pop()

    def _ranks(self) -> dict[int, int]:
        """The processes of the ranks, by rank."""
        found = {}
        for pid, parent in _processes():
            if parent == self.process.pid and (rank := _environment(pid).get("RANK")) is not None:
                found[int(rank)] = pid
        assert set(found) == {0, 1}, found
        return found


def _pause(began_s: float, what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    if process is not None and process.poll() is not None:
        raise RuntimeError(f"the run ended with {process.returncode} while this waited for {what}")
    if time.monotonic() - began_s > LIMIT_S:
        raise TimeoutError(f"waited {LIMIT_S:g} s for {what}")
    time.sleep(_POLL_S)


def _processes() -> Iterator[tuple[int, int]]:
    """(process, its parent) of all that run."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                yield int(path.name), int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def losses(run_dir: Path) -> dict[int, float]:
    """Step to loss; a line that a kill cut short is left out."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record["step"]] = record["loss"]
    return found


def after_kill(run_dir: Path, reference: dict[int, float]) -> dict[str, Any]:
    """What the kill left, and whether it can be gone on from."""
    directory = run_dir / "checkpoints"
    left = sorted(f"{path.parent.name}/{path.name}" for path in directory.glob("*.tmp/*"))
    scratch = [path.name for path in directory.glob("*.tmp")]
    found, damaged = checkpoint.find(directory)
    differences = [abs(loss - reference[step]) for step, loss in losses(run_dir).items()]
    return {
        "in_the_middle_of": scratch,
        "files_left": left,
        "newest_whole": found.step,
        "damaged": damaged,
        "largest_loss_difference": max(differences),
    }


def measure(parent: Path, kills: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A record a kill, and the sum of them."""
    draw = random.Random(seed)
    steps = 6 * kills
    print(f"reference: {steps} steps in one go", flush=True)
    whole = Attempt(parent / "whole", steps, resume=False, asynchronous=True)
    assert whole.end() == 0, whole.log.read_text()
    reference = losses(parent / "whole")
    run_dir, records, wrong = parent / "killed", [], 0
    for number in range(1, kills + 1):
        asynchronous = number % 2 == 1
        attempt = Attempt(run_dir, steps, resume=number > 1, asynchronous=asynchronous)
        record = attempt.kill_while_saving(draw, draw.choice(list(VICTIMS)))
        wrong += bool(records) and not attempt.went_on_after(records[-1]["newest_whole"])
        records.append({"asynchronous": asynchronous, **record, **after_kill(run_dir, reference)})
        wrong += records[-1]["newest_whole"] < record["published_before"] or bool(records[-1]["damaged"])
        print(f"{number}/{kills}", json.dumps(records[-1]), flush=True)
    print("and to the end", flush=True)
    last = Attempt(run_dir, steps, resume=True, asynchronous=True)
    assert last.end() == 0, last.log.read_text()
    wrong += not last.went_on_after(records[-1]["newest_whole"])
    found = losses(run_dir)
    return records, {
        "kills": kills,
        "not_resumed_from_the_newest": wrong,
        "kills_in_the_middle_of_a_save": sum(bool(record["in_the_middle_of"]) for record in records),
        "steps": len(found),
        "largest_loss_difference": max(abs(found[step] - reference[step]) for step in reference),
    }


def main() -> int:
    """Measure, print, write JSON; status 1 where a kill cost more than what was being saved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kill_saving.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        records, summary = measure(Path(parent), arguments.kills, arguments.seed)
    print(json.dumps(summary, indent=1))
    result = {
        "versions": {
            "themis": themis.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 2 ranks of one thread",
        "settings": " ".join(SETTINGS),
        "seed": arguments.seed,
        "summary": summary,
        "records": records,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(summary["not_resumed_from_the_newest"] > 0 or summary["largest_loss_difference"] > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
