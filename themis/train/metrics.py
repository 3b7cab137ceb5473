"""What a run writes down: a line of metrics a step, recorded routing, TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from themis.core.errors import ConfigError
from themis.core.files import replace_text

Bytes = dict[str, dict[str, int]]


@final
@dataclass(frozen=True)
class StepMetrics:
    """One step, over all ranks. Bytes and seconds are those since the line before.

    loss includes the router losses, cross_entropy does not (nats a token); imbalance_*_L: busiest over mean device
    of each layer, with every expert at its owner alone and as it ran; replicas_L: copies added in each layer;
    bytes_sent: {collective: {link class: bytes}} summed over ranks; exposed_s: seconds ranks waited, their
    mean, for sparse collectives, token AlltoAlls and small exchanges; waiting for a slower rank shows in these too.
    """

    step: int
    loss: float
    cross_entropy: float
    aux_loss: float
    z_loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    exposed_s: dict[str, float]
    imbalance_before_L: list[float]
    imbalance_after_L: list[float]
    replicas_L: list[int]
    bytes_sent: Bytes
    held_out_loss: float | None = None


@final
class MetricsLog:
    """`metrics.jsonl`, one StepMetrics a line, and TensorBoard. A resumed run cuts back what lies after its step."""

    def __init__(self, directory: Path, resumed_step: int, *, tensorboard: bool | None) -> None:
        self._path = directory / "metrics.jsonl"
        cut_back(self._path, resumed_step)
        self._file = self._path.open("a")
        wanted = tensorboard or (tensorboard is None and _has_tensorboard())
        self._board = _tensorboard(directory / "tensorboard", resumed_step) if wanted else None

    def write(self, metrics: StepMetrics) -> None:
        """Append a line; it is with the operating system when this returns, so that a killed run keeps it."""
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(metrics).items():
                self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


@final
class RoutingLog:
    """`routing.npz`: where tokens went, `tokens` int32 [iteration, layer, expert, rank] and `iteration` int64.

    Held in memory and written whole, so that the file is valid at all times. A run resumed on another number of ranks,
    or over a file that something else has damaged, starts a new one and keeps the old as `routing-before-STEP.npz`.
    """

    def __init__(self, directory: Path, resumed_step: int, world_size: int) -> None:
        self._path = directory / "routing.npz"
        self._records: list[tuple[int, NDArray[np.int32]]] = []
        if not resumed_step or not self._path.exists():
            return
        try:
            with np.load(self._path) as stored:
                records = list(zip(stored["iteration"].tolist(), stored["tokens"], strict=True))
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            records = None
        if records is None or any(tokens_LED.shape[-1:] != (world_size,) for _, tokens_LED in records):
            os.replace(self._path, directory / f"routing-before-{resumed_step + 1}.npz")
            return
        self._records = [(step, tokens_LED) for step, tokens_LED in records if step <= resumed_step]

    def add(self, step: int, tokens_LED: NDArray[np.int64]) -> None:
        """Remember the counts of a step."""
        self._records.append((step, tokens_LED.astype(np.int32)))

    def write(self) -> None:
        """Replace the file."""
        if not self._records:
            return
        steps, tokens = zip(*self._records, strict=True)
        scratch = self._path.with_suffix(".tmp")
        with scratch.open("wb") as file:
            np.savez_compressed(file, iteration=np.array(steps, dtype=np.int64), tokens=np.stack(tokens))
        os.replace(scratch, self._path)


@final
@dataclass(frozen=True)
class Summary:
    """A whole run in numbers: what the closing lines show and `summary.json` holds. Imbalances are means over steps."""

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    imbalance_before: float
    imbalance_after: float
    tokens_per_s: float
    exposed_share: dict[str, float]
    bytes_sent: Bytes
    run_dir: str


def summarise(lines: Iterable[Mapping[str, Any]], run_dir: str) -> Summary:
    """The summary of a run from the lines of its `metrics.jsonl`, resumed parts included.

    The last loss is the mean of the last tenth of the lines, 20 at most; tokens_per_s is the median.
    """
    records = list(lines)
    assert records, "a run has at least one step"
    tail = records[-max(1, min(20, len(records) // 10)) :]
    held_out = [record["held_out_loss"] for record in records if record["held_out_loss"] is not None]
    total_s = sum(record["step_s"] for record in records)
    return Summary(
        steps=records[-1]["step"],
        first_loss=records[0]["cross_entropy"],
        last_loss=float(np.mean([record["cross_entropy"] for record in tail])),
        held_out_loss=held_out[-1] if held_out else None,
        imbalance_before=float(np.mean([record["imbalance_before_L"] for record in records])),
        imbalance_after=float(np.mean([record["imbalance_after_L"] for record in records])),
        tokens_per_s=float(np.median([record["tokens_per_s"] for record in records])),
        exposed_share={
            name: sum(record["exposed_s"][name] for record in records) / total_s if total_s else 0.0
            for name in records[0]["exposed_s"]
        },
        bytes_sent=_add_bytes(record["bytes_sent"] for record in records),
        run_dir=run_dir,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a `metrics.jsonl`, up to one that was cut off by a kill or is no StepMetrics."""
    if not path.exists():
        return []
    names = {item.name for item in fields(StepMetrics)}
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one
            break
        if not isinstance(record, dict) or not names <= record.keys():
            break
        records.append(record)
    return records


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step`, replacing the file whole."""
    kept = [record for record in read_lines(path) if record["step"] <= step]
    replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def _add_bytes(parts: Iterable[Bytes]) -> Bytes:
    total: Bytes = {}
    for part in parts:
        for name, links in part.items():
            sums = total.setdefault(name, {})
            for link, count in links.items():
                sums[link] = sums.get(link, 0) + count
    return total


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    single = {
        name: value
        for name, value in asdict(metrics).items()
        if name != "step" and isinstance(value, int | float) and value is not None
    }
    single |= {f"exposed_s/{name}": value for name, value in metrics.exposed_s.items()}
    for which, values_L in (("before", metrics.imbalance_before_L), ("after", metrics.imbalance_after_L)):
        single |= {f"imbalance_{which}/layer_{layer}": value for layer, value in enumerate(values_L)}
    return single


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _tensorboard(directory: Path, resumed_step: int) -> Any:
    if not _has_tensorboard():
        raise ConfigError("log.tensorboard is on; it needs the package `tensorboard`: pip install 'themis-moe[report]'")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=resumed_step + 1)
