"""One rank of a run: `python -m themis.cli.worker RUN_DIR`, started by the launcher, or called in this process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from themis.cli.console import Console
from themis.cli.failure import FAILED, Failure, explain, report
from themis.cli.mailbox import Launcher
from themis.moe.host_memory import keep_host_memory
from themis.train.config import RunConfig, load_config
from themis.train.ranks import joined
from themis.train.session import run
from themis.train.stopping import StopRequest


def config_path(run_dir: Path, *, resume: bool) -> Path:
    """Where ranks find their configuration.

    Apart for a run that is resumed: its config.json changes only once its checkpoint turned out to fit.
    """
    return run_dir / ("resumed.json" if resume else "config.json")


def work(config: RunConfig, run_dir: Path, stop: StopRequest, *, resume: bool, as_json: bool) -> None:
    """Join the other ranks and train; rank 0 draws."""
    with joined(config.parallel) as place, Console(as_json=as_json) as console:
        if place.device.type == "cpu":
            keep_host_memory()
        run(config, run_dir, place, console, resume=resume, stop=stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run of which the configuration lies in the run directory."""
    parser = argparse.ArgumentParser(prog="python -m themis.cli.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    stop = StopRequest()
    try:
        launcher = Launcher.from_environment()
    except OSError:  # it is gone, and with it who would listen
        return FAILED
    if launcher is not None:
        launcher.watch(stop.ask, lambda: os._exit(FAILED))
    try:
        config = load_config(config_path(given.run_dir, resume=given.resume))
        work(config, given.run_dir, stop, resume=given.resume, as_json=given.json)
    except BaseException as error:
        end_rank(error, given.run_dir, launcher)
    return 0


def end_rank(error: BaseException, run_dir: Path | None, launcher: Launcher | None = None) -> NoReturn:
    """End this process for `error`, told to the launcher or shown in a line.

    At once: threads and process groups of a failed run may wait for peers that are gone.
    """
    failure = explain(error, run_dir)
    if launcher is not None:
        launcher.tell(failure)
    else:
        report(Failure(failure.status, f"rank {os.environ.get('RANK', '0')}: {failure.line}"))
    sys.stdout.flush()
    os._exit(failure.status)


if __name__ == "__main__":
    sys.exit(main())
