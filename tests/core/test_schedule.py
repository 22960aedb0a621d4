"""The schedule keeps its promises in thousands of random worlds, answers as the reference does, and, one
sentence each, the sharp cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import Reference
from world import LEGAL_MOVES, Ask, Settings, World, play, random_world

from envrunner._core import schedule as schedule_module
from envrunner._core.schedule import MOVES, Abandoned, Doing, Schedule

NAMES = [doing.name for doing in Doing]


@pytest.fixture(autouse=True)
def every_move_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "CHECK_MOVES", True)


class Twins:
    """A schedule and the reference: told the same, asked the same, and every answer must be equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.schedule, self.reference = Schedule(*args, **kwargs), Reference(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A question: to both."""

        def ask(*args: Any, **kwargs: Any) -> Any:
            told = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
            answer = getattr(self.schedule, name)(*args, **kwargs)
            right = getattr(self.reference, name)(*told, **kwargs)
            answered = answer if answer is None else answer.tolist()
            assert answered == right, f"{name} answers {answered}, the reference {right}"
            self._compare(name)
            return answer

        return ask

    def _compare(self, name: str) -> None:
        schedule, reference = self.schedule, self.reference
        facts = {
            "doing": ([NAMES[doing] for doing in schedule.doing.tolist()], reference.doing),
            "has_row": (schedule.has_row.tolist(), reference.has_row),
            "begun": (schedule.begun.tolist(), reference.begun),
            "quota": (schedule.quota.tolist(), reference.quota),
            "owed": (schedule.owed, reference.owed),
            "abandoned": ([(one.env, one.rows_lost) for one in schedule.abandoned], reference.abandoned),
            "lost_ends": (schedule.lost_ends, reference.lost_ends),
        }
        for fact, (is_now, right) in facts.items():
            assert is_now == right, f"after {name}, {fact} is {is_now}, in the reference {right}"

    @property
    def finished(self) -> bool:
        assert self.schedule.finished == self.reference.finished, f"finished is {self.schedule.finished}"
        return self.schedule.finished

    @property
    def starved(self) -> bool:
        assert self.schedule.starved == self.reference.starved, f"starved is {self.schedule.starved}"
        return self.schedule.starved

    doing = property(lambda self: self.schedule.doing)
    has_row = property(lambda self: self.schedule.has_row)
    quota = property(lambda self: self.schedule.quota)
    owed = property(lambda self: self.schedule.owed)

    @property
    def abandoned(self) -> list[Any]:
        return self.schedule.abandoned

    @abandoned.setter
    def abandoned(self, none: list[Any]) -> None:
        self.schedule.abandoned, self.reference.abandoned = list(none), list(none)

    @property
    def lost_ends(self) -> list[int]:
        return self.schedule.lost_ends

    @lost_ends.setter
    def lost_ends(self, none: list[int]) -> None:
        self.schedule.lost_ends, self.reference.lost_ends = list(none), list(none)


# --- random worlds: the promises are checked in `world`, at every event and after every call


def seeds(first: int, last: int, chunk: int) -> Any:
    """So many seeds in each test."""
    chunks = [range(start, start + chunk) for start in range(first, last, chunk)]
    return pytest.mark.parametrize("chunk", chunks, ids=lambda chunk: f"{chunk.start}-{chunk.stop - 1}")


def play_all(chunk: range, make_schedule: Callable[..., Any], **fixed: Any) -> None:
    for seed in chunk:
        world, asks = random_world(seed, make_schedule, **fixed)
        play(world, asks, f"world {seed}")


@seeds(0, 1000, 200)
def test_every_promise_holds_in_random_worlds(chunk: range) -> None:
    play_all(chunk, Schedule)


@seeds(100_000, 100_500, 100)
def test_the_schedule_answers_as_the_reference_does(chunk: range) -> None:
    play_all(chunk, Twins)


@seeds(200_000, 200_100, 50)
def test_an_ordered_schedule_answers_as_the_reference_does(chunk: range) -> None:
    play_all(chunk, Twins, ordered=True)


@pytest.mark.slow
@seeds(300_000, 308_000, 1_000)
def test_every_promise_holds_in_many_more_worlds(chunk: range) -> None:
    play_all(chunk, Schedule)


@pytest.mark.slow
@seeds(400_000, 404_000, 500)
def test_the_schedule_answers_as_the_reference_does_in_many_more_worlds(chunk: range) -> None:
    play_all(chunk, Twins)


# --- ordered: nothing depends on timing


def trace(seed: int, timing: int) -> dict[str, Any]:
    """What the calls of this seed return, infer and give up, if time goes by like this."""
    world, asks = random_world(seed, timing=timing, ordered=True, deaths=0.0, by_rows_only=True)
    results = play(world, asks, f"world {seed}, timing {timing}")
    return {
        "rows": [[row.key for row in result.rows] for result in results],
        "batches": world.batches,
        "abandoned": world.abandoned,
    }


@seeds(0, 150, 50)
def test_ordered_calls_do_the_same_under_another_timing(chunk: range) -> None:
    for seed in chunk:
        assert trace(seed, timing=1) == trace(seed, timing=0), f"world {seed}"


@pytest.mark.slow
@seeds(1_000, 3_000, 500)
def test_ordered_calls_do_the_same_under_two_other_timings(chunk: range) -> None:
    for seed in chunk:
        first = trace(seed, timing=0)
        assert trace(seed, timing=1) == first, f"world {seed}"
        assert trace(seed, timing=2) == first, f"world {seed}"


# --- the sharp cases, by hand


def started(num_envs: int, **options: Any) -> Schedule:
    """A schedule whose environments have their first observations."""
    schedule = Schedule(num_envs, **options)
    schedule.observed(np.arange(num_envs))
    return schedule


def serve(schedule: Schedule, **how: Any) -> list[list[int]]:
    """Give out the actions that are due; the batches."""
    batches = []
    while (batch := schedule.next_batch(**how)).size:
        schedule.acted(batch)
        batches.append(batch.tolist())
    return batches


def step(schedule: Schedule, *envs: int, ended: tuple[int, ...] = ()) -> None:
    """These environments finish their steps."""
    schedule.stepped(np.array(envs), np.array([env in ended for env in envs]))


def observe(schedule: Schedule, *envs: int) -> None:
    schedule.observed(np.array(envs))


def die(schedule: Schedule, *envs: int) -> None:
    schedule.died(np.array(envs))


def take(schedule: Schedule) -> list[int]:
    return schedule.take().tolist()


def resets(schedule: Schedule) -> list[int]:
    return schedule.due_resets().tolist()


def one_step_ahead(num_envs: int, **options: Any) -> Schedule:
    """Between two calls: everybody's first step is in flight, and nothing was delivered yet."""
    schedule = started(num_envs, **options)
    schedule.want_steps(0)
    serve(schedule)
    schedule.forget()
    return schedule


def in_mid_episode(num_envs: int, **options: Any) -> Schedule:
    """Between two calls: everybody's first step was delivered, the second is in flight."""
    schedule = started(num_envs, **options)
    schedule.want_steps(num_envs)
    serve(schedule)
    step(schedule, *range(num_envs))
    take(schedule)
    serve(schedule)
    schedule.forget()
    return schedule


# one step ahead


def test_the_moves_are_those_that_the_questions_make() -> None:
    made = {move for moves in LEGAL_MOVES.values() for move in moves}
    assert made == {(int(source), int(to)) for source, targets in MOVES.items() for to in targets}


def test_a_step_of_an_environment_that_was_given_no_action_is_refused() -> None:
    with pytest.raises(AssertionError, match="environment 1 is IDLE"):
        step(started(2), 1)


def test_a_second_call_at_the_same_time_is_refused() -> None:
    schedule = started(1)
    schedule.want_steps(1)
    with pytest.raises(AssertionError, match="a call that wants steps is in progress"):
        schedule.want_rollout(np.array([1]))


def test_a_call_for_nothing_still_gives_everybody_the_next_action() -> None:
    schedule = started(2, min_batch=2)
    schedule.want_steps(0)
    assert serve(schedule) == [[0, 1]]
    assert schedule.finished


def test_an_environment_with_an_undelivered_row_is_not_given_another_action() -> None:
    schedule = one_step_ahead(2)
    schedule.want_steps(1)
    step(schedule, 0, 1)
    assert take(schedule) == [0]
    assert serve(schedule) == [[0]]
    assert schedule.finished and schedule.has_row.tolist() == [False, True]


def test_what_was_left_undelivered_comes_first_in_the_next_call() -> None:
    schedule = one_step_ahead(3)
    schedule.want_steps(1)
    step(schedule, 0, 1)
    take(schedule)
    serve(schedule)
    schedule.forget()
    step(schedule, 0)
    step(schedule, 2)
    schedule.want_steps(3)
    assert take(schedule) == [1, 0, 2]


def test_nobody_is_waited_for_once_nothing_is_owed() -> None:
    schedule = one_step_ahead(2, min_batch=2)
    schedule.want_steps(1)
    step(schedule, 0)
    assert take(schedule) == [0]
    assert serve(schedule) == [[0]]
    assert schedule.finished


def test_a_call_is_not_over_while_somebody_waits_for_an_action() -> None:
    schedule = started(2, max_batch=1)
    schedule.want_steps(0)
    schedule.acted(schedule.next_batch())
    assert not schedule.finished
    assert serve(schedule) == [[1]] and schedule.finished


def test_a_resetting_environment_does_not_delay_a_return() -> None:
    schedule = one_step_ahead(2, min_batch=2)
    schedule.want_steps(2)
    step(schedule, 0, 1, ended=(1,))
    assert take(schedule) == [0, 1]
    assert serve(schedule) == [[0]]
    assert schedule.finished


def test_a_straggler_holds_nobody() -> None:
    schedule = started(3)
    schedule.want_steps(6)
    assert serve(schedule) == [[0, 1, 2]]
    for _ in range(3):
        step(schedule, 0, 1)
        assert take(schedule) == [0, 1]
        assert serve(schedule) == [[0, 1]]
    assert schedule.finished and schedule.doing[2] == Doing.STEPPING


def test_an_update_between_calls_serves_who_has_got_an_observation() -> None:
    schedule = one_step_ahead(2, min_batch=2)
    schedule.want_steps(1)
    step(schedule, 0, ended=(0,))
    take(schedule)
    schedule.forget()
    observe(schedule, 0)
    assert serve(schedule, everyone=True) == [[0]]


# strictly on-policy


def test_without_steps_ahead_exactly_the_steps_asked_for_are_started() -> None:
    schedule = started(3, steps_ahead=0)
    schedule.want_steps(4)
    assert serve(schedule) == [[0, 1, 2]]
    step(schedule, 1)
    assert take(schedule) == [1]
    assert serve(schedule) == [[1]]
    step(schedule, 0, 1, 2)
    assert take(schedule) == [0, 1, 2]
    assert serve(schedule) == []
    assert schedule.finished


def test_without_steps_ahead_the_longest_waiting_start_first() -> None:
    schedule = Schedule(3, steps_ahead=0)
    for env in (2, 0, 1):
        observe(schedule, env)
    schedule.want_steps(2)
    assert serve(schedule) == [[0, 2]]


def test_without_steps_ahead_a_step_left_in_flight_counts() -> None:
    schedule = started(2, steps_ahead=0)
    schedule.want_steps(2)
    serve(schedule)
    schedule.forget()  # interrupted
    schedule.want_steps(1)
    assert serve(schedule) == []
    step(schedule, 1)
    assert take(schedule) == [1]
    assert schedule.finished


def test_without_steps_ahead_a_row_that_came_while_others_were_delivered_counts() -> None:
    schedule = started(3, steps_ahead=0)
    schedule.want_steps(3)
    serve(schedule)
    step(schedule, 0)
    assert take(schedule) == [0]
    step(schedule, 1)  # noticed by an update_policy from a processor
    assert serve(schedule, everyone=True) == []


def test_without_steps_ahead_a_step_that_is_lost_does_not_count() -> None:
    schedule = started(2, steps_ahead=0)
    schedule.want_episodes(np.array([1, 0]))
    serve(schedule)
    step(schedule, 0)
    take(schedule)
    serve(schedule)
    schedule.forget()  # interrupted: the second step of environment 0 is lost
    schedule.want_steps(1)
    assert serve(schedule) == [[1]]


def test_without_steps_ahead_nothing_runs_between_calls() -> None:
    schedule = started(2, steps_ahead=0)
    schedule.want_steps(2)
    schedule.next_batch()  # the policy raises
    schedule.forget(abandon=False)
    assert serve(schedule, everyone=True) == []
    assert schedule.doing.tolist() == [Doing.IDLE, Doing.IDLE]


def test_without_steps_ahead_a_rollout_gives_nobody_a_step_too_many() -> None:
    schedule = started(2, steps_ahead=0, min_batch=2)
    schedule.want_rollout(np.array([2, 1]))
    assert serve(schedule) == [[0, 1]]
    step(schedule, 0)
    assert take(schedule) == [0]
    assert serve(schedule) == [[0]], "environment 1 plays its only step, so nobody else can come"
    step(schedule, 0, 1)
    assert take(schedule) == [0, 1]
    assert serve(schedule) == [] and schedule.finished


# batches


def test_a_batch_waits_for_who_can_still_join_it() -> None:
    schedule = one_step_ahead(3, min_batch=3)
    schedule.want_steps(9)
    step(schedule, 0, 1)
    take(schedule)
    assert serve(schedule) == []
    step(schedule, 2)
    take(schedule)
    assert serve(schedule) == [[0, 1, 2]]


def test_who_has_waited_long_enough_is_served() -> None:
    schedule = one_step_ahead(2, min_batch=2)
    schedule.want_steps(4)
    step(schedule, 0)
    take(schedule)
    assert serve(schedule) == []
    assert serve(schedule, expired=True) == [[0]]


def test_a_dead_environment_does_not_hold_the_batch() -> None:
    schedule = one_step_ahead(3, min_batch=3)
    schedule.want_steps(9)
    step(schedule, 0, 1)
    take(schedule)
    die(schedule, 2)
    assert serve(schedule) == [[0, 1]]


def test_a_resetting_environment_does_not_hold_the_batch() -> None:
    schedule = one_step_ahead(3, min_batch=3)
    schedule.want_steps(9)
    step(schedule, 0, 1, 2, ended=(2,))
    take(schedule)
    assert serve(schedule) == [[0, 1]]


def test_an_environment_without_an_episode_to_play_does_not_hold_the_batch() -> None:
    schedule = one_step_ahead(3, min_batch=3)
    schedule.want_episodes(np.array([1, 1, 0]))
    step(schedule, 0, 1)
    take(schedule)
    assert serve(schedule) == [[0, 1]]


def test_an_environment_whose_column_is_full_does_not_hold_the_batch() -> None:
    schedule = one_step_ahead(2, min_batch=2)
    schedule.want_rollout(np.array([2, 1]))
    step(schedule, 1)
    take(schedule)
    assert serve(schedule) == [], "environment 0 may still join"
    assert serve(schedule, everyone=True) == [[1]]
    step(schedule, 0)
    take(schedule)
    assert serve(schedule) == [[0]]


def test_a_step_that_is_lost_does_not_hold_the_batch() -> None:
    schedule = in_mid_episode(2, min_batch=2)
    schedule.want_episodes(np.array([1, 1]))
    step(schedule, 0)
    assert resets(schedule) == [0]
    observe(schedule, 0)
    assert serve(schedule) == [[0]]


def test_a_batch_takes_the_longest_waiting() -> None:
    schedule = Schedule(4, max_batch=3)
    for envs in ((3,), (0, 2), (1,)):
        observe(schedule, *envs)
    schedule.want_steps(4)
    assert serve(schedule) == [[0, 2, 3], [1]]


# whole episodes


@pytest.mark.parametrize("pace", [0.2, 1.0])
@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("min_batch", [1, 4])
def test_forty_episodes_of_four_short_and_four_long_environments_have_a_mean_length_of_21(
    pace: float, steps_ahead: int, min_batch: int
) -> None:
    settings = Settings(num_envs=8, steps_ahead=steps_ahead, min_batch=min_batch, pace=pace)
    world = World(settings, seed=0, lengths=lambda env, number: 2 if env < 4 else 40)
    (result,) = play(world, [Ask("episodes", 40)])
    lengths = [row.t + 1 for row in result.rows if row.ended]
    assert len(lengths) == 40
    assert sum(lengths) == 20 * 2 + 20 * 40 == 21 * 40


def test_an_episode_of_which_nothing_was_delivered_is_continued() -> None:
    schedule = one_step_ahead(1)
    step(schedule, 0)
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [] and resets(schedule) == []
    assert take(schedule) == [0]
    serve(schedule)
    step(schedule, 0, ended=(0,))
    assert take(schedule) == [0]
    assert schedule.finished


def test_an_episode_of_one_undelivered_step_is_a_whole_one() -> None:
    schedule = one_step_ahead(1)
    step(schedule, 0, ended=(0,))
    schedule.want_episodes(np.array([1]))
    assert take(schedule) == [0]
    assert schedule.finished


def test_an_episode_that_run_steps_has_begun_is_abandoned_with_its_step_in_flight() -> None:
    schedule = in_mid_episode(1)
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [Abandoned(0, rows_lost=1)]
    assert resets(schedule) == []
    step(schedule, 0)
    assert take(schedule) == []
    assert resets(schedule) == [0]
    assert schedule.lost_ends == []


def test_an_episode_that_run_steps_has_begun_is_abandoned_with_its_undelivered_row() -> None:
    schedule = in_mid_episode(1)
    step(schedule, 0)
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [Abandoned(0, rows_lost=1)]
    assert take(schedule) == []
    assert resets(schedule) == [0]


def test_an_abandoned_episode_is_not_given_another_action() -> None:
    schedule = in_mid_episode(1)
    step(schedule, 0)
    schedule.want_episodes(np.array([1]))
    assert serve(schedule) == []
    assert resets(schedule) == [0]


def test_an_abandoned_episode_that_waits_for_an_action_is_reset_instead() -> None:
    schedule = in_mid_episode(1)
    schedule.want_steps(1)
    step(schedule, 0)
    take(schedule)
    schedule.next_batch()  # the policy raises
    schedule.forget(abandon=False)
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [Abandoned(0, rows_lost=0)]
    assert resets(schedule) == [0]


def test_an_episode_that_rests_between_two_steps_is_abandoned_without_a_loss() -> None:
    schedule = started(1, steps_ahead=0)
    schedule.want_steps(1)
    serve(schedule)
    step(schedule, 0)
    take(schedule)
    schedule.forget()
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [Abandoned(0, rows_lost=0)]
    assert resets(schedule) == [0]


def test_a_lost_step_that_ends_its_episode_needs_no_other_reset() -> None:
    schedule = in_mid_episode(1)
    schedule.want_episodes(np.array([1]))
    step(schedule, 0, ended=(0,))
    observe(schedule, 0)
    assert schedule.lost_ends == [0]
    assert resets(schedule) == []
    assert serve(schedule) == [[0]]


def test_an_undelivered_last_row_of_an_abandoned_episode_needs_no_other_reset() -> None:
    schedule = in_mid_episode(1)
    step(schedule, 0, ended=(0,))
    observe(schedule, 0)
    schedule.want_episodes(np.array([1]))
    assert schedule.abandoned == [Abandoned(0, rows_lost=1)]
    assert schedule.lost_ends == [0]
    assert resets(schedule) == []
    assert serve(schedule) == [[0]]


def test_a_lost_step_that_ends_its_episode_is_followed_by_the_reset_of_a_seeded_one() -> None:
    schedule = in_mid_episode(1)
    schedule.want_episodes(np.array([1]), seeded=True)
    step(schedule, 0, ended=(0,))
    assert resets(schedule) == [], "it cannot take a command while it is resetting"
    observe(schedule, 0)
    assert resets(schedule) == [0]
    assert serve(schedule) == []


def test_a_seeded_episode_begins_with_a_reset_though_nothing_was_played() -> None:
    schedule = started(2)
    schedule.want_episodes(np.array([1, 0]), seeded=True)
    assert schedule.abandoned == []
    assert resets(schedule) == [0]


def test_a_seeded_call_does_not_continue_an_episode_of_which_nothing_was_delivered() -> None:
    schedule = one_step_ahead(1)
    step(schedule, 0)
    schedule.want_episodes(np.array([1]), seeded=True)
    assert schedule.abandoned == [Abandoned(0, rows_lost=1)]
    assert take(schedule) == []


def test_after_its_seeded_episodes_an_environment_rests_until_the_next_call() -> None:
    schedule = started(2)
    schedule.want_episodes(np.array([1, 0]), seeded=True)
    resets(schedule)
    serve(schedule)
    observe(schedule, 0)
    serve(schedule)
    step(schedule, 0, ended=(0,))
    assert take(schedule) == [0]
    observe(schedule, 0)
    assert serve(schedule) == [] and schedule.finished
    schedule.forget()
    assert serve(schedule, everyone=True) == []
    schedule.want_steps(1)
    assert serve(schedule) == [[0]]


def test_giving_up_twice_while_one_step_is_in_flight_is_reported_once() -> None:
    schedule = in_mid_episode(1)
    schedule.want_episodes(np.array([1]))
    schedule.forget()
    schedule.want_episodes(np.array([1]), seeded=True)
    assert schedule.abandoned == [Abandoned(0, rows_lost=1)]


def test_an_environment_without_a_quota_keeps_its_undelivered_row() -> None:
    schedule = in_mid_episode(2)
    step(schedule, 0, 1)
    schedule.want_episodes(np.array([0, 1]))
    assert schedule.abandoned == [Abandoned(1, rows_lost=1)]
    assert take(schedule) == []
    schedule.forget()
    schedule.want_steps(1)
    assert take(schedule) == [0]


def test_an_interrupted_call_gives_up_the_episodes_it_had_begun() -> None:
    schedule = one_step_ahead(2)
    schedule.want_episodes(np.array([1, 1]))
    step(schedule, 0)
    take(schedule)
    schedule.forget()
    assert schedule.abandoned == [Abandoned(0, rows_lost=0)]
    assert resets(schedule) == [0]


def test_a_call_that_raises_keeps_the_episodes_it_had_begun() -> None:
    schedule = one_step_ahead(1)
    schedule.want_episodes(np.array([1]))
    step(schedule, 0)
    take(schedule)
    schedule.forget(abandon=False)
    assert schedule.abandoned == [] and resets(schedule) == []
    schedule.want_steps(1)
    assert serve(schedule) == [[0]]


def test_an_interrupted_run_steps_gives_nothing_up() -> None:
    schedule = in_mid_episode(1)
    schedule.want_steps(5)
    schedule.forget()
    assert schedule.abandoned == []
    schedule.want_steps(1)
    step(schedule, 0)
    assert take(schedule) == [0]


# deaths


def test_a_row_that_was_ready_is_delivered_though_its_environment_has_died() -> None:
    schedule = one_step_ahead(1)
    step(schedule, 0)
    die(schedule, 0)
    schedule.want_steps(2)
    assert not schedule.starved
    assert take(schedule) == [0]
    assert schedule.starved


def test_the_column_of_a_dead_environment_ends_where_it_died() -> None:
    schedule = one_step_ahead(3)
    schedule.want_rollout(np.array([2, 2, 2]))
    step(schedule, 0, 1)
    die(schedule, 0, 2)
    assert schedule.quota.tolist() == [1, 2, 0]
    assert take(schedule) == [0, 1]
    serve(schedule)
    step(schedule, 1)
    assert take(schedule) == [1]
    serve(schedule)
    assert schedule.finished


def test_a_rollout_asks_nothing_of_the_dead_but_their_row() -> None:
    schedule = one_step_ahead(3)
    step(schedule, 0, 1, 2)
    die(schedule, 1, 2)
    schedule.want_steps(2)
    assert take(schedule) == [0, 1]
    schedule.forget()
    schedule.want_rollout(np.array([0, 4, 4]))
    assert schedule.quota.tolist() == [0, 0, 1]


def test_the_episodes_of_the_dead_go_to_the_living_with_the_fewest() -> None:
    schedule = one_step_ahead(4)
    schedule.want_episodes(np.array([4, 1, 3, 0]))
    die(schedule, 0)
    assert schedule.quota.tolist() == [0, 3, 3, 2]
    assert schedule.owed == 8


def test_an_heir_gives_up_the_episode_that_run_steps_had_begun() -> None:
    schedule = in_mid_episode(2)
    schedule.want_episodes(np.array([1, 0]))
    schedule.abandoned.clear()
    die(schedule, 0)
    assert schedule.abandoned == [Abandoned(1, rows_lost=1)]


def test_the_episode_that_an_environment_dies_in_is_given_up() -> None:
    schedule = one_step_ahead(2)
    schedule.want_episodes(np.array([1, 1]))
    step(schedule, 0)
    take(schedule)
    serve(schedule)
    die(schedule, 0)
    assert schedule.abandoned == [Abandoned(0, rows_lost=0)]
    assert resets(schedule) == []


def test_when_all_are_dead_what_is_owed_is_never_delivered() -> None:
    schedule = one_step_ahead(2)
    schedule.want_episodes(np.array([1, 1]))
    die(schedule, 0)
    assert not schedule.starved
    die(schedule, 1)
    assert schedule.starved and not schedule.finished


def test_a_row_that_nobody_asks_for_does_not_hide_that_all_are_dead() -> None:
    schedule = one_step_ahead(2)
    step(schedule, 1)
    schedule.want_episodes(np.array([1, 0]))
    die(schedule, 0, 1)
    assert take(schedule) == []
    assert schedule.starved


# ordered


def test_ordered_rows_and_actions_wait_for_the_slowest() -> None:
    schedule = one_step_ahead(3, ordered=True, max_batch=2)
    schedule.want_steps(3)
    step(schedule, 2)
    step(schedule, 0, 1, ended=(0,))
    assert take(schedule) == [] and serve(schedule) == []
    observe(schedule, 0)
    assert take(schedule) == [0, 1, 2]
    assert serve(schedule) == [[0, 1], [2]]
    assert schedule.finished


def test_an_ordered_round_waits_for_a_reset_that_is_to_be_sent() -> None:
    schedule = in_mid_episode(2, ordered=True)
    schedule.want_episodes(np.array([1, 0]))
    schedule.forget()
    schedule.want_steps(1)
    step(schedule, 1)
    step(schedule, 0)
    assert take(schedule) == [], "had the lost step of environment 0 come first, it would be resetting by now"
    assert resets(schedule) == [0]
    observe(schedule, 0)
    assert take(schedule) == [1]
    assert serve(schedule) == [[0, 1]]


def test_an_ordered_call_returns_only_between_rounds() -> None:
    schedule = in_mid_episode(2, ordered=True)
    schedule.want_episodes(np.array([1, 0]))
    schedule.forget()
    schedule.want_steps(0)
    step(schedule, 0)
    assert resets(schedule) == [0]
    assert serve(schedule) == [] and not schedule.finished
    observe(schedule, 0)
    assert serve(schedule) == [] and not schedule.finished
    step(schedule, 1)
    assert serve(schedule) == [[0]] and schedule.finished


def test_an_ordered_environment_that_has_reset_between_calls_waits_for_its_round() -> None:
    schedule = in_mid_episode(1, ordered=True)
    schedule.want_episodes(np.array([1]))
    schedule.forget()
    step(schedule, 0, ended=(0,))
    observe(schedule, 0)
    assert serve(schedule, everyone=True) == []
    schedule.want_steps(0)
    assert serve(schedule) == [[0]]


def test_nothing_ordered_is_decided_between_calls() -> None:
    schedule = in_mid_episode(1, ordered=True)
    schedule.want_episodes(np.array([1]))
    schedule.forget()
    step(schedule, 0)
    assert resets(schedule) == [] and serve(schedule, everyone=True) == []
    schedule.want_steps(0)
    assert resets(schedule) == [0]
    observe(schedule, 0)
    assert serve(schedule) == [[0]]
