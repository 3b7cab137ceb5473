"""Which windows of the corpus a step trains on: a pure function of (seed, step, sample), so nothing needs saving.

Each epoch cuts the corpus into windows, at an offset of its own, and visits every one once in shuffled order. The
shuffle is a keyed permutation computed on the fly (a small Feistel network that walks until it lands inside the
range), so that no order is stored however large the corpus is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import require

_ROUNDS = 4


def split(total: int, parts: int, index: int) -> range:
    """The rows of part `index` when `total` rows are cut into `parts` runs whose lengths differ by at most one."""
    return range(total * index // parts, total * (index + 1) // parts)


def mix(value_X: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A well mixed uint64 for each value under `key` (the finaliser of SplitMix64)."""
    mixed_X = value_X + np.uint64(((key + 1) * 0x9E3779B97F4A7C15) % 2**64)
    mixed_X = (mixed_X ^ (mixed_X >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_X = (mixed_X ^ (mixed_X >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_X ^ (mixed_X >> np.uint64(31))


def permute(index_X: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a keyed permutation of 0 … size-1 sends each index [X]."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    value_X = index_X.astype(np.uint64)
    walking_X = np.ones(value_X.shape, dtype=np.bool_)
    while walking_X.any():
        left, right = value_X[walking_X] >> half, value_X[walking_X] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (mix(right, key * _ROUNDS + turn) & mask)
        value_X[walking_X] = (left << half) | right
        walking_X = value_X >= size
    return value_X.astype(np.int64)


def window_starts(sample_X: NDArray[np.int64], num_tokens: int, length: int, seed: int) -> NDArray[np.int64]:
    """int64 [X]: the first token of the window of each sample; a window takes `length` + 1 tokens.

    `sample_X` int64 [X] counts samples from the start of training. Within an epoch no two windows overlap (but for
    the one token that is a target of one and an input of the next).
    """
    require(num_tokens > length, "the corpus's number of tokens", num_tokens, f"above {length}, a sequence's length")
    whole = (num_tokens - 1) // length
    windows = max(1, whole - 1)  # one window's worth of slack lets each epoch start at another offset
    slack = num_tokens - 1 - windows * length
    epoch_X, index_X = np.divmod(sample_X, windows)
    starts_X = np.empty_like(sample_X)
    for epoch in np.unique(epoch_X):
        key = (seed * 1_000_003 + int(epoch)) % 2**61
        chosen_X = epoch_X == epoch
        offset = int(mix(np.zeros(1, dtype=np.uint64), key)[0] % np.uint64(slack + 1))
        starts_X[chosen_X] = offset + permute(index_X[chosen_X], windows, key) * length
    return starts_X
