from __future__ import annotations

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.core.plan import TransferPlan
from themis.core.topology import LinkClass, Topology


def plan_of(rows, pieces=(2,), owners=(0,), num_devices=4):
    stage, expert, piece, source, destination = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return TransferPlan(num_devices, np.array(owners), np.array(pieces), stage, expert, piece, source, destination)


RELAY = [(0, 0, 0, 0, 2), (0, 0, 1, 0, 2), (1, 0, 0, 2, 3), (1, 0, 1, 2, 3)]


def test_counts_and_spans():
    plan = plan_of(RELAY)
    assert (plan.num_transfers, plan.num_stages) == (4, 2)
    assert [plan.span(row, 7) for row in range(4)] == [(0, 3), (3, 7), (0, 3), (3, 7)]
    assert [plan.span(row, 1) for row in range(2)] == [(0, 0), (0, 1)]


def test_bytes_by_link():
    crossed = plan_of(RELAY).bytes_by_link(Topology(2, 2), numel=7, element_bytes=4)
    assert crossed == {LinkClass.INTER: 28, LinkClass.INTRA: 28}


def test_an_empty_plan():
    plan = plan_of([])
    assert (plan.num_transfers, plan.num_stages) == (0, 0)
    assert plan.bytes_by_link(Topology(2, 2), 7, 4) == {LinkClass.INTER: 0, LinkClass.INTRA: 0}


def test_columns_are_frozen_copies():
    plan = plan_of(RELAY)
    with pytest.raises(ValueError, match="read-only"):
        plan.source_X[0] = 1


def test_bad_plans():
    with pytest.raises(ConfigError, match="sorted by stage"):
        plan_of(RELAY[::-1])
    with pytest.raises(ConfigError, match="differ in length"):
        plan_of(RELAY, owners=(0, 1))
    with pytest.raises(ConfigError, match="differ in length"):
        TransferPlan(2, *(np.zeros(n, dtype=np.int64) for n in (1, 1, 1, 1, 1, 1, 2)))
