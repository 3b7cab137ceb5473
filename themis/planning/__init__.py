"""Plans as pure functions of loads: predict, materialise, shard, dispatch, transfer, calibrate. No torch.

Every function takes NumPy arrays, changes none of them, and gives the same output for the same input on every rank.
"""

from themis.planning.calibrate import added_transfers, calibrate
from themis.planning.dispatch import dispatch
from themis.planning.materialize import materialize, overlap_degree
from themis.planning.predict import LoadPredictor
from themis.planning.sharding import shard
from themis.planning.transfers import transfers

__all__ = [
    "LoadPredictor",
    "added_transfers",
    "calibrate",
    "dispatch",
    "materialize",
    "overlap_degree",
    "shard",
    "transfers",
]
