"""What a user may pass to a loop and to its calls: checked here, once, and frozen.

The rule that must hold: what is refused is refused with its name, what was got and what is legal.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envrunner.events import EventProcessor, Interrupter, Progress
from envrunner.policy import AsyncPolicy, as_policy


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a loop's constructor was given, checked and completed."""

    who: str
    steps_ahead: int
    min_batch: int
    max_batch: int
    max_wait: float | None
    ordered: bool
    eval: bool
    deterministic: bool
    clip_actions: bool
    seed: int | None
    start_timeout: float | None
    first_env_id: int = 0


def make_agent(policy: Any, who: str, num_envs: int) -> AsyncPolicy:
    """The policy as an AsyncPolicy: its own, or one around it."""
    if isinstance(policy, AsyncPolicy):
        return policy
    return AsyncPolicy(as_policy(policy, who), max_batch_size=num_envs, min_batch_size=1)


def make_options(
    who: str,
    policy: Any,
    num_envs: int,
    *,
    seed: int | None,
    eval: bool,
    deterministic: bool,
    steps_ahead: int | None,
    clip_actions: bool,
    ordered: bool = False,
    max_batch_size: int | None = None,
    min_batch_size: int | None = None,
    start_timeout: float | None = None,
    first_env_id: int = 0,
) -> LoopOptions:
    """Check what a loop's constructor was given.

    Raises:
        ValueError, TypeError: naming the argument, what was got and what is legal.
    """
    max_wait = None
    if isinstance(policy, AsyncPolicy):
        if max_batch_size is not None or min_batch_size is not None:
            raise ValueError(
                f"{who}: max_batch_size and min_batch_size belong to the AsyncPolicy, which has "
                f"max_batch_size={policy.max_batch_size} and min_batch_size={policy.min_batch_size}; "
                "leave them out here, or pass the policy without AsyncPolicy"
            )
        max_batch, min_batch, max_wait = policy.max_batch_size, policy.min_batch_size, policy.max_wait
    else:
        max_batch = num_envs if max_batch_size is None else count(max_batch_size, f"{who}: max_batch_size", least=1)
        min_batch = 1 if min_batch_size is None else count(min_batch_size, f"{who}: min_batch_size", least=1)
        if min_batch > max_batch:
            raise ValueError(f"{who}: min_batch_size is {min_batch}; legal is at most max_batch_size, {max_batch}")
    if steps_ahead is None:
        steps_ahead = 0 if eval else 1
    if steps_ahead not in (0, 1):
        raise ValueError(f"{who}: steps_ahead is {steps_ahead!r}; legal is 0 (only the steps asked for) or 1")
    if seed is not None:
        seed = count(seed, f"{who}: seed")
        if seed + num_envs >= 1 << 63:
            raise ValueError(f"{who}: seed is {seed}; legal is an int >= 0 and < 2**63 - num_envs")
    if start_timeout is not None and not start_timeout > 0:
        raise ValueError(f"{who}: start_timeout is {start_timeout!r}; legal is seconds > 0, or None for no limit")
    return LoopOptions(
        who, steps_ahead, min_batch, max_batch, max_wait, ordered, eval, deterministic, clip_actions, seed,
        start_timeout, count(first_env_id, f"{who}: id"),
    )  # fmt: skip


def count(value: Any, what: str, least: int = 0) -> int:
    """`value` as an int of at least `least`; a bool or a float is none."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is {value!r}; legal is an int >= {least}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{what} is {number}; legal is an int >= {least}")
    return number


def check_around(who: str, processor: Any, interrupter: Any, progress: Any, timeout: Any) -> None:
    """What every `run_*` takes besides its number."""
    for name, value, kind in (
        ("processor", processor, EventProcessor),
        ("interrupter", interrupter, Interrupter),
        ("progress", progress, Progress),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{who}: {name} is {type(value).__name__} {value!r:.40}; legal is {kind.__name__} or None")
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"{who}: timeout is {timeout!r}; legal is seconds >= 0, or None for no limit")


def seed_list(values: Sequence[int], num: int, who: str) -> list[int]:
    """`values` as a list of `num` seeds.

    Raises:
        ValueError: another number of them, or one that is no seed.
    """
    seeds = [int(value) for value in values]
    if len(seeds) != num:
        raise ValueError(f"{who}: seeds has {len(seeds)} entries for {num} episodes; legal is one per episode")
    bad = [seed for seed in seeds if not 0 <= seed < 1 << 63]
    if bad:
        raise ValueError(f"{who}: seeds holds {bad[0]}; legal is an int >= 0 and < 2**63")
    return seeds
