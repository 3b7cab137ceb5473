"""`themis info`: the model of a recipe, the memory a rank needs, and what this machine offers."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Annotated, Any, final

import torch
import tyro
from rich.console import Console
from rich.table import Table

from themis import __version__
from themis.cli.parse import parse
from themis.cli.units import format_bytes, format_count
from themis.core.errors import ConfigError
from themis.train.config import RunConfig
from themis.train.memory import count, rank_memory
from themis.train.recipes import RECIPES, recipe

_PACKAGES = ("torch", "numpy", "numba", "safetensors", "tokenizers", "transformers", "tensorboard")


@final
@dataclass(frozen=True)
class InfoOptions:
    """Parameters and memory a rank by kind of RECIPE, overridden as in `themis train`, and the environment."""

    run: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands] = field(default_factory=RunConfig)
    nproc: int = 1
    """Ranks to spread the model over."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str]) -> int:
    """Run the command."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise ConfigError(f"no recipe is named; there are {', '.join(RECIPES)}")
    helps = arguments[0].startswith("-")
    base = RunConfig() if helps else recipe(arguments[0])
    options = parse(InfoOptions, arguments[0 if helps else 1 :], "themis info RECIPE", default=InfoOptions(run=base))
    facts = gather(options.run, options.nproc)
    if options.json:
        print(json.dumps(facts))
    else:
        _show(facts)
    return 0


def gather(config: RunConfig, world_size: int) -> dict[str, Any]:
    """All that the command shows, JSON-able."""
    memory = rank_memory(config, world_size)
    model = count(config.model)
    return {
        "recipe": config.name,
        "ranks": world_size,
        "parameters": {
            "total": model.total,
            "active_per_token": model.active,
            "one_expert": model.expert.elements,
        },
        "memory_per_rank_bytes": {**asdict(memory), "total_bytes": memory.total_bytes},
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and devices; None for a package that is not installed."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "themis": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "cpu_cores": os.cpu_count(),
        "cuda_devices": cuda,
    }


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{facts['recipe']} on {facts['ranks']} rank(s)", title_justify="left", box=None)
    table.add_column()
    table.add_column(justify="right")
    for name, number in facts["parameters"].items():
        table.add_row(f"parameters, {name.replace('_', ' ')}", format_count(number))
    for name, number in facts["memory_per_rank_bytes"].items():
        table.add_row(f"memory a rank, {name.removesuffix('_bytes').replace('_', ' ')}", format_bytes(number))
    console.print(table)
    environment = facts["environment"]
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in environment["packages"].items())
    console.print(f"\nThemis {environment['themis']}, Python {environment['python']}; {packages}", soft_wrap=True)
    devices = ", ".join(environment["cuda_devices"]) or "no CUDA device"
    console.print(f"{environment['cpu_cores']} CPU cores, {devices}", soft_wrap=True)
