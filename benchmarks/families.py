"""Every transformers MoE family on two ranks against one process: writes the table docs/families.md (two minutes).

python -m benchmarks.families [--out docs/families.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from themis.testing.agreement import RANKS, disagreement
from themis.testing.families import family_names
from themis.testing.ranks import RankError, run_ranks

TOLERANCE_FLOAT64, TOLERANCE_FLOAT32 = 1e-9, 1e-5


def row(family: str) -> tuple[bool, str]:
    """Whether the family passes, and its line."""
    try:
        worst = max(worst for worst, _ in run_ranks(RANKS, disagreement, family, torch.float64))
    except RankError as error:
        return False, f"| {family} | none | {str(error).strip().splitlines()[-1]} |"
    if worst <= TOLERANCE_FLOAT64:
        return True, f"| {family} | {worst:.0e} | float64 |"
    passes = worst <= TOLERANCE_FLOAT32
    remark = "within float32's tolerance" if passes else "differs"
    return passes, f"| {family} | {worst:.0e} | {remark} |"


def main() -> None:
    """Measure all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
entry is above 1. Text inputs.

**{passed} of {len(rows)} pass** ({TOLERANCE_FLOAT64:.0e} in float64; {TOLERANCE_FLOAT32:.0e} for families that
compute parts in float32).

| family | difference | |
|---|---|---|
"""
    arguments.out.write_text(head + "\n".join(line for _, line in rows) + "\n")


if __name__ == "__main__":
    main()
