"""A figure's page: tables and a picture, written as Markdown and PNG."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

from themis.core.errors import ConfigError
from themis.core.files import replace_text
from themis.report.claims import Claim, Ordering, claims_table, orderings_table
from themis.report.jobs import Job, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@final
@dataclass(frozen=True)
class TableData:
    """A table: its caption, header and rows, all text."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@final
@dataclass(frozen=True)
class Page:
    """What a figure shows. draw: paints on a canvas of `size` inches; None for a page without a picture."""

    key: str
    title: str
    tables: Sequence[TableData]
    claims: Sequence[Claim] = ()
    orderings: Sequence[Ordering] = ()
    notes: Sequence[str] = ()
    draw: Callable[[Canvas], None] | None = None
    size: tuple[float, float] = field(default=(8.0, 4.0))


class Study(ABC):
    """A figure or table to reproduce: which simulations it needs, and what it makes of them."""

    @property
    @abstractmethod
    def key(self) -> str:
        """The name on the command line."""

    @abstractmethod
    def jobs(self) -> list[Job]:
        """The simulations."""

    @abstractmethod
    def page(self, results: Results) -> Page:
        """The page, from the results of at least `jobs()`."""


def markdown(table: TableData) -> str:
    """A Markdown table."""
    lines = [f"**{table.caption}**", ""] if table.caption else []
    lines.append("| " + " | ".join(table.header) + " |")
    lines.append("|" + "---|" * len(table.header))
    lines.extend("| " + " | ".join(row) + " |" for row in table.rows)
    return "\n".join(lines) + "\n"


def write_page(page: Page, directory: Path) -> list[Path]:
    """Write `page` into `directory` as KEY.md and, if it has one, its picture KEY.png; returns what was written."""
    written = []
    text = [f"# {page.title}\n"]
    if page.draw is not None:
        written.append(_write_picture(page, directory / f"{page.key}.png"))
        text.append(f"![{page.title}]({page.key}.png)\n")
    text.extend(markdown(table) for table in page.tables)
    if page.claims:
        text.append(markdown(TableData("The paper's numbers and ours", *claims_table(page.claims))))
    if page.orderings:
        text.append(markdown(TableData("The paper's orderings", *orderings_table(page.orderings))))
    text.extend(f"{note}\n" for note in page.notes)
    path = directory / f"{page.key}.md"
    replace_text(path, "\n".join(text))
    return [*written, path]


def need_matplotlib() -> None:
    """ConfigError unless matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need the package `matplotlib`: pip install 'themis-moe[report]'")


def _write_picture(page: Page, path: Path) -> Path:
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert page.draw is not None
    canvas = Figure(figsize=page.size, layout="constrained")
    FigureCanvasAgg(canvas)
    page.draw(canvas)
    scratch = path.with_suffix(".tmp.png")
    canvas.savefig(scratch, dpi=130, metadata={"Software": None})
    scratch.replace(path)
    return path
