"""Mixed precision of expert parameters, as in FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True)
class MixedPrecision:
    """The owner keeps and updates its shard in the type the model was built in (the master copy).

    param_dtype: in which chunks travel and experts compute; reduce_dtype: in which gradients are reduced. None means
    the master's own type.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
