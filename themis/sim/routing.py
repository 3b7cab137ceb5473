"""Where tokens go: from a generator with a set skew and drift, or from a recorded run."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError, require
from themis.planning.compiled import compiled
from themis.sim.workload import Workload

#: Iterations that the load predictor averages over (section 4.2).
WINDOW = 5
#: Skew as a part of the largest standard deviation that top-K allows. Fine-grained experts, four or more a token: what
#: figure 16a measures for Qwen1.5-MoE, 0.0455 of 0.0605. Coarse ones: set so that EP's slowdown against Uniform spans
#: what section 5.2 says, 1.48 to 2.87 (docs/reproduction.md).
FINE_SKEW, COARSE_SKEW = 0.752, 0.20
FINE_TOP_K = 4


class Routing(ABC):
    """A source of the gate's counts, iteration by iteration."""

    @abstractmethod
    def advance(self) -> None:
        """Go on to the next iteration."""

    @abstractmethod
    def tokens_ED(self, layer: int) -> NDArray[np.int64]:
        """int64 [E, D]: this iteration's tokens of each device for each expert of `layer`."""


@final
@dataclass(frozen=True)
class Skew:
    """What the generator aims at.

    share_std: standard deviation of the experts' shares of a layer's tokens, mean over layers; r2: R² of the mean of
    the last five loads as a prediction of the next; device_spread: standard deviation, relative, of a device's tokens
    for an expert; layer_spread: the same of share_std over layers.
    """

    share_std: float
    r2: float = 0.99
    device_spread: float = 0.2
    layer_spread: float = 0.12

    def __post_init__(self) -> None:
        require(self.share_std >= 0, "share_std", self.share_std, "zero or more")
        require(0 < self.r2 <= 1, "r2", self.r2, "above 0 and at most 1")
        require(0 <= self.device_spread <= 0.5, "device_spread", self.device_spread, "between 0 and 0.5")
        require(0 <= self.layer_spread <= 0.5, "layer_spread", self.layer_spread, "between 0 and 0.5")


@final
class GeneratedRouting(Routing):
    """Expert popularity as a softmax of drifting scores, capped at the 1/K that distinct experts allow.

    Scores follow an autoregression of unit variance, one for each layer and expert, whose step is set by `skew.r2`;
    their scale is set by `skew.share_std`. Each device's counts vary about the shares, anew in each iteration, and sum
    to tokens * K. Same seed, same counts.
    """

    def __init__(
        self, num_layers: int, num_experts: int, top_k: int, num_devices: int, tokens: int, skew: Skew, seed: int
    ) -> None:
        most = most_share_std(num_experts, top_k)
        require(
            skew.share_std <= 0.98 * most, "share_std", skew.share_std, f"at most {0.98 * most:.4f}, with top-{top_k}"
        )
        self._top_k, self._tokens, self._num_devices = top_k, tokens, num_devices
        self._spread, self._seed, self._iteration = skew.device_spread, seed, 0
        self._random = np.random.default_rng(seed)
        factor_L = 1.0 + skew.layer_spread * np.clip(self._random.standard_normal(num_layers), -2.0, 2.0)
        factor_L *= num_layers / factor_L.sum()
        wanted_L = np.minimum(skew.share_std * factor_L, 0.98 * most)
        self._scale_L = np.array([score_scale(float(wanted), num_experts, top_k) for wanted in wanted_L])
        self._keep = _persistence(skew, num_experts, top_k, num_devices, float(self._scale_L.mean()))
        self._score_LE = self._random.standard_normal((num_layers, num_experts))
        self._share_LE = self._shares()

    @staticmethod
    def for_workload(workload: Workload, skew: Skew, seed: int) -> GeneratedRouting:
        """Routing of `workload`'s layers, experts, devices and tokens."""
        model, devices = workload.model, workload.cluster.num_devices
        return GeneratedRouting(model.num_layers, model.num_experts, model.top_k, devices, workload.tokens, skew, seed)

    def _shares(self) -> NDArray[np.float64]:
        return capped_softmax(self._scale_L[:, None] * self._score_LE, self._top_k)

    @property
    def share_LE(self) -> NDArray[np.float64]:
        """float64 [L, E]: this iteration's shares, before devices vary about them."""
        return self._share_LE

    def advance(self) -> None:
        """See Routing."""
        step = np.sqrt(1.0 - self._keep**2)
        self._score_LE = self._keep * self._score_LE + step * self._random.standard_normal(self._score_LE.shape)
        self._share_LE = self._shares()
        self._iteration += 1

    def tokens_ED(self, layer: int) -> NDArray[np.int64]:
        """See Routing."""
        key = np.uint64((self._seed * 1_000_003 + self._iteration * 4099 + layer) % 2**63)
        out: NDArray[np.int64] = _assign(
            self._share_LE[layer], self._num_devices, self._tokens, self._top_k, np.sqrt(3.0) * self._spread, key
        )
        return out


@final
class RecordedRouting(Routing):
    """A recorded run's counts, `tokens_ILED` [iteration, layer, expert, rank]; after its end it begins again."""

    def __init__(self, tokens_ILED: NDArray[np.integer[Any]]) -> None:
        self._tokens_ILED = tokens_ILED
        self._iteration = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, E, D)."""
        _, layers, experts, devices = self._tokens_ILED.shape
        return layers, experts, devices

    @property
    def num_iterations(self) -> int:
        """Iterations recorded."""
        return int(self._tokens_ILED.shape[0])

    def from_start(self) -> RecordedRouting:
        """The same recording, at its first iteration."""
        return RecordedRouting(self._tokens_ILED)

    def scaled_to(self, assignments: int) -> RecordedRouting:
        """The same shares, each device's counts summing to `assignments`; a device without tokens stays without."""
        running_ILED = np.cumsum(self._tokens_ILED, axis=2, dtype=np.float64)
        total_IL1D = np.maximum(running_ILED[:, :, -1:], 1.0)
        upto_ILED = np.rint(running_ILED * (assignments / total_IL1D)).astype(np.int64)
        return RecordedRouting(np.diff(upto_ILED, axis=2, prepend=0))

    def prediction_r2(self, windows: Sequence[int]) -> dict[int, float]:
        """R² of the mean of so many iterations' loads as a prediction of the next, by window that is short enough."""
        load_ILE = self._tokens_ILED.sum(axis=3, dtype=np.float64)
        share_ILE = load_ILE / np.maximum(load_ILE.sum(axis=2, keepdims=True), 1.0)
        flat_IX = share_ILE.reshape(self.num_iterations, -1)
        return {w: prediction_r2(flat_IX, w) for w in windows if w < self.num_iterations}

    def advance(self) -> None:
        """See Routing."""
        self._iteration = (self._iteration + 1) % self.num_iterations

    def tokens_ED(self, layer: int) -> NDArray[np.int64]:
        """See Routing."""
        return np.ascontiguousarray(self._tokens_ILED[self._iteration, layer], dtype=np.int64)


def read_routing(path: Path) -> RecordedRouting:
    """The routing of a `routing.npz` (`themis train` writes one); ConfigError in one line for anything else."""
    if not path.is_file():
        raise ConfigError(f"trace {str(path)!r} does not exist; give a routing.npz that a run recorded")
    try:
        with np.load(path) as stored:
            tokens = stored["tokens"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}; it must hold `tokens` [I, L, E, D]") from None
    if tokens.ndim != 4 or tokens.dtype.kind not in "iu" or tokens.size == 0 or tokens.min() < 0:
        raise ConfigError(
            f"trace {str(path)!r} holds {tokens.dtype} of shape {tokens.shape}; `tokens` must be counts [I, L, E, D]"
        )
    return RecordedRouting(tokens)


def most_share_std(num_experts: int, top_k: int) -> float:
    """The standard deviation of shares when K experts take everything."""
    return float(np.sqrt(num_experts / top_k - 1) / num_experts)


def typical_share_std(num_experts: int, top_k: int) -> float:
    """A skew for a model nobody has measured: a typical part of the largest standard deviation there can be."""
    return (FINE_SKEW if top_k >= FINE_TOP_K else COARSE_SKEW) * most_share_std(num_experts, top_k)


def capped_softmax(score_XE: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Softmax over the last axis, no share above 1/K: what is above goes to the others in proportion."""
    share_XE: NDArray[np.float64] = np.exp(score_XE - score_XE.max(axis=-1, keepdims=True))
    share_XE /= share_XE.sum(axis=-1, keepdims=True)
    cap = 1.0 / top_k
    for _ in range(top_k):
        full_XE = share_XE >= cap
        if not (share_XE > cap * (1 + 1e-12)).any():
            break
        rest_X1 = np.where(full_XE, 0.0, share_XE).sum(axis=-1, keepdims=True)
        left_X1 = 1.0 - cap * full_XE.sum(axis=-1, keepdims=True)
        share_XE = np.where(
            full_XE, cap, share_XE * np.divide(left_X1, rest_X1, out=np.ones_like(rest_X1), where=rest_X1 > 0)
        )
    return share_XE


def prediction_r2(share_IX: NDArray[np.float64], window: int = WINDOW) -> float:
    """R² of the mean of `window` rows as the prediction of the next, over all columns [iteration, anything]."""
    if share_IX.shape[0] <= window:
        raise ConfigError(f"{share_IX.shape[0]} iterations are too few for R²; there must be more than {window}")
    sums_IX = np.cumsum(np.concatenate([np.zeros_like(share_IX[:1]), share_IX]), axis=0)
    predicted_IX = (sums_IX[window:-1] - sums_IX[: -window - 1]) / window
    actual_IX = share_IX[window:]
    spread = float(((actual_IX - actual_IX.mean()) ** 2).sum())
    return 1.0 - float(((actual_IX - predicted_IX) ** 2).sum()) / spread if spread > 0 else 1.0


def score_scale(share_std: float, num_experts: int, top_k: int) -> float:
    """The scale of unit normal scores at which shares have this standard deviation; bisection on fixed draws."""
    if share_std == 0 or num_experts == 1:
        return 0.0
    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if scaled_std(middle, num_experts, top_k) < share_std else (low, middle)
    return (low + high) / 2


def scaled_std(scale: float, num_experts: int, top_k: int) -> float:
    """The standard deviation of shares whose scores are unit normal ones times `scale`, over fixed draws."""
    draws_XE = np.random.default_rng(0).standard_normal((max(4, 4096 // num_experts), num_experts))
    return float(capped_softmax(scale * draws_XE, top_k).std(axis=1).mean())


def _persistence(skew: Skew, num_experts: int, top_k: int, num_devices: int, scale: float) -> float:
    """The autoregression's coefficient at which the five-iteration prediction of loads reaches `skew.r2`.

    What devices vary by lowers R² too, by an amount that follows from `device_spread`; drift has the rest.
    """
    if scale == 0.0:
        return 1.0
    layers, iterations = max(1, 1024 // num_experts), 240
    random = np.random.default_rng(1)
    start_LE = random.standard_normal((layers, num_experts))
    shocks_ILE = random.standard_normal((iterations, layers, num_experts))
    share_LE = capped_softmax(scale * start_LE, top_k)
    noise = (1 + 1 / WINDOW) * skew.device_spread**2 / num_devices * float((share_LE**2).mean() / share_LE.var())
    missing = max(1.0 - skew.r2 - noise, 0.0)
    if missing == 0.0:
        return 1.0

    def shortfall(change: float) -> float:
        score_LE, rows = start_LE, []
        for shock_LE in shocks_ILE:
            rows.append(capped_softmax(scale * score_LE, top_k).ravel())
            score_LE = (1 - change) * score_LE + np.sqrt(1 - (1 - change) ** 2) * shock_LE
        return 1.0 - prediction_r2(np.stack(rows))

    low, high = np.log(missing / 4.4) - 3.0, min(0.0, np.log(missing / 4.4) + 3.0)
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (middle, high) if shortfall(float(np.exp(middle))) < missing else (low, middle)
    return 1.0 - float(np.exp((low + high) / 2))


@compiled
def _noise(key: Any, index: Any) -> Any:
    """Uniform in [-1, 1), from a counter (splitmix64): the same whatever the order of calls."""
    x = key + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * (2.0 / 9007199254740992.0) - 1.0


@compiled
def _assign(share_E: Any, num_devices: Any, tokens: Any, top_k: Any, spread: Any, key: Any) -> Any:
    """int64 [E, D]: each device's tokens * top_k assignments in proportion to its noisy shares, none above `tokens`."""
    num_experts = share_E.size
    total_D = np.zeros(num_devices)
    for e in range(num_experts):
        for d in range(num_devices):
            total_D[d] += share_E[e] * (1.0 + spread * _noise(key, e * num_devices + d))
    running_D, given_D = np.zeros(num_devices), np.zeros(num_devices, dtype=np.int64)
    tokens_ED = np.empty((num_experts, num_devices), dtype=np.int64)
    wanted = tokens * top_k
    for e in range(num_experts):
        for d in range(num_devices):
            running_D[d] += share_E[e] * (1.0 + spread * _noise(key, e * num_devices + d))
            upto = int(wanted * (running_D[d] / total_D[d]) + 0.5)
            count = min(max(min(upto, wanted) - given_D[d], 0), tokens)
            tokens_ED[e, d] = count
            given_D[d] += count
    for d in range(num_devices):  # what the cap has left over
        e = 0
        while given_D[d] < wanted and e < num_experts:
            more = min(wanted - given_D[d], tokens - tokens_ED[e, d])
            tokens_ED[e, d] += more
            given_D[d] += more
            e += 1
    return tokens_ED
