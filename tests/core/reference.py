"""The decisions of a loop as promises 1, 2, 3, 5, 7 and 8 of DESIGN section 3 state them.

The specification of `envrunner._core.schedule.Schedule`: the same questions, answered for one
environment at a time with lists and small objects. Slow and plain on purpose: it is read against the
promises, and random worlds (`world`) show that the schedule answers the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GivenUp(NamedTuple):
    """An abandoned episode, and how many of its steps (one in flight counts) nobody will ever see."""

    env: int
    rows_lost: int


@dataclass(slots=True, eq=False)
class Environment:
    """One environment: what it does, and, apart from that, what it holds."""

    index: int
    doing: str = "RESETTING"
    holds_row: bool = False  # a finished step that was not delivered
    row_ended: bool = False  # ... and that ended its episode
    begun: bool = False  # some of its episode under way was delivered
    step_is_lost: bool = False  # the step in flight belongs to an episode given up
    needs_reset: bool = False
    rests: bool = False  # has played its seeded episodes
    quota: int = 0  # rows (rollout) or episodes (episodes) that the call wants of it
    waits_since: int = 0
    row_turn: int = 0  # whose row is delivered first
    acted_at: int = 0

    @property
    def lives(self) -> bool:
        return self.doing != "DEAD"

    @property
    def is_free(self) -> bool:
        """Could be given an action, as far as it is concerned."""
        return self.doing == "IDLE" and not self.holds_row and not self.needs_reset and not self.rests

    @property
    def is_under_way(self) -> bool:
        """A step that will be delivered is done, about to start, or computing."""
        return self.holds_row or self.doing == "WAITING" or (self.doing == "STEPPING" and not self.step_is_lost)


class Reference:
    """A schedule in the plainest words; the arguments are the schedule's."""

    def __init__(
        self,
        num_envs: int,
        *,
        steps_ahead: int = 1,
        min_batch: int = 1,
        max_batch: int | None = None,
        ordered: bool = False,
    ) -> None:
        self.envs = [Environment(index) for index in range(num_envs)]
        self.steps_ahead, self.ordered = steps_ahead, ordered
        self.min_batch, self.max_batch = min_batch, max_batch or num_envs
        self.call = "nothing"
        self.seeded = False
        self.steps_owed = 0
        self.orphans = 0  # episodes owed that nobody is left to play
        self.last_round_decided = False
        self.abandoned: list[GivenUp] = []
        self.lost_ends: list[int] = []
        self.clock = 0

    # -- what the caller asks

    def want_steps(self, num_steps: int) -> None:
        self._begin("steps")
        self.steps_owed = num_steps

    def want_rollout(self, rows: Sequence[int]) -> None:
        self._begin("rollout")
        for env in self.envs:
            wanted = int(rows[env.index])
            env.quota = wanted if env.lives else min(wanted, int(env.holds_row))

    def want_episodes(self, episodes: Sequence[int], *, seeded: bool = False) -> None:
        self._begin("episodes")
        self.seeded = seeded
        for env in self.envs:
            self._ask_for_episodes(env, int(episodes[env.index]))

    def forget(self, *, abandon: bool = True) -> None:
        for env in self.envs:
            if self.call == "episodes" and abandon and env.quota > 0 and env.begun:
                self._give_up(env)
            env.quota = 0
            if self.steps_ahead == 0 and env.doing == "WAITING":
                env.doing = "IDLE"
        self.call, self.steps_owed, self.orphans = "nothing", 0, 0

    # -- what happened

    def observed(self, ids: Iterable[int]) -> None:
        for env in self._named(ids):
            assert env.doing == "RESETTING"
            env.doing = "IDLE"
            env.waits_since = self._tick()

    def stepped(self, ids: Iterable[int], ended: Iterable[bool]) -> None:
        for env, over in zip(self._named(ids), ended, strict=True):
            assert env.doing == "STEPPING"
            env.doing = "RESETTING" if over else "IDLE"
            env.holds_row, env.row_ended = True, bool(over)
            env.waits_since = self._tick()
            env.row_turn = env.acted_at if self.ordered else env.waits_since
            if env.step_is_lost:
                env.step_is_lost = False
                self._leave_episode(env)

    def acted(self, ids: Iterable[int]) -> None:
        for env in self._named(ids):
            assert env.doing == "WAITING"
            env.doing = "STEPPING"
            env.acted_at = self._tick()

    def died(self, ids: Iterable[int]) -> None:
        dead = self._named(ids)
        for env in dead:
            assert env.lives
            env.doing = "DEAD"
            env.step_is_lost = env.needs_reset = False
        if self.call == "rollout":
            for env in dead:
                env.quota = min(env.quota, int(env.holds_row))
        if self.call == "episodes":
            homeless = 0
            for env in dead:
                if env.quota > 0 and (env.begun or env.holds_row):
                    self._give_up(env)
                homeless += env.quota
                env.quota = 0
            self._hand_over(homeless)

    # -- what to do

    @property
    def owed(self) -> int:
        return self.steps_owed + self.orphans + sum(env.quota for env in self.envs)

    @property
    def finished(self) -> bool:
        """Asked when what was due has been sent."""
        if self.owed > 0 or any(env.doing == "WAITING" for env in self.envs):
            return False
        if self.ordered:
            return self.last_round_decided  # whatever that leaves in flight: the same under every timing
        return self.steps_ahead == 0 or not any(env.is_free for env in self.envs)

    @property
    def starved(self) -> bool:
        return self.owed > 0 and not any(env.lives or self._is_owed(env) for env in self.envs)

    def take(self) -> list[int]:
        if self.owed == 0 or not self._may_decide():
            return []
        ready = sorted((env for env in self.envs if self._is_owed(env)), key=lambda env: env.row_turn)
        if self.call == "steps":
            ready = ready[: self.steps_owed]
        for env in ready:
            env.holds_row = False
            env.begun = not env.row_ended
            if self.call == "steps":
                self.steps_owed -= 1
            elif self.call == "rollout" or env.row_ended:
                env.quota -= 1
                env.rests = self.seeded and env.quota == 0
        return [env.index for env in ready]

    def due_resets(self) -> list[int]:
        """At once; with `ordered` inside a call, so that who resets when is the same under every timing."""
        if self.ordered and self.call == "nothing":
            return []
        due = [env for env in self.envs if env.needs_reset and env.doing in ("IDLE", "WAITING")]
        for env in due:
            env.needs_reset = False
            env.doing = "RESETTING"
        return [env.index for env in due]

    def next_batch(self, *, expired: bool = False, everyone: bool = False) -> list[int]:
        if self._may_decide():
            self.last_round_decided = self.owed == 0
            self._let_them_act()
        waiting = [env for env in self.envs if env.doing == "WAITING"]
        if not self.ordered:
            waiting.sort(key=lambda env: env.waits_since)
        others_come = self.owed > 0 and not self.ordered and not everyone and self._others_may_join()
        if len(waiting) < self.min_batch and others_come and not expired:
            return []
        return sorted(env.index for env in waiting[: self.max_batch])

    # -- what may be seen

    @property
    def doing(self) -> list[str]:
        return [env.doing for env in self.envs]

    @property
    def has_row(self) -> list[bool]:
        return [env.holds_row for env in self.envs]

    @property
    def begun(self) -> list[bool]:
        return [env.begun for env in self.envs]

    @property
    def quota(self) -> list[int]:
        return [env.quota for env in self.envs]

    # -- inside

    def _named(self, ids: Iterable[int]) -> list[Environment]:
        return [self.envs[int(index)] for index in ids]

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _begin(self, call: str) -> None:
        assert self.call == "nothing"
        self.call, self.seeded, self.last_round_decided = call, False, False
        for env in self.envs:
            env.rests = False

    def _may_decide(self) -> bool:
        """With `ordered` only between two rounds of a call: nothing computes, nothing is to be reset."""
        if not self.ordered:
            return True
        in_flight = any(env.doing in ("STEPPING", "RESETTING") or env.needs_reset for env in self.envs)
        return self.call != "nothing" and not in_flight

    def _is_owed(self, env: Environment) -> bool:
        """Holds a row that this call asks for."""
        return env.holds_row and (env.quota > 0 if self.call in ("rollout", "episodes") else self.steps_owed > 0)

    def _let_them_act(self) -> None:
        free = [env for env in self.envs if env.is_free]
        if self.steps_ahead == 0 and self.call == "steps":
            free.sort(key=lambda env: env.row_turn if self.ordered else env.waits_since)
            free = free[: max(0, self._steps_to_start())]
        elif self.steps_ahead == 0:
            free = [env for env in free if env.quota > 0]
        for env in free:
            env.doing = "WAITING"

    def _steps_to_start(self) -> int:
        return self.steps_owed - sum(env.is_under_way for env in self.envs)

    def _others_may_join(self) -> bool:
        """Somebody computes now who will want an action in this call as soon as it has computed."""
        computing = [env for env in self.envs if env.doing == "STEPPING" and not env.step_is_lost]
        if self.call == "steps":
            return bool(computing) and (self.steps_ahead > 0 or self._steps_to_start() > 0)
        if self.call == "rollout" and self.steps_ahead == 0:
            return any(env.quota > 1 for env in computing)
        return any(env.quota > 0 for env in computing)

    def _ask_for_episodes(self, env: Environment, episodes: int) -> None:
        is_new_to_this_call = episodes > 0 and env.quota == 0
        env.quota += episodes
        if not is_new_to_this_call:
            return
        env.rests = False
        if env.begun or (self.seeded and (env.holds_row or env.doing == "STEPPING")):
            self._give_up(env)
        if self.seeded:
            env.needs_reset = True

    def _give_up(self, env: Environment) -> None:
        if env.step_is_lost:
            return  # that was reported already
        computes = env.doing == "STEPPING"
        self.abandoned.append(GivenUp(env.index, int(computes or env.holds_row)))
        env.begun = False
        if computes:
            env.step_is_lost = True
        else:
            self._leave_episode(env)

    def _leave_episode(self, env: Environment) -> None:
        if env.holds_row and env.row_ended:
            self.lost_ends.append(env.index)
        elif env.lives:
            env.needs_reset = True
        env.holds_row = False

    def _hand_over(self, episodes: int) -> None:
        """One by one to the living environment that has the fewest to play, lowest index first."""
        living = [env for env in self.envs if env.lives]
        if not living:
            self.orphans += episodes
            return
        more = [0] * len(self.envs)
        for _ in range(episodes):
            heir = min(living, key=lambda env: (env.quota + more[env.index], env.index))
            more[heir.index] += 1
        for env in living:
            self._ask_for_episodes(env, more[env.index])
