"""Where delivered rows go: into one batch (`StepSink`) or one block (`BlockSink`), column by column.

A sink copies from *sources*: one array `[N, ...]` per column, indexed by environment, in the order
that `RowSchema` fixes. The rule that must hold: what a sink returns shares no memory with a source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envrunner import _tree
from envrunner.spaces import Columns, Layout
from envrunner.types import RolloutBatch, StepBatch, Trajectory

_CHUNK_ROWS = 65_536
_CHUNK_BYTES = 64 << 20

_BEFORE_OBS = ("env_id", "episode_id")
_AFTER_NEXT_OBS = ("reward", "terminated", "truncated", "ep_len", "cum_reward", "policy_version")

Selector = slice | np.ndarray


def selector(ids: np.ndarray) -> Selector:
    """A slice where the ids are consecutive (ten times as fast to copy by), else the ids."""
    size, first = ids.size, int(ids[0])
    if int(ids[-1]) - first != size - 1 or np.count_nonzero(ids[1:] > ids[:-1]) != size - 1:
        return ids
    return slice(first, first + size)


class RowSchema:
    """The order of a row's columns as a flat list, and back to a batch.

    Flat order: `_BEFORE_OBS`, leaves of obs, leaves of next_obs, `_AFTER_NEXT_OBS`, leaves of action,
    leaves of action_context.
    """

    def __init__(self, observation: Layout, action: Layout, context: dict[str, Any]) -> None:
        self._observation = observation
        self._action = action
        self._context = context  # a tree whose leaves do not matter
        k = len(observation.leaves)
        self.obs = slice(len(_BEFORE_OBS), len(_BEFORE_OBS) + k)
        self.next_obs = slice(self.obs.stop, self.obs.stop + k)
        self.rest = slice(self.next_obs.stop, self.next_obs.stop + len(_AFTER_NEXT_OBS))
        self.action = slice(self.rest.stop, self.rest.stop + len(action.leaves))
        self.context = slice(self.action.stop, None)

    def shared(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The columns that batches and blocks have in common, by name."""
        context = iter(flat[self.context])
        return {
            **dict(zip(_BEFORE_OBS, flat, strict=False)),
            **dict(zip(_AFTER_NEXT_OBS, flat[self.rest], strict=True)),
            "action": self._action.nest(flat[self.action]),
            "action_context": _tree.map_tree(lambda _: next(context), self._context),
        }

    def nest_obs(self, flat: Sequence[Any]) -> Any:
        return self._observation.nest(flat)

    def batch(self, flat: Sequence[Any], **extra: Any) -> StepBatch:
        return StepBatch(
            **self.shared(flat), obs=self.nest_obs(flat[self.obs]), next_obs=self.nest_obs(flat[self.next_obs]), **extra
        )

    def flatten(self, rows: StepBatch) -> list[np.ndarray]:
        """The columns of a batch of this schema, in flat order."""
        flat = [getattr(rows, name) for name in _BEFORE_OBS]
        flat += self._observation.flatten(rows.obs)
        flat += self._observation.flatten(rows.next_obs)
        flat += [getattr(rows, name) for name in _AFTER_NEXT_OBS]
        flat += self._action.flatten(rows.action)
        return flat + list(_tree.leaves(rows.action_context))


Origin = Callable[[], tuple[RowSchema, list[np.ndarray]]]


@dataclass(frozen=True, slots=True)
class Infos:
    """What the environments said beside the rows about to be taken: environment -> non-empty dict."""

    steps: dict[int, dict[str, Any]]
    resets: dict[int, dict[str, Any]]


class StepSink:
    """Rows in order of arrival.

    Args:
        origin: gives schema and sources; asked at the first row, since they are not known before.
        num_rows: how many are expected; memory is taken in chunks up to that. None: unknown.
        kept: rows of an earlier call that raised; they come first.
    """

    def __init__(self, origin: Origin, num_rows: int | None, kept: StepBatch | None = None) -> None:
        self._origin = origin
        self._left = num_rows
        self._chunks: list[Columns] = []
        self._size = 0  # rows in the last chunk
        self._capacity = 0
        self._num_rows = 0  # rows in all, without the kept ones
        self._kept = kept
        self._infos: dict[int, dict[str, Any]] = {}
        self._reset_infos: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return self._num_rows

    def _new_chunk(self) -> None:
        if not self._chunks:
            self._schema, self._sources = self._origin()
        row_bytes = sum(source.itemsize * int(np.prod(source.shape[1:])) for source in self._sources)
        rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes)))
        if self._left is None:  # nobody said how many: begin small
            rows = min(rows, 256 << 2 * len(self._chunks))
        else:
            rows = min(rows, self._left)
        self._chunks.append([np.empty((rows, *source.shape[1:]), source.dtype) for source in self._sources])
        self._size, self._capacity = 0, rows

    def take(self, ids: np.ndarray, ends: np.ndarray, finals: Columns, infos: Infos) -> None:
        """Copy the row of each of these environments; where it ended, `finals` has its next_obs."""
        if infos.steps or infos.resets:
            for row, env in enumerate(ids.tolist(), start=self._num_rows):
                if env in infos.steps:
                    self._infos[row] = infos.steps[env]
                if env in infos.resets:
                    self._reset_infos[row] = infos.resets[env]
        while ids.size:
            if self._size == self._capacity:
                self._new_chunk()
            fits = self._capacity - self._size
            self._copy(ids[:fits], ends[:fits], finals)
            ids, ends = ids[fits:], ends[fits:]

    def _copy(self, ids: np.ndarray, ends: np.ndarray, finals: Columns) -> None:
        begin, end = self._size, self._size + ids.size
        chunk = self._chunks[-1]
        where = selector(ids)
        if isinstance(where, slice):
            for column, source in zip(chunk, self._sources, strict=True):
                column[begin:end] = source[where]
        else:
            for column, source in zip(chunk, self._sources, strict=True):
                np.take(source, ids, axis=0, out=column[begin:end], mode="clip")
        if np.count_nonzero(ends):
            rows, over = begin + np.flatnonzero(ends), ids[ends]
            for column, final in zip(chunk[self._schema.next_obs], finals, strict=True):
                column[rows] = final[over]
        self._size = end
        self._num_rows += ids.size
        if self._left is not None:
            self._left -= ids.size

    def rows(self, complete: bool) -> StepBatch:
        """Everything taken, the kept rows first. The sink gives up its memory."""
        if not self._chunks:
            self._new_chunk()
        self._chunks[-1] = [column[: self._size] for column in self._chunks[-1]]
        if len(self._chunks) == 1:
            flat = self._chunks[0]
        else:
            flat = [np.concatenate(parts) for parts in zip(*self._chunks, strict=True)]
        fresh = self._schema.batch(flat, infos=self._infos, reset_infos=self._reset_infos, complete=complete)
        self._chunks = []
        if self._kept is None:
            return fresh
        joined = StepBatch.concatenate([self._kept, fresh])
        return joined if joined.complete == complete else with_complete(joined, complete)


class BlockSink:
    """Rows into `[T, N]`: each environment's next row below its last one.

    Args:
        origin: gives schema and sources; asked at the first row, since they are not known before.
        num_steps: T.
        num_envs: N.
    """

    def __init__(self, origin: Origin, num_steps: int, num_envs: int) -> None:
        self._origin = origin
        self._num_steps, self._num_envs = num_steps, num_envs
        self.lengths = np.zeros(num_envs, np.int64)
        self._columns: list[np.ndarray | None] = []
        self._ended = np.zeros(num_envs, np.bool_)  # the last row of each column ended its episode
        self._finals: list[tuple[np.ndarray, np.ndarray, Columns]] = []
        self._infos: dict[tuple[int, int], dict[str, Any]] = {}
        self._reset_infos: dict[tuple[int, int], dict[str, Any]] = {}
        self._last_state: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def _open(self) -> None:
        if self._columns:
            return
        self._schema, self._sources = self._origin()
        shape = (self._num_steps, self._num_envs)
        once = {*range(len(self._sources))[self._schema.obs], *range(len(self._sources))[self._schema.next_obs]}
        self._columns = [
            None if k in once else np.zeros((*shape, *source.shape[1:]), source.dtype)
            for k, source in enumerate(self._sources)
        ]
        self._observations = [
            np.zeros((shape[0] + 1, shape[1], *source.shape[1:]), source.dtype)
            for source in self._sources[self._schema.obs]
        ]

    def take(
        self,
        ids: np.ndarray,
        ends: np.ndarray,
        finals: Columns,
        infos: Infos,
        sources: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Copy the row of each of these environments; where it ended, `finals` has its next_obs."""
        self._open()
        sources = self._sources if sources is None else sources
        steps = self.lengths[ids]
        where = selector(ids)
        even = isinstance(where, slice) and np.count_nonzero(steps == steps[0]) == ids.size
        at: Any = (int(steps[0]), where) if even else (steps, ids)
        below: Any = (int(steps[0]) + 1, where) if even else (steps + 1, ids)
        ep_len = sources[self._schema.rest][_AFTER_NEXT_OBS.index("ep_len")]
        self._begin_episodes(ids, steps, ep_len[ids] == 1, sources[self._schema.obs])
        picked: Any = where if even else ids
        for column, source in zip(self._columns, sources, strict=True):
            if column is not None:
                column[at] = source[picked]
        for column, source in zip(self._observations, sources[self._schema.next_obs], strict=True):
            column[below] = source[picked]
        if np.count_nonzero(ends):
            over = ids[ends]
            self._finals.append((steps[ends], over, [final[over] for final in finals]))
        self._ended[ids] = ends
        self.lengths[ids] += 1
        if infos.steps or infos.resets:
            for step, env in zip(steps.tolist(), ids.tolist(), strict=True):
                if env in infos.steps:
                    self._infos[step, env] = infos.steps[env]
                if env in infos.resets:
                    self._reset_infos[step, env] = infos.resets[env]

    def _begin_episodes(
        self, ids: np.ndarray, steps: np.ndarray, firsts: np.ndarray, sources: Sequence[np.ndarray]
    ) -> None:
        """Where a column or an episode begins, write the observation before the row's own step.

        If an episode was cut there, what stood in its place was the last row's next_obs: keep that.
        """
        begins = firsts | (steps == 0)
        if not np.count_nonzero(begins):
            return
        cut = firsts & (steps > 0) & ~self._ended[ids]
        if np.count_nonzero(cut):
            at, env = steps[cut], ids[cut]
            self._finals.append((at - 1, env, [column[at, env] for column in self._observations]))
        at, env = steps[begins], ids[begins]
        for column, source in zip(self._observations, sources, strict=True):
            column[at, env] = source[env]

    def put(self, kept: StepBatch) -> StepBatch | None:
        """Enter rows of an earlier call, each below its environment's last; those that do not fit come back."""
        self._open()
        flat = self._schema.flatten(kept)
        envs = flat[0] - self._sources[0][0]
        left: list[np.ndarray] = []
        rows = np.arange(len(kept))
        while rows.size:  # one row of each environment at a time
            first = np.sort(np.unique(envs[rows], return_index=True)[1])
            these, rows = rows[first], np.delete(rows, first)
            fits = self.lengths[envs[these]] < self._num_steps
            left.append(these[~fits])
            these = these[fits]
            if not these.size:
                continue
            ids = envs[these]
            scattered = [np.zeros((self._num_envs, *column.shape[1:]), column.dtype) for column in flat]
            for target, column in zip(scattered, flat, strict=True):
                target[ids] = column[these]
            at = dict(zip(these.tolist(), ids.tolist(), strict=True))
            infos = Infos(
                {at[row]: info for row, info in kept.infos.items() if row in at},
                {at[row]: info for row, info in kept.reset_infos.items() if row in at},
            )
            ends = (kept.terminated | kept.truncated)[these]
            self.take(ids, ends, scattered[self._schema.next_obs], infos, scattered)
        over = np.sort(np.concatenate([np.empty(0, np.int64), *left]))
        return kept[over] if over.size else None

    def keep_state(self, ids: np.ndarray, states: Sequence[np.ndarray]) -> None:
        """The recurrent states after the rows just taken."""
        if self._last_state is None:
            self._last_state = [np.zeros_like(state) for state in states]
        for kept, state in zip(self._last_state, states, strict=True):
            kept[ids] = state[ids]

    def block(self, complete: bool, state_tree: Any = None) -> RolloutBatch:
        """The block. The sink gives up its memory."""
        self._open()
        k = len(self._observations)
        none = np.empty(0, np.int64)
        steps = np.concatenate([step for step, _, _ in self._finals] or [none])
        envs = np.concatenate([env for _, env, _ in self._finals] or [none])
        finals = [
            np.concatenate([parts[leaf] for _, _, parts in self._finals] or [self._observations[leaf][0, :0]])
            for leaf in range(k)
        ]
        last = self.lengths - 1
        envs_all = np.arange(self._num_envs)
        last_obs = [column[self.lengths, envs_all] for column in self._observations]
        at_end = np.flatnonzero(steps == last[envs]) if steps.size else none
        for column, final in zip(last_obs, finals, strict=True):
            column[envs[at_end]] = final[at_end]
        states = None
        if state_tree is not None:
            flat = iter(self._last_state or [np.zeros_like(state) for state in _tree.leaves(state_tree)])
            states = _tree.map_tree(lambda _: next(flat), state_tree)
        nest = self._schema.nest_obs
        return RolloutBatch(
            **self._schema.shared(self._columns),
            observations=nest(self._observations),
            finals=(steps, envs, nest(finals)),
            lengths=self.lengths,
            last_obs=nest(last_obs),
            last_state=states,
            infos=self._infos,
            reset_infos=self._reset_infos,
            complete=complete,
        )

    def rows(self, complete: bool) -> StepBatch:
        """Everything taken, by time and then by environment: for a call that raised."""
        return self.block(complete).flatten()


def with_complete(rows: StepBatch, complete: bool) -> StepBatch:
    """The same rows, sharing memory, with another `complete`."""
    return dataclasses.replace(rows, complete=complete)


def whole_episodes(rows: StepBatch, envs: np.ndarray) -> list[Trajectory | None]:
    """The episode of each entry of `envs` (`[k]` environment ids): environment e's first whole one for
    its first entry, and so on; None where it played too few."""
    entries: dict[int, list[int]] = {}
    for j, env in enumerate(envs.tolist()):
        entries.setdefault(env, []).append(j)
    found: list[Trajectory | None] = [None] * len(envs)
    done = rows.done
    for env, js in entries.items():
        mine = np.flatnonzero(rows.env_id == env)
        if not mine.size:
            continue
        cuts = np.flatnonzero(np.diff(rows.episode_id[mine])) + 1
        whole = [part for part in np.split(mine, cuts) if done[part[-1]]]
        for j, part in zip(js, whole, strict=False):
            found[j] = Trajectory.from_rows(rows[part])
    return found
