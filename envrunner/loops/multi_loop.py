"""Many environments in worker processes, one step ahead, their inference in batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from envrunner._transport.pool import ProcessPool
from envrunner.loops.base import EnvLoop, starting
from envrunner.loops.factories import EnvLike, resolve_factories
from envrunner.loops.options import count, make_agent, make_options


class MultiAgentEnvLoop(EnvLoop):
    """Many environments in worker processes, always one step ahead of what the trainer has asked for.

    Args:
        env: environment id, EnvSpec, a function that returns a new environment, or a sequence of those.
        policy: AsyncPolicy, Policy, TorchPolicy, or a function from observations `[B, *O]` to actions `[B, *A]`.
        num_envs: N; follows from `env` where that is a sequence.
        seed: environment i's first reset and spaces get `seed + i`, as in `gymnasium.vector`; a policy
            that has `seed` is seeded too.
        max_batch_size: the most environments in one forward pass; default all.
        min_batch_size: how many must wait before one starts, unless nobody else can come; default 1.
        num_workers: processes; default one per core, less one for the caller, which computes too. The
            environments of one process wait for one another: give slow ones more processes
            (`num_workers=num_envs`: one each), which pays from about 0.2 ms a step.
        envs_per_worker: instead of `num_workers`.
        steps_ahead: 1: every environment computes its next step while you train (double batching);
            0: exactly the steps asked for. Default 1, and 0 with `eval`.
        ordered: rounds of all environments in index order: whole runs repeat bit for bit, and wait for the slowest.
        eval: events go to `process_valid`.
        deterministic: asked of the policy.
        clip_actions: Box actions beyond the bounds are clipped for the environment; the row keeps the policy's own.
        start_timeout: seconds for all constructors and first resets, or None for no limit.

    The constructor returns when every environment is built and has its first observation.

    Raises:
        ValueError, TypeError: an argument is not legal.
        EnvError: an environment could not be built or reset; nothing is left running.

    >>> import numpy as np
    >>> with MultiAgentEnvLoop("CartPole-v1", lambda obs: np.zeros(len(obs), int), num_envs=4, seed=1) as loop:
    ...     steps, block, episodes = loop.run_steps(10), loop.run_rollout(5), loop.run_episodes(3)
    >>> len(steps), block.reward.shape, len(episodes)
    (10, (5, 4), 3)
    """

    def __init__(
        self,
        env: EnvLike | Sequence[EnvLike],
        policy: Any,
        num_envs: int | None = None,
        *,
        seed: int | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        num_workers: int | None = None,
        envs_per_worker: int | None = None,
        steps_ahead: int | None = None,
        ordered: bool = False,
        eval: bool = False,
        deterministic: bool = False,
        clip_actions: bool = True,
        start_timeout: float | None = 60.0,
    ) -> None:
        who = type(self).__name__
        factories = resolve_factories(env, num_envs, who)
        options = make_options(
            who,
            policy,
            len(factories),
            seed=seed,
            eval=eval,
            deterministic=deterministic,
            steps_ahead=steps_ahead,
            clip_actions=clip_actions,
            ordered=ordered,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            start_timeout=start_timeout,
        )
        agent = make_agent(policy, who, len(factories))
        workers = choose_num_workers(len(factories), num_workers, envs_per_worker, who)
        with starting(options):
            pool = ProcessPool(factories, num_workers=workers, seed=options.seed, start_timeout_s=start_timeout)
        super().__init__(pool, agent, options)
        self._num_workers = workers

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._num_workers


def choose_num_workers(num_envs: int, num_workers: int | None, envs_per_worker: int | None, who: str) -> int:
    """How many processes for `num_envs` environments.

    Raises:
        ValueError: both are given and contradict each other, or one is out of range.
    """
    if num_workers is None and envs_per_worker is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(num_envs, max(1, cores - 1))
    from_envs = None
    if envs_per_worker is not None:
        from_envs = -(-num_envs // count(envs_per_worker, f"{who}: envs_per_worker", least=1))
    if num_workers is None:
        assert from_envs is not None
        return from_envs
    num_workers = count(num_workers, f"{who}: num_workers", least=1)
    if from_envs not in (None, num_workers):
        raise ValueError(
            f"{who}: num_workers is {num_workers}, but envs_per_worker={envs_per_worker} makes {from_envs} of "
            f"{num_envs} environments; leave one of them out"
        )
    if num_workers > num_envs:
        raise ValueError(f"{who}: num_workers is {num_workers} for {num_envs} environments; legal is at most one each")
    return num_workers
