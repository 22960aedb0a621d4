"""A random world around a schedule: environments, time, a caller, and a loop in the image of `loops.driver`.

The world knows what each environment really did (`Episode`, `Row`) and what became of every row (`Fate`),
and holds the schedule to the promises of DESIGN section 3 whenever something happens and after every call.
What is asked comes from one generator and what time does from another, so that the same calls can be
played under two timings. No clock and no sleeping: waiting is a random group of steps and resets that end.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from envrunner._core.episodes import EpisodeBook, assign
from envrunner._core.schedule import Doing, Schedule

MAX_WAKES = 20_000

R, I, W, S, D = map(int, (Doing.RESETTING, Doing.IDLE, Doing.WAITING, Doing.STEPPING, Doing.DEAD))
# which question may move an environment how
LEGAL_MOVES: dict[str, set[tuple[int, int]]] = {
    "want_steps": set(),
    "want_rollout": set(),
    "want_episodes": set(),
    "take": set(),
    "forget": {(W, I)},
    "observed": {(R, I)},
    "stepped": {(S, I), (S, R)},
    "acted": {(W, S)},
    "died": {(R, D), (I, D), (W, D), (S, D)},
    "due_resets": {(I, R), (W, R)},
    "next_batch": {(I, W)},
}


class Fate(enum.Enum):
    """What became of a finished step."""

    UNDELIVERED = "undelivered"
    TAKEN = "taken"  # by the call in progress
    RETURNED = "returned"
    KEPT = "kept"  # by a call that raised; the next one returns it
    DROPPED = "dropped"  # the first rows of an episode that an interrupted run_episodes did not finish
    LOST = "lost"  # of an abandoned episode, and never delivered


@dataclass(slots=True, eq=False)
class Episode:
    env: int
    number: int
    length: int
    seed: int | None  # that its reset got
    reset_in_call: int
    rows_taken: int = 0
    is_abandoned: bool = False


@dataclass(slots=True, eq=False)
class Row:
    episode: Episode
    t: int
    ended: bool
    reward: float
    total_reward: float
    acted_in_call: int
    arrived: int = 0
    fate: Fate = Fate.UNDELIVERED

    @property
    def key(self) -> tuple[int, int, int]:
        return self.episode.env, self.episode.number, self.t


@dataclass(slots=True, eq=False)
class Env:
    """What an environment really does, and what the loop knows of it."""

    index: int
    episode: Episode
    t: int = 0  # steps of the episode that were finished
    total_reward: float = 0.0
    is_resetting: bool = True
    is_stepping: bool = False
    is_dead: bool = False
    acted_in_call: int = 0
    reset_seed: int | None = None  # for its next reset
    finished: Row | None = None  # published, the loop has not looked
    has_new_obs: bool = False  # likewise
    row: Row | None = None  # its undelivered row, as the loop knows
    step_is_lost: bool = False  # the episode was abandoned while the step was in flight
    since: int = 0  # when the loop saw its present observation

    @property
    def latest_episode(self) -> Episode:
        """That of its latest step: also when that step ended it and the next episode has begun."""
        row = self.row or self.finished
        return self.episode if row is None else row.episode


@dataclass(frozen=True, slots=True)
class Settings:
    """A loop and its environments."""

    num_envs: int
    steps_ahead: int = 1
    min_batch: int = 1
    max_batch: int = 8
    ordered: bool = False
    deaths: float = 0.0  # chance per wake
    expiry: float = 0.0  # chance that the longest-waiting one has waited `max_wait`
    pace: float = 0.5  # chance that a step or reset ends at a wake
    max_length: int = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, and what happens around it. Counts are within the call."""

    kind: str  # "steps", "rollout" or "episodes"
    amount: int
    seeded: bool = False
    stop_after_rows: int | None = None  # the interrupter, from a processor
    stop_at_wake: int | None = None  # the interrupter, from a thread or a timer
    raise_after_rows: int | None = None  # the processor raises
    raise_at_batch: int | None = None  # the policy raises
    raise_at_wake: int | None = None  # Ctrl-C
    update_after_rows: int | None = None  # a processor calls update_policy
    update_next: bool = False  # update_policy before the next call


class Raised(Exception):
    """The call raises here."""


class Starved(Exception):
    """Nobody is left to deliver what is owed."""


@dataclass(slots=True)
class Call:
    ask: Ask
    sink: list[Row] = field(default_factory=list)
    wakes: int = 0
    batches: int = 0
    updated: bool = False


class UnderWay(NamedTuple):
    """An environment's episode when a call begins."""

    row: Row | None  # undelivered
    episode: Episode  # of its latest step
    acting: bool  # a step of it is undelivered or in flight
    begun: bool  # some of it was delivered
    given_up: bool


@dataclass(frozen=True, slots=True)
class Result:
    rows: list[Row]  # in the order in which they were returned
    complete: bool


def random_settings(rng: random.Random, **fixed: Any) -> Settings:
    max_batch = rng.randint(1, 9)
    drawn = Settings(
        num_envs=rng.randint(1, 8),
        steps_ahead=rng.choice([0, 1, 1]),
        min_batch=rng.randint(1, max_batch),
        max_batch=max_batch,
        ordered=rng.random() < 0.2,
        deaths=rng.choice([0.0, 0.0, 0.02, 0.1]),
        expiry=rng.choice([0.0, 0.0, 0.3]),
        pace=rng.choice([0.2, 0.5, 0.9, 1.0]),
        max_length=rng.choice([1, 2, 3, 6]),
    )
    return replace(drawn, **fixed)


def random_ask(rng: random.Random, num_envs: int, *, by_rows_only: bool = False) -> Ask:
    """`by_rows_only`: what cuts a call short comes with its k-th row, whenever that is."""
    kind = rng.choice(["steps", "rollout", "episodes"])
    amount = rng.randint(0, {"steps": 3 * num_envs + 2, "rollout": 4, "episodes": 2 * num_envs + 1}[kind])
    ask = Ask(kind, amount, seeded=kind == "episodes" and rng.random() < 0.3, update_next=rng.random() < 0.4)
    if rng.random() < 0.25:
        ask = replace(ask, update_after_rows=rng.randint(1, 6))
    if rng.random() < 0.55:
        return ask
    if by_rows_only or rng.random() < 0.3:
        cut = rng.choice(["stop_after_rows", "stop_after_rows", "raise_after_rows"])
        return replace(ask, **{cut: rng.randint(1, 2 * num_envs + 2)})
    cut = rng.choice(["stop_at_wake", "stop_at_wake", "raise_at_wake", "raise_at_batch"])
    return replace(ask, **{cut: rng.randint(0, 6)})


class World:
    """Environments, time, and a loop.

    Args:
        settings: of the loop and its environments.
        seed: of what time does.
        lengths: (env, episode number) -> length.
        make_schedule: what is to decide, with the arguments of `Schedule`.
    """

    def __init__(
        self,
        settings: Settings,
        seed: int,
        lengths: Callable[[int, int], int],
        make_schedule: Callable[..., Any] = Schedule,
    ) -> None:
        self.settings, self.lengths = settings, lengths
        self.time = random.Random(seed)
        self.schedule = make_schedule(
            settings.num_envs,
            steps_ahead=settings.steps_ahead,
            min_batch=settings.min_batch,
            max_batch=settings.max_batch,
            ordered=settings.ordered,
        )
        self.clock = 0
        self.calls = 0
        self.rows: list[Row] = []
        self.kept: list[Row] = []
        self.envs = [Env(index, self._new_episode(index, 0, None)) for index in range(settings.num_envs)]
        self.book = EpisodeBook(settings.num_envs)
        self.episodes_so_far = np.zeros(settings.num_envs, np.int64)
        self.seeds: list[deque[int]] | None = None
        self.dying: list[Env] = []
        self.seeded_calls = 0
        self.lost_steps = 0
        self.never_finished = 0  # lost steps whose environment died in them
        self.kind: str | None = None  # of the call in progress
        self.last_in_stream: list[Row | None] = [None] * settings.num_envs
        self.batches: list[tuple[int, list[int]]] = []  # (call, environments)
        self.abandoned: list[tuple[int, int, int]] = []  # (env, episode, rows lost)
        self.story: list[Any] = [settings]
        self._reset_all()

    # -- the calls, as in loops.base ---------------------------------------------------------------

    def run(self, ask: Ask) -> Result:
        """Play one call and hold its result, and the state it leaves, to the promises."""
        self.calls += 1
        self.kind = ask.kind
        self.story.append(ask)
        call = Call(ask)
        before = [self._under_way(env) for env in self.envs]
        front, counts = self._begin(ask)
        num_dead = sum(env.is_dead for env in self.envs)
        complete = raised = False
        try:
            complete = self._drive(call)
            self._ask("forget")
            self.kind = None
            if not complete:
                self._clear_seeds()
                self._command(call, everyone=True)
        except (Raised, Starved):
            raised = True
            self._ask("forget", abandon=False)
        self.kind = None
        self._clear_seeds()
        deaths = sum(env.is_dead for env in self.envs) - num_dead
        if raised:
            for row in call.sink:
                row.fate = Fate.KEPT
            taken = front + call.sink
            self.kept = self.kept + taken if ask.kind == "episodes" else taken + self.kept
            result = Result([], complete=False)
        elif ask.kind == "episodes":
            result = self._whole_episodes(call, counts, complete, deaths)
        else:
            result = Result(front + call.sink, complete)
            self._check_rows(ask, result, call.sink)
            self._check_stream(result)
        if ask.kind == "episodes" and not deaths:
            self._check_duty(ask, before, result, counts)
        if not raised:
            self._check_rest(call, complete, counts, deaths)
        self._check_books()
        return result

    def _begin(self, ask: Ask) -> tuple[list[Row], np.ndarray]:
        """The kept rows that come first, and the episodes of each environment."""
        front: list[Row] = []
        counts = np.zeros(len(self.envs), np.int64)
        if ask.kind == "steps":
            front, self.kept = self.kept[: ask.amount], self.kept[ask.amount :]
            self._ask("want_steps", ask.amount - len(front))
        elif ask.kind == "rollout":
            kept, self.kept = self.kept, []
            for row in kept:
                fits = counts[row.episode.env] < ask.amount
                (front if fits else self.kept).append(row)
                counts[row.episode.env] += fits
            self._ask("want_rollout", ask.amount - counts)
        else:
            living = np.array([env.index for env in self.envs if not env.is_dead])
            chosen = living[assign(self.episodes_so_far[living], ask.amount)]
            counts = np.bincount(chosen, minlength=len(self.envs))
            if ask.seeded:
                self.seeded_calls += 1
                self.seeds = [deque(self._seeds_of(env, counts)) for env in self.envs]
            self._ask("want_episodes", counts, seeded=ask.seeded)
        return front, counts

    def _seeds_of(self, env: Env, counts: np.ndarray) -> list[int]:
        return [1000 * self.calls + 100 * env.index + j for j in range(counts[env.index])]

    def _clear_seeds(self) -> None:
        if self.seeds is not None:
            self.seeds = None
            for env in self.envs:
                env.reset_seed = None

    def serve_waiting(self) -> None:
        """update_policy, on the loop's own thread."""
        self._absorb()
        self._command(None, everyone=True)

    def pass_time(self) -> None:
        """The trainer trains; what is in flight may end, and nobody looks."""
        for _ in range(self.time.randint(0, 3)):
            self._something_ends()

    # -- the loop, as in loops.driver --------------------------------------------------------------

    def _reset_all(self) -> None:
        while any(env.is_resetting for env in self.envs):
            self._something_ends(may_die=False)
        self._absorb()

    def _drive(self, call: Call) -> bool:
        ask = call.ask
        naps = 0  # a wait also ends when nothing has happened for a while
        while True:
            self._absorb()
            ids = self._ask("take")
            if ids:
                self._deliver(ids, call)
            self._command(call)
            if self.schedule.finished:
                return True
            if self.schedule.starved:
                raise Starved
            if ask.raise_at_wake is not None and call.wakes >= ask.raise_at_wake:
                raise Raised
            if ask.stop_at_wake is not None and call.wakes >= ask.stop_at_wake:
                return False
            if ask.stop_after_rows is not None and len(call.sink) >= ask.stop_after_rows:
                return False
            call.wakes += 1
            assert call.wakes < MAX_WAKES, "the call does not end"
            naps = 0 if self._something_ends() else naps + 1
            assert naps < 2, "stall: something is owed and nothing can happen"

    def _absorb(self) -> None:
        stepped = [env for env in self.envs if env.finished is not None]
        if stepped:
            self.clock += 1
            rows = [env.finished for env in stepped]
            for env, row in zip(stepped, rows, strict=True):
                assert env.row is None, f"environment {env.index} has two undelivered steps"
                env.row, env.finished = row, None
                row.arrived = env.since = self.clock
                self.rows.append(row)
                if env.step_is_lost:
                    self._lose(env)
            self.book.stepped(_ids(stepped), np.array([row.reward for row in rows]))
            self._ask("stepped", _ids(stepped), np.array([row.ended for row in rows]))
        fresh = [env for env in self.envs if env.has_new_obs]
        if fresh:
            self.clock += 1
            for env in fresh:
                env.has_new_obs = False
                env.since = self.clock
            self._ask("observed", _ids(fresh))
        if self.dying:
            dead, self.dying = sorted(self.dying, key=lambda env: env.index), []
            for env in dead:
                env.is_dead = True
            self._ask("died", _ids(dead))
            for env in dead:
                self.never_finished += env.step_is_lost
                env.step_is_lost = False

    def _deliver(self, ids: list[int], call: Call) -> None:
        for index in ids:
            env = self.envs[index]
            row = env.row
            assert row is not None and row.fate is Fate.UNDELIVERED, f"environment {index} has no row to deliver"
            assert (self.book.episode_id[index], self.book.length[index]) == (row.episode.number, row.t + 1)
            assert self.book.total_reward[index] == row.total_reward, "the return is not the sum of the rewards"
            env.row, row.fate = None, Fate.TAKEN
            row.episode.rows_taken += 1
            call.sink.append(row)
            if row.ended:
                if self.seeds is not None and self.seeds[index]:
                    self.seeds[index].popleft()
                self.book.next_episode(np.array([index]))
        ask = call.ask
        if ask.update_after_rows is not None and not call.updated and len(call.sink) >= ask.update_after_rows:
            call.updated = True
            self.pass_time()
            self.serve_waiting()
        if ask.raise_after_rows is not None and len(call.sink) >= ask.raise_after_rows:
            raise Raised

    def _command(self, call: Call | None, *, everyone: bool = False) -> None:
        while True:
            resets = self._ask("due_resets")
            if self.schedule.lost_ends:
                self.book.next_episode(np.array(self.schedule.lost_ends))
                self.schedule.lost_ends = []
            for index in resets:
                env = self.envs[index]
                assert env.row is None, f"environment {index} is reset though its row was not delivered"
                assert env.episode.is_abandoned or env.t == 0, f"environment {index} is reset in mid-episode"
                assert env.t or self.seeded_calls, f"environment {index} is reset again, though it had just been"
                env.reset_seed = self.seeds[index].popleft() if self.seeds and self.seeds[index] else None
                self._reset(env)
                self.book.next_episode(np.array([index]))
            expired = self.time.random() < self.settings.expiry
            before = _doing(self.schedule)
            ids = self._ask("next_batch", expired=expired, everyone=everyone)
            self._check_batch(ids, before, everyone=everyone, expired=expired)
            if not ids:
                return
            if call is not None:
                call.batches += 1
                if call.ask.raise_at_batch == call.batches:
                    raise Raised
            self._act(ids)

    def _act(self, ids: list[int]) -> None:
        for index in ids:
            env = self.envs[index]
            assert env.row is None, f"environment {index} is given an action though its row was not delivered"
            assert not (env.is_resetting or env.is_stepping or env.is_dead), f"environment {index} cannot act now"
            env.is_stepping, env.acted_in_call = True, self.calls
            env.reset_seed = self.seeds[index][0] if self.seeds and self.seeds[index] else None
        self.batches.append((self.calls, ids))
        self._ask("acted", np.array(ids))

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> list[int]:
        """Put a question to the schedule, watch how the environments move, note what it gave up."""
        before = _doing(self.schedule)
        answer = getattr(self.schedule, name)(*args, **kwargs)
        after = _doing(self.schedule)
        if before != after:
            moves = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
            assert moves <= LEGAL_MOVES[name], f"{name} made the moves {moves - LEGAL_MOVES[name]}"
        self._note_abandoned(name)
        ids = [] if answer is None else [int(index) for index in answer]
        self.story.append((name, args, kwargs, ids))
        return ids

    def _note_abandoned(self, name: str) -> None:
        given_up, self.schedule.abandoned = list(self.schedule.abandoned), []
        for one in given_up:
            env = self.envs[one.env]
            row, episode = env.row, env.latest_episode
            in_flight = _doing(self.schedule)[one.env] == S
            assert name in ("want_episodes", "forget", "died"), f"{name} gave up an episode"
            assert not episode.is_abandoned, f"episode {episode.number} of {one.env} was abandoned twice"
            assert episode.rows_taken or self.seeded_calls or env.is_dead, "abandoned though nothing was delivered"
            assert one.rows_lost == (row is not None or in_flight), "the number of rows lost is wrong"
            episode.is_abandoned = True
            self.lost_steps += one.rows_lost
            self.abandoned.append((one.env, episode.number, one.rows_lost))
            if row is not None:
                self._lose(env)
            env.step_is_lost = in_flight

    def _lose(self, env: Env) -> None:
        assert env.row is not None and env.row.fate is Fate.UNDELIVERED
        env.row.fate, env.row, env.step_is_lost = Fate.LOST, None, False

    # -- the environments and their time ------------------------------------------------------------

    def _new_episode(self, env: int, number: int, seed: int | None) -> Episode:
        return Episode(env, number, self.lengths(env, number), seed, self.calls)

    def _reset(self, env: Env) -> None:
        env.episode = self._new_episode(env.index, env.episode.number + 1, env.reset_seed)
        env.t, env.total_reward, env.is_resetting = 0, 0.0, True

    def _something_ends(self, *, may_die: bool = True) -> bool:
        """A random group of steps and resets ends; False: none was in flight."""
        busy = [env for env in self.envs if env.is_stepping or env.is_resetting]
        unseen = self.dying or any(env.finished or env.has_new_obs for env in self.envs)
        if not busy:
            return bool(unseen)
        ending = [env for env in busy if self.time.random() < self.settings.pace]
        if not ending and not unseen:
            ending = [self.time.choice(busy)]
        for env in ending:
            if env.is_stepping:
                self._finish_step(env)
                if env.is_resetting and self.time.random() < 0.5:
                    continue
            if env.is_resetting:
                env.is_resetting, env.has_new_obs = False, True
        if may_die and self.time.random() < self.settings.deaths:
            group = self.time.randint(1, 2)
            mortal = [env for env in self.envs if not env.is_dead and env not in self.dying]
            for env in self.time.sample(mortal, min(group, len(mortal))):
                env.is_stepping = env.is_resetting = False
                self.dying.append(env)
        return True

    def _finish_step(self, env: Env) -> None:
        reward = 0.1 * (env.index + 1) + 0.01 * env.episode.number + 0.3 * env.t
        env.total_reward += reward
        ended = env.t + 1 == env.episode.length
        env.finished = Row(env.episode, env.t, ended, reward, env.total_reward, env.acted_in_call)
        env.t += 1
        env.is_stepping = False
        if ended:
            self._reset(env)

    # -- what must hold -----------------------------------------------------------------------------

    def _whole_episodes(self, call: Call, counts: np.ndarray, complete: bool, deaths: int) -> Result:
        """Promise 5: whole episodes, each environment's own number of them, and nobody favoured."""
        whole: list[list[list[Row]]] = [[] for _ in self.envs]
        for episode in dict.fromkeys(row.episode for row in call.sink):
            rows = [row for row in call.sink if row.episode is episode]
            assert [row.t for row in rows] == list(range(len(rows))), "an episode's rows are not t = 0, 1, ..."
            ended = rows[-1].ended
            assert len(rows) == episode.length if ended else episode.is_abandoned or self.envs[episode.env].is_dead
            for row in rows:
                row.fate = Fate.RETURNED if ended else Fate.DROPPED
            if ended:
                whole[episode.env].append(rows)
        played = np.array([len(episodes) for episodes in whole])
        for env in self.envs:
            episodes = [rows[0].episode for rows in whole[env.index]]
            assert [one.number for one in episodes] == sorted(one.number for one in episodes)
            if call.ask.seeded:
                assert all(one.reset_in_call == self.calls for one in episodes), "an episode without its own reset"
                seeds = self._seeds_of(env, counts)
                assert deaths or [one.seed for one in episodes] == seeds[: len(episodes)], "the wrong seed"
        if complete:
            assert played.sum() == call.ask.amount, f"{played.sum()} episodes instead of {call.ask.amount}"
        if not deaths:
            assert (played == counts).all() if complete else (played <= counts).all(), "not shared out as settled"
        spread = np.ptp(self.episodes_so_far)
        self.episodes_so_far += played
        if complete and not any(env.is_dead for env in self.envs):
            assert np.ptp(self.episodes_so_far) <= max(1, spread), "an environment was favoured"
        return Result([row for episodes in whole for rows in episodes for row in rows], complete)

    def _check_rows(self, ask: Ask, result: Result, taken: list[Row]) -> None:
        """Promise 1: exact counts, in order of arrival."""
        if ask.kind == "steps":
            num_rows = len(result.rows)
            assert num_rows == ask.amount if result.complete else num_rows <= ask.amount, f"{num_rows} rows"
            arrivals = [row.arrived for row in taken]
            assert self.settings.ordered or arrivals == sorted(arrivals), "rows are not in order of arrival"
            return
        for env in self.envs:
            num_rows = sum(row.episode.env == env.index for row in result.rows)
            exact = result.complete and not env.is_dead
            assert num_rows == ask.amount if exact else num_rows <= ask.amount, f"{num_rows} of {env.index}"

    def _check_stream(self, result: Result) -> None:
        """Promise 2: each row follows on its environment's last, or an episode lies between."""
        for row in result.rows:
            assert row.fate in (Fate.TAKEN, Fate.KEPT), f"row {row.key} is {row.fate.value} and returned again"
            row.fate = Fate.RETURNED
            last = self.last_in_stream[row.episode.env]
            self.last_in_stream[row.episode.env] = row
            if last is None:
                assert row.t == 0
            elif last.episode is row.episode:
                assert row.t == last.t + 1, f"row {row.key} follows row {last.key}"
            else:
                assert row.t == 0 and row.episode.number > last.episode.number, f"row {row.key} follows {last.key}"
                assert last.ended or last.episode.is_abandoned, f"episode of row {last.key} was left silently"

    def _under_way(self, env: Env) -> UnderWay:
        episode = env.latest_episode
        acting = env.row is not None or _doing(self.schedule)[env.index] == S
        return UnderWay(env.row, episode, acting, episode.rows_taken > 0, episode.is_abandoned)

    def _check_duty(self, ask: Ask, before: list[UnderWay], result: Result, counts: np.ndarray) -> None:
        """Promise 5: what becomes of the episode that was under way when run_episodes was called."""
        for env, was in zip(self.envs, before, strict=True):
            first = next((row.episode for row in result.rows if row.episode.env == env.index), None)
            if was.given_up:
                assert first is not was.episode, "an episode given up is returned"
            elif counts[env.index] == 0:
                assert was.row is None or was.row is env.row, f"environment {env.index} has no quota, but lost its row"
                assert not was.episode.is_abandoned, f"environment {env.index} has no quota, but lost its episode"
            elif was.begun or (ask.seeded and was.acting):
                assert was.episode.is_abandoned and first is not was.episode, "a begun episode was returned"
            elif was.acting and not ask.seeded and result.complete:
                assert first is was.episode, "an episode of which nothing was delivered was not continued"

    def _check_batch(self, ids: list[int], before: list[int], *, everyone: bool, expired: bool) -> None:
        """Promise 7, and who may be let act: promise 3."""
        schedule, settings = self.schedule, self.settings
        after = _doing(schedule)
        waiting = [env for env in self.envs if after[env.index] == W]
        left = [env for env in waiting if env.index not in ids]
        assert ids == sorted(ids) and len(set(ids)) == len(ids) <= settings.max_batch
        assert all(after[index] == W for index in ids), "a batch holds somebody who does not wait"
        if ids:
            assert len(ids) == min(len(waiting), settings.max_batch)
            chosen = [self.envs[index] for index in ids]
            turn = (lambda env: env.index) if settings.ordered else (lambda env: env.since)
            assert not left or max(map(turn, chosen)) <= min(map(turn, left)), "not the longest-waiting first"
        elif waiting:
            assert not everyone and not expired and schedule.owed and len(waiting) < settings.min_batch
            company = [env for env in self.envs if after[env.index] == S and not env.step_is_lost]
            if self.kind != "steps":
                company = [env for env in company if schedule.quota[env.index] > 0]
            assert company, "a batch waits for nobody who could join it"
        if settings.steps_ahead == 0:
            assert schedule.owed or not waiting, "a step is started that nobody asked for"
            granted = [env for env in self.envs if before[env.index] == I and after[env.index] == W]
            if granted and self.kind == "steps" and not settings.ordered:
                idle = [env for env in self.envs if after[env.index] == I and env.row is None]
                latest = max(env.since for env in granted)
                assert all(latest <= env.since for env in idle), "not the longest-waiting first"

    def _check_rest(self, call: Call, complete: bool, counts: np.ndarray, deaths: int) -> None:
        """Promise 3: what every environment does when a call has returned."""
        doing = _doing(self.schedule)
        for env in self.envs:
            if env.is_dead:
                continue
            state, who = doing[env.index], f"environment {env.index}"
            ends = sum(row.ended for row in call.sink if row.episode.env == env.index)
            rests = call.ask.seeded and ends >= counts[env.index] > 0
            assert state != W, f"{who} waits for an action"
            if rests and not deaths:
                assert state in (I, R) and env.row is None, f"{who} does not rest"
            rests |= call.ask.seeded and deaths > 0 and ends > 0  # it played what a dead one could not
            if self.settings.steps_ahead == 0 and complete:
                row = env.row or env.finished
                asked = env.acted_in_call if row is None else row.acted_in_call
                is_under_way = row is not None or state == S
                assert not is_under_way or asked < self.calls, f"{who} was given a step that nobody asked for"
            if self.settings.steps_ahead == 1 and not rests and (complete or not self.settings.ordered):
                is_ahead = state in (S, R) or env.row is not None
                assert is_ahead, f"{who} has an observation and was not given its action"

    def _check_books(self) -> None:
        """Promise 1: every row has one fate, and exactly those were lost that were reported."""
        assert [bool(has) for has in self.schedule.has_row] == [env.row is not None for env in self.envs]
        fates = [row.fate for row in self.rows]
        assert fates.count(Fate.TAKEN) == 0
        assert fates.count(Fate.KEPT) == len(self.kept)
        assert fates.count(Fate.UNDELIVERED) == sum(env.row is not None for env in self.envs)
        lost_in_flight = sum(env.step_is_lost for env in self.envs) + self.never_finished
        assert fates.count(Fate.LOST) + lost_in_flight == self.lost_steps, "rows were lost that were not reported"


def _ids(envs: Iterable[Env]) -> np.ndarray:
    return np.array([env.index for env in envs])


def _doing(schedule: Any) -> list[int]:
    return schedule.doing.tolist()


def random_world(
    seed: int,
    make_schedule: Callable[..., Any] = Schedule,
    *,
    timing: int = 0,
    by_rows_only: bool = False,
    **fixed: Any,
) -> tuple[World, list[Ask]]:
    """A world, and the calls to make in it; `timing`: the same under another timing."""
    rng = random.Random(seed)
    settings = random_settings(rng, **fixed)
    asks = [random_ask(rng, settings.num_envs, by_rows_only=by_rows_only) for _ in range(rng.randint(1, 6))]
    slow = rng.randrange(settings.num_envs) if rng.random() < 0.3 else None

    def lengths(env: int, number: int) -> int:
        if env == slow:
            return 3 * settings.max_length
        return random.Random(f"{seed} {env} {number}").randint(1, settings.max_length)

    return World(settings, rng.randrange(1 << 30) + timing, lengths, make_schedule), asks


def play(world: World, asks: Iterable[Ask], name: str = "this world") -> list[Result]:
    """Make the calls one after the other; an error tells the whole story."""
    results = []
    try:
        for ask in asks:
            if all(env.is_dead for env in world.envs):
                break
            results.append(world.run(ask))
            world.pass_time()
            if ask.update_next:
                world.serve_waiting()
                world.pass_time()
    except AssertionError as error:
        story = "\n".join(map(str, world.story))
        raise AssertionError(f"{name}: {error}\n{story}") from error
    return results
