"""What can go wrong, and who was wrong.

    EnvRunnerError
    ├── EnvError        an environment raised, died or fell silent
    │   └── SpaceError  an environment handed over what its own spaces do not allow
    ├── PolicyError     a policy raised, or answered what the action space does not allow
    └── ClosedError     the loop is closed, or was closed during the call

Every message names who, what was got, what would have been legal, and what to try next.
Bad arguments are `ValueError` and `TypeError`, as everywhere in Python.
"""

from __future__ import annotations

from typing import Any


class EnvRunnerError(Exception):
    """Base of every error that this package raises about a run."""


class EnvError(EnvRunnerError):
    """An environment raised, died or fell silent; the traceback from its process is `__cause__`.

    Attributes:
        env_id: index of the environment, from 0.
        episode_id: episode it was in (counts from 0 per environment), or None before the first.
        step: step of that episode it was taking, from 1; None outside `step`.
        phase: "constructor", "reset", "step" or "close".
        last_action: the action it was given, or None.
        exit_code: exit code of its process, or None if it lives or was killed by a signal.
        signal: name of the signal that ended its process ("SIGKILL"), or None.
        lost_env_ids: every environment that went down with it.
        rows: a `StepBatch` of what the call had taken before, or None; nothing of it is lost.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int,
        episode_id: int | None = None,
        step: int | None = None,
        phase: str = "step",
        last_action: Any = None,
        exit_code: int | None = None,
        signal: str | None = None,
        lost_env_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.episode_id = episode_id
        self.step = step
        self.phase = phase
        self.last_action = last_action
        self.exit_code = exit_code
        self.signal = signal
        self.lost_env_ids = lost_env_ids or (env_id,)
        self.rows: Any = None


class SpaceError(EnvError):
    """An environment handed over an observation, reward or flag that its own spaces do not allow."""


class PolicyError(EnvRunnerError):
    """A policy raised, or its answer does not fit the action space; the loop stays usable."""


class ClosedError(EnvRunnerError):
    """The loop was closed before the call, or by another thread during it."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text: the `__cause__` of an EnvError."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text.rstrip()
