"""The examples run as their first lines say, and learn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(name: str, directory: Path, *arguments: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", ["train_loop.py", "transformers_loop.py", "transformers_trainer.py", "continue_from_directory.py"]
)
def test_an_example_trains_under_torchrun(name: str, tmp_path: Path) -> None:
    losses = [
        float(found) for found in re.findall(r"loss'?:? '?(\d+\.\d+)", _run(name, tmp_path).replace("train_loss", ""))
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    if name == "continue_from_directory.py":  # what it has written, it goes on from, with a lower loss than at first
        shutil.move(tmp_path / "continued", tmp_path / "again")
        again = re.findall(r"loss (\d+\.\d+)", _run(name, tmp_path, "again"))
        assert float(again[0]) < losses[0]


def test_an_example_starts_on_meta_and_exports(tmp_path: Path) -> None:
    printed = _run("export_model.py", tmp_path)
    assert float(printed.rsplit(maxsplit=1)[-1]) < 1e-6


def test_an_own_loop_saves_and_resumes(tmp_path: Path) -> None:
    """On two ranks, then one: a new start would begin near ln 256 again."""
    first, second = (
        re.findall(r"step (\d+): loss (\d+\.\d+)", _run("save_and_resume.py", tmp_path, ranks=n)) for n in (2, 1)
    )
    assert [step for step, _ in (*first, *second)] == ["10", "20", "30", "40"]
    assert float(second[0][1]) < float(first[-1][1]) < float(first[0][1])
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-000020", "step-000040"]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("continue_from_directory.py", "continued"),
        ("export_model.py", "exported"),
        ("transformers_trainer.py", "trained"),
    ],
)
def test_an_example_refuses_its_target_before_it_trains(name: str, target: str, tmp_path: Path) -> None:
    """In one process: the check comes before everything else."""
    (tmp_path / target).mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"{target}/ exists, and ")
    assert [path.name for path in tmp_path.iterdir()] == [target]
