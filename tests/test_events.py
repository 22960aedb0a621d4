"""Stopping a run from anywhere, counting how far it is, and watching it."""

from __future__ import annotations

import dataclasses
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from envrunner.events import (
    End,
    EnvStep,
    EpisodeAbandoned,
    EpisodeEnd,
    EventProcessor,
    Interrupter,
    Progress,
    ProgressSnapshot,
    Start,
    TrainStep,
)
from envrunner.types import EpisodeSummary, TimeStep

PATIENCE_S = 10.0  # how long a wait that must end may take before its test fails


# --- Interrupter


def test_an_interrupter_is_stopped_from_stop_to_reset():
    interrupter = Interrupter()
    assert not interrupter.should_stop() and interrupter.reason is None
    interrupter.stop("target reached")
    assert interrupter.should_stop() and interrupter.reason == "target reached"
    interrupter.reset()
    assert not interrupter.should_stop() and interrupter.reason is None


def test_the_first_reason_is_kept():
    interrupter = Interrupter()
    interrupter.stop("first")
    interrupter.stop("second")
    assert interrupter.reason == "first"
    silent = Interrupter()
    silent.stop()
    silent.stop("second")
    assert silent.should_stop() and silent.reason is None


def test_a_stop_wakes_who_waits_in_another_thread():
    interrupter, inside = Interrupter(), threading.Event()

    def wait() -> bool:
        woken = threading.Event()
        with interrupter.waking(woken.set):
            inside.set()
            return woken.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(wait)
        assert inside.wait(PATIENCE_S)
        interrupter.stop()
        assert waiter.result()


def test_every_loop_that_waits_is_woken():
    interrupter, woken = Interrupter(), []
    with interrupter.waking(lambda: woken.append("outer")), interrupter.waking(lambda: woken.append("inner")):
        interrupter.stop()
    assert sorted(woken) == ["inner", "outer"]


def test_one_callback_may_be_given_twice():
    interrupter, woken = Interrupter(), []
    callback = lambda: woken.append(1)  # noqa: E731
    with interrupter.waking(callback):
        with interrupter.waking(callback):
            pass
        interrupter.stop()
    assert woken == [1]


def test_who_begins_to_wait_after_the_stop_is_woken_at_once():
    interrupter, woken = Interrupter(), []
    interrupter.stop()
    with interrupter.waking(lambda: woken.append(1)):
        assert woken == [1]


def test_nobody_is_woken_without_a_stop_or_after_leaving():
    interrupter, woken = Interrupter(), []
    with interrupter.waking(lambda: woken.append(1)):
        pass
    interrupter.stop()
    interrupter.reset()
    with interrupter.waking(lambda: woken.append(2)):
        pass
    assert woken == []


def test_no_stop_is_lost_between_looking_and_waiting():
    """Three waiters enter while a fourth thread stops, 100 times over: whatever the order, all wake."""
    interrupter = Interrupter()
    for _ in range(100):
        together = threading.Barrier(4)

        def wait(together: threading.Barrier = together) -> bool:
            woken = threading.Event()
            together.wait()
            with interrupter.waking(woken.set):
                return woken.wait(PATIENCE_S)

        with ThreadPoolExecutor(3) as pool:
            waiters = [pool.submit(wait) for _ in range(3)]
            together.wait()
            interrupter.stop()
            assert all(waiter.result() for waiter in waiters)
        interrupter.reset()


def test_a_stop_right_after_looking_is_not_lost():
    class StoppedRightAfterLooking(Interrupter):
        def should_stop(self) -> bool:
            answer = super().should_stop()
            self.stop()
            return answer

    woken: list[int] = []
    with StoppedRightAfterLooking().waking(lambda: woken.append(1)):
        assert woken == [1]


def test_leaving_waits_for_a_callback_that_is_running():
    """So a callback may write to a descriptor that is closed right after the exit."""
    interrupter = Interrupter()
    running, exiting, exited = (threading.Event() for _ in range(3))
    seen: list[bool] = []

    def callback() -> None:
        running.set()
        exiting.wait(PATIENCE_S)
        seen.append(exited.wait(0.05))

    with ThreadPoolExecutor(1) as pool:
        with interrupter.waking(callback):
            stopper = pool.submit(interrupter.stop)
            assert running.wait(PATIENCE_S)
            exiting.set()
        exited.set()
        stopper.result()
    assert seen == [False]


def test_a_callback_that_raises_breaks_neither_stop_nor_the_others():
    interrupter, woken = Interrupter(), []

    def broken() -> None:
        raise OSError("bell is gone")

    with pytest.raises(OSError, match="bell is gone"):
        with interrupter.waking(broken), interrupter.waking(lambda: woken.append(1)):
            interrupter.stop("enough")
            woken.append("stop returned")
    assert woken == [1, "stop returned"] and interrupter.reason == "enough"
    interrupter.stop()  # the broken one is out
    with pytest.raises(OSError, match="bell is gone"), interrupter.waking(broken):
        woken.append("entered though stopped")
    assert woken[-1] == "entered though stopped"


def test_an_error_of_the_body_stands_though_the_callback_raised_too():
    interrupter = Interrupter()
    with pytest.raises(KeyboardInterrupt), interrupter.waking(lambda: [][0]):
        interrupter.stop()
        raise KeyboardInterrupt
    interrupter.stop()  # and the callback is out


@pytest.fixture
def on_signal() -> Iterator[Any]:
    """Sets a signal's handler and gives the signal; the old handler comes back, and no timer stays.

    Not SIGALRM: its timer is what pytest-timeout ends a hanging test with.
    """
    before: dict[int, Any] = {}

    def set_handler(number: int, handler: Any) -> int:
        before[number] = signal.signal(number, handler)
        return number

    yield set_handler
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(6 * PATIENCE_S)
def test_a_signal_handler_wakes_a_blocked_wait(on_signal):
    interrupter = Interrupter()
    usr1 = on_signal(signal.SIGUSR1, lambda *_: interrupter.stop("signal"))
    reader, writer = os.pipe()
    waiter, woken = threading.get_ident(), threading.Event()

    def send() -> None:
        # Again and again: a signal that comes just before the system call is handled after it only.
        while not woken.wait(0.01):
            signal.pthread_kill(waiter, usr1)

    try:
        with ThreadPoolExecutor(1) as pool, interrupter.waking(lambda: os.write(writer, b"!")):
            pool.submit(send)
            ready, _, _ = select.select([reader], [], [], PATIENCE_S)
            woken.set()
        assert ready == [reader] and interrupter.reason == "signal"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_signal_handler_may_stop_in_the_middle_of_a_stop(on_signal):
    """The handler runs on the thread that is inside stop(): a plain lock would wait for itself."""
    interrupter, calls = Interrupter(), []
    usr1 = on_signal(signal.SIGUSR1, lambda *_: interrupter.stop("from the handler"))

    def callback() -> None:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(usr1)

    with interrupter.waking(callback):
        interrupter.stop("from the thread")
    assert calls == [1, 1] and interrupter.reason == "from the thread"


@pytest.mark.timeout(60)
def test_a_signal_handler_may_stop_at_any_instant_of_waking(on_signal):
    """A timer fires on every clock tick while contexts are entered and left: no deadlock, no call outside."""
    interrupter, inside, outside = Interrupter(), [0], [0]
    on_signal(signal.SIGVTALRM, lambda *_: interrupter.stop())
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3, 1e-3)
    while inside[0] < 30:
        is_inside = [True]

        def callback(is_inside: list[bool] = is_inside) -> None:
            (inside if is_inside[0] else outside)[0] += 1

        with interrupter.waking(callback):
            interrupter.reset()
        is_inside[0] = False
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    assert outside == [0]


# --- Progress


def test_progress_counts_what_it_is_told():
    progress = Progress(items_total=100, unit="rows")
    progress.advance()
    progress.advance(np.int64(63))
    progress.advance(0)
    assert progress.items_processed == 64
    assert progress.snapshot() == ProgressSnapshot(items_processed=64, items_total=100, unit="rows")
    assert repr(progress) == "Progress(64 of 100 rows)"
    assert repr(Progress()) == "Progress(0 steps)"


def test_a_snapshot_does_not_move():
    progress = Progress()
    snapshot = progress.snapshot()
    progress.advance(5)
    assert snapshot.items_processed == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.items_processed = 5  # type: ignore[misc]


def test_more_than_the_total_is_counted_too():
    progress = Progress(items_total=10)
    progress.advance(12)
    assert progress.items_processed == 12


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="Progress: items_total is -1; legal is None or an int >= 0"):
        Progress(items_total=-1)
    progress = Progress()
    with pytest.raises(ValueError, match="Progress.advance: num_items is -2; legal is an int >= 0"):
        progress.advance(-2)
    with pytest.raises(TypeError):
        progress.advance(0.5)  # type: ignore[arg-type]
    assert progress.items_processed == 0


def test_no_count_is_lost_between_threads():
    progress = Progress()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(lambda: [progress.advance() for _ in range(2000)])
    finally:
        sys.setswitchinterval(interval)
    assert progress.items_processed == 8000


def test_a_subscriber_follows_each_advance_until_it_leaves():
    progress, seen = Progress(), []
    with progress.subscribe(lambda snapshot: seen.append(snapshot.items_processed)):
        progress.advance(2)
        progress.advance(0)
        progress.advance(3)
    progress.advance(4)
    assert seen == [2, 5]


def test_no_advance_overtakes_another_on_its_way_to_a_subscriber():
    progress, first_is_told, second_is_told = Progress(), threading.Event(), threading.Event()
    overtaken: list[bool] = []

    def callback(snapshot: ProgressSnapshot) -> None:
        if snapshot.items_processed == 1:
            first_is_told.set()
            overtaken.append(second_is_told.wait(0.05))
        else:
            second_is_told.set()

    with progress.subscribe(callback), ThreadPoolExecutor(2) as pool:
        pool.submit(progress.advance)
        assert first_is_told.wait(PATIENCE_S)
        pool.submit(progress.advance)
    assert overtaken == [False] and second_is_told.is_set()


def test_a_bar_follows_its_progress():
    progress, out = Progress(items_total=100, unit="rows"), io.StringIO()
    progress.advance(10)
    with progress.bar(disable=False, file=out, mininterval=0, ncols=80) as bar:
        assert (bar.n, bar.total, bar.unit) == (10, 100, " rows")
        progress.advance(54)
        assert bar.n == 64
    progress.advance(36)
    assert bar.n == 64
    assert " 64%" in out.getvalue() and "64/100" in out.getvalue() and " rows/s" in out.getvalue()


def test_options_of_the_bar_win_over_what_progress_says():
    with Progress(items_total=100).bar(disable=False, file=io.StringIO(), total=7, desc="PPO") as bar:
        assert bar.total == 7 and bar.desc.startswith("PPO")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_only():
    with Progress().bar(file=io.StringIO()) as bar:
        assert bar.disable
    with Progress().bar(file=Terminal()) as bar:
        assert not bar.disable


def test_a_bar_lets_go_when_its_body_raises():
    progress = Progress()
    with pytest.raises(RuntimeError, match="boom"):
        with progress.bar(disable=False, file=io.StringIO()) as bar:
            raise RuntimeError("boom")
    progress.advance(3)
    assert bar.n == 0 and bar.disable  # tqdm disables what is closed


def test_a_bar_without_tqdm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="tqdm is not installed; try `pip install tqdm`"):
        with Progress().bar():
            pass


# --- events

SUMMARY = EpisodeSummary(env_id=3, episode_id=9, length=2, total_reward=1.5, terminated=False, truncated=True)
NOW = ProgressSnapshot(2, None, "steps")


def row() -> TimeStep:
    obs = np.zeros(3)
    return TimeStep(3, 9, obs, np.int64(1), 1.0, obs, False, True, 2, 1.5, {}, 0, {}, None)


def all_events() -> list[Any]:
    return [
        Start(NOW),
        EnvStep(row(), NOW),
        EpisodeEnd(SUMMARY, NOW),
        EpisodeAbandoned(SUMMARY, NOW),
        TrainStep({"loss": 0.5}, NOW),
        End(NOW, complete=False),
    ]


def test_a_processor_ignores_what_it_does_not_override():
    class Lengths(EventProcessor):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def process_train(self, event: Any) -> None:
            if isinstance(event, EpisodeEnd):
                self.lengths.append(event.summary.length)

    processor = Lengths()
    for event in all_events():
        processor.process_train(event)
        processor.process_valid(event)
    assert processor.lengths == [2]


def test_events_are_values():
    assert End(NOW, complete=True) == End(NOW, complete=True) != End(NOW, complete=False)
    for event in all_events():
        assert event.progress is NOW
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.progress = None
