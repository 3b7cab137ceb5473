"""All studies by name, and the page of all claims together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from themis.report.claims import tally
from themis.report.page import Page, Study
from themis.report.studies.ablation import Components, Rearrangement
from themis.report.studies.convergence import GpuHours
from themis.report.studies.end_to_end import Breakdown, EndToEnd, Layers
from themis.report.studies.memory import ModelStates, OutOfMemory
from themis.report.studies.routing import Imbalance, Prediction, TopK
from themis.report.studies.scaling import FarScaling, WeakScaling
from themis.report.studies.sensitivity import Sensitivity


def studies() -> Mapping[str, Study]:
    """Every study by its name on the command line, in the paper's order."""
    made: Sequence[Study] = (
        EndToEnd(),
        Layers(),
        Breakdown(),
        ModelStates(),
        OutOfMemory(),
        WeakScaling(),
        Components(),
        Prediction(),
        Imbalance(),
        TopK(),
        GpuHours(),
        Rearrangement(),
        FarScaling(),
        Sensitivity(),
    )
    return {study.key: study for study in made}


def claims_page(pages: Sequence[Page]) -> Page:
    """All claims and orderings of `pages`."""
    claims = [claim for page in pages for claim in page.claims]
    orderings = [ordering for page in pages for ordering in page.orderings]
    within, counted = tally(claims)
    hold = sum(ordering.holds for ordering in orderings)
    notes = [
        f"{within} of {counted} counted claims within 20 %; {hold} of {len(orderings)} orderings hold.",
        "Claims marked as inputs are what assumptions were taken from, and count for nothing.",
    ]
    return Page("claims", "The paper's claims and ours", [], claims, orderings, notes)
