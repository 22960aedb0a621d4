"""Looking at processes from outside (Linux: /proc), and waiting for what must come, with a bound."""

from __future__ import annotations

import os
import time


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`; zombies and multiprocessing's resource tracker left out."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{name}/cmdline", "rb") as file:
                is_tracker = b"resource_tracker" in file.read()
        except OSError:
            continue
        if fields[0] != "Z" and not is_tracker:
            parents[int(name)] = int(fields[1])
    found, todo = [], [pid]
    while todo:
        above = todo.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        todo += below
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 10.0) -> float:
    """Return how long it took until `condition()`, or fail."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {condition}"
        time.sleep(0.002)
    return time.monotonic() - began
