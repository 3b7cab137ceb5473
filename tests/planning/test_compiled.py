from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import themis
from themis.core.placement import even_owner
from themis.core.topology import Topology
from themis.planning import dispatch, materialize, shard, transfers
from themis.planning.balance import _balance
from themis.planning.dispatch import _local_first
from themis.planning.materialize import _fill, _materialize
from themis.planning.sharding import _shard
from themis.planning.transfers import _transfers


def test_inputs_of_any_kind_use_one_compiled_signature():
    topology, owner_E = Topology(2, 2), even_owner(4, 4)
    load_E = np.array([9.0, 1.0, 1.0, 1.0])
    frozen_E = owner_E.copy()
    frozen_E.setflags(write=False)
    for owners, loads in (
        (owner_E, load_E),
        (frozen_E, load_E.astype(np.float32)),
        (owner_E.tolist(), load_E.tolist()),
    ):
        placement_ED = materialize(owners, loads, topology, overlap_degree=2, budget=1)
        tokens_ED = np.arange(16, dtype=np.int32).reshape(4, 4)
        for given_ED in (tokens_ED, tokens_ED.T, tokens_ED.astype(np.int64)):
            dispatch(given_ED, np.asfortranarray(placement_ED), topology, rule="balanced")
        transfers(owners, placement_ED, topology)
        shard([loads, loads], topology, overlap_degree=1, current_LE=[owners, owners])
    for kernel in (_materialize, _local_first, _balance, _transfers, _shard):
        assert len(kernel.signatures) == 1, kernel
    assert len(_fill.signatures) == 1


def test_planning_neither_imports_torch_nor_needs_a_writable_cache(tmp_path):
    """Where no directory can be written the kernels are compiled without a cache."""
    program = (
        "import sys, numba.core.caching as caching\n"
        "for locator in caching.CacheImpl._locator_classes: locator.from_function = classmethod(lambda *a: None)\n"
        "import themis.planning, themis.planning.compiled as compiled\n"
        "assert compiled.compiled(lambda x: x + 1)(1) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(themis.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
