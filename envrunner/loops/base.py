"""The calls every loop has, and the loop that runs in this process.

`run_steps`, `run_rollout` and `run_episodes` are written once, here, for all loops; what differs
between loops is where their environments live. Not here: how a call is driven (`driver`).
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium import Space

from envrunner._core.episodes import assign
from envrunner._transport.pool import LocalPool, Pool, PoolError
from envrunner.errors import ClosedError, EnvError, EnvRunnerError
from envrunner.events import End, EventProcessor, Interrupter, Progress, Start
from envrunner.loops.driver import Call, Driver
from envrunner.loops.factories import EnvLike, resolve_factories
from envrunner.loops.faults import env_error
from envrunner.loops.options import (
    LoopOptions,
    check_around,
    count,
    make_agent,
    make_options,
    seed_list,
)
from envrunner.loops.sinks import BlockSink, StepSink, whole_episodes
from envrunner.policy import AsyncPolicy
from envrunner.types import EpisodeSummary, RolloutBatch, StepBatch, Trajectory

_UPDATE = "update_policy"
_CLOSE_WAIT_S = 1.5  # for a call in another thread to notice that the loop closes


class Episodes(list[Trajectory]):
    """What `run_episodes` returns: a list of whole `Trajectory`s that knows whether it is complete."""

    def __init__(self, trajectories: Sequence[Trajectory] = (), *, complete: bool = True) -> None:
        super().__init__(trajectories)
        self.complete = complete

    @property
    def episodes(self) -> tuple[EpisodeSummary, ...]:
        """The summary of each episode, in order."""
        return tuple(trajectory.summary for trajectory in self)


@dataclass(frozen=True, slots=True)
class LoopStats:
    """What a loop has done since it was made.

    Attributes:
        steps: rows taken from the environments by calls.
        episodes: those that ended in these rows, terminated or truncated.
        episodes_terminated, episodes_truncated: the two kinds (an episode that ends both ways is terminated).
        episodes_abandoned: given up in their middle, by `run_episodes` or by an interrupt of it.
        rows_lost: steps of abandoned episodes that no call returned.
        batches: forward passes.
        mean_batch_size: environments per forward pass, or NaN before the first.
        policy_version: of the policy now.
    """

    steps: int
    episodes: int
    episodes_terminated: int
    episodes_truncated: int
    episodes_abandoned: int
    rows_lost: int
    batches: int
    mean_batch_size: float
    policy_version: int


@runtime_checkable
class AgentEnvLoop(Protocol):
    """What every loop can do; annotate with it what works with any of them."""

    def run_steps(self, num_steps: int) -> StepBatch: ...

    def run_rollout(self, num_steps: int) -> RolloutBatch: ...

    def run_episodes(self, num_episodes: int) -> Episodes: ...

    def update_policy(self, update: Any) -> None: ...

    def policy(self) -> Any: ...

    @property
    def stats(self) -> LoopStats: ...

    def close(self) -> None: ...


class EnvLoop:
    """A pool of environments, a policy, and the calls; what the three public loops share."""

    def __init__(self, pool: Pool, agent: AsyncPolicy, options: LoopOptions) -> None:
        self._who = options.who
        self._agent = agent
        self._eval = options.eval
        self._kept: StepBatch | None = None  # rows of calls that raised: they come first
        self._running: tuple[int, str] | None = None  # (thread, call)
        self._turn = threading.Lock()
        self._end_of_pool = weakref.finalize(self, pool.close)
        self._pool = pool
        try:
            self._driver = Driver(pool, agent, options)
            if options.seed is not None:
                agent.seed(options.seed)
            self._driver.reset_all()
        except BaseException:
            self._end_of_pool()
            raise
        self._episodes_so_far = np.zeros(self.num_envs, np.int64)

    # -- calls -----------------------------------------------------------------------------------

    def run_steps(
        self,
        num_steps: int,
        *,
        processor: EventProcessor | None = None,
        interrupter: Interrupter | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> StepBatch:
        """The next `num_steps` transitions of whichever environments are first, in order of arrival.

        Args:
            num_steps: n >= 0.
            processor: is told of every row and every episode's end.
            interrupter: ends the call early; it returns what it has, with `complete == False`.
            progress: counts every row.
            timeout: seconds after which the call returns what it has, likewise.

        Returns:
            Exactly `num_steps` rows `[n, ...]`, the caller's own memory.

        Raises:
            EnvError: an environment raised or died; the rows taken so far are in `error.rows`.
            PolicyError: the policy raised or answered wrongly; the rows taken so far come first next time.
            ClosedError: the loop is closed.
        """
        n = count(num_steps, f"{self._who}.run_steps: num_steps")
        with self._call("run_steps", processor, interrupter, progress, timeout) as call:
            kept, self._kept = _split(self._kept, n)
            want = n - (0 if kept is None else len(kept))
            sink = StepSink(self._driver.row_origin, want, kept)
            self._driver.schedule.want_steps(want)
            call.result = rows = sink.rows(self._run(sink, call))
            return rows

    def run_rollout(
        self,
        num_steps: int,
        *,
        processor: EventProcessor | None = None,
        interrupter: Interrupter | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> RolloutBatch:
        """The next `num_steps` transitions of every environment, as a block `[T, N, ...]`.

        Args and errors as in `run_steps`. A call cut short keeps its shape and says `lengths`.
        """
        num_rows = count(num_steps, f"{self._who}.run_rollout: num_steps")
        with self._call("run_rollout", processor, interrupter, progress, timeout) as call:
            sink = BlockSink(self._driver.row_origin, num_rows, self.num_envs)
            if self._kept is not None:
                self._kept = sink.put(self._kept)
            self._driver.schedule.want_rollout(num_rows - sink.lengths)
            complete = self._run(sink, call)
            call.result = block = sink.block(complete, self._driver.state_tree)
            return block

    def run_episodes(
        self,
        num_episodes: int,
        *,
        seeds: Sequence[int] | None = None,
        processor: EventProcessor | None = None,
        interrupter: Interrupter | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Episodes:
        """`num_episodes` whole episodes, without favour for short ones: who plays which is settled before.

        Args:
            num_episodes: k >= 0.
            seeds: one reset seed per episode; each then begins with a reset of its own. Without
                seeds an episode of which nothing was delivered yet counts as the first.
            others: as in `run_steps`; a call cut short returns the episodes that are whole.

        Returns:
            A list of k `Trajectory`, episode j at index j, the caller's own memory.
        """
        k = count(num_episodes, f"{self._who}.run_episodes: num_episodes")
        given = None if seeds is None else seed_list(seeds, k, f"{self._who}.run_episodes")
        with self._call("run_episodes", processor, interrupter, progress, timeout) as call:
            driver = self._driver
            envs = assign(self._episodes_so_far, k)
            if given is not None:
                queues: list[deque[int]] = [deque() for _ in range(self.num_envs)]
                for env, seed in zip(envs.tolist(), given, strict=True):
                    queues[env].append(seed)
                driver.seed_episodes(queues)
            sink = StepSink(driver.row_origin, None)
            driver.schedule.want_episodes(np.bincount(envs, minlength=self.num_envs), seeded=given is not None)
            try:
                complete = self._run(sink, call, older_rows_first=True)
            finally:
                driver.seed_episodes(None)
            rows = sink.rows(complete)
            found = whole_episodes(rows, envs + driver.options.first_env_id)
            played = [(env, one) for env, one in zip(envs.tolist(), found, strict=True) if one is not None]
            for env, _ in played:
                self._episodes_so_far[env] += 1
            driver.counters.rows_lost += len(rows) - sum(len(one) for _, one in played)
            call.result = episodes = Episodes([one for _, one in played], complete=complete)
            return episodes

    def _run(self, sink: StepSink | BlockSink, call: Call, *, older_rows_first: bool = False) -> bool:
        """Drive the call; if it raises, keep what the sink has, in order with the rows kept before."""
        driver = self._driver
        complete = False
        try:
            driver.report(call, Start(call.progress.snapshot()))
            complete = driver.drive(sink, call)
            driver.schedule.forget()
            if not complete:
                driver.seed_episodes(None)
                driver.settle(call)
        except BaseException as error:
            driver.schedule.forget(abandon=False)
            rows = sink.rows(False)
            if self._kept is not None:
                rows = StepBatch.concatenate([self._kept, rows] if older_rows_first else [rows, self._kept])
            self._kept = rows if len(rows) else None
            if isinstance(error, EnvError):
                error.rows = rows
            raise
        finally:
            driver.report(call, End(call.progress.snapshot(), complete))
        return complete

    @contextlib.contextmanager
    def _call(
        self,
        name: str,
        processor: EventProcessor | None,
        interrupter: Interrupter | None,
        progress: Progress | None,
        timeout: float | None,
    ) -> Iterator[Call]:
        """One `run_*` at a time, on an open and unbroken loop."""
        check_around(f"{self._who}.{name}", processor, interrupter, progress, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        call = Call(processor, interrupter, progress or Progress(), deadline)
        self._check_open(name)
        self._take_turn(name)
        try:
            self._check_open(name)
            if self._driver.broken is not None:
                raise self._broken_again(name)
            waking = contextlib.nullcontext() if interrupter is None else interrupter.waking(self._pool.wake)
            with waking, _ctrl_c_between_wakes(call, self._pool):
                yield call
        except KeyboardInterrupt:
            if call.result is not None:  # Ctrl-C came when the rows were ready, and nobody will get them
                self._keep(call.result)
            raise
        finally:
            self._running = None
            self._turn.release()

    def _keep(self, result: StepBatch | RolloutBatch | Episodes) -> None:
        """What a call was about to return comes first in the next."""
        if isinstance(result, RolloutBatch):
            parts = [result.flatten()]
        elif isinstance(result, Episodes):
            parts = [episode[:] for episode in result]
        else:
            parts = [result]
        parts += [] if self._kept is None else [self._kept]
        rows = StepBatch.concatenate(parts) if parts else None
        self._kept = rows if rows is not None and len(rows) else None

    def _take_turn(self, name: str) -> None:
        """Become the one call that runs; an update from another thread is waited for."""
        while not self._turn.acquire(timeout=0.01):
            thread, other = self._running or (0, _UPDATE)
            if other != _UPDATE:
                mine = thread == threading.get_ident()
                raise EnvRunnerError(
                    f"{self._who}.{name}: {'this very thread (an event processor?)' if mine else 'another thread'} is "
                    f"inside {other} of this loop; legal is one run_* at a time. Give each thread a loop of its own"
                )
            self._check_open(name)
        self._running = (threading.get_ident(), name)

    def _broken_again(self, name: str) -> EnvError:
        first = self._driver.broken
        assert first is not None
        error = type(first)(
            f"{self._who}.{name}: this loop has been broken since: {first}. Close it and build a new one",
            env_id=first.env_id,
            episode_id=first.episode_id,
            step=first.step,
            phase=first.phase,
            last_action=first.last_action,
            exit_code=first.exit_code,
            signal=first.signal,
            lost_env_ids=first.lost_env_ids,
        )
        error.__cause__ = first.__cause__
        error.rows = self._kept
        return error

    # -- policy ----------------------------------------------------------------------------------

    def update_policy(self, update: Any) -> None:
        """Give the policy new weights; the next forward pass uses them, and `version` grows by one.

        Environments that wait for an action get theirs from the old weights first. May be called
        from any thread.

        Args:
            update: what the policy's `update` takes; for a TorchPolicy `model.state_dict()`.
        """
        self._check_open(_UPDATE)
        running = self._running
        if running is not None and running[0] == threading.get_ident():
            self._driver.serve_waiting()
        elif self._turn.acquire(blocking=False):
            self._running = (threading.get_ident(), _UPDATE)
            try:
                if self._driver.broken is None:
                    self._driver.serve_waiting()
            finally:
                self._running = None
                self._turn.release()
        self._agent.update(update)

    def policy(self) -> Any:
        """The policy's `state()`: its weights."""
        return self._agent.state()

    # -- facts -----------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """N."""
        return self._driver.num_envs

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one environment."""
        return self._driver.observation.space

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one environment."""
        return self._driver.action.space

    @property
    def stats(self) -> LoopStats:
        """What the loop has done so far; may be read from any thread."""
        counters = self._driver.counters
        return LoopStats(
            steps=counters.steps,
            episodes=counters.episodes_terminated + counters.episodes_truncated,
            episodes_terminated=counters.episodes_terminated,
            episodes_truncated=counters.episodes_truncated,
            episodes_abandoned=counters.episodes_abandoned,
            rows_lost=counters.rows_lost,
            batches=counters.batches,
            mean_batch_size=counters.batched_rows / counters.batches if counters.batches else math.nan,
            policy_version=self._agent.version,
        )

    # -- ending ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every environment and end every process, within 5 s; may be called again, from any thread.

        A call that another thread is in raises `ClosedError`.
        """
        if not self._end_of_pool.alive:
            return
        self._driver.closing = True
        running = self._running
        if running is not None and running[0] != threading.get_ident():
            self._pool.wake()
            if self._turn.acquire(timeout=_CLOSE_WAIT_S):
                self._turn.release()
        self._end_of_pool()

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._driver.closing

    def _check_open(self, name: str) -> None:
        if self._driver.closing:
            raise ClosedError(f"{self._who}.{name}: this loop is closed; build a new one")

    def __enter__(self) -> Any:
        self._check_open("__enter__")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self._who}(num_envs={self.num_envs}, closed={self.closed}, steps={self.stats.steps})"


class AgentEnvBaseLoop(EnvLoop):
    """One environment in this process, stepped when it is asked for: for debugging, and to compare with.

    Breakpoints and prints inside the environment work; nothing runs in parallel.

    Args:
        env: environment id, EnvSpec, or a function that returns a new environment.
        policy: AsyncPolicy, Policy, or a function from observations `[B, *O]` to actions `[B, *A]`.
        seed: of the first reset, of the spaces, and of a policy that has `seed`.
        eval: events go to `process_valid`.
        deterministic: asked of the policy.
        steps_ahead: 0, or 1 to step once more before a call returns, as the other loops do.

    >>> import numpy as np
    >>> with AgentEnvBaseLoop("CartPole-v1", lambda obs: np.zeros(len(obs), int), seed=1) as loop:
    ...     len(loop.run_steps(10))
    10
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Any,
        *,
        seed: int | None = None,
        eval: bool = False,
        deterministic: bool = False,
        steps_ahead: int = 0,
        clip_actions: bool = True,
    ) -> None:
        who = type(self).__name__
        options = make_options(
            who, policy, 1, seed=seed, eval=eval, deterministic=deterministic, steps_ahead=steps_ahead,
            clip_actions=clip_actions,
        )  # fmt: skip
        agent = make_agent(policy, who, 1)
        factories = resolve_factories(env, 1, who)
        with starting(options):
            pool = LocalPool(factories, seed=seed)
        super().__init__(pool, agent, options)


@contextlib.contextmanager
def starting(options: LoopOptions) -> Iterator[None]:
    """What goes wrong while a pool starts, in words."""
    try:
        yield
    except PoolError as error:
        raise env_error(error.problem, first_env_id=options.first_env_id) from env_error(error.problem).__cause__
    except OSError as error:
        raise EnvRunnerError(f"{options.who}: could not start its worker processes: {error}") from error


@contextlib.contextmanager
def _ctrl_c_between_wakes(call: Call, pool: Pool) -> Iterator[None]:
    """Ctrl-C during a call is acted on where the loop's state is whole; a second one at once.

    Only Python's own handler is replaced, and only for the call: who has installed another keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return

    def note(signum: int, frame: Any) -> None:
        if call.ctrl_c:
            raise KeyboardInterrupt
        call.ctrl_c = True
        pool.wake()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if call.ctrl_c:  # it came after the last look
        raise KeyboardInterrupt


def _split(rows: StepBatch | None, n: int) -> tuple[StepBatch | None, StepBatch | None]:
    """The first n rows and the rest; None for no rows."""
    if rows is None or n == 0:
        return None, rows
    return rows[:n], rows[n:] if len(rows) > n else None
