"""Numbers for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: 1,500,000 is 1.5 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def format_count(count: float) -> str:
    """A number of things with a suffix: 1,500,000 is 1.5 M."""
    for unit in ("", " k", " M", " B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.4g} T"
