"""Replay storage: the last `capacity` rows, in columns, sampled uniformly.

Decided here: which rows stay and which are drawn. Not here: what a row is (`types`), and the
targets: a sample has `terminated`, `truncated` and `next_obs`, so a truncated row can bootstrap.

The rule that must hold: what goes in and what comes out is copied; a sample never changes when
the buffer goes on, and `state_dict` brings back the same buffer and the same next samples.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from envrunner._tree import map_tree
from envrunner.types import ROW_COLUMNS, StepBatch, Tree, check_same_layout, column_layout, take


class TransitionBuffer:
    """Circular storage of transitions; the columns are allocated by the first `extend`.

    Infos are not stored: they are Python objects and most rows have none. All other columns are,
    the action context too.

    Args:
        capacity: rows it holds; the oldest make room for new ones.
        seed: of the generator that `sample` uses when it is given none; None draws one.
    """

    def __init__(self, capacity: int, seed: int | None = None) -> None:
        self._capacity = operator.index(capacity)
        if self._capacity < 1:
            raise ValueError(f"TransitionBuffer: capacity is {capacity}; legal is an int >= 1, the rows it can hold")
        self._generator = np.random.default_rng(seed)
        self._columns: dict[str, Tree] = {}  # name -> [capacity, ...], or nothing before the first extend
        self._layout: dict[str, str] = {}
        self._num_rows = 0
        self._next_slot = 0

    @property
    def capacity(self) -> int:
        """Rows it can hold."""
        return self._capacity

    def __len__(self) -> int:
        return self._num_rows

    def extend(self, batch: StepBatch) -> None:
        """Copy the rows of `batch` in, over the oldest ones; of more than `capacity` the last stay.

        Raises:
            TypeError: the columns are not numpy arrays.
            ValueError: the columns are not those of the first batch.
        """
        for name, column in batch.columns():
            if not isinstance(column, np.ndarray):
                raise TypeError(
                    f"TransitionBuffer.extend: column {name} is a {type(column).__name__}; legal are numpy arrays: "
                    "extend with the loop's batch, and call to_torch on what `sample` returns"
                )
        if len(batch) == 0:
            return
        layout = column_layout(batch)
        if self._columns:
            check_same_layout(layout, self._layout, "TransitionBuffer.extend")
        else:
            self._allocate(batch)
        rows = np.arange(max(0, len(batch) - self._capacity), len(batch))
        slots = (self._next_slot + rows) % self._capacity
        for name, columns in self._columns.items():
            map_tree(lambda stored, new: operator.setitem(stored, slots, new[rows]), columns, getattr(batch, name))
        self._next_slot = (self._next_slot + len(batch)) % self._capacity
        self._num_rows = min(self._num_rows + len(batch), self._capacity)

    def sample(self, batch_size: int, generator: np.random.Generator | None = None) -> StepBatch:
        """`batch_size` rows, each drawn uniformly and independently: one row may come twice.

        Args:
            batch_size: 1 to `len`.
            generator: what to draw with; None is the buffer's own.

        Returns:
            A StepBatch with memory of its own and without infos.

        Raises:
            ValueError: `batch_size` is out of bounds.
        """
        batch_size = operator.index(batch_size)
        if not 1 <= batch_size <= self._num_rows:
            raise ValueError(
                f"TransitionBuffer.sample: batch_size is {batch_size}; legal is 1..{self._num_rows}, the "
                "rows it holds: extend it first, or ask for fewer"
            )
        rows = (self._generator if generator is None else generator).integers(0, self._num_rows, batch_size)
        return StepBatch(**self._copy_of(rows))

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint needs, as numpy arrays and Python values; only the rows it holds."""
        return {
            "capacity": self._capacity,
            "next_slot": self._next_slot,
            "columns": self._copy_of(slice(0, self._num_rows)),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the buffer that `state_dict` was called on.

        Raises:
            ValueError: that buffer had another capacity.
        """
        if state["capacity"] != self._capacity:
            raise ValueError(
                f"TransitionBuffer.load_state_dict: the state has capacity {state['capacity']}; legal is "
                f"{self._capacity}, this buffer's: make it with the capacity of the checkpoint"
            )
        rows = StepBatch(**state["columns"]) if state["columns"] else None
        self._columns, self._layout = {}, {}
        self._num_rows = self._next_slot = 0
        if rows is not None:
            self.extend(rows)
        self._next_slot = state["next_slot"]
        self._generator.bit_generator.state = state["generator"]

    def __repr__(self) -> str:
        return f"TransitionBuffer(len={self._num_rows}, capacity={self._capacity})"

    def _allocate(self, batch: StepBatch) -> None:
        def empty(column: np.ndarray) -> np.ndarray:
            return np.empty((self._capacity, *column.shape[1:]), column.dtype)

        self._columns = {name: map_tree(empty, getattr(batch, name)) for name in ROW_COLUMNS}
        self._layout = column_layout(batch)

    def _copy_of(self, rows: np.ndarray | slice) -> dict[str, Tree]:
        return {name: map_tree(lambda column: take(column, rows), tree) for name, tree in self._columns.items()}
