"""What every test is held to: it leaves no process, descriptor or shared memory behind."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from processes import descendants

from envrunner._core import schedule

schedule.CHECK_MOVES = True


def _left_behind() -> dict[str, object]:
    return {
        "processes": descendants(os.getpid()),
        "shared memory": sorted(os.listdir("/dev/shm")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What a module has imported is out of the collector's way: a collection after each test costs little then."""
    gc.freeze()


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT, also where the suite was started with the signal ignored (`&`, nohup)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = _left_behind()
    yield
    gc.collect()
    after = _left_behind()
    assert after["processes"] == before["processes"], "child processes are left"
    assert after["shared memory"] == before["shared memory"], "shared memory is left"
    assert after["descriptors"] <= before["descriptors"], "file descriptors are left"
