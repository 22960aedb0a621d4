"""What a run hands over: single rows, batches of rows in columns, blocks `[T, N]`, whole episodes.

Decided here: which columns there are, how rows are picked, copied, joined and turned into torch
tensors. Not here: which rows a call returns (`_core`), and who fills the columns (`loops`).

The rule that must hold: a batch is its holder's own memory. Picking rows, joining, flattening
and `to_torch` copy; nothing here gives out a view of another batch's columns. A constructor
takes the arrays that it is given as they are.

Letters: `n` rows, `T` time steps, `N` environments, `L` length of an episode, `B` batch, `K` ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias, overload

import numpy as np

from envrunner._tree import map_tree

Column: TypeAlias = Any  # numpy array, or torch tensor after `to_torch`
Tree: TypeAlias = Any  # a Column, or dicts and tuples of Columns

# The columns that a batch of rows and a block have in common; both have obs and next_obs besides.
_SHARED_COLUMNS = (
    "env_id",
    "episode_id",
    "action",
    "reward",
    "terminated",
    "truncated",
    "ep_len",
    "cum_reward",
    "action_context",
    "policy_version",
)
ROW_COLUMNS = (*_SHARED_COLUMNS, "obs", "next_obs")


@dataclass(frozen=True, slots=True, eq=False)
class PolicyOutput:
    """What a policy answers to a batch of observations.

    Attributes:
        actions: `[B, *A]`, or dicts and tuples of such; the row keeps them as they are.
        context: what else the trainer wants to keep of this forward pass, by name, each `[B, ...]`
            (`log_prob`, `value`); it comes back as `action_context`.
        state: the recurrent state after this step, `[B, ...]`, or None.
    """

    actions: Tree
    context: dict[str, Tree] = field(default_factory=dict)
    state: Tree | None = None


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """How one episode went. An aborted or abandoned one is neither terminated nor truncated."""

    env_id: int
    episode_id: int
    length: int
    total_reward: float
    terminated: bool
    truncated: bool
    aborted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TimeStep:
    """One step of one environment: `obs`, the action chosen there, and what came of it.

    Attributes:
        env_id: index of the environment, from 0.
        episode_id: counts from 0 per environment and grows by one at every reset.
        obs: `[*O]` that the action was chosen on.
        action: `[*A]`, the policy's own, before any clipping.
        reward: of this step.
        next_obs: `[*O]`, at an end the true last observation and never a reset's.
        terminated: the task ended; nothing comes after, so nothing is bootstrapped.
        truncated: the episode was cut from outside; `next_obs` still has a value.
        ep_len: steps of this episode so far, this one included: 1 on its first row.
        cum_reward: rewards of this episode so far, this one included.
        action_context: what the policy said beside the action.
        policy_version: version of the policy that chose the action.
        info: as `env.step` gave it.
        reset_info: as `env.reset` gave it on the first row of an episode, None on every other.
    """

    env_id: int
    episode_id: int
    obs: Tree
    action: Tree
    reward: float
    next_obs: Tree
    terminated: bool
    truncated: bool
    ep_len: int
    cum_reward: float
    action_context: dict[str, Tree]
    policy_version: int
    info: dict[str, Any]
    reset_info: dict[str, Any] | None

    @property
    def done(self) -> bool:
        """The episode ended with this row, by either kind of end."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Rows:
    """Rows in columns: what StepBatch and Trajectory share."""

    env_id: Column
    episode_id: Column
    obs: Tree
    action: Tree
    reward: Column
    next_obs: Tree
    terminated: Column
    truncated: Column
    ep_len: Column
    cum_reward: Column
    action_context: dict[str, Tree]
    policy_version: Column
    infos: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    reset_infos: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        for name in ROW_COLUMNS:
            _check_leading_axes(type(self).__name__, name, getattr(self, name), tuple(self.reward.shape))

    def columns(self) -> Iterator[tuple[str, Column]]:
        """Every column with its name, nested ones as `obs['camera'][0]`."""
        for name in ROW_COLUMNS:
            yield from named_leaves(getattr(self, name), name)

    @property
    def num_rows(self) -> int:
        """Number of rows; the same as `len`."""
        return len(self.reward)

    @property
    def done(self) -> Column:
        """`[n] bool`: the row's episode ended with it, by either kind of end."""
        return self.terminated | self.truncated

    @property
    def info(self) -> list[dict[str, Any]]:
        """One info per row, `{}` where the environment sent nothing."""
        return [self.infos.get(row, {}) for row in range(len(self))]

    @property
    def reset_info(self) -> list[dict[str, Any] | None]:
        """One per row: what the reset said on the first row of an episode, None on every other."""
        return [self._reset_info_of(row, ep_len) for row, ep_len in enumerate(self.ep_len.tolist())]

    @property
    def episodes(self) -> tuple[EpisodeSummary, ...]:
        """Every episode that ended in these rows, in the order of the rows."""
        return _summaries(self, (np.flatnonzero(_host(self.done)),))

    def __len__(self) -> int:
        return len(self.reward)

    def __iter__(self) -> Iterator[TimeStep]:
        return (self._row(row) for row in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TimeStep: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Column) -> StepBatch: ...

    def __getitem__(self, index: Any) -> TimeStep | StepBatch:
        """Row `index` as a TimeStep, or the rows of a slice, index array or bool mask as a StepBatch."""
        if isinstance(index, slice):
            return self._pick(index, range(len(self))[index])
        if getattr(index, "ndim", 0) == 0 and hasattr(index, "__index__"):
            return self._row(self._row_number(operator.index(index)))
        rows = self._row_numbers(index)
        return self._pick(rows, rows.tolist() if self.infos or self.reset_infos else ())

    def _row_number(self, row: int) -> int:
        """`row` counted from the front."""
        num_rows = len(self)
        if not -num_rows <= row < num_rows:
            legal = f"legal is {-num_rows}..{num_rows - 1}" if num_rows else "it has no rows"
            raise IndexError(f"{type(self).__name__}: there is no row {row}; {legal}: look at `len` first")
        return row + num_rows if row < 0 else row

    def _row_numbers(self, index: Any) -> np.ndarray:
        """`[k] int64` of row numbers counted from the front, from an index array or a mask `[n] bool`."""
        num_rows = len(self)
        rows = np.asarray(_host(index))
        if rows.dtype == bool and rows.shape == (num_rows,):
            return np.flatnonzero(rows)
        if rows.ndim != 1 or (rows.size > 0 and rows.dtype.kind not in "iu"):
            raise IndexError(
                f"{type(self).__name__}: cannot pick rows by {rows.dtype} of shape {rows.shape}; legal are an int, "
                f"a slice, an integer array [k] and a bool mask [{num_rows}]"
            )
        rows = rows.astype(np.int64)
        if rows.size > 0:
            self._row_number(int(rows.min()))
            self._row_number(int(rows.max()))
        return np.where(rows < 0, rows + num_rows, rows)

    def _row(self, row: int) -> TimeStep:
        cell = operator.itemgetter(row)
        ep_len = _scalar(self.ep_len, row)
        return TimeStep(
            env_id=_scalar(self.env_id, row),
            episode_id=_scalar(self.episode_id, row),
            obs=map_tree(cell, self.obs),
            action=map_tree(cell, self.action),
            reward=_scalar(self.reward, row),
            next_obs=map_tree(cell, self.next_obs),
            terminated=_scalar(self.terminated, row),
            truncated=_scalar(self.truncated, row),
            ep_len=ep_len,
            cum_reward=_scalar(self.cum_reward, row),
            action_context=map_tree(cell, self.action_context),
            policy_version=_scalar(self.policy_version, row),
            info=self.infos.get(row, {}),
            reset_info=self._reset_info_of(row, ep_len),
        )

    def _reset_info_of(self, row: int, ep_len: int) -> dict[str, Any] | None:
        return self.reset_infos.get(row, {}) if ep_len == 1 else None

    def _pick(self, rows: slice | np.ndarray, row_numbers: Sequence[int]) -> StepBatch:
        return StepBatch(
            **_map_columns(lambda column: take(column, rows), self, ROW_COLUMNS),
            infos=_pick_infos(self.infos, row_numbers),
            reset_infos=_pick_infos(self.reset_infos, row_numbers),
            complete=self.complete,
        )

    def _torch_arguments(self, device: Any) -> dict[str, Any]:
        return {
            **_columns_to_torch(self, ROW_COLUMNS, device),
            "infos": _copy_infos(self.infos),
            "reset_infos": _copy_infos(self.reset_infos),
            "complete": self.complete,
        }


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepBatch(_Rows):
    """n rows in columns, in order of arrival; indexing and iteration give `TimeStep`s.

    Dict and tuple spaces have the same nesting of columns: `obs["camera"]` is `[n, *O]`.
    `batch[3]` is a row whose arrays are views of this batch; `batch[3:9]`, `batch[[5, 2]]` and
    `batch[batch.done]` are StepBatches with memory of their own.

    Attributes:
        env_id: `[n] int64`.
        episode_id: `[n] int64`.
        obs: `[n, *O]`.
        action: `[n, *A]`.
        reward: `[n] float64`.
        next_obs: `[n, *O]`, at an end the true last observation.
        terminated: `[n] bool`.
        truncated: `[n] bool`.
        ep_len: `[n] int64`, the row itself included.
        cum_reward: `[n] float64`, the row itself included.
        action_context: name -> `[n, ...]`.
        policy_version: `[n] int64`.
        infos: row -> info, only of rows where it is not empty; `info` has one for each row.
        reset_infos: row -> info of the reset before it, likewise.
        complete: False if the call was interrupted or timed out, so that rows asked for are missing.
    """

    @staticmethod
    def concatenate(batches: Sequence[StepBatch]) -> StepBatch:
        """The rows of all batches, one after the other, in memory of their own.

        Batches without rows add none, whatever their columns. The result is complete if all are.

        Raises:
            ValueError: no batches, or their columns differ in name, dtype or shape.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("StepBatch.concatenate: got no batches, so there are no columns; legal is at least one")
        full = [batch for batch in batches if len(batch)] or batches[:1]
        for batch in full:
            check_same_layout(column_layout(batch), column_layout(full[0]), "StepBatch.concatenate")
        offsets = np.cumsum([0, *(len(batch) for batch in full)]).tolist()
        return StepBatch(
            **{
                name: map_tree(lambda *columns: _join(columns), *(getattr(batch, name) for batch in full))
                for name in ROW_COLUMNS
            },
            infos=_join_infos([batch.infos for batch in full], offsets),
            reset_infos=_join_infos([batch.reset_infos for batch in full], offsets),
            complete=all(batch.complete for batch in batches),
        )

    def to_torch(self, device: Any = None) -> StepBatch:
        """The same batch with torch tensors as columns, in memory of their own.

        float64 becomes float32, integer actions int64, uint16 and uint32 int64; uint8 and bool
        stay. Columns that torch has no dtype for (text, objects) stay numpy arrays.

        Args:
            device: where the tensors go; None is the CPU.
        """
        return StepBatch(**self._torch_arguments(device))

    def __repr__(self) -> str:
        return f"StepBatch(n={len(self)}, episodes={int(self.done.sum())}, complete={self.complete})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trajectory(_Rows):
    """One whole episode, first step to last: the columns of a StepBatch, `[L, ...]`.

    Slices and masks of it are StepBatches, for a part of an episode is no Trajectory.
    """

    @staticmethod
    def from_rows(rows: StepBatch) -> Trajectory:
        """The episode that `rows` is; it takes over their memory, and is complete whatever the call was.

        Raises:
            ValueError: the rows are not one episode from its first step to its end, in order.
        """
        length = len(rows)
        whole = (
            length > 0
            and bool((rows.env_id == rows.env_id[0]).all())
            and bool((rows.episode_id == rows.episode_id[0]).all())
            and _host(rows.ep_len).tolist() == list(range(1, length + 1))
            and np.flatnonzero(_host(rows.done)).tolist() == [length - 1]
        )
        if not whole:
            raise ValueError(
                f"Trajectory.from_rows: {rows!r} is not one whole episode; legal are all rows of one env_id and "
                "episode_id in order, with ep_len 1, 2, ... and an end in the last row only"
            )
        return Trajectory(**{f.name: getattr(rows, f.name) for f in fields(_Rows) if f.name != "complete"})

    @property
    def summary(self) -> EpisodeSummary:
        """How the episode went."""
        return self.episodes[0]

    def to_torch(self, device: Any = None) -> Trajectory:
        """The same episode with torch tensors as columns; see `StepBatch.to_torch`."""
        return Trajectory(**self._torch_arguments(device))

    def __repr__(self) -> str:
        s = self.summary
        return (
            f"Trajectory(env_id={s.env_id}, episode_id={s.episode_id}, length={s.length}, "
            f"total_reward={s.total_reward:g}, terminated={s.terminated}, truncated={s.truncated})"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RolloutBatch:
    """T steps of each of N environments, time-major; column n is environment n.

    Columns are those of StepBatch as `[T, N, ...]`. What lies in rows beyond `lengths` (only after
    an interrupt or a timeout) is unspecified: `flatten()` leaves it out, `gae(..., lengths=)` stops.

    Observations are kept once: `next_obs` of row t is `observations[t + 1]` except in the rows
    that `finals` lists.

    Attributes:
        observations: `[T + 1, N, *O]`; row t's obs at t.
        finals: `(t [K] int64, env [K] int64, observations [K, *O])`: the true last observation of
            each row that ended, or after which the episode or the column was cut.
        lengths: `[N] int64`, how many rows of each column are valid.
        last_obs: `[N, *O]`, `next_obs` of each column's last row.
        last_state: `[N, ...]` recurrent state after each column's last row, or None.
        infos: `(t, env)` -> info, only of rows where it is not empty.
        reset_infos: `(t, env)` -> info of the reset before that row, likewise.
        complete: False if the call was interrupted or timed out.
    """

    observations: Tree
    finals: tuple[np.ndarray, np.ndarray, Tree]
    env_id: Column
    episode_id: Column
    action: Tree
    reward: Column
    terminated: Column
    truncated: Column
    ep_len: Column
    cum_reward: Column
    action_context: dict[str, Tree]
    policy_version: Column
    lengths: Column
    last_obs: Tree
    last_state: Tree | None = None
    infos: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    reset_infos: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    complete: bool = True
    _next_obs: list[Tree] = field(default_factory=list, init=False)  # filled on first access

    def __post_init__(self) -> None:
        num_steps, num_envs = self.reward.shape
        for name in _SHARED_COLUMNS:
            _check_leading_axes("RolloutBatch", name, getattr(self, name), (num_steps, num_envs))
        _check_leading_axes("RolloutBatch", "observations", self.observations, (num_steps + 1, num_envs))
        _check_leading_axes("RolloutBatch", "lengths", self.lengths, (num_envs,))
        _check_leading_axes("RolloutBatch", "last_obs", self.last_obs, (num_envs,))
        num_finals = len(self.finals[0])
        for position, name in enumerate(("t", "env", "observations")):
            _check_leading_axes("RolloutBatch", f"finals {name}", self.finals[position], (num_finals,))

    @property
    def obs(self) -> Tree:
        """`[T, N, *O]`: a view of `observations`."""
        return map_tree(lambda column: column[:-1], self.observations)

    @property
    def next_obs(self) -> Tree:
        """`[T, N, *O]`, at an end the true last observation; built on first access, then kept."""
        if not self._next_obs:
            step, env, final_obs = self.finals

            def build(column: Column, finals: Column) -> Column:
                shifted = take(column, slice(1, None))
                shifted[_index_for(column, step), _index_for(column, env)] = finals
                return shifted

            self._next_obs.append(map_tree(build, self.observations, final_obs))
        return self._next_obs[0]

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self.reward.shape[1])

    @property
    def num_rows(self) -> int:
        """Number of valid rows."""
        return int(self.lengths.sum())

    @property
    def done(self) -> Column:
        """`[T, N] bool`: the row's episode ended with it, by either kind of end."""
        return self.terminated | self.truncated

    @property
    def valid(self) -> np.ndarray:
        """`[T, N] bool`, numpy: the rows within `lengths`."""
        return np.asarray(np.arange(len(self))[:, None] < _host(self.lengths))

    @property
    def episodes(self) -> tuple[EpisodeSummary, ...]:
        """Every episode that ended in this block, by time and then by environment."""
        return _summaries(self, np.nonzero(_host(self.done) & self.valid))

    def __len__(self) -> int:
        return len(self.reward)

    def flatten(self) -> StepBatch:
        """The valid rows as a StepBatch, by time and then by environment, in memory of their own."""
        valid = self.valid
        row_of = np.cumsum(valid).reshape(valid.shape) - 1
        return StepBatch(
            **_map_columns(lambda column: column[_index_for(column, valid)], self, ROW_COLUMNS),
            infos={int(row_of[at]): dict(info) for at, info in self.infos.items() if valid[at]},
            reset_infos={int(row_of[at]): dict(info) for at, info in self.reset_infos.items() if valid[at]},
            complete=self.complete,
        )

    def to_torch(self, device: Any = None) -> RolloutBatch:
        """The same block with torch tensors as columns; see `StepBatch.to_torch`."""
        convert = partial(_to_torch, device=device)
        step, env, final_obs = self.finals
        return RolloutBatch(
            **_columns_to_torch(self, _SHARED_COLUMNS, device),
            observations=map_tree(convert, self.observations),
            finals=(step.copy(), env.copy(), map_tree(convert, final_obs)),
            lengths=convert(self.lengths),
            last_obs=map_tree(convert, self.last_obs),
            last_state=None if self.last_state is None else map_tree(convert, self.last_state),
            infos=_copy_infos(self.infos),
            reset_infos=_copy_infos(self.reset_infos),
            complete=self.complete,
        )

    def __repr__(self) -> str:
        episodes = len(self.episodes)
        return f"RolloutBatch(T={len(self)}, N={self.num_envs}, episodes={episodes}, complete={self.complete})"


def named_leaves(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths: `obs['camera'][0]`."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from named_leaves(child, f"{name}[{key!r}]")
    elif isinstance(tree, tuple):
        for position, child in enumerate(tree):
            yield from named_leaves(child, f"{name}[{position}]")
    else:
        yield name, tree


def _check_leading_axes(who: str, name: str, tree: Tree, legal: tuple[int, ...]) -> None:
    for path, column in named_leaves(tree, name):
        shape = tuple(column.shape)
        if shape[: len(legal)] != legal:
            raise ValueError(
                f"{who}: {path} has shape {shape}; legal are leading axes {legal}, which go with the "
                "other columns: build all of them from the same rows"
            )


def _map_columns(function: Callable[[Column], Column], batch: Any, names: Sequence[str]) -> dict[str, Tree]:
    return {name: map_tree(function, getattr(batch, name)) for name in names}


def _summaries(batch: _Rows | RolloutBatch, ends: tuple[np.ndarray, ...]) -> tuple[EpisodeSummary, ...]:
    """A summary for each of the rows `ends`, given as one index array per axis."""
    names = ("env_id", "episode_id", "ep_len", "cum_reward", "terminated", "truncated")
    columns = [_host(getattr(batch, name))[ends].tolist() for name in names]
    return tuple(EpisodeSummary(*row) for row in zip(*columns, strict=True))


def column_layout(rows: _Rows) -> dict[str, str]:
    """What each column holds per row, by name: `{"obs['camera']": "uint8 [84, 84]"}`."""
    return {name: f"{column.dtype} {list(column.shape[1:])}" for name, column in rows.columns()}


def check_same_layout(got: dict[str, str], legal: dict[str, str], who: str) -> None:
    """Raise a ValueError naming the first column that differs between two `column_layout`s."""
    for name in legal | got:
        if got.get(name) != legal.get(name):
            raise ValueError(
                f"{who}: column {name} is {got.get(name, 'missing')}, but in the rows before it was "
                f"{legal.get(name, 'missing')}; legal are the same columns throughout: keep to one loop and one policy"
            )


def _host(column: Any) -> Any:
    """A numpy array of a column, or of an index, that may be a tensor on any device."""
    return column.cpu().numpy() if hasattr(column, "cpu") else column


def _scalar(column: Column, row: int) -> Any:
    """One cell as a Python number; `item(row)` is six times as fast as `[row].item()`, but numpy's only."""
    return column.item(row) if isinstance(column, np.ndarray) else column[row].item()


def _index_for(column: Column, index: np.ndarray) -> Any:
    """A numpy index array as `column`'s own library takes it."""
    if isinstance(column, np.ndarray):
        return index
    import torch

    return torch.from_numpy(np.ascontiguousarray(index)).to(column.device)


def take(column: Column, rows: slice | np.ndarray) -> Column:
    """A copy of some rows. Index arrays copy by themselves; slices do not."""
    if not isinstance(rows, slice):
        return column[_index_for(column, rows)]
    if isinstance(column, np.ndarray):
        return column[rows].copy()
    return column[_index_for(column, np.arange(len(column))[rows])]


def _join(columns: Sequence[Column]) -> Column:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    import torch

    return torch.cat(tuple(columns))


def _columns_to_torch(batch: Any, names: Sequence[str], device: Any) -> dict[str, Tree]:
    convert = partial(_to_torch, device=device)
    others = [name for name in names if name != "action"]
    return {
        **_map_columns(convert, batch, others),
        "action": map_tree(partial(convert, is_action=True), batch.action),
    }


def _to_torch(column: Column, device: Any, is_action: bool = False) -> Column:
    """A tensor with memory of its own; a numpy copy where torch has no such dtype."""
    import torch

    if isinstance(column, torch.Tensor):
        return column.to(device=device, copy=True)
    kind, size = column.dtype.kind, column.dtype.itemsize
    if kind not in "biufc":
        return column.copy()
    dtype = column.dtype.newbyteorder("=")  # torch has no other byte order
    if kind == "f" and size > 4:
        dtype = np.float32
    elif (kind in "iu" and is_action) or (kind == "u" and size in (2, 4)):
        dtype = np.int64
    return torch.from_numpy(np.array(column, dtype=dtype, order="C")).to(device=device)


def _copy_infos(infos: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {key: dict(info) for key, info in infos.items()}


def _pick_infos(infos: Mapping[int, dict[str, Any]], row_numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The infos of the picked rows, under their new numbers."""
    if not infos:
        return {}
    return {new: dict(infos[old]) for new, old in enumerate(row_numbers) if old in infos}


def _join_infos(all_infos: Sequence[Mapping[int, dict[str, Any]]], offsets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The infos of joined batches; batch k's rows now begin at `offsets[k]`."""
    return {
        offset + row: dict(info)
        for infos, offset in zip(all_infos, offsets, strict=False)
        for row, info in infos.items()
    }
