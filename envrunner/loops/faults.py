"""What went wrong in an environment, as the error a user reads."""

from __future__ import annotations

from typing import Any

from envrunner._transport.host import Fault
from envrunner._transport.pool import Death, NotReady, Problem
from envrunner._transport.slots import Phase
from envrunner.errors import EnvError, RemoteTraceback, SpaceError

_ADVICE = {
    "SIGKILL": "On Linux this is usually the out-of-memory killer: try fewer environments, or see dmesg",
    "SIGSEGV": "It crashed in native code: run one environment alone under `python -X faulthandler`",
    "SIGABRT": "It crashed in native code: run one environment alone under `python -X faulthandler`",
}
_EXIT_ADVICE = "Something in it ends the whole process (os._exit): raise an exception there instead"


def env_error(
    problem: Problem,
    *,
    first_env_id: int = 0,
    episode_id: int | None = None,
    step: int | None = None,
    action: Any = None,
) -> EnvError:
    """The EnvError or SpaceError for a problem; the caller adds which episode, step and action it was in.

    Args:
        problem: as a pool reports it.
        first_env_id: what environment 0 of the pool is called.
        episode_id: episode under way, or None if there was none yet.
        step: the step of that episode being taken, from 1.
        action: the action it was given.
    """
    env_id = first_env_id + (problem.env_ids[0] if isinstance(problem, NotReady) else problem.env_id)
    if problem.phase is not Phase.STEP:
        step, action = None, None
    if problem.phase is Phase.CONSTRUCTOR:
        episode_id = None
    facts: dict[str, Any] = {
        "env_id": env_id,
        "episode_id": episode_id,
        "step": step,
        "phase": problem.phase.name.lower() if problem.phase is not Phase.NOTHING else "step",
        "last_action": action,
    }
    where = _where(problem.phase, episode_id, step)
    if isinstance(problem, Fault):
        doing = "" if action is None else f" (action {action!r:.40})"
        if problem.is_space:
            error: EnvError = SpaceError(f"environment {env_id}{where}: {problem.summary}", **facts)
        else:
            error = EnvError(
                f"environment {env_id} raised {problem.summary}{where}{doing}; its own traceback stands above", **facts
            )
        error.__cause__ = RemoteTraceback(problem.traceback)
        return error
    if isinstance(problem, Death):
        lost = tuple(first_env_id + lost for lost in problem.lost_env_ids)
        how = problem.signal or f"exit code {problem.exit_code}"
        others = "" if len(lost) == 1 else f", and with it environments {lost[0]} to {lost[-1]} of the same process"
        advice = _ADVICE.get(problem.signal or "", _EXIT_ADVICE)
        return EnvError(
            f"environment {env_id} died{where} ({how}){others}. {advice}",
            exit_code=problem.exit_code,
            signal=problem.signal,
            lost_env_ids=lost,
            **facts,
        )
    late = tuple(first_env_id + late for late in problem.env_ids)
    what = "not constructed" if problem.phase is Phase.CONSTRUCTOR else "without a first observation"
    return EnvError(
        f"environment {env_id}{'' if len(late) == 1 else f' and {len(late) - 1} more'} still {what} after "
        f"{problem.timeout_s:g} s; legal is within start_timeout. Give start_timeout more seconds, or None for no limit",
        lost_env_ids=late,
        **facts,
    )


def _where(phase: Phase, episode_id: int | None, step: int | None) -> str:
    if phase is Phase.CONSTRUCTOR:
        return " in its constructor"
    episode = "" if episode_id is None else f" of episode {episode_id}"
    if phase is Phase.STEP and step is not None:
        return f" in step {step}{episode}"
    if phase is Phase.RESET:
        return f" in reset, at the end{episode}" if episode_id is not None else " in its first reset"
    if phase is Phase.CLOSE:
        return " in close"
    return " between two steps"
