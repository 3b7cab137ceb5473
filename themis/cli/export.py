"""`themis export`: a run's model as a directory that transformers loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

import torch
import tyro

from themis.cli.parse import parse
from themis.train.run_export import export_run


@final
@dataclass(frozen=True)
class ExportOptions:
    """Write the model of RUN's newest whole checkpoint into the new directory OUT, which transformers loads."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's directory."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The directory to write."""
    step: int | None = None
    """The checkpoint's step; by default the newest."""
    dtype: Literal["as-trained", "float32", "bfloat16", "float16"] = "as-trained"
    """Type of the tensors written."""
    drop: tuple[str, ...] = ()
    """Shell-style patterns of tensors that may be left out, as transformers' model has no slot for them."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(ExportOptions, arguments, "themis export")
    dtype = None if options.dtype == "as-trained" else getattr(torch, options.dtype)
    step, notes = export_run(options.run, options.out, step=options.step, dtype=dtype, drop=options.drop)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    if options.json:
        print(json.dumps({"out": str(options.out), "step": step, "bytes": size, "notes": notes}))
        return 0
    for line in notes:
        print(line)
    print(f"wrote the model of step {step} to {options.out}")
    return 0
