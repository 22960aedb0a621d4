"""Looking before sleeping: how often is learnt from how the waits went. No clock but the real one's edges."""

from __future__ import annotations

import pytest

from envrunner._transport import wakeup
from envrunner._transport.wakeup import AdaptiveWait


class Scene:
    """`is_due` turns true at the k-th look, or when the sleep says so."""

    def __init__(self, due_at_look=None, due_after_sleep=True):
        self.looks = self.sleeps = 0
        self.due_at_look, self.due_after_sleep, self.due = due_at_look, due_after_sleep, False

    def is_due(self):
        self.looks += 1
        return self.due or (self.due_at_look is not None and self.looks >= self.due_at_look)

    def sleep(self, timeout_s):
        self.sleeps += 1
        self.timeout_s = timeout_s
        self.due = self.due_after_sleep


def test_what_is_due_is_taken_without_sleeping():
    scene = Scene(due_at_look=1)
    assert AdaptiveWait(scene.is_due, scene.sleep).wait() and scene.sleeps == 0


def test_a_short_wait_is_sat_out_by_looking_and_looking_gets_longer():
    scene = Scene(due_at_look=5)
    wait = AdaptiveWait(scene.is_due, scene.sleep)
    before = wait.looks
    assert wait.wait() and scene.sleeps == 0 and wait.looks > before


def test_a_long_sleep_makes_looking_shorter_until_there_is_none(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(wakeup.time, "perf_counter", lambda: float(next(clock)))  # every sleep takes a second
    wait = AdaptiveWait(lambda: False, lambda timeout_s: None)
    for _ in range(10):
        assert not wait.wait(0.5)
    assert wait.looks == 0


def test_a_sleep_that_was_short_brings_looking_back(monkeypatch):
    clock = iter(k * 1e-6 for k in range(1000))
    monkeypatch.setattr(wakeup.time, "perf_counter", lambda: next(clock))
    wait = AdaptiveWait(lambda: False, lambda timeout_s: None)
    wait.looks = 0
    for _ in range(3):
        wait.wait()
    assert wait.looks == 7


def test_looking_is_bounded_and_the_sleep_gets_the_timeout():
    scene = Scene(due_after_sleep=False)
    wait = AdaptiveWait(scene.is_due, scene.sleep)
    assert not wait.wait(0.25)
    assert scene.sleeps == 1 and scene.timeout_s == 0.25 and scene.looks <= wakeup._MOST_LOOKS + 2


@pytest.mark.parametrize("rings", [0, 1, 5])
def test_a_drained_bell_is_quiet_however_often_it_was_rung(rings):
    import os
    import select

    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        for _ in range(rings):
            wakeup.ring(bell)
        assert bool(select.select([bell], [], [], 0)[0]) == (rings > 0)
        wakeup.drain(bell)
        wakeup.drain(bell)
        assert select.select([bell], [], [], 0)[0] == []
    finally:
        os.close(bell)
