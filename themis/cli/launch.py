"""Starts the ranks of a run on this machine through torch's elastic launcher, and sums up why one failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from themis.cli.failure import FAILED, INTERRUPTED, Failure
from themis.cli.interrupt import gentle_interrupt
from themis.cli.mailbox import Mailbox

_SHUTDOWN_S = 5


def launch(run_dir: Path, nproc: int, *, resume: bool, as_json: bool) -> Failure | None:
    """Run `nproc` workers on the run in `run_dir` until they end; None when all went well.

    Stop signals reach every worker, and none outlives this process.
    """
    _quiet_elastic()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
        shutdown_timeout=_SHUTDOWN_S,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # SIGINT is ours
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # what ranks say comes through the mailbox
    )
    command = ["-m", "themis.cli.worker", str(run_dir), *(["--resume"] if resume else [])]
    command += ["--json"] if as_json else []
    with Mailbox(nproc) as mailbox, gentle_interrupt(mailbox.ask_to_stop, _end):
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return root_cause(error.failures, mailbox.letters(), run_dir)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            return Failure(INTERRUPTED, f"stopped by {name}; {how_to_go_on(run_dir)}")
    return None


def root_cause(failures: Mapping[int, ProcessFailure], told: Mapping[int, Failure], run_dir: Path) -> Failure:
    """The failure that explains the others: what a rank has `told` of itself, bad input first, else how it ended."""
    killed = [
        rank for rank, failure in failures.items() if rank not in told and failure.exitcode not in (-signal.SIGTERM, 0)
    ]
    if killed and all(failure.status != 2 for failure in told.values()):
        rank = min(killed)
        code = failures[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Failure(FAILED, f"rank {rank} {how}; {how_to_go_on(run_dir)}")
    if told:
        return told[min(told, key=lambda rank: (told[rank].status != 2, rank))]
    return Failure(FAILED, f"rank {min(failures)} was stopped; {how_to_go_on(run_dir)}")


def how_to_go_on(run_dir: Path) -> str:
    """What a user can do about a run in `run_dir` that did not end by itself."""
    if any((run_dir / "checkpoints").glob("step-*[0-9]")):
        return f"continue with --resume {run_dir}"
    return "no checkpoint was written yet, so start it again"


def _end() -> None:
    """Have torch's launcher end all workers, as for the signals it handles itself."""
    raise SignalException("interrupted", signal.SIGINT)


def _quiet_elastic() -> None:
    """The launcher's own report of failures is a wall of text; ours is one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
