"""The child: what a worker process does from its first message to its end.

First message: what to build. Answer: the spaces, or a fault. Second message: the plan of the shared
slots. From then on commands come through the slots, and the pipe carries only what has no fixed
size: faults, and infos too large for their slot. Ends when told to, or when the pipe breaks.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from gymnasium import Space

from envrunner._transport.host import EnvHost, Fault, describe_fault
from envrunner._transport.slots import CACHE_LINE, InfoOf, Phase, SlotPlan, cells
from envrunner._transport.wakeup import AdaptiveWait


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker is to build.

    `factories` holds pickles, one per distinct factory; `which[i]` is the one of environment `first + i`.
    """

    first: int
    factories: tuple[bytes, ...]
    which: tuple[int, ...]
    seed: int | None
    working_directory: str
    groups: tuple[range, ...]  # published and taken together


@dataclass(frozen=True, slots=True)
class Built:
    """Every environment of a worker is constructed; these are the spaces of its first one."""

    observation_space: Space[Any]
    action_space: Space[Any]


@dataclass(frozen=True, slots=True)
class LargeInfo:
    """An info that did not fit its slot, still pickled."""

    env_id: int
    which: InfoOf
    number: int  # of the command it answers, as in `sent`: that of a dropped row is never taken for a later one's
    data: bytes


def run_worker(
    worker: int,
    pipe: Connection,
    *,
    memory: Callable[[int], Any],
    ring: Callable[[], None],
    sleep: Callable[[float | None], None],
) -> int:
    """Build, obey, close; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        _serve(worker, pipe, memory, ring, sleep)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the pipe: nobody is left to report to
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    return 0


def _serve(worker: int, pipe: Connection, memory: Any, ring: Callable[[], None], sleep: Any) -> None:
    job: Job = pipe.recv()
    os.chdir(job.working_directory)
    writing = threading.Lock()

    def report(fault: Fault) -> None:
        with writing:
            pipe.send(fault)

    def send_info(env_id: int, which: InfoOf, data: bytes) -> None:
        with writing:
            pipe.send(LargeInfo(env_id, which, host.number(env_id), data))

    stamp_cells: list[Any] = []

    def stamp(env_id: int, phase: Phase) -> None:
        if stamp_cells:
            at = stamp_cells[0]
            at[1] = phase
            at[0] = env_id

    tick_cells: list[Any] = []

    def publish(wake: bool) -> None:
        tick = tick_cells[0]
        tick[0] = (tick[0] + 1) & 0xFFFFFFFF
        if wake:
            ring()

    loaded = []
    for offset, k in enumerate(job.which):
        try:
            loaded.append(pickle.loads(job.factories[k]))  # each its own copy: nothing is shared by accident
        except BaseException as error:
            report(describe_fault(job.first + offset, Phase.CONSTRUCTOR, error))
            return
    host = EnvHost(job.first, loaded, seed=job.seed, report=report, send_info=send_info, publish=publish, stamp=stamp)
    host.seed_globals()
    try:
        spaces = host.build()
        if spaces is None:
            return
        pipe.send_bytes(cloudpickle.dumps(Built(*spaces)))
        plan: SlotPlan = pipe.recv()
        slots = plan.lay_over(memory(plan.num_bytes()))
        stamp_cells.append(cells(slots.at[worker]))
        tick_cells.append(cells(slots.tick[worker]))
        host.attach(slots)
        kick, closing = cells(slots.kick[worker]), cells(slots.closing)
        assert len(kick) * kick.itemsize == CACHE_LINE
        seen = -1
        waiter = AdaptiveWait(lambda: kick[0] != seen or closing[0] != 0, sleep)
        while True:
            while not waiter.wait():
                pass
            if closing[0]:
                return
            seen = kick[0]
            for group in job.groups:
                ids = host.pending(group)
                if ids:
                    host.obey(ids)
                    if closing[0]:
                        return
    finally:
        host.close()
