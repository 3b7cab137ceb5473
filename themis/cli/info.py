"""`themis info`: the model of a recipe, the memory a rank needs, and what this machine offers."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Annotated, Any, final

import torch
import tyro
from rich.console import Console
from rich.table import Table

from themis import __version__
from themis.cli.console import PLAIN_WIDTH
from themis.cli.parse import parse
from themis.cli.units import format_bytes, format_count
from themis.core.errors import ConfigError
from themis.train.config import RunConfig
from themis.train.memory import count, rank_memory
from themis.train.recipes import RECIPES, list_recipes, recipe

_PACKAGES = ("torch", "numpy", "numba", "safetensors", "tokenizers", "transformers", "tensorboard")

#: What the table's rows count, where the name does not say it.
_MEANING = {
    "active_per_token": "the dense part and the experts of one token",
    "one_expert": "of one layer",
    "dense_parameters": "all but the routed experts",
    "expert_parameters": "of the experts that a rank owns; rank 0, which owns the most",
    "optimizer": "AdamW's two moments of what the rank owns",
    "buckets": "what dense gradients are averaged over ranks through",
    "replicas": "at most: short-lived replicas of other ranks' experts, every slot of the budget in use",
    "copies": "in mixed precision: the owned experts once more, in the type they compute in",
    "all_kinds": "activations come on top; they depend on the batch",
}


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
    if not arguments:
        print(
            f"{list_recipes()}\n\nThe size of one and the memory it needs: themis info {next(iter(RECIPES))} --nproc 2"
        )
        return 0
    if arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        raise ConfigError(
            f"no recipe is named; there are {', '.join(RECIPES)}; type for example: themis info tiny {arguments[0]}"
        )
    helps = arguments[0].startswith("-")
    base = RunConfig() if helps else recipe(arguments[0])
    note = f"\n\nrecipes:\n{list_recipes()}" if helps else ""
    rest = arguments[0 if helps else 1 :]
    options = parse(InfoOptions, rest, "themis info RECIPE", default=InfoOptions(run=base), note=note)
    facts = gather(options.run, options.nproc)
    if options.json:
        print(json.dumps(facts))
    else:
        _show(facts)
    return 0


def gather(config: RunConfig, world_size: int) -> dict[str, Any]:
    """All that the command shows, JSON-able."""
    model = count(config.model)
    memory = rank_memory(config, world_size, model=model)
    return {
        "recipe": config.name,
        "ranks": world_size,
        "model": {
            "layers": config.model.num_layers,
            "moe_layers": model.num_layers,
            "experts_per_layer": model.num_experts,
            "experts_per_token": model.top_k,
            "width": config.model.width,
            "expert_hidden_width": config.model.expert_hidden,
            "sequence_length": config.model.sequence_length,
            "vocabulary": config.model.vocab_size,
        },
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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    table = Table(title=f"{facts['recipe']} on {facts['ranks']} rank(s)", title_justify="left", box=None)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for name, number in facts["model"].items():
        table.add_row(name.replace("_", " "), str(number))
    for name, number in facts["parameters"].items():
        table.add_row(f"parameters, {name.replace('_', ' ')}", format_count(number), _MEANING.get(name, ""))
    for name, number in facts["memory_per_rank_bytes"].items():
        kind = "all_kinds" if name == "total_bytes" else name.removesuffix("_bytes")
        table.add_row(f"memory a rank, {kind.replace('_', ' ')}", format_bytes(number), _MEANING.get(kind, ""))
    console.print(table)
    environment = facts["environment"]
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in environment["packages"].items())
    console.print(f"\nThemis {environment['themis']}, Python {environment['python']}; {packages}", soft_wrap=True)
    devices = ", ".join(environment["cuda_devices"]) or "no CUDA device"
    console.print(f"{environment['cpu_cores']} CPU cores, {devices}", soft_wrap=True)
