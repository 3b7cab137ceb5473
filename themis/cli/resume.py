"""Which run `themis train --resume` goes on with, and whether there is anything left to do in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from themis.core.errors import CheckpointError, ConfigError
from themis.train.checkpoint import find

#: A run's folder: the recipe's name, when it began, and a number where several began in that second.
_RUN = re.compile(r"(?P<name>.+)-(?P<began>\d{8}-\d{6})(?:-(?P<number>\d+))?")


def take_resume(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """`arguments` without --resume, and its value: "" where none is given, None where it is absent."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument.startswith("--resume="):
            return rest[:index] + rest[index + 1 :], argument.removeprefix("--resume=")
        if argument == "--resume":
            has_value = index + 1 < len(rest) and not rest[index + 1].startswith("-")
            value = rest[index + 1] if has_value else ""
            return rest[:index] + rest[index + 1 + has_value :], value
    return rest, None


def newest_run(name: str | None, parent: Path = Path("runs")) -> Path:
    """The newest run of recipe `name`, or of all where it is None, under `parent`; ConfigError where there is none."""
    found: list[tuple[str, int, Path]] = []
    for path in parent.glob("*/config.json"):
        parts = _RUN.fullmatch(path.parent.name)
        if parts is not None and name in (None, parts["name"]):
            found.append((parts["began"], int(parts["number"] or 1), path.parent))
    if not found:
        whose = "no run" if name is None else f"no run of {name!r}"
        raise ConfigError(
            f"there is {whose} under {str(parent)!r}; name its directory, --resume RUN, or start one: "
            f"themis train {name or 'tiny'} --nproc 2"
        )
    return max(found)[2]


def finished(run_dir: Path, steps: int) -> int:
    """How many steps the run in `run_dir` has done if it has done `steps` or more and all that follows; else 0.

    Only reads, unless a checkpoint was being replaced when a run was killed. One that counts as done is whole, which
    takes as long as reading it.
    """
    try:
        done = int(json.loads((run_dir / "summary.json").read_text())["steps"])
        if done < steps:
            return 0
        found, damaged = find(run_dir / "checkpoints")
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return 0
    return done if found.step == done and not damaged else 0


def how_to_train_on(run_dir: Path, done: int) -> str:
    """A line for a user who resumes a run that is finished after `done` steps."""
    return (
        f"{run_dir} has done its {done} steps already; to train on: themis train --resume {run_dir} --steps {2 * done}"
    )
