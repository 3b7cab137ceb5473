"""One thread everywhere: ranks are forked, and a parent that has run OpenMP threads cannot be forked safely."""

import numpy as np
import torch
import torch._dynamo  # optimizers load it on first use; better once here than in every forked rank
from hypothesis import settings

from themis.core.topology import Topology
from themis.planning import dispatch, materialize, transfers

torch.set_num_threads(1)
settings.register_profile("themis", derandomize=True, deadline=None)
settings.load_profile("themis")


def _load_kernels() -> None:
    """Compiled planners load in the parent, so that forked ranks have them."""
    topology, owner_E = Topology(1, 2), np.array([0, 1])
    placement_ED = materialize(owner_E, np.array([2.0, 1.0]), topology, overlap_degree=2, budget=1)
    transfers(owner_E, placement_ED, topology)
    for rule in ("local-first", "balanced"):
        dispatch(np.array([[2, 3], [1, 0]]), placement_ED, topology, rule=rule)


_load_kernels()
