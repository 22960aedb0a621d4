"""From what a user passes as `env` to one factory per environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

EnvFactory = Callable[[], gymnasium.Env]
EnvLike = str | EnvSpec | EnvFactory

_LEGAL = "an environment id, an EnvSpec, or a function that returns a new gymnasium.Env"


def resolve_factories(env: EnvLike | Sequence[EnvLike], num_envs: int | None, who: str) -> list[EnvFactory]:
    """One factory per environment; equal ones are the same object.

    Args:
        env: id, EnvSpec, factory, or a sequence of those (then `num_envs` follows from it).
        num_envs: how many, or None with a sequence.
        who: the loop's name, for messages.

    Raises:
        ValueError: unknown id, or `num_envs` missing, below 1 or contradicting the sequence.
        TypeError: a live environment, or anything else that is no factory.
    """
    if isinstance(env, Sequence) and not isinstance(env, str):
        if num_envs is not None and num_envs != len(env):
            raise ValueError(f"{who}: num_envs is {num_envs}, but env is a sequence of {len(env)}; leave num_envs out")
        if not env:
            raise ValueError(f"{who}: env is an empty sequence; legal is at least one of: {_LEGAL}")
        return [_resolve(one, f"{who}: env[{index}]") for index, one in enumerate(env)]
    if num_envs is None:
        raise ValueError(f"{who}: num_envs is missing; legal is an int >= 1, or a sequence of environments as env")
    if isinstance(num_envs, bool) or not hasattr(num_envs, "__index__") or num_envs < 1:
        raise ValueError(f"{who}: num_envs is {num_envs!r}; legal is an int >= 1")
    return [_resolve(env, f"{who}: env")] * num_envs


def _resolve(env: Any, who: str) -> EnvFactory:
    if isinstance(env, str):
        try:
            env = gymnasium.spec(env)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(
                f"{who} is {env!r}, which Gymnasium cannot find ({error}). Legal is {_LEGAL}. If a package registers "
                "it, import that package first, or write 'package:Id'"
            ) from error
    if isinstance(env, EnvSpec):
        return functools.partial(gymnasium.make, env)
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        raise TypeError(
            f"{who} is a live environment ({env}), which cannot be in several places at once; legal is {_LEGAL}. "
            "Write `lambda: ...` around what builds it"
        )
    if not callable(env):
        raise TypeError(f"{who} is {type(env).__name__} {env!r:.60}; legal is {_LEGAL}")
    return env  # type: ignore[no-any-return]
