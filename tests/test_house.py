"""Walls that import-linter cannot hold."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent / "themis"
COLLECTIVES = re.compile(
    r"\b(?:dist|distributed)\.(?:all_|reduce|broadcast|isend|irecv|send\(|recv\(|batch_isend|barrier|scatter|gather|new_group)"
)
PICKLE = re.compile(r"\b(?:pickle\.loads?\(|torch\.load\(|marshal\.|shelve\.|(?<![.\w])(?:eval|exec)\()")


def _sources(*without: str) -> list[tuple[str, str]]:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if str(path.relative_to(ROOT)) not in without]
    assert len(paths) > 50
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def test_only_one_file_issues_collectives() -> None:
    sources = _sources("comm/collectives.py")
    assert not [name for name, text in sources if COLLECTIVES.search(text) and not name.startswith("testing/")]
    assert COLLECTIVES.search((ROOT / "comm/collectives.py").read_text())


def test_nothing_from_a_file_is_run() -> None:
    assert not [name for name, text in _sources() if PICKLE.search(text)]


def test_no_file_outgrows_its_room() -> None:
    assert not [name for name, text in _sources() if text.count("\n") > 400]


def test_the_readme_has_no_gaps() -> None:
    assert "@@" not in (ROOT.parent / "README.md").read_text()
