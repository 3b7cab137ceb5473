"""`themis reproduce`: the paper's figures and tables from the simulator, its numbers beside ours."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, final

import tyro
from rich.console import Console
from rich.table import Table

from themis.cli.parse import parse
from themis.core.errors import ConfigError, require
from themis.report.claims import tally
from themis.report.jobs import run_jobs
from themis.report.page import Page, need_matplotlib, write_page
from themis.report.reproduce import claims_page, studies


@final
@dataclass(frozen=True)
class ReproduceOptions:
    """Reproduce FIGURES of the paper's section 5, or all of them, and set its numbers beside ours."""

    figures: Annotated[tuple[str, ...], tyro.conf.Positional] = ("all",)
    """fig9 to fig12, fig13a, fig13b, fig14, fig15, fig16a, fig16b, fig17, rearrangement, scaling, sensitivity; all."""
    out: Path = Path("reproduction")
    """Where pages and pictures go."""
    processes: int = 0
    """Simulations at a time; 0 for as many as there are cores."""
    json: bool = False
    """Print claims and orderings as JSON."""


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parse(ReproduceOptions, arguments, "themis reproduce")
    require(options.processes >= 0, "processes", options.processes, "0 for one a core, or 1 or more")
    pages = reproduce(options.figures, options.out, options.processes or os.cpu_count() or 1, quiet=options.json)
    if options.json:
        print(json.dumps(_facts(pages)))
    else:
        _show(pages, options.out)
    return 0


def reproduce(figures: tuple[str, ...], out: Path, processes: int, *, quiet: bool) -> list[Page]:
    """Simulate, write and return the pages of `figures`, the page of all claims last."""
    known = studies()
    if unknown := [name for name in figures if name not in known and name != "all"]:
        raise ConfigError(f"figure {unknown[0]!r} is unknown; there are {', '.join(known)}, and all")
    need_matplotlib()
    wanted = [study for name, study in known.items() if name in figures or "all" in figures]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {str(out)!r} cannot be made: {error}") from None
    start_s = time.monotonic()

    def tell(done: int, count: int) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"\r{done} of {count} simulations, {time.monotonic() - start_s:.0f} s", end="", file=sys.stderr)

    results = run_jobs([job for study in wanted for job in study.jobs()], processes, tell)
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)
    pages = [study.page(results) for study in wanted]
    pages.append(claims_page(pages))
    for page in pages:
        write_page(page, out)
    return pages


def _facts(pages: list[Page]) -> dict[str, object]:
    last = pages[-1]
    within, counted = tally(last.claims)
    claims = [{**asdict(claim), "ratio": claim.ratio, "within": claim.within} for claim in last.claims]
    return {
        "claims": claims,
        "orderings": [asdict(ordering) for ordering in last.orderings],
        "within": within,
        "counted": counted,
    }


def _show(pages: list[Page], out: Path) -> None:
    console = Console(highlight=False)
    table = Table(title="claims", title_justify="left", box=None)
    for name in ("claim", "paper", "ours", "ratio", ""):
        table.add_column(name, justify="left" if name in ("claim", "") else "right")
    for claim in pages[-1].claims:
        mark = "" if claim.within else "outside"
        mark = mark if claim.counted else f"{mark} (an input)".strip()
        table.add_row(claim.text, f"{claim.paper:.4g}", f"{claim.ours:.4g}", f"{claim.ratio:.2f}", mark)
    console.print(table)
    for ordering in pages[-1].orderings:
        if not ordering.holds:
            console.print(f"does not hold: {ordering.text} ({ordering.detail})", soft_wrap=True)
    console.print(f"{pages[-1].notes[0]} Pages and pictures are in {out}/", soft_wrap=True)
