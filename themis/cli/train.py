"""`themis train`: from a command line to a run directory, and ranks that train in it."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, final

import torch
import tyro

from themis.cli.console import Console
from themis.cli.failure import INTERRUPTED, Failure, explain, report
from themis.cli.interrupt import gentle_interrupt
from themis.cli.launch import how_to_go_on, launch
from themis.cli.parse import parse
from themis.cli.resume import finished, how_to_train_on, newest_run, take_resume
from themis.cli.worker import config_path, end_rank, work
from themis.comm.collectives import all_reduce_sum
from themis.comm.launch import Launch
from themis.comm.mesh import Mesh
from themis.comm.together import work_together
from themis.core.errors import ConfigError
from themis.train.checkpoint import require_any
from themis.train.config import RunConfig, load_config, save_config
from themis.train.data import is_prepared, open_corpus, prepare
from themis.train.ranks import Place, choose_device, joined
from themis.train.recipes import RECIPES, list_recipes, recipe
from themis.train.session import run
from themis.train.stopping import StopRequest

_PROG = "themis train RECIPE"
_NO_RECIPE = """

recipes:
{recipes}

The defaults below are those of no recipe; a recipe's own: themis train tiny --help"""
#: Short names of often used flags.
_SHORT = {"--nproc": "--parallel.nproc", "--policy": "--policy.name", "--data": "--data.source"}


@final
@dataclass(frozen=True)
class TrainOptions:
    """Train a Mixture-of-Experts model. RECIPE is tiny or another that `themis info` lists; every setting below can be
    overridden.

    Short forms: --nproc N, --policy NAME, --data PATH. --resume [RUN] continues a run, by default the newest of the
    recipe, or of all without one; settings given beside it replace those of the run.
    """

    run: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands] = field(default_factory=RunConfig)
    run_dir: Path | None = None
    """Where the run is written; by default a new folder under runs/."""
    json: bool = False
    """Print the closing summary as JSON and nothing else."""


def main(arguments: list[str]) -> int:
    """Run the command; returns 0 or the status of the failure after its line was shown."""
    rest, resumed = take_resume(_lengthen(arguments))
    name = rest[0] if rest and not rest[0].startswith("-") else None
    flags = rest[1:] if name is not None else rest
    wants_help = "-h" in flags or "--help" in flags
    if name is None and resumed is None and not wants_help:
        raise ConfigError(
            f"no recipe is named; there are {', '.join(RECIPES)}; type for example: themis train tiny --nproc 2"
        )
    base = recipe(name) if name is not None else RunConfig()
    if resumed is not None and not wants_help:
        resumed = resumed or str(newest_run(name))
        base = load_config(Path(resumed) / "config.json")
    whose = "" if name is not None else _NO_RECIPE.format(recipes=list_recipes())
    options = parse(TrainOptions, flags, _PROG, default=TrainOptions(run=base), note=whose)
    if resumed is not None and options.run_dir is not None:
        raise ConfigError(
            f"--run-dir is {str(options.run_dir)!r}; leave it out with --resume, which goes on in its run"
        )
    run_dir = Path(resumed) if resumed is not None else options.run_dir
    if Launch.from_environment() is not None:
        return _train_as_rank(options, run_dir, resume=resumed is not None)
    return _train_here(options, run_dir, resume=resumed is not None)


def _lengthen(arguments: Sequence[str]) -> list[str]:
    """Short flags replaced by the settings they stand for."""
    full = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        full.append(_SHORT.get(flag, flag) + equals + value)
    return full


def _train_here(options: TrainOptions, run_dir: Path | None, *, resume: bool) -> int:
    """Check everything that can be checked, then train: in this process, or in ranks that it starts."""
    config = options.run
    nproc = config.parallel.nproc
    config.parallel.topology(nproc, nproc)
    choose_device(config.parallel.device, 0, nproc)
    directory = run_dir or _new_directory(config.name)
    if resume and finished(directory, config.steps):
        return _show_finished(directory, as_json=options.json)
    fresh = not directory.exists()
    console = Console(as_json=options.json)
    try:
        _prepare_directory(directory, resume=resume)
        if not is_prepared(config.data, directory / "data"):
            with console:
                console.preparing(f"tokenising {config.data.source or 'the Python standard library'}")
                prepare(config.data, directory / "data")
        corpus = open_corpus(config.data, directory / "data")
        corpus.check(config.model.sequence_length, config.model.vocab_size)
        save_config(config, config_path(directory, resume=resume))
    except BaseException:
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if nproc == 1:
        return _train_alone(config, directory, resume=resume, as_json=options.json)
    console.say(f"starting {nproc} ranks")
    failure = launch(directory, nproc, resume=resume, as_json=options.json)
    return 0 if failure is None else report(failure)


def _train_alone(config: RunConfig, directory: Path, *, resume: bool, as_json: bool) -> int:
    """In this process."""
    stop = StopRequest()

    def ask() -> bool:
        stop.ask()
        return True

    try:
        with gentle_interrupt(ask, _interrupt):
            work(config, directory, stop, resume=resume, as_json=as_json)
    except KeyboardInterrupt:
        return report(Failure(INTERRUPTED, f"stopped by SIGINT; {how_to_go_on(directory)}"))
    except Exception as error:
        return report(explain(error, directory))
    return 0


def _interrupt() -> None:
    raise KeyboardInterrupt


def _train_as_rank(options: TrainOptions, run_dir: Path | None, *, resume: bool) -> int:
    """One rank under torchrun."""
    config = options.run
    with joined(config.parallel) as place:
        try:
            directory = run_dir or _new_directory(config.name, _agreed(config, place, lambda: int(time.time())))
            done = _agreed(config, place, lambda: finished(directory, config.steps)) if resume else 0
            if done:
                return _show_finished(directory, as_json=options.json) if place.rank == 0 else 0
            if place.rank == 0:
                _prepare_directory(directory, resume=resume)
                save_config(config, config_path(directory, resume=resume))
            with Console(as_json=options.json) as console:
                run(config, directory, place, console, resume=resume)
        except BaseException as error:
            end_rank(error, run_dir)
    return 0


def _new_directory(name: str, now_s: int | None = None) -> Path:
    """A folder under runs/ that does not exist yet, named after the recipe and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() if now_s is None else now_s))
    path = Path("runs") / f"{name}-{stamp}"
    for number in itertools.count(2):
        if not path.exists() or now_s is not None:
            return path
        path = path.with_name(f"{name}-{stamp}-{number}")
    raise AssertionError


def _agreed(config: RunConfig, place: Place, ask: Callable[[], int]) -> int:
    """What rank 0 gets when it asks, however long that takes; on every rank. A collective."""
    mesh = Mesh.create(place.topology, device=place.device, timeout_s=config.parallel.timeout_s)
    answers: list[int] = []
    work_together(mesh, (lambda: answers.append(ask())) if place.rank == 0 else None)
    agreed = all_reduce_sum(mesh, torch.tensor(answers or [0]))
    mesh.close()
    return int(agreed)


def _show_finished(run_dir: Path, *, as_json: bool) -> int:
    summary = json.loads((run_dir / "summary.json").read_text())
    print(json.dumps(summary) if as_json else how_to_train_on(run_dir, summary["steps"]), flush=True)
    return 0


def _prepare_directory(directory: Path, *, resume: bool) -> None:
    """Make the run directory of a new run, or see that there is something to resume in an old one."""
    if resume:
        require_any(directory / "checkpoints")
    elif (directory / "config.json").exists():
        raise ConfigError(f"run directory {str(directory)!r} holds a run; --resume it or name another with --run-dir")
    directory.mkdir(parents=True, exist_ok=True)
