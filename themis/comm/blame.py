"""Who is to blame when an operation with peers failed or ran out of time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from themis.comm.beats import Beat, Channel, Heartbeat
from themis.core.errors import PeerError

#: A rank is taken for dead or frozen when it misses this many beats.
MISSED_BEATS = 3


@final
@dataclass(frozen=True)
class Verdict:
    """The ranks at fault, none if unknown, and what is known about each in words."""

    ranks: tuple[int, ...]
    reasons: tuple[str, ...]


def judge(
    before: Mapping[int, Beat], after: Mapping[int, Beat], world_size: int, rank: int, channel: Channel, now_s: float
) -> Verdict:
    """Compare two readings of all records, `MISSED_BEATS` beats apart, from the view of `rank` waiting in `channel`.

    First the ranks that have gone (no beat, or left), and whom they or others accused before; a rank that went
    because of another is not to blame. Else the ranks that have not come to the operation, or that came to another
    one in its place. `now_s` is the wall clock. Clocks of machines may differ, so ages only inform; what decides is
    whether a record changed.
    """
    others = [other for other in range(world_size) if other != rank]
    accused = {culprit for other in others if other in after for culprit in after[other].accused}
    gone = {other for other in others if _has_gone(other, before, after) and not _accuses(after.get(other))}
    culprits = tuple(sorted(accused | gone)) or _behind(after, rank, channel) or tuple(_astray(after, rank, channel))
    return Verdict(culprits, tuple(_why(culprit, rank, channel, gone, after, now_s) for culprit in culprits))


def _has_gone(rank: int, before: Mapping[int, Beat], after: Mapping[int, Beat]) -> bool:
    if rank not in after or after[rank].left:
        return True
    return rank in before and before[rank].count == after[rank].count


def _accuses(beat: Beat | None) -> bool:
    return beat is not None and bool(beat.accused)


def _why(culprit: int, rank: int, channel: Channel, gone: set[int], after: Mapping[int, Beat], now_s: float) -> str:
    if words := _astray(after, rank, channel).get(culprit):
        return words
    if culprit == rank:
        return f"the other ranks gave up waiting for this rank ({rank})"
    if culprit not in after:
        return f"rank {culprit} never joined"
    beat = after[culprit]
    if beat.left:
        return f"rank {culprit} has left; it was last {beat.latest()}"
    if culprit in gone:
        return f"rank {culprit} stopped responding {beat.latest()}; it was last seen {now_s - beat.wall_s:.1f} s ago"
    if culprit in _behind(after, rank, channel):
        return f"rank {culprit} has not come to it; it is {beat.latest()}"
    return f"other ranks hold rank {culprit} responsible"


def _behind(beats: Mapping[int, Beat], rank: int, channel: Channel) -> tuple[int, ...]:
    """The ranks that keep `rank` waiting in `channel`, following those that themselves wait in another channel.

    What a rank saves in the background keeps it from nothing else.
    """
    direct = _late(beats, rank, channel)
    culprits: set[int] = set()
    seen = {(rank, channel)}
    frontier = [(other, channel) for other in direct]
    while frontier:
        other, cause = frontier.pop()
        if (other, cause) in seen:
            continue
        seen.add((other, cause))
        running = [
            c
            for c, operation in beats[other].operations.items()
            if operation.running and c not in (cause, Channel.SAVING)
        ]
        waits_for = [(further, c) for c in running for further in _late(beats, other, c)]
        frontier += waits_for
        if not waits_for:
            culprits.add(other)
    return tuple(sorted(culprits)) or direct


def _astray(beats: Mapping[int, Beat], rank: int, channel: Channel) -> dict[int, str]:
    """The ranks that take the operation of `channel` that `rank` is in for another than most ranks do, in words."""
    number = _number(beats[rank], channel)
    present = {r: o.name for r, beat in beats.items() if (o := beat.operations.get(channel)) and o.number == number}
    if len(set(present.values())) < 2:
        return {}
    count, mine = Counter(present.values()), present[rank]
    common = max(count, key=lambda name: (count[name], name == mine))
    strays = [r for r in sorted(present) if present[r] != common]
    return {r: f"rank {r} is in {present[r]} while the others are in {common}" for r in strays}


def _late(beats: Mapping[int, Beat], rank: int, channel: Channel) -> tuple[int, ...]:
    mine = _number(beats[rank], channel)
    return tuple(other for other in sorted(beats) if other != rank and _number(beats[other], channel) < mine)


def _number(beat: Beat, channel: Channel) -> int:
    operation = beat.operations.get(channel)
    return operation.number if operation else 0


def diagnose(heartbeat: Heartbeat, channel: Channel, name: str, cause: str) -> PeerError:
    """The PeerError for operation `name` of `channel`, which failed with `cause`; takes MISSED_BEATS beats."""
    pause_s = MISSED_BEATS * heartbeat.beat_s
    readings: list[dict[int, Beat]] = []

    def read_twice() -> None:
        try:
            readings.append(heartbeat.read())
            time.sleep(pause_s)
            readings.append(heartbeat.read())
        except RuntimeError:
            return

    # In a thread of its own, for a store whose host is frozen answers never.
    reader = threading.Thread(target=read_twice, name="themis-diagnosis", daemon=True)
    reader.start()
    reader.join(pause_s + heartbeat.beat_s)
    if len(readings) < 2:
        return PeerError(
            f"{name} failed and the rendezvous store does not answer: the process that hosts it "
            "(rank 0, or the launcher on rank 0's machine) is gone",
            (0,),
        )
    verdict = judge(readings[0], readings[1], heartbeat.world_size, heartbeat.rank, channel, time.time())
    heartbeat.accuse(verdict.ranks)
    reasons = "; ".join(verdict.reasons) or f"every rank is alive and has come to it ({cause})"
    return PeerError(f"{name} failed: {reasons}", verdict.ranks)
