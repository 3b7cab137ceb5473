from __future__ import annotations

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.core.load import check_load, device_load, imbalance, owner_load


def test_check_load_normalises():
    load_LE = check_load([[1, 2], [3, 4]], "load_LE", 2)
    assert load_LE.dtype == np.float64
    assert load_LE.flags.c_contiguous


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [float("inf")], [[1.0]], 3.0])
def test_check_load_rejects(bad):
    with pytest.raises(ConfigError, match=r"load_E is (of shape|negative)"):
        check_load(bad, "load_E", 1)


def test_imbalance():
    assert imbalance([1, 1, 4]) == 2.0
    assert imbalance([0, 0]) == imbalance([]) == 1.0


def test_loads_of_devices():
    route_EDD = np.zeros((2, 2, 2), dtype=np.int64)
    route_EDD[0] = [[1, 2], [0, 3]]
    route_EDD[1] = [[0, 0], [4, 0]]
    assert device_load(route_EDD).tolist() == [5, 5]
    assert owner_load([3.0, 4.0, 5.0], np.array([2, 0, 2]), 4).tolist() == [4.0, 0.0, 8.0, 0.0]
