from __future__ import annotations

import json

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.planning import LoadPredictor


def test_mean_of_the_latest_five():
    predictor = LoadPredictor()
    assert predictor.predict() is None
    for value in range(8):
        predictor.observe(np.full(3, value))
        seen = np.arange(max(0, value - 4), value + 1)
        assert np.array_equal(predictor.predict(), np.full(3, seen.mean()))


def test_observations_are_copied_and_predictions_are_new():
    predictor, load_LE = LoadPredictor(2), np.ones((2, 3))
    predictor.observe(load_LE)
    load_LE[:] = 9
    predictor.predict()[:] = 7
    assert np.array_equal(predictor.predict(), np.ones((2, 3)))


def test_state_goes_through_json():
    predictor = LoadPredictor(3)
    for value in (0.1, 0.7, 1 / 3, 5.0):
        predictor.observe([[value, 2.0]])
    restored = LoadPredictor(3)
    restored.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    assert np.array_equal(restored.predict(), predictor.predict())
    for each in (predictor, restored):
        each.observe([[4.0, 4.0]])
    assert np.array_equal(restored.predict(), predictor.predict())
    shorter = LoadPredictor(1)
    shorter.load_state_dict(predictor.state_dict())
    assert np.array_equal(shorter.predict(), [[4.0, 4.0]])


def test_bad_arguments():
    predictor = LoadPredictor()
    predictor.observe([1.0, 2.0])
    bad_loads = [([1.0], "shape"), (1.0, "shape"), ([-1.0, 0.0], "negative"), ([float("nan"), 0.0], "negative")]
    for load, message in bad_loads:
        with pytest.raises(ConfigError, match=message):
            predictor.observe(load)
    assert np.array_equal(predictor.predict(), [1.0, 2.0])
    with pytest.raises(ConfigError, match="window is 0"):
        LoadPredictor(0)
    with pytest.raises(ConfigError, match="'loads'"):
        predictor.load_state_dict({})
