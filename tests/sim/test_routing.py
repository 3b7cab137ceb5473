"""Generated routing has the skew and the drift it was asked for; recorded routing is what was recorded."""

from __future__ import annotations

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.planning import LoadPredictor
from themis.sim.routing import (
    GeneratedRouting,
    RecordedRouting,
    Skew,
    capped_softmax,
    most_share_std,
    prediction_r2,
    read_routing,
    typical_share_std,
)


def generate(skew: Skew, layers=6, experts=64, top_k=4, devices=16, tokens=4096, seed=3) -> GeneratedRouting:
    return GeneratedRouting(layers, experts, top_k, devices, tokens, skew, seed)


@pytest.mark.parametrize(("share_std", "top_k"), [(0.02, 2), (0.045, 4), (0.034, 4), (0.06, 2)])
def test_skew_is_the_standard_deviation_of_shares(share_std, top_k):
    found = []
    for seed in range(4):
        routing = generate(Skew(share_std), top_k=top_k, layers=12, seed=seed)
        load_LE = np.stack([routing.tokens_ED(layer).sum(axis=1) for layer in range(12)])
        found.append((load_LE / load_LE.sum(axis=1, keepdims=True)).std(axis=1).mean())
    assert np.mean(found) == pytest.approx(share_std, rel=0.1)


@pytest.mark.parametrize("r2", [0.9, 0.95, 0.99])
def test_drift_is_the_r2_of_the_prediction(r2):
    routing = generate(Skew(0.045, r2), layers=8, devices=32)
    loads, predictor, predicted = [], LoadPredictor(), []
    for _ in range(150):
        load_LE = np.stack([routing.tokens_ED(layer).sum(axis=1) for layer in range(8)]).astype(float)
        predicted.append(predictor.predict())
        predictor.observe(load_LE)
        loads.append(load_LE)
        routing.advance()
    actual, guess = np.stack(loads[5:]), np.stack(predicted[5:])
    found = 1 - ((actual - guess) ** 2).sum() / ((actual - actual.mean()) ** 2).sum()
    assert 1 - found == pytest.approx(1 - r2, rel=0.35)
    assert prediction_r2(np.stack(loads).reshape(150, -1)) == pytest.approx(found)


def test_counts_are_exact_capped_and_vary_by_device():
    routing = generate(Skew(0.045), tokens=1000)
    for layer in range(6):
        tokens_ED = routing.tokens_ED(layer)
        assert (tokens_ED.sum(axis=0) == 4000).all()
        assert 0 <= tokens_ED.min() <= tokens_ED.max() <= 1000
    popular_D = tokens_ED[tokens_ED.sum(axis=1).argmax()]
    assert np.ptp(popular_D) > 0
    even = generate(Skew(0.045, device_spread=0.0)).tokens_ED(0)
    assert np.ptp(even, axis=1).max() == 0


def test_same_seed_same_counts():
    one, two, other = generate(Skew(0.03)), generate(Skew(0.03)), generate(Skew(0.03), seed=4)
    for _ in range(3):
        np.testing.assert_array_equal(one.tokens_ED(2), two.tokens_ED(2))
        assert (one.tokens_ED(2) != other.tokens_ED(2)).any()
        before = one.tokens_ED(2)
        for routing in (one, two, other):
            routing.advance()
        assert (one.tokens_ED(2) != before).any()


def test_no_skew_and_no_drift():
    routing = generate(Skew(0.0, 1.0, device_spread=0.0), tokens=6400)
    assert (routing.tokens_ED(0) == 400).all()
    still = generate(Skew(0.03, 1.0))
    before = still.share_LE
    still.advance()
    np.testing.assert_allclose(still.share_LE, before)


def test_shares_stay_below_one_kth():
    share_XE = capped_softmax(np.array([[9.0, 8.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 2)
    np.testing.assert_allclose(share_XE.sum(axis=1), 1.0)
    assert share_XE.max() <= 0.5 + 1e-12
    assert share_XE[0, :2] == pytest.approx([0.5, 0.4995], abs=1e-4)
    assert typical_share_std(64, 4) < most_share_std(64, 4) == pytest.approx(np.std([0.25] * 4 + [0.0] * 60))


@pytest.mark.parametrize(
    ("skew", "message"),
    [
        ({"share_std": -1.0}, "share_std is -1.0; it must be zero or more"),
        ({"share_std": 0.1, "r2": 0.0}, "r2 is 0.0"),
        ({"share_std": 0.1, "device_spread": 2.0}, "device_spread is 2.0"),
        ({"share_std": 0.1, "layer_spread": 2.0}, "layer_spread is 2.0"),
    ],
)
def test_bad_skews_are_refused(skew, message):
    with pytest.raises(ConfigError, match=message):
        Skew(**skew)


def test_a_skew_that_top_k_forbids_is_refused():
    with pytest.raises(ConfigError, match=r"share_std is 0.2; it must be at most 0.0593, with top-4"):
        generate(Skew(0.2))


def test_recorded_routing_comes_back_and_begins_again(tmp_path):
    tokens_ILED = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(np.int32)
    np.savez(tmp_path / "routing.npz", tokens=tokens_ILED, iteration=np.arange(2))
    routing = read_routing(tmp_path / "routing.npz")
    assert (routing.shape, routing.num_iterations) == ((3, 4, 5), 2)
    for step in (0, 1, 0):
        np.testing.assert_array_equal(routing.tokens_ED(2), tokens_ILED[step, 2])
        routing.advance()
    assert isinstance(routing, RecordedRouting)


def test_a_recording_is_scaled_to_any_batch():
    recorded = RecordedRouting(np.array([[[[3, 0, 1], [1, 0, 2]]]]))
    scaled = recorded.scaled_to(8)
    assert scaled.tokens_ED(0).tolist() == [[6, 0, 3], [2, 0, 5]]
    assert scaled.from_start().shape == recorded.shape == (1, 2, 3)
    assert recorded.prediction_r2([1, 5]) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"nonsense", "cannot be read"),
        ({"load": np.ones(3)}, "cannot be read"),
        ({"tokens": np.ones((2, 3, 4, 5))}, "holds float64"),
        ({"tokens": np.ones((2, 3, 4), dtype=int)}, r"of shape \(2, 3, 4\)"),
        ({"tokens": np.full((1, 1, 1, 1), -1)}, "must be counts"),
    ],
)
def test_bad_traces_are_refused_in_a_line(tmp_path, content, message):
    path = tmp_path / "routing.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_routing(path)
    assert "\n" not in str(caught.value)


def test_too_short_for_r2():
    with pytest.raises(ConfigError, match="5 iterations are too few"):
        prediction_r2(np.ones((5, 2)))
