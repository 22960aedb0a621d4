"""The parent's end of the workers: start them, command them, wait for them, notice how they end.

`ProcessPool` has child processes; `LocalPool` has the same environments in this process, obeyed at
once. Both fill the same slots and collect the same `faults`, so a loop cannot tell them apart.
Not here: which environment is to do what (`_core.schedule`), and what a fault means (`loops`).
The rule that must hold: every wait also watches the workers, and `close` is bounded.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np

from envrunner._transport.host import EnvHost, Fault, check_same_spaces, describe_fault
from envrunner._transport.launcher import Launcher, launch
from envrunner._transport.slots import IN_PIPE, Command, InfoOf, Phase, SlotPlan, Slots, cells
from envrunner._transport.wakeup import AdaptiveWait
from envrunner._transport.worker import Built, Job, LargeInfo

_LOOK_EVERY_S = 0.05  # pipes and deaths are looked at this often even while every wait is answered at once
_NAP_S = 0.005  # rows published without a ring, before a reset that was expected to be quick, are seen by then
_CLOSE_GRACE_S = 3.0  # for env.close() and a step that is under way; then SIGKILL


@dataclass(frozen=True, slots=True)
class Death:
    """A worker process ended by itself."""

    lost_env_ids: tuple[int, ...]
    env_id: int  # the one it was inside of, or its first
    phase: Phase
    exit_code: int | None
    signal: str | None


@dataclass(frozen=True, slots=True)
class NotReady:
    """Environments that were not built, or had no first observation, in time."""

    env_ids: tuple[int, ...]
    phase: Phase
    timeout_s: float


Problem = Fault | Death | NotReady


class PoolError(Exception):
    """A pool could not start; carries the problem for the loop to put in words."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


class Pool(Protocol):
    """What a loop needs of its environments, wherever they live."""

    slots: Slots
    problems: deque[Problem]

    def send(self, ids: np.ndarray, command: Command) -> None:
        """Give each of these environments, in index order, one command; its action and seed stand in the slots."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when something may have happened, somebody called `wake`, or the time is over."""

    def wake(self) -> None:
        """End a `wait`, from any thread or signal handler."""

    def info(self, env_id: int, which: InfoOf) -> dict[str, Any]:
        """The info that the slots announce for this environment."""

    def close(self) -> None:
        """End everything within 5 s; may be called again."""


class ProcessPool:
    """Environments in worker processes over one block of shared memory.

    Args:
        factories: one per environment; pickled by value where they must be, once per distinct one.
        num_workers: processes; the environments are dealt out in contiguous runs.
        seed: decides each process's global random generators.
        start_timeout_s: for constructors, from now.

    Raises:
        PoolError: an environment could not be built; nothing is left running.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], gymnasium.Env]],
        *,
        num_workers: int,
        seed: int | None,
        start_timeout_s: float | None,
    ) -> None:
        self.problems: deque[Problem] = deque()
        self._owner = os.getpid()
        self._closed = False
        self._woken = False
        self._next_look = 0.0
        self._infos: dict[tuple[int, InfoOf], LargeInfo] = {}
        num_envs = len(factories)
        bounds = [num_envs * worker // num_workers for worker in range(num_workers + 1)]
        self._ranges = [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]
        self._bounds = np.array(bounds)
        self._worker_of = [worker for worker, ids in enumerate(self._ranges) for _ in ids]
        self._built: dict[int, Built] = {}
        self._alive = set(range(num_workers))
        blobs, which = pickle_factories(factories)
        deadline = math.inf if start_timeout_s is None else time.monotonic() + start_timeout_s
        self._launcher: Launcher = launch(num_workers, timeout_s=start_timeout_s)
        self._selector = selectors.DefaultSelector()
        self._pipes: list[Connection] = []
        try:
            self._pipes = self._launcher.start()
            for worker, pipe in enumerate(self._pipes):
                self._watch(pipe.fileno(), functools.partial(self._read_pipe, worker))
            for fd, silence in self._launcher.bells().items():
                self._watch(fd, silence)
            if (ends := self._launcher.ends_fileno()) is not None:
                self._watch(ends, self._read_ends)
            for worker, ids in enumerate(self._ranges):
                used = sorted({which[env_id] for env_id in ids})
                job = Job(
                    first=ids.start,
                    factories=tuple(blobs[k] for k in used),
                    which=tuple(used.index(which[env_id]) for env_id in ids),
                    seed=seed,
                    working_directory=os.getcwd(),
                    groups=_halves(ids),
                )
                self._try_send(worker, job)
            self._await_built(deadline, start_timeout_s)
            self._lay_slots()
        except BaseException:
            self.close()
            raise

    def _await_built(self, deadline: float, timeout_s: float | None) -> None:
        while len(self._built) < len(self._ranges):
            if self.problems:
                raise PoolError(self.problems[0])
            left = deadline - time.monotonic()
            if left <= 0:
                late = [ids for worker, ids in enumerate(self._ranges) if worker not in self._built]
                ids = tuple(env_id for run in late for env_id in run)
                raise PoolError(NotReady(ids, Phase.CONSTRUCTOR, timeout_s or 0.0))
            self._sleep(None if left == math.inf else left)

    def _lay_slots(self) -> None:
        first = self._built[0]
        spaces = (first.observation_space, first.action_space)
        for worker, ids in enumerate(self._ranges):
            other = self._built[worker]
            try:
                check_same_spaces(spaces, (other.observation_space, other.action_space), 0, ids.start)
            except ValueError as error:
                raise PoolError(describe_fault(ids.start, Phase.CONSTRUCTOR, error)) from None
        plan = SlotPlan(int(self._bounds[-1]), len(self._ranges), *spaces)
        self.slots = plan.lay_over(self._launcher.memory(plan.num_bytes()))
        self._kicks = [cells(row) for row in self.slots.kick]
        self._is_due = _tick_watch(self.slots.tick, lambda: self._woken)
        self._waiter = AdaptiveWait(self._is_due, self._sleep)
        for worker in range(len(self._ranges)):
            self._try_send(worker, plan)

    def _try_send(self, worker: int, message: Any) -> None:
        try:
            self._pipes[worker].send(message)
        except ConnectionError:
            pass  # it has ended; its end is about to be reported

    # -- working ---------------------------------------------------------------------------------

    def send(self, ids: np.ndarray, command: Command) -> None:
        if self._closed:
            return
        slots = self.slots
        where: Any = slice(ids[0], ids[-1] + 1) if ids[-1] - ids[0] == len(ids) - 1 else ids
        slots.command[where] = command
        slots.sent[where] += 1
        first, last = self._worker_of[ids[0]], self._worker_of[ids[-1]]
        if first == last:
            self._kick(first)
            return
        cuts = np.searchsorted(ids, self._bounds[first : last + 2])
        for worker in range(first, last + 1):
            if cuts[worker - first] < cuts[worker - first + 1]:
                self._kick(worker)

    def _kick(self, worker: int) -> None:
        kick = self._kicks[worker]
        kick[0] = (kick[0] + 1) & 0xFFFFFFFF
        self._launcher.kick(worker)

    def wait(self, timeout_s: float | None) -> None:
        self._waiter.wait(_NAP_S if timeout_s is None else min(timeout_s, _NAP_S))
        self._woken = False
        if time.monotonic() >= self._next_look:
            self._sleep(0)

    def wake(self) -> None:
        self._woken = True
        if not self._closed:
            self._launcher.ring()

    def _watch(self, fd: int, read: Callable[[], Any]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, read)

    def _unwatch(self, fd: int | None) -> None:
        if fd is not None and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _sleep(self, timeout_s: float | None) -> None:
        """Sleep until anything is readable, and read it."""
        if self._launcher.ends_fileno() is None:  # nothing becomes readable when a process ends: look
            timeout_s = min(_LOOK_EVERY_S if timeout_s is None else timeout_s, _LOOK_EVERY_S)
            self._read_ends()
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._next_look = time.monotonic() + _LOOK_EVERY_S

    def _read_pipe(self, worker: int) -> None:
        pipe = self._pipes[worker]
        try:
            while pipe.poll():
                message = pickle.loads(pipe.recv_bytes())
                if isinstance(message, Built):
                    self._built[worker] = message
                elif isinstance(message, LargeInfo):
                    self._infos[message.env_id, message.which] = message
                else:
                    self.problems.append(message)
        except (EOFError, OSError):
            if not pipe.closed:
                self._unwatch(pipe.fileno())  # how it ended is the launcher's to report

    def _read_ends(self) -> None:
        try:
            ended = self._launcher.ended()
        except EOFError:  # the launcher is gone, and the kernel has killed its workers
            self._unwatch(self._launcher.ends_fileno())
            ended = [(worker, -signal.SIGKILL) for worker in sorted(self._alive)]
        for worker, exit_code in ended:
            if worker not in self._alive:
                continue
            self._alive.discard(worker)
            self._read_pipe(worker)  # what it said before it ended
            if not self._closed and not any(_is_of(problem, self._ranges[worker]) for problem in self.problems):
                self.problems.append(self._death(worker, exit_code))

    def _death(self, worker: int, exit_code: int) -> Death:
        ids = self._ranges[worker]
        env_id, phase = ids.start, Phase.CONSTRUCTOR
        if hasattr(self, "slots"):
            stamped, phase_number = self.slots.at[worker, :2].tolist()
            env_id, phase = (stamped if stamped in ids else ids.start), Phase(phase_number)
        name = signal.Signals(-exit_code).name if exit_code < 0 else None
        return Death(tuple(ids), env_id, phase, None if name else exit_code, name)

    def info(self, env_id: int, which: InfoOf) -> dict[str, Any]:
        size = int(self.slots.info_size[env_id, which])
        if size != IN_PIPE:
            return _load_info(self.slots, env_id, which, size)
        number = int(self.slots.sent[env_id])
        while (found := self._infos.get((env_id, which))) is None or found.number != number:  # it is being written
            if self._worker_of[env_id] not in self._alive:
                return {"envrunner": "lost: the worker died before it had sent this info"}
            self._sleep(_LOOK_EVERY_S)
        del self._infos[env_id, which]
        return pickle.loads(found.data)  # type: ignore[no-any-return]

    # -- ending ----------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._owner:  # a fork's copy closes nothing
            self._launcher.abandon()
            return
        deadline = time.monotonic() + _CLOSE_GRACE_S
        if hasattr(self, "slots"):
            self.slots.closing[0] = 1
            for worker in self._alive:
                self._kick(worker)
        for pipe in self._pipes:
            self._unwatch(pipe.fileno())
            _shut_down(pipe)  # a worker that writes or reads is released
        while self._alive and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)
        self._selector.close()
        self._launcher.close()

    @property
    def process_ids(self) -> dict[int, int]:
        """worker -> process id of those that live."""
        return self._launcher.process_ids()


class LocalPool:
    """Environments in this process; a command is obeyed before `send` returns.

    Raises:
        PoolError: an environment could not be built.
    """

    def __init__(self, factories: Sequence[Callable[[], gymnasium.Env]], *, seed: int | None) -> None:
        self.problems: deque[Problem] = deque()
        self._infos: dict[tuple[int, InfoOf], bytes] = {}
        self._host = EnvHost(
            0,
            factories,
            seed=seed,
            report=self.problems.append,
            send_info=lambda env_id, which, data: self._infos.update({(env_id, which): data}),
            publish=lambda wake: None,
        )
        spaces = self._host.build()
        if spaces is None:
            self._host.close()
            raise PoolError(self.problems[0])
        plan = SlotPlan(len(factories), 1, *spaces)
        self.slots = plan.lay_over(bytearray(plan.num_bytes()))
        self._host.attach(self.slots)

    def send(self, ids: np.ndarray, command: Command) -> None:
        self.slots.command[ids] = command
        self.slots.sent[ids] += 1
        self._host.obey(ids.tolist())

    def wait(self, timeout_s: float | None) -> None:
        """Nothing is ever in flight here."""

    def wake(self) -> None:
        """Nobody ever sleeps here."""

    def info(self, env_id: int, which: InfoOf) -> dict[str, Any]:
        size = int(self.slots.info_size[env_id, which])
        if size != IN_PIPE:
            return _load_info(self.slots, env_id, which, size)
        return pickle.loads(self._infos[env_id, which])  # type: ignore[no-any-return]

    def close(self) -> None:
        self._host.close()


def pickle_factories(factories: Sequence[Callable[[], gymnasium.Env]]) -> tuple[list[bytes], list[int]]:
    """(pickles, which): each distinct factory once; environment i is built from `pickles[which[i]]`.

    Raises:
        PoolError: a factory cannot be pickled.
    """
    blobs: list[bytes] = []
    known: dict[int, int] = {}
    for env_id, factory in enumerate(factories):
        if id(factory) not in known:
            known[id(factory)] = len(blobs)
            try:
                blobs.append(cloudpickle.dumps(factory, pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                fault = describe_fault(env_id, Phase.CONSTRUCTOR, error)
                raise PoolError(
                    Fault(
                        env_id,
                        Phase.CONSTRUCTOR,
                        False,
                        f"{fault.summary}. Its factory has to travel to another process: create locks, sockets and "
                        "open files inside the factory, not outside",
                        fault.traceback,
                    )
                ) from error
    return blobs, [known[id(factory)] for factory in factories]


def _halves(ids: range) -> tuple[range, ...]:
    """Two groups a worker, so that it steps one while the policy sees the other."""
    middle = ids.start + (len(ids) + 1) // 2
    return tuple(group for group in (range(ids.start, middle), range(middle, ids.stop)) if group)


def _tick_watch(tick: np.ndarray, woken: Callable[[], bool]) -> Callable[[], bool]:
    """`is_due()`: a worker has published since `is_due` was last true, or `woken()`."""
    seen = tick[:, 0].copy()
    counters = [cells(row) for row in tick]
    if len(counters) > 8:

        def any_of_many() -> bool:
            if (tick[:, 0] == seen).all():
                return woken()
            seen[:] = tick[:, 0]
            return True

        return any_of_many
    last = [int(value) for value in seen]

    def any_of_few() -> bool:
        due = woken()
        for worker, counter in enumerate(counters):
            if counter[0] != last[worker]:
                last[worker] = counter[0]
                due = True
        return due

    return any_of_few


def _load_info(slots: Slots, env_id: int, which: InfoOf, size: int) -> dict[str, Any]:
    return pickle.loads(slots.info[env_id, which, :size].tobytes()) if size else {}


def _is_of(problem: Problem, ids: range) -> bool:
    return isinstance(problem, Fault) and problem.env_id in ids and problem.phase is Phase.CONSTRUCTOR


def _shut_down(pipe: Any) -> None:
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has gone first
    pipe.close()
