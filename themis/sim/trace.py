"""A recorded iteration in Chrome's trace format, which Perfetto opens: a process a device, a track a lane."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from themis.core.errors import ConfigError
from themis.core.files import replace_text
from themis.sim.timeline import Event

_LANES = {"compute": 0, "intra": 1, "inter": 2}


def trace_events(events: Iterable[Event], num_devices: int, devices_per_node: int) -> list[dict[str, Any]]:
    """Complete events in microseconds, and names of processes and tracks; an idle device has no event."""
    rows: list[dict[str, Any]] = []
    for device in range(num_devices):
        name = f"device {device} (node {device // devices_per_node})"
        rows.append({"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": name}})
        for lane, track in _LANES.items():
            rows.append({"ph": "M", "name": "thread_name", "pid": device, "tid": track, "args": {"name": lane}})
    for event in events:
        for device, seconds in enumerate(event.seconds_D.tolist()):
            if seconds > 0:
                row = {"ph": "X", "name": event.name, "cat": event.lane, "pid": device, "tid": _LANES[event.lane]}
                layer = {"layer": event.layer} if event.layer >= 0 else {}
                rows.append({**row, "ts": event.start_s * 1e6, "dur": seconds * 1e6, "args": layer})
    return rows


def write_trace(path: Path, events: Iterable[Event], num_devices: int, devices_per_node: int) -> None:
    """Write the trace to `path`; ConfigError if that cannot be done."""
    body = {"displayTimeUnit": "ms", "traceEvents": trace_events(events, num_devices, devices_per_node)}
    try:
        replace_text(path, json.dumps(body))
    except OSError as error:
        raise ConfigError(f"trace file {str(path)!r} cannot be written: {error}") from None
