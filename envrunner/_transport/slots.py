"""The one block of memory that a loop and its workers share, as named columns.

Structure of arrays: column `reward` holds the rewards of all environments side by side, so that the
loop takes a whole group with one slice. Who writes what: the loop writes `command`, `sent`, `seed`,
`action`, `kick` and `closing`; the worker that owns an environment writes everything else.
The rule that must hold: a reply is complete in memory before its step number (`stepped`,
`observed`) equals `sent`; a late reply can never pass for the next one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from envrunner.spaces import Columns, Layout

CACHE_LINE = 64
INFO_BYTES = 2048  # a pickled info larger than this travels through the pipe instead


class Command(enum.IntEnum):
    STEP = 1
    RESET = 2


class Phase(enum.IntEnum):
    """What a worker is inside of, stamped where the parent can read it after its death."""

    NOTHING = 0
    CONSTRUCTOR = 1
    RESET = 2
    STEP = 3
    CLOSE = 4


class InfoOf(enum.IntEnum):
    STEP = 0
    RESET = 1


IN_PIPE = -1  # in `info_size`: the pickle follows through the pipe


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Everything both sides need to lay the same columns over the same bytes."""

    num_envs: int
    num_workers: int
    observation_space: Space[Any]
    action_space: Space[Any]

    def fields(self) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
        n, line = self.num_envs, CACHE_LINE // 4
        plan: list[tuple[str, Any, tuple[int, ...]]] = [
            ("command", np.uint8, (n,)),
            ("sent", np.uint32, (n,)),
            ("seed", np.int64, (n,)),
            ("kick", np.uint32, (self.num_workers, line)),
            ("closing", np.uint32, (line,)),
            ("stepped", np.uint32, (n,)),
            ("observed", np.uint32, (n,)),
            ("reward", np.float64, (n,)),
            ("terminated", np.bool_, (n,)),
            ("truncated", np.bool_, (n,)),
            ("info_size", np.int32, (n, len(InfoOf))),
            ("info", np.uint8, (n, len(InfoOf), INFO_BYTES)),
            ("tick", np.uint32, (self.num_workers, line)),
            ("at", np.int32, (self.num_workers, line)),  # [w, 0]: environment, [w, 1]: Phase
        ]
        for name, space in (("obs", self.observation_space), ("final", self.observation_space)):
            plan += [(f"{name}.{k}", leaf.dtype, (n, *leaf.shape)) for k, leaf in enumerate(Layout(space, name).leaves)]
        plan += [
            (f"action.{k}", leaf.dtype, (n, *leaf.shape))
            for k, leaf in enumerate(Layout(self.action_space, "action").leaves)
        ]
        return [(name, np.dtype(dtype), shape) for name, dtype, shape in plan]

    def num_bytes(self) -> int:
        return self._offsets()[1]

    def _offsets(self) -> tuple[dict[str, int], int]:
        offsets, position = {}, 0
        for name, dtype, shape in self.fields():
            offsets[name] = position
            position += -(-int(np.prod(shape)) * dtype.itemsize // CACHE_LINE) * CACHE_LINE
        return offsets, max(position, CACHE_LINE)

    def lay_over(self, memory: Any) -> Slots:
        """The columns over a buffer of at least `num_bytes()` zeroed bytes; no copy."""
        offsets, _ = self._offsets()
        columns = {
            name: np.ndarray(shape, dtype, buffer=memory, offset=offsets[name]) for name, dtype, shape in self.fields()
        }
        return Slots(self, columns)


class Slots:
    """The columns; `obs`, `final` and `action` are lists with one column per leaf of their space.

    `obs[i]` is what environment i acts on next: its last step's observation or its last reset's.
    `final[i]` is the true last observation of an episode that a step has ended.
    """

    def __init__(self, plan: SlotPlan, columns: dict[str, np.ndarray]) -> None:
        self.plan = plan
        self.command = columns["command"]
        self.sent = columns["sent"]
        self.seed = columns["seed"]
        self.kick = columns["kick"]
        self.closing = columns["closing"]
        self.stepped = columns["stepped"]
        self.observed = columns["observed"]
        self.reward = columns["reward"]
        self.terminated = columns["terminated"]
        self.truncated = columns["truncated"]
        self.info_size = columns["info_size"]
        self.info = columns["info"]
        self.tick = columns["tick"]
        self.at = columns["at"]
        self.obs = _leaves(columns, "obs")
        self.final = _leaves(columns, "final")
        self.action = _leaves(columns, "action")


def cells(array: np.ndarray) -> Any:
    """A memoryview: an element of one costs a third of an element of an array."""
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs do not say that it is a buffer


def _leaves(columns: dict[str, np.ndarray], prefix: str) -> Columns:
    return [column for name, column in columns.items() if name.startswith(prefix + ".")]
