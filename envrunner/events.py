"""What goes on around a run: events to watch it, a way to stop it, a count of how far it is.

Decided here: what an event carries, and when `Interrupter` and `Progress` call back. Not here:
when a loop sends which event, and how it ends a call early (`loops`).

The rule that must hold: `stop()` may be called from anywhere, a signal handler included, and
whoever waits inside `waking` is woken: a stop is never lost between looking and waiting.

As in burn, with `EpisodeAbandoned` besides.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from envrunner.types import EpisodeSummary, TimeStep


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """How far a run was at one moment.

    Attributes:
        items_processed: delivered so far.
        items_total: how many are wanted, or None if nobody said.
        unit: what is counted, in the plural: "steps".
    """

    items_processed: int
    items_total: int | None
    unit: str


@dataclass(frozen=True, slots=True)
class Start:
    """A call has begun."""

    progress: ProgressSnapshot


@dataclass(frozen=True, slots=True)
class EnvStep:
    """A row is delivered."""

    step: TimeStep
    progress: ProgressSnapshot


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """An episode terminated or was truncated; its last row has been delivered."""

    summary: EpisodeSummary
    progress: ProgressSnapshot


@dataclass(frozen=True, slots=True)
class EpisodeAbandoned:
    """The loop gave an episode up in its middle, to begin a fresh one; the rest of it is never played."""

    summary: EpisodeSummary
    progress: ProgressSnapshot


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A step of the trainer's own; the trainer sends it, no loop does."""

    metrics: Mapping[str, float]
    progress: ProgressSnapshot


@dataclass(frozen=True, slots=True)
class End:
    """A call is over; `complete` is False if it was interrupted or timed out."""

    progress: ProgressSnapshot
    complete: bool


Event: TypeAlias = Start | EnvStep | EpisodeEnd | EpisodeAbandoned | TrainStep | End


class EventProcessor:
    """Watches runs: subclass it and override what you need; what is not overridden does nothing.

    >>> class Lengths(EventProcessor):
    ...     def __init__(self):
    ...         self.lengths = []
    ...     def process_train(self, event):
    ...         if isinstance(event, EpisodeEnd):
    ...             self.lengths.append(event.summary.length)
    """

    def process_train(self, event: Event) -> None:
        """An event of a training loop."""

    def process_valid(self, event: Event) -> None:
        """An event of a loop made with `eval=True`."""


class Interrupter:
    """Ends calls early: they return what they have. It stays stopped until `reset()`.

    >>> interrupter = Interrupter()
    >>> interrupter.stop("target reached")
    >>> interrupter.should_stop(), interrupter.reason
    (True, 'target reached')
    """

    def __init__(self) -> None:
        self._stop: tuple[str | None] | None = None  # (reason,) once stopped: both facts in one assignment
        self._wakers: dict[object, Callable[[], None]] = {}
        # Reentrant, because a signal handler may call stop() on a thread that is inside waking().
        self._wakers_lock = threading.RLock()

    def stop(self, reason: str | None = None) -> None:
        """Ask every call that uses this interrupter to return; the first reason is kept.

        It may be called from any thread and from a signal handler. Python runs a handler between
        two bytecodes of the main thread: one whose signal comes just before a system call runs
        after it, so a wait on the main thread needs a bound (or `signal.set_wakeup_fd`) as well.
        """
        if self._stop is None:
            self._stop = (reason,)
        with self._wakers_lock:
            for wake in tuple(self._wakers.values()):
                wake()

    def should_stop(self) -> bool:
        """`stop()` has been called, and no `reset()` since."""
        return self._stop is not None

    @property
    def reason(self) -> str | None:
        """The reason given to the first `stop()`; None if it gave none, or if nobody stopped."""
        stop = self._stop
        return None if stop is None else stop[0]

    def reset(self) -> None:
        """Forget the stop, so that the next call runs."""
        self._stop = None

    @contextmanager
    def waking(self, callback: Callable[[], object]) -> Iterator[None]:
        """While inside, `stop()` also calls `callback()`, so that a blocked wait wakes up.

        If it is stopped already, the callback is called at once. It may be called several times,
        on any thread or in a signal handler, so it must be short and must not block; after the
        exit it is not called again. Several loops may be inside at a time. If the callback
        raises, `stop()` goes on to the others, and this context raises the error on its exit,
        where its owner sees it (unless the body raised: then that error stands).
        """
        key = object()
        errors: list[Exception] = []

        def wake() -> None:
            try:
                callback()
            except Exception as error:
                errors.append(error)

        with self._wakers_lock:
            self._wakers[key] = wake
        try:
            if self.should_stop():  # asked after the callback is in place: no stop falls in between
                wake()
            yield
        finally:
            with self._wakers_lock:
                del self._wakers[key]
        if errors:
            raise errors[0]

    def __repr__(self) -> str:
        return f"Interrupter(stopped={self.should_stop()}, reason={self.reason!r})"


class Progress:
    """Counts what has been delivered, over as many calls as it is handed to.

    Args:
        items_total: how many are wanted in all, or None.
        unit: what is counted, in the plural.

    >>> progress = Progress(items_total=100)
    >>> progress.advance(64)
    >>> progress.snapshot()
    ProgressSnapshot(items_processed=64, items_total=100, unit='steps')
    """

    def __init__(self, items_total: int | None = None, unit: str = "steps") -> None:
        self.items_total = None if items_total is None else _count(items_total, "Progress: items_total", "None or ")
        self.unit = unit
        self._items_processed = 0
        self._subscribers: dict[object, Callable[[ProgressSnapshot], object]] = {}
        self._lock = threading.RLock()

    @property
    def items_processed(self) -> int:
        """How many have been counted so far."""
        return self._items_processed

    def advance(self, num_items: int = 1) -> None:
        """Count `num_items` more."""
        num_items = _count(num_items, "Progress.advance: num_items")
        if num_items == 0:
            return
        with self._lock:
            self._items_processed += num_items
            snapshot = self.snapshot()
            for callback in tuple(self._subscribers.values()):
                callback(snapshot)

    def snapshot(self) -> ProgressSnapshot:
        """How far it is now, as a value that never changes."""
        return ProgressSnapshot(self._items_processed, self.items_total, self.unit)

    @contextmanager
    def subscribe(self, callback: Callable[[ProgressSnapshot], object]) -> Iterator[None]:
        """While inside, `callback(snapshot)` follows each advance: on its thread, one at a time, in order."""
        key = object()
        with self._lock:
            self._subscribers[key] = callback
        try:
            yield
        finally:
            with self._lock:
                del self._subscribers[key]

    @contextmanager
    def bar(self, **tqdm_options: Any) -> Iterator[Any]:
        """A tqdm bar that follows this progress while inside; gives the bar.

        Args:
            tqdm_options: passed to tqdm; they win over the defaults: total and unit from the
                progress, and `disable=None`, which shows no bar where stderr is no terminal.

        Raises:
            ImportError: tqdm is not installed.
        """
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("Progress.bar: tqdm is not installed; try `pip install tqdm`") from error
        now = self.snapshot()
        defaults = {"total": now.items_total, "initial": now.items_processed, "unit": f" {now.unit}", "disable": None}
        with tqdm(**{**defaults, **tqdm_options}) as bar:

            def follow(snapshot: ProgressSnapshot) -> None:
                bar.n = snapshot.items_processed
                bar.update(0)  # draws if it is time to

            with self.subscribe(follow):
                yield bar

    def __repr__(self) -> str:
        total = "" if self.items_total is None else f" of {self.items_total}"
        return f"Progress({self.items_processed}{total} {self.unit})"


def _count(value: int, what: str, legal: str = "") -> int:
    """`value` as an int of at least 0."""
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{what} is {count}; legal is {legal}an int >= 0")
    return count
