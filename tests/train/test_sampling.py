"""Stateless sampling: every window once an epoch, whatever asks for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from themis.core.errors import ConfigError
from themis.train.sampling import permute, split, window_starts


@given(total=st.integers(0, 200), parts=st.integers(1, 17))
def test_split_is_an_even_partition(total, parts):
    runs = [split(total, parts, index) for index in range(parts)]
    assert [row for run in runs for row in run] == list(range(total))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1


@given(size=st.integers(1, 3000), key=st.integers(0, 2**40))
@settings(max_examples=60)
def test_permute_is_a_permutation(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_permute_depends_on_its_key_and_shuffles():
    first, second = permute(np.arange(1000), 1000, 1), permute(np.arange(1000), 1000, 2)
    assert (first != second).mean() > 0.9
    # Neighbours end up far apart: the mean distance of random pairs is a third of the range.
    assert 250 < np.abs(np.diff(first)).mean() < 420


@given(num_tokens=st.integers(12, 500), length=st.integers(1, 11), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_an_epoch_visits_disjoint_windows_inside_the_corpus(num_tokens, length, seed):
    windows = max(1, (num_tokens - 1) // length - 1)
    for epoch in (0, 3):
        start_X = np.sort(window_starts(np.arange(windows) + epoch * windows, num_tokens, length, seed))
        assert start_X[0] >= 0
        assert start_X[-1] + length + 1 <= num_tokens
        assert (np.diff(start_X) == length).all()


@given(first=st.integers(0, 10**6), count=st.integers(1, 40), cut=st.integers(0, 40))
@settings(max_examples=40)
def test_a_sample_does_not_depend_on_what_is_asked_with_it(first, count, cut):
    sample_X = np.arange(first, first + count)
    whole = window_starts(sample_X, 1000, 9, 5)
    parts = [window_starts(part, 1000, 9, 5) for part in (sample_X[:cut], sample_X[cut:])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_corpus_shorter_than_a_window_is_refused():
    with pytest.raises(ConfigError, match="number of tokens is 10; it must be above 10, a sequence's length"):
        window_starts(np.arange(1), 10, 10, 0)
