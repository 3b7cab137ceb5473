"""Every transformers MoE family on two ranks against one process: writes the table docs/families.md (three minutes).

python -m benchmarks.families [--out docs/families.md]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from themis.testing.agreement import RANKS, disagreement
from themis.testing.directories import first_difference, round_trip
from themis.testing.families import build_tiny, family_names
from themis.testing.ranks import RankError, run_ranks

TOLERANCE_FLOAT64, TOLERANCE_FLOAT32 = 1e-9, 1e-5


def directory_remark(family: str, dtype: torch.dtype) -> str:
    """Whether a directory of the family, read on two ranks and written again, is the same; else what differs."""
    with tempfile.TemporaryDirectory() as parent:
        source, target = Path(parent) / "in", Path(parent) / "out"
        model: Any = build_tiny(family, dtype=dtype)
        model.save_pretrained(source)
        try:
            run_ranks(RANKS, round_trip, source, target)
        except RankError as error:
            return str(error).strip().splitlines()[-1]
        return first_difference(source, target) or "same"


def row(family: str) -> tuple[bool, str]:
    """Whether the family passes, and its line."""
    try:
        worst = max(worst for worst, _ in run_ranks(RANKS, disagreement, family, torch.float64))
    except RankError as error:
        return False, f"| {family} | none | {str(error).strip().splitlines()[-1]} | |"
    remarks = {directory_remark(family, dtype) for dtype in (torch.float32, torch.bfloat16)}
    directory = "; ".join(sorted(remarks))
    if worst <= TOLERANCE_FLOAT64:
        return remarks == {"same"}, f"| {family} | {worst:.0e} | float64 | {directory} |"
    passes = worst <= TOLERANCE_FLOAT32
    remark = "within float32's tolerance" if passes else "differs"
    return passes and remarks == {"same"}, f"| {family} | {worst:.0e} | {remark} | {directory} |"


def main() -> None:
    """Measure all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    names = family_names()
    rows = []
    for number, family in enumerate(names, start=1):
        rows.append(row(family))
        print(f"{number}/{len(names)} {rows[-1][1]}", flush=True)
    passed = sum(passes for passes, _ in rows)
    head = f"""# Transformers families

Written by `python -m benchmarks.families`, torch {torch.__version__}, transformers {transformers.__version__}.
Each family is built tiny in float64 (width 32, experts of 24, 8 experts) and parallelized on {RANKS} ranks under
random owners and replicas, with batches of different sizes. The figure is the largest difference of outputs, all
gradients and the gradient norm from the family's own eager result in one process, relative where a tensor's largest
entry is above 1. Text inputs. The last column: a directory that transformers has written, in float32 and in
bfloat16, read on {RANKS} ranks (each its own experts and the dense part) and written again: the same names, types,
shapes and bytes.

**{passed} of {len(rows)} pass** ({TOLERANCE_FLOAT64:.0e} in float64; {TOLERANCE_FLOAT32:.0e} for families that
compute parts in float32; the same directory).

| family | difference | | directory |
|---|---|---|---|
"""
    arguments.out.write_text(head + "\n".join(line for _, line in rows) + "\n")


if __name__ == "__main__":
    main()
