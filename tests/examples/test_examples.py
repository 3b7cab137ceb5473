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


def _run(name: str, directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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
