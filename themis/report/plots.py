"""The few kinds of picture that reports draw, in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: One colour a system, told apart by colour-blind eyes too (Okabe and Ito).
COLOURS: Mapping[str, str] = {
    "ep": "#999999",
    "faster-moe": "#56B4E9",
    "smart-moe": "#009E73",
    "flex-moe": "#F0E442",
    "themis": "#D55E00",
    "themis-rm": "#CC79A7",
    "uniform": "#000000",
    "eplb": "#0072B2",
    "exact-load": "#E69F00",
}
NAMES: Mapping[str, str] = {
    "ep": "EP",
    "faster-moe": "FasterMoE",
    "smart-moe": "SmartMoE",
    "flex-moe": "FlexMoE",
    "themis": "Themis",
    "themis-rm": "Themis-RM",
    "uniform": "Uniform",
    "eplb": "EPLB",
    "exact-load": "exact load",
}
_OTHERS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000", "#7F4F24")


def label(name: str) -> str:
    """How a system is called in pictures and tables."""
    return NAMES.get(name, name)


def colour(name: str, index: int) -> str:
    """A system's colour, or the next one."""
    return COLOURS.get(name, _OTHERS[index % len(_OTHERS)])


def tidy(axes: Any, *, x: str = "", y: str = "", title: str = "") -> None:
    """Labels, a light grid behind, no box."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)


def grouped_bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """A cluster of bars for each group, one bar a series."""
    width = 0.84 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [g + (index - (len(series) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(places, values, width * 0.94, label=label(name), color=colour(name, index))
    axes.set_xticks(range(len(groups)), groups)


def stacked_bars(axes: Any, bars: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """A bar each, made of parts; the total above it."""
    bottom = [0.0] * len(bars)
    for index, (name, values) in enumerate(parts.items()):
        axes.bar(range(len(bars)), values, 0.7, bottom=bottom, label=name, color=_OTHERS[index % len(_OTHERS)])
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    for place, total in enumerate(bottom):
        axes.text(place, total, f"{total:,.4g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), bars, rotation=20)


def lines(axes: Any, xs: Sequence[float], series: Mapping[str, Sequence[float]], *, marker: str = "o") -> None:
    """A line a series; NaN leaves a gap."""
    for index, (name, values) in enumerate(series.items()):
        axes.plot(xs, values, marker=marker, markersize=4, label=label(name), color=colour(name, index))


def legend(axes: Any, **more: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=8, **more)
