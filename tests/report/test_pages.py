"""Pages, tables and claims: what is written, and what counts."""

from __future__ import annotations

import importlib.util

import pytest

from themis.core.errors import ConfigError
from themis.report.claims import Claim, Ordering, claims_table, orderings_table, tally
from themis.report.page import Page, TableData, markdown, need_matplotlib, write_page
from themis.report.plots import grouped_bars, label, legend, lines, stacked_bars, tidy
from themis.report.reproduce import claims_page

CLAIMS = [
    Claim("a", "one", 2.0, 2.39, "no reason"),
    Claim("b", "two", 2.0, 2.41, "too fast"),
    Claim("c", "three", 2.0, 9.0, "odd", counted=False),
    Claim("d", "four", 10.0, 8.0),
]


def test_twenty_per_cent_either_way():
    assert [claim.within for claim in CLAIMS] == [True, False, False, True]
    assert tally(CLAIMS) == (2, 3)
    assert CLAIMS[1].ratio == pytest.approx(1.205)


def test_reasons_stand_beside_what_is_outside():
    header, rows = claims_table(CLAIMS)
    assert header[-1] == "why not"
    assert [row[-1] for row in rows] == ["", "too fast", "odd", ""]
    assert [row[-2] for row in rows] == ["yes", "**no**", "(**no**, an input)", "yes"]
    assert rows[0][1:4] == ["2", "2.39", "1.20"]
    assert orderings_table([Ordering("o", "x before y", False, "z: 1, 2")])[1] == [["x before y", "**no**", "z: 1, 2"]]


def test_markdown():
    text = markdown(TableData("sizes", ["a", "b"], [["1", "2"]]))
    assert text == "**sizes**\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"


def test_a_page_is_written_whole(tmp_path):
    def draw(canvas):
        bars, stacks, curves = canvas.subplots(1, 3)
        grouped_bars(bars, ["g", "h"], {"ep": [1.0, 2.0], "themis": [2.0, 3.0]})
        stacked_bars(stacks, ["EP", "Themis"], {"A2A": [1.0, 2.0], "Comp": [0.5, 0.5]})
        lines(curves, [1, 2], {"ep": [1.0, float("nan")]})
        tidy(curves, x="x", y="y", title="t")
        legend(bars)

    page = Page(
        "figx", "A figure", [TableData("", ["a"], [["1"]])], CLAIMS, [Ordering("o", "x", True)], ["a note"], draw
    )
    written = write_page(page, tmp_path)
    assert [path.name for path in written] == ["figx.png", "figx.md"]
    assert (tmp_path / "figx.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "figx.md").read_text()
    assert text.startswith("# A figure\n")
    assert all(part in text for part in ("![A figure](figx.png)", "too fast", "a note", "| x | yes |"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figx.md", "figx.png"]


def test_all_claims_on_one_page():
    pages = [Page("a", "A", [], CLAIMS[:2], [Ordering("o", "x", True)]), Page("b", "B", [], CLAIMS[2:])]
    page = claims_page(pages)
    assert (len(page.claims), len(page.orderings)) == (4, 1)
    assert page.notes[0] == "2 of 3 counted claims within 20 %; 1 of 1 orderings hold."


def test_without_matplotlib_a_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need the package `matplotlib`: pip install 'themis-moe\[report\]'"):
        need_matplotlib()


def test_systems_have_names():
    assert (label("themis-rm"), label("new")) == ("Themis-RM", "new")
