"""Counted bytes: what the ranks sent is what the plan says, and what section 3.3 allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fssdp.harness import WIDTH, Case, scripted, train_on_rank
from themis.core.topology import Topology
from themis.fssdp.step_report import LayerReport
from themis.moe import MoEConfig
from themis.testing.ranks import run_ranks

TOPOLOGY = Topology(2, 2)
SEEDS = range(6)
CASE = Case(config=MoEConfig(WIDTH, 16, 5, 2), topology=TOPOLOGY, policy=scripted(0), tokens_SD=[[5, 7, 0, 3]])


def _run_all(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [train_on_rank(rank, case) for case in cases]


def _total(results: list[dict[str, Any]], collective: str, link: str) -> int:
    return sum(result["traffic"][collective][link] for result in results)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_counted_bytes_are_those_of_the_plans(rematerialize: bool) -> None:
    # With every other seed some replicas are kept, whose gradients are reduced and sent back.
    policies = [scripted(s, rematerialize_replicas=rematerialize, kept=0.3 * (s % 2)) for s in SEEDS]
    cases = [dataclasses.replace(CASE, seed=s, policy=policies[s]) for s in SEEDS]
    by_rank = run_ranks(4, _run_all, cases)
    for i in range(len(cases)):
        results = [rank[i] for rank in by_rank]
        reports: list[LayerReport] = results[0]["report"]
        for collective in ("all_to_all", "sparse_all_gather", "sparse_reduce_scatter", "all_reduce"):
            for link in ("intra", "inter"):
                planned = sum(report.bytes_moved[collective][link] for report in reports)
                assert _total(results, collective, link) == planned, (collective, link)
        if policies[i].kept:
            assert _total(results, "all_reduce", "inter") > 0
        else:
            _check_reduction(results, reports)


def _check_reduction(results: list[dict[str, Any]], reports: list[LayerReport]) -> None:
    """Gradients: one chunk a replica in total, one a newly entered node between nodes."""
    chunk_bytes = 8 * (WIDTH * 16 * 2 + 16 + 16)  # the second bias is padded from 12 to 16
    replicas = entered = 0
    for report in reports:
        mask_ED = report.placement_ED.copy()
        mask_ED[np.arange(mask_ED.shape[0]), report.owner_E] = False
        replicas += int(mask_ED.sum())
        for e, owner in enumerate(report.owner_E):
            nodes = set(TOPOLOGY.node_of_D[mask_ED[e]].tolist())
            entered += len(nodes - {int(TOPOLOGY.node_of_D[owner])})
    assert replicas > 0
    moved = {link: _total(results, "sparse_reduce_scatter", link) for link in ("intra", "inter")}
    assert moved["intra"] + moved["inter"] == replicas * chunk_bytes
    assert moved["inter"] == entered * chunk_bytes
