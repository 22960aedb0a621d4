"""One step's way through the loop: what the schedule decides, done with pool, policy and sinks.

`drive` is the whole of it: note what the workers have published, deliver the rows that are owed,
send the resets and inference batches that are due, wait. Which row, which batch: `_core.schedule`.
How a row is stored: `sinks`. What a call is about: `base`.
The rule that must hold: a row is copied out before its environment gets the next action.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from envrunner import _tree
from envrunner._as_policy import name_of
from envrunner._core.episodes import EpisodeBook
from envrunner._core.schedule import Doing, Schedule
from envrunner._transport.host import NO_SEED
from envrunner._transport.pool import NotReady, Pool
from envrunner._transport.slots import Command, InfoOf, Phase
from envrunner.errors import ClosedError, EnvError, PolicyError
from envrunner.events import (
    EnvStep,
    EpisodeAbandoned,
    EpisodeEnd,
    Event,
    EventProcessor,
    Interrupter,
    Progress,
)
from envrunner.loops.faults import env_error
from envrunner.loops.options import LoopOptions
from envrunner.loops.sinks import BlockSink, Infos, RowSchema, StepSink, selector
from envrunner.policy import AsyncPolicy
from envrunner.spaces import Columns, Layout, Mismatch
from envrunner.types import EpisodeSummary, TimeStep

_NO_INFOS = Infos({}, {})


@dataclass(slots=True)
class Call:
    """What one `run_*` was given besides its number."""

    processor: EventProcessor | None = None
    interrupter: Interrupter | None = None
    progress: Progress = field(default_factory=Progress)
    deadline: float | None = None  # time.monotonic()
    ctrl_c: bool = False
    result: Any = None  # what it is about to return

    def is_stopped(self) -> bool:
        return self.interrupter is not None and self.interrupter.should_stop()

    def is_over(self) -> bool:
        if self.is_stopped():
            return True
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(slots=True)
class Counters:
    """Behind `loop.stats`."""

    steps: int = 0
    episodes_terminated: int = 0
    episodes_truncated: int = 0
    episodes_abandoned: int = 0
    rows_lost: int = 0
    batches: int = 0
    batched_rows: int = 0


class Driver:
    """Environments, policy and schedule of one loop, and the state of every agent in between."""

    def __init__(self, pool: Pool, agent: AsyncPolicy, options: LoopOptions) -> None:
        plan = pool.slots.plan
        self.pool, self.agent, self.options = pool, agent, options
        self.slots = pool.slots
        self.num_envs = plan.num_envs
        self.observation = Layout(plan.observation_space, "observation")
        self.action = Layout(plan.action_space, "action")
        self.counters = Counters()
        self.closing = False
        self.broken: EnvError | None = None
        self.schedule = Schedule(
            self.num_envs,
            steps_ahead=options.steps_ahead,
            min_batch=options.min_batch,
            max_batch=options.max_batch,
            ordered=options.ordered,
        )
        self._book = EpisodeBook(self.num_envs)
        self._env_ids = np.arange(self.num_envs) + options.first_env_id
        # of the step under way or undelivered, per environment
        self._obs = self.observation.allocate(self.num_envs)
        self._actions: Columns = []
        self._context: dict[str, Any] = {}
        self._context_columns: Columns = []
        self._context_shapes: dict[str, tuple[int, ...]] | None = None  # a quick look for the usual, flat context
        self._versions = np.zeros(self.num_envs, np.int64)
        self._reset_infos: dict[int, dict[str, Any]] = {}
        self._next_reset_infos: dict[int, dict[str, Any]] = {}
        # of the recurrent policy, per environment: the state that enters the next step
        self._state: Any = agent.initial_state(self.num_envs) if agent.is_recurrent else None
        self._states: Columns = [np.array(leaf) for leaf in _tree.leaves(self._state)] if agent.is_recurrent else []
        self._is_fresh = np.ones(self.num_envs, np.bool_)
        self._seeds: list[deque[int]] | None = None  # of a seeded run_episodes, per environment
        self._waiting_since: float | None = None
        self._start_offset = self._index_offset()

    def _index_offset(self) -> Any:
        """What turns a policy's index (0, 1, ...) into an action of a Discrete space that starts elsewhere."""
        space = self.action.space
        if isinstance(space, spaces.Discrete) and getattr(self.agent.policy, "index_actions", False):
            return space.start
        return 0

    # -- starting --------------------------------------------------------------------------------

    def reset_all(self) -> None:
        """Give every environment its first observation.

        Raises:
            EnvError: one raised, died, or took longer than `start_timeout`.
        """
        seed, timeout_s = self.options.seed, self.options.start_timeout
        self.slots.seed[:] = NO_SEED if seed is None else seed + np.arange(self.num_envs)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.pool.send(np.arange(self.num_envs), Command.RESET)
        while self.schedule.is_doing(Doing.RESETTING).any():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                late = np.flatnonzero(self.schedule.is_doing(Doing.RESETTING)).tolist()
                raise env_error(NotReady(tuple(late), Phase.RESET, timeout_s or 0.0))
            self._absorb()
            if self.pool.problems:
                raise env_error(self.pool.problems[0], first_env_id=self.options.first_env_id)
            if self.schedule.is_doing(Doing.RESETTING).any():
                self.pool.wait(left)
        self.slots.seed[:] = NO_SEED

    # -- driving ---------------------------------------------------------------------------------

    def drive(self, sink: StepSink | BlockSink, call: Call) -> bool:
        """Run until what is owed is in the sink (True), or the call is over before that (False).

        Raises:
            EnvError, PolicyError, ClosedError, KeyboardInterrupt: the sink keeps what it has.
        """
        schedule = self.schedule
        if schedule.owed and call.is_stopped():  # before it began: what happens to be ready is not taken
            return False
        while True:
            self._absorb()
            ids = schedule.take()
            if ids.size:
                self._deliver(ids, sink, call)
            self._command(call)
            if schedule.finished:
                return True
            if self.closing:
                raise ClosedError(f"{self.options.who}: it was closed by another thread during this call")
            if call.ctrl_c:
                raise KeyboardInterrupt
            if call.is_over():
                return False
            if self.pool.problems:
                self.broken = self._env_error()
                raise self.broken
            self.pool.wait(self._patience(call))

    def settle(self, call: Call) -> None:
        """After a call that was cut short: give up what the schedule gave up, serve whoever waits."""
        self._command(call, everyone=True)

    def serve_waiting(self) -> None:
        """Between two calls: whoever has an observation gets its action from the present weights."""
        self._absorb()
        self._command(Call(), everyone=True)

    def seed_episodes(self, seeds: list[deque[int]] | None) -> None:
        """The reset seeds of each environment's episodes in this call; None: no seeds (any more)."""
        if self._seeds is not None and seeds is None:
            self.slots.seed[:] = NO_SEED
        self._seeds = seeds

    def _absorb(self) -> None:
        """Tell the schedule what the workers have published."""
        schedule, slots = self.schedule, self.slots
        arrived = np.flatnonzero(schedule.is_doing(Doing.STEPPING) & (slots.stepped == slots.sent))
        if arrived.size:
            self._book.stepped(arrived, slots.reward[arrived])
            schedule.stepped(arrived, slots.terminated[arrived] | slots.truncated[arrived])
        resetting = schedule.is_doing(Doing.RESETTING)
        if np.count_nonzero(resetting):
            fresh = np.flatnonzero(resetting & (slots.observed == slots.sent))
            if fresh.size:
                self._is_fresh[fresh] = True
                if slots.info_size[fresh, InfoOf.RESET].any():
                    for env in fresh[slots.info_size[fresh, InfoOf.RESET] != 0].tolist():
                        self._next_reset_infos[env] = self.pool.info(env, InfoOf.RESET)
                schedule.observed(fresh)

    def _command(self, call: Call, *, everyone: bool = False) -> None:
        """Send the resets and the inference batches that are due."""
        schedule = self.schedule
        while True:
            resets = schedule.due_resets()
            given_up = self._note_abandoned()
            if schedule.lost_ends:
                self._book.next_episode(np.array(schedule.lost_ends))
                schedule.lost_ends.clear()
            if resets.size:
                self._book.next_episode(resets)
                for env in resets.tolist():
                    self._next_reset_infos.pop(env, None)
                    seeds = self._seeds[env] if self._seeds is not None else None
                    self.slots.seed[env] = seeds.popleft() if seeds else NO_SEED
                self.pool.send(resets, Command.RESET)
            for summary in given_up:  # now that nothing is left undone: a processor may raise, or update the policy
                self.report(call, EpisodeAbandoned(summary, call.progress.snapshot()))
            ids = schedule.next_batch(expired=self._has_expired(), everyone=everyone)
            if not ids.size:
                return
            self._act(ids)
            self._waiting_since = None

    def _has_expired(self) -> bool:
        max_wait = self.options.max_wait
        if max_wait is None or self._waiting_since is None:
            return False
        return time.monotonic() - self._waiting_since >= max_wait

    def _patience(self, call: Call) -> float | None:
        """Seconds that a wait may take, or None: until something happens."""
        now = time.monotonic()
        until = [] if call.deadline is None else [call.deadline]
        if self.options.max_wait is not None and self.schedule.is_doing(Doing.WAITING).any():
            if self._waiting_since is None:
                self._waiting_since = now
            until.append(self._waiting_since + self.options.max_wait)
        return max(0.0, min(until) - now) if until else None

    # -- acting ----------------------------------------------------------------------------------

    def _act(self, ids: np.ndarray) -> None:
        """One forward pass for these environments, and their actions sent."""
        where = selector(ids)
        batch = [np.array(column[where]) for column in self.slots.obs]
        state = None
        if self._states:
            state = self._enter_state(ids)
        output, version = self.agent.run_batch(
            self.observation.nest(batch), self.options.deterministic, state=state, env_ids=self._env_ids[ids]
        )
        actions, env_actions = self._check_actions(output.actions, ids)
        context = self._check_context(output.context, state, ids.size)
        if self._states:
            self._leave_state(ids, output.state)
        # nothing raises from here on: an agent has acted, or it has not
        for column, values in zip(self._obs, batch, strict=True):
            column[where] = values
        for column, values in zip(self._actions, actions, strict=True):
            column[where] = values
        for column, values in zip(self._context_columns, context, strict=True):
            column[where] = values
        for column, values in zip(self.slots.action, env_actions, strict=True):
            column[where] = values
        self._versions[where] = version
        if self._reset_infos or self._next_reset_infos:
            for env in ids.tolist():
                self._reset_infos.pop(env, None)
                if env in self._next_reset_infos:
                    self._reset_infos[env] = self._next_reset_infos.pop(env)
        if self._seeds is not None:
            for env in ids.tolist():
                self.slots.seed[env] = self._seeds[env][0] if self._seeds[env] else NO_SEED
        self._is_fresh[where] = False
        self.counters.batches += 1
        self.counters.batched_rows += ids.size
        self.schedule.acted(ids)
        self.pool.send(ids, Command.STEP)

    def _check_actions(self, actions: Any, ids: np.ndarray) -> tuple[Columns, Columns]:
        """(the policy's own, what the environments get) as columns."""
        if type(actions) is not np.ndarray:
            actions = _tree.map_tree(_to_numpy, actions)
        try:
            own = self.action.flatten(actions)
            shifted = (
                actions if type(self._start_offset) is int and self._start_offset == 0 else own[0] + self._start_offset
            )
            checked = self.action.batch(shifted, ids.size)
        except Mismatch as error:
            raise PolicyError(f"{self._whose_answer()}: {error}. Check what its action() returns") from None
        own = own if shifted is not actions else checked
        if not self._actions:
            self._actions = [np.zeros((self.num_envs, *column.shape[1:]), column.dtype) for column in own]
        return own, self.action.clip(checked) if self.options.clip_actions else checked

    def _check_context(self, context: dict[str, Any], state: Any, size: int) -> Columns:
        """The leaves of a context that has the names and shapes of the first one."""
        if state is not None:
            context = {**context, "state": state}
        if self._context_shapes is not None and context.keys() == self._context_shapes.keys():
            if all(type(v) is np.ndarray and v.shape == (size, *self._context_shapes[k]) for k, v in context.items()):
                return [context[name] for name in self._context_shapes]
        context = _tree.map_tree(_to_numpy, context)
        values = [np.asarray(leaf) for leaf in _tree.leaves(context)]
        for name, leaf in context.items():
            if any(np.shape(value)[:1] != (size,) for value in _tree.leaves(leaf)):
                raise PolicyError(
                    f"{self._whose_answer()}: context[{name!r}] has shape {np.shape(_tree.first_leaf(leaf))} for a "
                    f"batch of {size}; legal is ({size}, ...): one row per environment"
                )
        if not self._context_columns:
            self._context = context
            self._context_columns = [np.zeros((self.num_envs, *value.shape[1:]), value.dtype) for value in values]
            if len(values) == len(context):  # no nesting
                self._context_shapes = {k: v.shape[1:] for k, v in zip(context, values, strict=True)}
        same = context.keys() == self._context.keys() and len(values) == len(self._context_columns)
        if not same or any(v.shape[1:] != c.shape[1:] for v, c in zip(values, self._context_columns, strict=True)):
            raise PolicyError(
                f"{self._whose_answer()}: its context has {_shapes(context)} in this batch, but had "
                f"{_shapes(self._context)} in the first; legal is the same names and row shapes every time"
            )
        return values

    def _whose_answer(self) -> str:
        return f"{self.options.who}: policy {name_of(self.agent.policy)}"

    def _enter_state(self, ids: np.ndarray) -> Any:
        """The recurrent states of these agents, fresh ones where an episode begins."""
        fresh = ids[self._is_fresh[ids]]
        if fresh.size:
            initial = [np.asarray(leaf) for leaf in _tree.leaves(self.agent.initial_state(int(fresh.size)))]
            for column, values in zip(self._states, initial, strict=True):
                column[fresh] = values
        rows = iter([column[ids] for column in self._states])
        return _tree.map_tree(lambda _: next(rows), self._state)

    def _leave_state(self, ids: np.ndarray, state: Any) -> None:
        values = [] if state is None else [np.asarray(_to_numpy(leaf)) for leaf in _tree.leaves(state)]
        legal = [(ids.size, *column.shape[1:]) for column in self._states]
        if [value.shape for value in values] != legal:
            got = "None" if state is None else str([value.shape for value in values])
            raise PolicyError(
                f"{self._whose_answer()}: it has initial_state, and answered state {got}; legal are arrays of the "
                f"shapes {legal}: PolicyOutput(actions, context, state=the state after this step)"
            )
        for column, value in zip(self._states, values, strict=True):
            column[ids] = value

    # -- delivering ------------------------------------------------------------------------------

    def row_origin(self) -> tuple[RowSchema, list[np.ndarray]]:
        """Schema and sources for a sink; final once a policy has answered."""
        schema = RowSchema(self.observation, self.action, self._context)
        slots, book = self.slots, self._book
        sources = [
            self._env_ids,
            book.episode_id,
            *self._obs,
            *slots.obs,
            slots.reward,
            slots.terminated,
            slots.truncated,
            book.length,
            book.total_reward,
            self._versions,
            *(self._actions or self.action.allocate(self.num_envs)),
            *self._context_columns,
        ]
        return schema, sources

    @property
    def state_tree(self) -> Any:
        """A recurrent state `[N, ...]` whose nesting and shapes count; None if the policy has none."""
        return self._state

    def _deliver(self, ids: np.ndarray, sink: StepSink | BlockSink, call: Call) -> None:
        slots = self.slots
        ends = slots.terminated[ids] | slots.truncated[ids]
        infos = self._infos_of(ids)
        sink.take(ids, ends, slots.final, infos)
        if self._states and isinstance(sink, BlockSink):
            sink.keep_state(ids, self._states)
        events = [] if call.processor is None else [self._row(env, infos) for env in ids.tolist()]
        counters = self.counters
        counters.steps += ids.size
        if np.count_nonzero(ends):
            over = ids[ends]
            terminated = int(slots.terminated[over].sum())
            counters.episodes_terminated += terminated
            counters.episodes_truncated += over.size - terminated
            if self._seeds is not None:
                for env in over.tolist():
                    if self._seeds[env]:
                        self._seeds[env].popleft()  # its reset has used it
            self._book.next_episode(over)
        if call.processor is None:
            call.progress.advance(int(ids.size))
        for step in events:
            call.progress.advance(1)
            self.report(call, EnvStep(step, call.progress.snapshot()))
            if step.done:
                summary = EpisodeSummary(
                    step.env_id, step.episode_id, step.ep_len, step.cum_reward, step.terminated, step.truncated
                )
                self.report(call, EpisodeEnd(summary, call.progress.snapshot()))

    def _infos_of(self, ids: np.ndarray) -> Infos:
        sizes = self.slots.info_size[ids, InfoOf.STEP]
        steps = {}
        if np.count_nonzero(sizes):
            steps = {env: self.pool.info(env, InfoOf.STEP) for env in ids[sizes != 0].tolist()}
        resets = {}
        if self._reset_infos:
            firsts = ids[self._book.length[ids] == 1].tolist()
            resets = {env: self._reset_infos[env] for env in firsts if env in self._reset_infos}
        return Infos(steps, resets) if steps or resets else _NO_INFOS

    def _row(self, env: int, infos: Infos) -> TimeStep:
        """The undelivered row of an environment, as a value of its own."""
        slots, book = self.slots, self._book
        ended = bool(slots.terminated[env] or slots.truncated[env])
        context = iter([np.copy(column[env]) for column in self._context_columns])
        return TimeStep(
            env_id=int(self._env_ids[env]),
            episode_id=int(book.episode_id[env]),
            obs=self.observation.nest([np.copy(column[env]) for column in self._obs]),
            action=self.action.nest([np.copy(column[env])[()] for column in self._actions]),
            reward=float(slots.reward[env]),
            next_obs=self.observation.nest([np.copy(column[env]) for column in (slots.final if ended else slots.obs)]),
            terminated=bool(slots.terminated[env]),
            truncated=bool(slots.truncated[env]),
            ep_len=int(book.length[env]),
            cum_reward=float(book.total_reward[env]),
            action_context=_tree.map_tree(lambda _: next(context)[()], self._context),
            policy_version=int(self._versions[env]),
            info=infos.steps.get(env, {}),
            reset_info=infos.resets.get(env, {}) if book.length[env] == 1 else None,
        )

    def _note_abandoned(self) -> list[EpisodeSummary]:
        """Count the episodes that the schedule has given up; how far each had come."""
        given_up, self.schedule.abandoned = self.schedule.abandoned, []
        self.counters.episodes_abandoned += len(given_up)
        self.counters.rows_lost += sum(one.rows_lost for one in given_up)
        book = self._book
        return [
            EpisodeSummary(
                int(self._env_ids[one.env]),
                int(book.episode_id[one.env]),
                int(book.length[one.env]),
                float(book.total_reward[one.env]),
                terminated=False,
                truncated=False,
            )
            for one in given_up
        ]

    def report(self, call: Call, event: Event) -> None:
        """The one place where events leave: for all calls, for training and for evaluation."""
        if call.processor is None:
            return
        if self.options.eval:
            call.processor.process_valid(event)
        else:
            call.processor.process_train(event)

    def _env_error(self) -> EnvError:
        problem = self.pool.problems[0]
        env = problem.env_ids[0] if isinstance(problem, NotReady) else problem.env_id
        action = self.action.nest([column[env].tolist() for column in self.slots.action])
        return env_error(
            problem,
            first_env_id=self.options.first_env_id,
            episode_id=int(self._book.episode_id[env]),
            step=int(self._book.length[env]) + 1,
            action=action,
        )


def _to_numpy(leaf: Any) -> Any:
    """Tensors of any device become arrays; everything else stays."""
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)


def _shapes(context: dict[str, Any]) -> str:
    return str({name: [np.shape(leaf)[1:] for leaf in _tree.leaves(tree)] for name, tree in context.items()})
