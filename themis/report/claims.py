"""Claims of the paper beside our numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

#: How far a number may be from the paper's to count as reproduced.
TOLERANCE = 0.20


@final
@dataclass(frozen=True)
class Claim:
    """A number of the paper and ours. reason: why they differ, where they do; counted: whether it is a result at all,
    not something that our assumptions were taken from."""

    key: str
    text: str
    paper: float
    ours: float
    reason: str = ""
    counted: bool = True

    @property
    def ratio(self) -> float:
        """Ours over the paper's."""
        return self.ours / self.paper

    @property
    def within(self) -> bool:
        """Whether it is within the tolerance."""
        return abs(self.ratio - 1) <= TOLERANCE


@final
@dataclass(frozen=True)
class Ordering:
    """A statement of the paper without a number, whether it holds here, and where not."""

    key: str
    text: str
    holds: bool
    detail: str = ""


def claims_table(claims: Sequence[Claim]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; the reason is shown where a claim is outside."""
    rows = []
    for claim in claims:
        verdict = "yes" if claim.within else "**no**"
        verdict = verdict if claim.counted else f"({verdict}, an input)"
        reason = claim.reason if not claim.within else ""
        rows.append([claim.text, _number(claim.paper), _number(claim.ours), f"{claim.ratio:.2f}", verdict, reason])
    return ["claim", "paper", "ours", "ratio", "within 20 %", "why not"], rows


def orderings_table(orderings: Sequence[Ordering]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    rows = [[o.text, "yes" if o.holds else "**no**", o.detail] for o in orderings]
    return ["ordering", "holds", "where not"], rows


def tally(claims: Sequence[Claim]) -> tuple[int, int]:
    """(within, all) of the claims that count."""
    counted = [claim for claim in claims if claim.counted]
    return sum(claim.within for claim in counted), len(counted)


def _number(value: float) -> str:
    return f"{value:.4g}"
