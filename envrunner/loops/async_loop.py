"""One environment in a child process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envrunner._transport.pool import ProcessPool
from envrunner.loops.base import EnvLoop, starting
from envrunner.loops.factories import EnvLike, resolve_factories
from envrunner.loops.options import make_agent, make_options


@dataclass(frozen=True, slots=True)
class AsyncAgentEnvLoopConfig:
    """As in burn.

    Attributes:
        eval: the loop evaluates: events go to `process_valid`.
        deterministic: asked of the policy.
        id: what the environment is called: `env_id` of its rows.
    """

    eval: bool = False
    deterministic: bool = False
    id: int = 0


class AsyncAgentEnvLoop(EnvLoop):
    """One environment in a child process, one step ahead of what is asked for.

    Args:
        env: environment id, EnvSpec, or a function that returns a new environment.
        policy: AsyncPolicy, Policy, or a function from observations `[B, *O]` to actions `[B, *A]`.
        config: evaluation, determinism, id.
        seed: of the first reset, of the spaces, of the child's global generators, of a policy that has `seed`.
        steps_ahead: 1: the environment computes its next step while you train; 0: only steps asked for.
        clip_actions: Box actions beyond the bounds are clipped for the environment; the row keeps the policy's own.
        start_timeout: seconds for constructor and first reset, or None for no limit.

    >>> import numpy as np
    >>> with AsyncAgentEnvLoop("CartPole-v1", lambda obs: np.zeros(len(obs), int)) as loop:
    ...     len(loop.run_steps(10))
    10
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Any,
        config: AsyncAgentEnvLoopConfig = AsyncAgentEnvLoopConfig(),  # noqa: B008  (frozen)
        *,
        seed: int | None = None,
        steps_ahead: int = 1,
        clip_actions: bool = True,
        start_timeout: float | None = 60.0,
    ) -> None:
        who = type(self).__name__
        if not isinstance(config, AsyncAgentEnvLoopConfig):
            raise TypeError(f"{who}: config is {config!r:.60}; legal is an AsyncAgentEnvLoopConfig")
        options = make_options(
            who,
            policy,
            1,
            seed=seed,
            eval=config.eval,
            deterministic=config.deterministic,
            steps_ahead=steps_ahead,
            clip_actions=clip_actions,
            start_timeout=start_timeout,
            first_env_id=config.id,
        )
        agent = make_agent(policy, who, 1)
        factories = resolve_factories(env, 1, who)
        with starting(options):
            pool = ProcessPool(factories, num_workers=1, seed=options.seed, start_timeout_s=start_timeout)
        super().__init__(pool, agent, options)
