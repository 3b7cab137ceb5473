"""The thread that writes a rank's beats ends with its rank, in peace."""

from __future__ import annotations

import subprocess
import sys

import torch.distributed as dist

from themis.comm.beats import Beat, Heartbeat

#: Beats all the time, so that Python's end nearly always finds the thread inside torch's store.
BUSY = """
import time
import torch.distributed as dist
from themis.comm.beats import Heartbeat
heartbeat = Heartbeat(dist.TCPStore("127.0.0.1", 0, 1, is_master=True), 0, 1, 1e-5)
time.sleep(0.1)
"""


def test_a_process_that_ends_without_closing_does_not_abort():
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_the_last_record_says_that_the_rank_has_left():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    for beat_s in (1e-4, 1.0):
        heartbeat = Heartbeat(store, 0, 1, beat_s)
        heartbeat.accuse((3,))
        heartbeat.stop()
        last = Beat.decode(store.get("0"))
        assert last.left
        assert last.accused == (3,)
