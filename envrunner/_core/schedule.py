"""Who may step, who is owed what, whose episode is given up. Pure: no process, clock, thread or torch.

An environment has two separate facts: what it is *doing* (the enum) and whether it holds an
*undelivered row*. The loop tells what happened (`stepped`, `observed`, `died`) for a whole group of
environments at once, and asks what to do (`take`, `due_resets`, `next_batch`); it decides nothing.

Rules that must hold (DESIGN promises 1, 2, 3, 5, 7):
an environment with an undelivered row is never given another action; what is owed is delivered
exactly; when nothing is owed any more, whoever has an observation is still given its next action
(with `steps_ahead=1`), and nothing waits for an environment that is resetting.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from envrunner._core.batcher import due
from envrunner._core.episodes import assign


class Doing(enum.IntEnum):
    """What an environment is doing. Legal moves: see `MOVES`."""

    RESETTING = 0  # no observation yet
    IDLE = 1  # has an observation, has not been allowed to act on it
    WAITING = 2  # allowed to act, waits for its action
    STEPPING = 3  # was given an action, computes
    DEAD = 4


MOVES = {
    Doing.RESETTING: {Doing.IDLE, Doing.DEAD},
    Doing.IDLE: {Doing.WAITING, Doing.RESETTING, Doing.DEAD},
    Doing.WAITING: {Doing.STEPPING, Doing.IDLE, Doing.RESETTING, Doing.DEAD},
    Doing.STEPPING: {Doing.IDLE, Doing.RESETTING, Doing.DEAD},
    Doing.DEAD: set(),
}
# NumPy compares an array with a plain int four times as fast as with an IntEnum.
_RESETTING, _IDLE, _WAITING, _STEPPING, _DEAD = (int(doing) for doing in Doing)
CHECK_MOVES = False  # the tests say True; checking takes three times as long as moving
_LEGAL = np.array([[to in MOVES[source] for to in Doing] for source in Doing])


class Wants(enum.Enum):
    """What the call in progress asks for."""

    NOTHING = "nothing"
    STEPS = "steps"  # any rows, `owed` of them
    ROLLOUT = "rollout"  # `quota[i]` rows of environment i
    EPISODES = "episodes"  # `quota[i]` whole episodes of environment i


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The episode of `env` is given up; `rows_lost` of its steps (one in flight counts) are never delivered."""

    env: int
    rows_lost: int


_NOBODY = np.empty(0, np.int64)


class Schedule:
    """The state of all environments of one loop, and every decision about them.

    Args:
        num_envs: N.
        steps_ahead: 1: every environment is given its next action before it is asked for;
            0: exactly the steps asked for are started.
        min_batch, max_batch: when an inference batch is due, and how large it may be.
        ordered: decide only when nothing is in flight, so that no decision depends on timing.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        steps_ahead: int = 1,
        min_batch: int = 1,
        max_batch: int | None = None,
        ordered: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self.steps_ahead = steps_ahead
        self.min_batch = min_batch
        self.max_batch = max_batch or num_envs
        self.ordered = ordered
        self.doing = np.full(num_envs, Doing.RESETTING, np.int8)
        self.has_row = np.zeros(num_envs, np.bool_)
        self.begun = np.zeros(num_envs, np.bool_)  # rows of the episode under way were delivered
        self.wants = Wants.NOTHING
        self.owed = 0  # rows (STEPS, ROLLOUT) or episodes (EPISODES) the call still waits for
        self.quota = np.zeros(num_envs, np.int64)
        self.abandoned: list[Abandoned] = []  # for the loop to report and clear
        self.lost_ends: list[int] = []  # likewise: a step that was lost had ended its episode, the next has begun
        self._row_ends = np.zeros(num_envs, np.bool_)  # the undelivered row ends its episode
        self._doomed = np.zeros(num_envs, np.bool_)  # the step in flight belongs to an episode given up
        self._reset_due = np.zeros(num_envs, np.bool_)  # reset as soon as it can take a command
        self._resting = np.zeros(num_envs, np.bool_)  # finished its seeded episodes: no step of its own accord
        self._seeded = False
        self._decided = False  # `ordered`: a round was decided in this call after nothing was owed any more
        self._row_order = np.zeros(num_envs, np.int64)  # delivery: smallest first
        self._since = np.zeros(num_envs, np.int64)  # when it got its observation: service: smallest first
        self._now = 0  # counts events

    # -- what the caller asks ------------------------------------------------------------------

    def want_steps(self, num_steps: int) -> None:
        """Owe `num_steps` rows of whichever environments are first."""
        self._begin(Wants.STEPS)
        self.owed = num_steps

    def want_rollout(self, rows: np.ndarray) -> None:
        """Owe `rows[i]` rows of environment i."""
        self._begin(Wants.ROLLOUT)
        self.quota[:] = np.where(self.doing == _DEAD, np.minimum(rows, self.has_row), rows)
        self.owed = int(self.quota.sum())

    def want_episodes(self, episodes: np.ndarray, *, seeded: bool = False) -> None:
        """Owe `episodes[i]` whole episodes of environment i.

        An episode of which nothing was delivered yet counts as the first; one that was begun is
        given up. `seeded`: every episode begins with a reset of its own, so what is under way is
        given up in any case, and an environment rests when its last one is over.
        """
        self._begin(Wants.EPISODES)
        self._seeded = seeded
        self._put_on_duty(np.asarray(episodes, np.int64))

    def forget(self, *, abandon: bool = True) -> None:
        """The call is over, whatever it still owed.

        `abandon`: give up the episodes it had begun to take (their rows go nowhere). Without it
        they go on, because their rows were kept.
        """
        if self.wants is Wants.EPISODES and abandon:
            self._give_up(np.flatnonzero((self.quota > 0) & self.begun))
        self.wants = Wants.NOTHING
        self.owed = 0
        self.quota[:] = 0
        if self.steps_ahead == 0:
            self._move(np.flatnonzero(self.doing == _WAITING), _IDLE)

    def is_doing(self, doing: Doing) -> np.ndarray:
        """`[N] bool`: who does that now."""
        mask: np.ndarray = self.doing == int(doing)
        return mask

    # -- what happened -------------------------------------------------------------------------

    def observed(self, ids: np.ndarray) -> None:
        """These environments have reset: they have a first observation."""
        self._now += 1
        self._since[ids] = self._now
        self._move(ids, _IDLE)

    def stepped(self, ids: np.ndarray, ended: np.ndarray) -> None:
        """These environments finished a step; where it ended the episode they are resetting by now."""
        self._now += 1
        self._since[ids] = self._now
        self._move(ids[ended], _RESETTING)
        self._move(ids[~ended], _IDLE)
        self.has_row[ids] = True
        self._row_ends[ids] = ended
        if not self.ordered:
            self._row_order[ids] = self._now
        if np.count_nonzero(self._doomed[ids]):
            doomed = ids[self._doomed[ids]]
            self._doomed[doomed] = False
            self._drop(doomed)

    def acted(self, ids: np.ndarray) -> None:
        """These environments were given an action."""
        self._now += 1
        if self.ordered:
            self._row_order[ids] = self._now
        self._move(ids, _STEPPING)

    def died(self, ids: np.ndarray) -> None:
        """These environments are gone for good; a row that was ready can still be delivered."""
        self._move(ids, _DEAD)
        self._doomed[ids] = False
        self._reset_due[ids] = False
        if self.wants is Wants.ROLLOUT:
            lost = self.quota[ids] - np.minimum(self.quota[ids], self.has_row[ids])
            self.quota[ids] -= lost
            self.owed -= int(lost.sum())
        elif self.wants is Wants.EPISODES:
            self._hand_over(ids)

    # -- what to do ----------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Nothing is owed, and nobody that has an observation waits for an action.

        With `ordered`, only once a round was decided since: else what the call leaves undone would depend on timing.
        """
        return self.owed == 0 and not np.count_nonzero(self.doing == _WAITING) and (self._decided or not self.ordered)

    @property
    def starved(self) -> bool:
        """Something is owed that nobody is left to deliver."""
        return self.owed > 0 and bool((self.doing == _DEAD).all()) and not self._owed_rows().any()

    def take(self) -> np.ndarray:
        """Environments whose row is delivered now, longest undelivered first."""
        if self.owed == 0 or not self._may_decide():
            return _NOBODY
        ids = np.flatnonzero(self._owed_rows())
        if not ids.size:
            return ids
        order = self._row_order[ids]
        if np.count_nonzero(order != order[0]):
            ids = ids[np.argsort(order, kind="stable")]
        if self.wants is Wants.STEPS:
            ids = ids[: self.owed]
        self.has_row[ids] = False
        ends = self._row_ends[ids]
        self.begun[ids] = ~ends
        if self.wants is not Wants.EPISODES:
            self.owed -= ids.size
            if self.wants is Wants.ROLLOUT:
                self.quota[ids] -= 1
        elif np.count_nonzero(ends):
            over = ids[ends]
            self.quota[over] -= 1
            self.owed -= over.size
            if self._seeded:
                self._resting[over[self.quota[over] == 0]] = True
        return ids

    def due_resets(self) -> np.ndarray:
        """Environments to reset now, in mid-episode or afresh."""
        if not np.count_nonzero(self._reset_due) or (self.ordered and self.wants is Wants.NOTHING):
            return _NOBODY
        ids = np.flatnonzero(self._reset_due & ((self.doing == _IDLE) | (self.doing == _WAITING)))
        self._reset_due[ids] = False
        self._move(ids, _RESETTING)
        return ids

    def next_batch(self, *, expired: bool = False, everyone: bool = False) -> np.ndarray:
        """Environments to infer actions for now, in index order; empty: wait on.

        Args:
            expired: the longest-waiting one has waited `max_wait`.
            everyone: serve whoever waits, without waiting for company.
        """
        self._grant()
        waiting = np.flatnonzero(self.doing == _WAITING)
        if not waiting.size:
            return waiting
        joiners = 0 if self.owed == 0 or self.ordered or everyone else self._joiners()
        size = due(waiting.size, joiners, min_batch=self.min_batch, max_batch=self.max_batch, expired=expired)
        if size < waiting.size:
            key = waiting if self.ordered else self._since[waiting]
            waiting = np.sort(waiting[np.argsort(key, kind="stable")[:size]])
        return waiting

    # -- inside --------------------------------------------------------------------------------

    def _begin(self, wants: Wants) -> None:
        assert self.wants is Wants.NOTHING, f"a call that wants {self.wants.value} is in progress"
        self.wants = wants
        self._seeded = False
        self._decided = False
        self._resting[:] = False

    def _move(self, ids: np.ndarray, to: int) -> None:
        if CHECK_MOVES:
            illegal = ids[~_LEGAL[self.doing[ids], to]]
            assert not illegal.size, f"environment {illegal[0]} is {Doing(self.doing[illegal[0]]).name}, not to {to}"
        self.doing[ids] = to

    def _may_decide(self) -> bool:
        """With `ordered`, only inside a call and when nothing is in flight or about to be reset; else always."""
        if not self.ordered:
            return True
        busy = (self.doing == _STEPPING) | (self.doing == _RESETTING) | self._reset_due
        return self.wants is not Wants.NOTHING and not np.count_nonzero(busy)

    def _grant(self) -> None:
        """Let idle environments act, as far as the rules allow: IDLE -> WAITING."""
        if not self._may_decide():
            return
        self._decided = self.owed == 0
        idle = self.doing == _IDLE
        if not np.count_nonzero(idle):
            return
        idle &= ~(self.has_row | self._reset_due | self._resting)
        if self.steps_ahead == 0:
            if self.wants is Wants.STEPS:
                chosen = np.flatnonzero(idle)
                key = self._row_order[chosen] if self.ordered else self._since[chosen]
                chosen = chosen[np.argsort(key, kind="stable")[: max(0, self._steps_to_start())]]
                self._move(chosen, _WAITING)
                return
            idle &= self.quota > 0
        self._move(np.flatnonzero(idle), _WAITING)

    def _owed_rows(self) -> np.ndarray:
        """Whose undelivered row the call asks for."""
        return self.has_row if self.wants is Wants.STEPS else self.has_row & (self.quota > 0)

    def _steps_to_start(self) -> int:
        """STEPS with `steps_ahead=0`: steps owed that are neither done nor under way."""
        under_way = self.has_row | (self.doing == _WAITING) | ((self.doing == _STEPPING) & ~self._doomed)
        return self.owed - int(under_way.sum())

    def _joiners(self) -> int:
        """Environments that compute now and will want an action during this call, without a reset of ours."""
        stepping = (self.doing == _STEPPING) & ~self._doomed
        if self.wants is Wants.STEPS:
            num_stepping = int(np.count_nonzero(stepping))
            return num_stepping if self.steps_ahead else min(num_stepping, self._steps_to_start())
        needed = 1 if self.steps_ahead or self.wants is Wants.EPISODES else 2
        return int(np.count_nonzero(stepping & (self.quota >= needed)))

    def _put_on_duty(self, episodes: np.ndarray) -> None:
        """Add to the quotas; give up what the environments newly on duty have under way, where the rules say so."""
        new = np.flatnonzero((episodes > 0) & (self.quota == 0))
        self.quota += episodes
        self.owed += int(episodes.sum())
        self._resting[new] = False
        if not self._seeded:
            self._give_up(new[self.begun[new]])
            return
        acting = (self.doing[new] == _STEPPING) | self.has_row[new] | self.begun[new]
        self._give_up(new[acting])
        self._reset_due[new] = True

    def _give_up(self, ids: np.ndarray) -> None:
        """Abandon the episodes under way; a step in flight is dropped when it arrives."""
        ids = ids[~self._doomed[ids]]
        in_flight = self.doing[ids] == _STEPPING
        lost = in_flight | self.has_row[ids]
        self.abandoned += map(Abandoned, ids.tolist(), lost.astype(int).tolist())
        self.begun[ids] = False
        self._doomed[ids[in_flight]] = True
        self._drop(ids[~in_flight])

    def _drop(self, ids: np.ndarray) -> None:
        """Leave the episode given up: where a lost row had ended it that has happened, else by a reset."""
        over = self.has_row[ids] & self._row_ends[ids]
        self.lost_ends += ids[over].tolist()
        self.has_row[ids] = False
        alive = self.doing[ids] != _DEAD
        self._reset_due[ids[~over & alive]] = True

    def _hand_over(self, dead: np.ndarray) -> None:
        """The episodes that dead environments owe go to the living with the fewest."""
        orphans = int(self.quota[dead].sum())
        self._give_up(dead[(self.quota[dead] > 0) & (self.begun[dead] | self.has_row[dead])])
        self.quota[dead] = 0
        self.owed -= orphans
        living = np.flatnonzero(self.doing != _DEAD)
        if living.size:
            extra = np.zeros(self.num_envs, np.int64)
            np.add.at(extra, living[assign(self.quota[living], orphans)], 1)
            self._put_on_duty(extra)
        else:
            self.owed += orphans
