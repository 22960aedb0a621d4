"""How worker processes come to be: forked by a zygote on Linux, fresh interpreters elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from envrunner._transport import spawn, zygote


class Launcher(Protocol):
    """Starts the workers of one loop, shares memory with them, wakes them, and knows how they ended."""

    def start(self) -> list[Connection]:
        """Start every worker; the parent's ends of the pipes to them."""

    def memory(self, num_bytes: int) -> Any:
        """The block that the workers see too, zeroed. To be called once."""

    def kick(self, worker: int) -> None:
        """Wake a worker."""

    def ring(self) -> None:
        """Wake this process, from any thread or signal handler."""

    def bells(self) -> dict[int, Callable[[], Any]]:
        """What becomes readable when a worker has published, each with what makes it quiet again."""

    def ends_fileno(self) -> int | None:
        """What becomes readable when a worker has ended; None: its pipe does."""

    def ended(self) -> list[tuple[int, int]]:
        """(worker, exit code or minus the signal) of those that ended since the last call; never blocks."""

    def process_ids(self) -> dict[int, int]:
        """worker -> process id of those that live."""

    def close(self) -> None:
        """End every worker that is left, within a second or two."""

    def abandon(self) -> None:
        """In a fork of the loop's process: let go of this copy, end nothing."""


def launch(num_workers: int, *, timeout_s: float | None) -> Launcher:
    """The launcher for this platform; its workers are started by `start`.

    The environment variable ENVRUNNER_START_METHOD=spawn asks for fresh interpreters on Linux too.
    """
    method = os.environ.get("ENVRUNNER_START_METHOD", "")
    if method not in ("", "spawn", "zygote"):
        raise OSError(f"ENVRUNNER_START_METHOD is {method!r}; legal is 'zygote' (Linux) or 'spawn', or unset")
    if method == "spawn" or not zygote.is_supported():
        return spawn.Interpreters(num_workers, timeout_s)
    return zygote.Zygote(num_workers, timeout_s)
