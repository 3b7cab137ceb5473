from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.core.errors import ConfigError
from themis.core.placement import Placement, check_owner, even_owner, owner_mask, shard_only
from themis.testing.strategies import owners, placements, quick


@quick(40)
@given(st.integers(1, 40), st.integers(1, 12))
def test_even_owners_are_contiguous_and_even(num_experts, num_devices):
    owner_E = even_owner(num_experts, num_devices)
    count_D = np.bincount(owner_E, minlength=num_devices)
    assert owner_E.size == num_experts
    assert (np.diff(owner_E) >= 0).all()
    assert count_D.max() - count_D.min() <= 1


@quick(40)
@given(st.data())
def test_a_placement_knows_owners_and_replicas(data):
    owner_E = data.draw(owners(5, 3))
    placement_ED = data.draw(placements(owner_E, 3))
    placement = Placement(owner_E, placement_ED)
    assert (placement.num_experts, placement.num_devices) == (5, 3)
    assert np.array_equal(placement.replicas_ED | owner_mask(owner_E, 3), placement_ED)
    assert placement.replicas_ED.sum() == placement_ED.sum() - 5
    for device in range(3):
        held = sorted(placement.owned_by(device) + placement.replicas_at(device))
        assert held == np.flatnonzero(placement_ED[:, device]).tolist()


def test_a_placement_is_a_frozen_copy():
    owner_E, placement_ED = np.array([0, 1]), np.eye(2, dtype=np.bool_)
    placement = Placement(owner_E, placement_ED)
    placement_ED[:] = True
    assert placement.placement_ED.sum() == 2
    for array in (placement.owner_E, placement.placement_ED):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_merge_adds_copies():
    before = shard_only([0, 1], 2)
    after = before.merge(np.array([[False, True], [False, False]]))
    assert after.placement_ED.tolist() == [[True, True], [False, True]]
    assert before.placement_ED.sum() == 2


@pytest.mark.parametrize(
    ("owner_E", "placement_ED"),
    [([0, 1], [[True, False]]), ([0], [[False, True]]), ([0], [True]), ([2], [[True, True]]), ([[0]], [[True]])],
)
def test_bad_placements(owner_E, placement_ED):
    with pytest.raises(ConfigError, match="must"):
        Placement(np.array(owner_E), np.array(placement_ED))


def test_bad_owners_and_sizes():
    for owner_E, message in (
        ([0, 5], "names devices 0 to 5"),
        ([-1], "names devices -1"),
        ([], "of shape"),
        ([0.5], "type"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_owner(owner_E, 4)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="1 or more"):
            even_owner(*sizes)
