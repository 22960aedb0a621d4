"""Waking the other side: look again for a short while, then sleep until rung.

Waking an idle core takes 40 to 50 us here, as long as several CartPole steps, so whoever expects
an answer soon looks a few times first, yielding the core in between. How often is learnt from how
long the waits were: a process that waits for milliseconds goes to sleep at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_SHORT_S = 150e-6  # a sleep this short would better have been spent looking
_MOST_LOOKS = 128

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class AdaptiveWait:
    """Waits until `is_due()`: looks up to `looks` times, then calls `sleep`.

    Args:
        is_due: cheap; called often.
        sleep: `sleep(timeout_s)`: blocks until rung or until the time is over (None: no limit).
    """

    def __init__(self, is_due: Callable[[], bool], sleep: Callable[[float | None], None]) -> None:
        self._is_due = is_due
        self._sleep = sleep
        self.looks = 16

    def wait(self, timeout_s: float | None = None) -> bool:
        """True as soon as `is_due()`; else what it is after one sleep, which other things may end too."""
        is_due = self._is_due
        if is_due():
            return True
        for _ in range(self.looks):
            _yield_core()
            if is_due():
                self.looks = min(_MOST_LOOKS, self.looks + 8)
                return True
        began = time.perf_counter()
        self._sleep(timeout_s)
        if time.perf_counter() - began < _SHORT_S:
            self.looks = min(_MOST_LOOKS, 2 * self.looks + 1)
        else:
            self.looks //= 2
        return is_due()


def ring(eventfd: int) -> None:
    """Wake whoever sleeps on this eventfd; may be called from any thread and from a signal handler."""
    os.eventfd_write(eventfd, 1)


def drain(eventfd: int) -> None:
    """Make a non-blocking eventfd quiet again."""
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        pass
