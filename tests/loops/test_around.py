"""Events, interrupter, progress, stats and timeouts around a run."""

from __future__ import annotations

import functools
import signal
import threading
import time

import numpy as np
import pytest
from envs import Count, zeros
from processes import wait_until

from envrunner import (
    AgentEnvBaseLoop,
    AgentEnvLoop,
    AsyncAgentEnvLoop,
    EventProcessor,
    Interrupter,
    MultiAgentEnvLoop,
    PolicyError,
    Progress,
)
from envrunner.events import End, EnvStep, EpisodeAbandoned, EpisodeEnd, Start

P = functools.partial


class Recorder(EventProcessor):
    def __init__(self):
        self.train, self.valid = [], []

    def process_train(self, event):
        self.train.append(event)

    def process_valid(self, event):
        self.valid.append(event)


def of(kind, events):
    return [event for event in events if type(event) is kind]


LOOPS = {
    "base": lambda env, **options: AgentEnvBaseLoop(env, zeros, **options),
    "async": lambda env, **options: AsyncAgentEnvLoop(env, zeros, **options),
    "multi": lambda env, **options: MultiAgentEnvLoop(env, zeros, 1, **options),
}


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_reports_rows_and_both_kinds_of_ends(name, end):
    recorder, progress = Recorder(), Progress()
    with LOOPS[name](P(Count, 0, 3, end=end)) as loop:
        assert isinstance(loop, AgentEnvLoop)
        rows = loop.run_steps(7, processor=recorder, progress=progress)
    events = recorder.train
    assert isinstance(events[0], Start) and isinstance(events[-1], End) and events[-1].complete
    steps = [event.step for event in of(EnvStep, events)]
    assert [step.obs[1] for step in steps] == rows.obs[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert [event.progress.items_processed for event in of(EnvStep, events)] == list(range(1, 8))
    ends = [event.summary for event in of(EpisodeEnd, events)]
    assert [(s.length, s.total_reward, s.episode_id) for s in ends] == [(3, 3.0, 0), (3, 3.0, 1)]
    assert [(s.terminated, s.truncated) for s in ends] == [(end == "terminated", end == "truncated")] * 2
    assert tuple(ends) == rows.episodes
    assert recorder.valid == [] and progress.items_processed == 7


def test_an_evaluation_loop_reports_to_process_valid_and_takes_no_step_ahead(tmp_path):
    recorder, log = Recorder(), tmp_path / "log"
    log.touch()
    with MultiAgentEnvLoop(P(Count, 0, 3, log=str(log)), zeros, 1, eval=True) as loop:
        episodes = loop.run_episodes(2, processor=recorder)
        loop.run_steps(1)
    assert log.stat().st_size == 7, "steps_ahead defaults to 0 with eval"
    assert recorder.train == [] and len(of(EpisodeEnd, recorder.valid)) == 2
    assert [event.summary for event in of(EpisodeEnd, recorder.valid)] == list(episodes.episodes)


def test_rows_in_events_are_the_rows_that_are_returned():
    recorder = Recorder()
    with MultiAgentEnvLoop([P(Count, i, 3, info=True) for i in range(3)], zeros) as loop:
        rows = loop.run_steps(20, processor=recorder)
    for event, row in zip(of(EnvStep, recorder.train), rows, strict=True):
        step = event.step
        assert (step.env_id, step.episode_id, step.reward, step.ep_len) == (
            row.env_id,
            row.episode_id,
            row.reward,
            row.ep_len,
        )
        np.testing.assert_array_equal(step.obs, row.obs)
        np.testing.assert_array_equal(step.next_obs, row.next_obs)
        assert step.info == row.info and step.reset_info == row.reset_info
        assert (step.action, step.terminated, step.policy_version) == (row.action, row.terminated, row.policy_version)


def test_an_abandoned_episode_is_an_event_and_counted():
    recorder = Recorder()
    with MultiAgentEnvLoop([P(Count, 0, 10)], zeros) as loop:
        loop.run_steps(4)
        loop.run_episodes(1, processor=recorder)
        stats = loop.stats
    [event] = of(EpisodeAbandoned, recorder.train)
    assert (event.summary.episode_id, event.summary.terminated, event.summary.truncated) == (0, False, False)
    assert event.summary.length in (4, 5), "with or without the step that was in flight"
    assert (stats.episodes_abandoned, stats.rows_lost, stats.episodes) == (1, 1, 1)


def test_a_processor_that_fails_on_an_abandoned_episode_leaves_nothing_undone():
    class Fails(EventProcessor):
        def process_train(self, event):
            if isinstance(event, EpisodeAbandoned):
                raise RuntimeError("the disk is full")

    for Loop in (AgentEnvBaseLoop, AsyncAgentEnvLoop):
        with Loop(P(Count, 0, 10), zeros) as loop:
            loop.run_steps(4)
            with pytest.raises(RuntimeError, match="the disk is full"):
                loop.run_episodes(1, processor=Fails())
            rows = loop.run_steps(12, timeout=10)
            assert len(rows) == 12 and rows.complete
            assert rows.episode_id.tolist() == [1] * 10 + [2] * 2


def test_the_policy_may_be_updated_where_an_abandoned_episode_is_told():
    class Updates(EventProcessor):
        def process_train(self, event):
            if isinstance(event, EpisodeAbandoned):
                loop.update_policy(None)

    class Constant:
        def action(self, obs, deterministic):
            return np.zeros(len(obs), np.int64)

        def forward(self, obs):
            return obs

        def update(self, state):
            pass

        def state(self):
            return None

    with AgentEnvBaseLoop(P(Count, 0, 3), Constant(), steps_ahead=1) as loop:
        loop.run_steps(1)
        episodes = loop.run_episodes(2, seeds=[5, 6], processor=Updates(), timeout=10)
        assert len(episodes) == 2 and loop.stats.policy_version == 1


def test_progress_and_bar_follow_over_several_calls():
    progress = Progress(items_total=30)
    with MultiAgentEnvLoop([P(Count, i, 4) for i in range(2)], zeros) as loop:
        with progress.bar(disable=True) as bar:
            loop.run_steps(10, progress=progress)
            loop.run_rollout(5, progress=progress)
            assert bar.n in (20, 0)  # a disabled bar may not count
    assert progress.items_processed == 20


def test_an_interrupter_wakes_a_call_that_waits(tmp_path):
    interrupter = Interrupter()
    with MultiAgentEnvLoop(P(Count, 0, 9, gate=str(tmp_path)), zeros, 1) as loop:
        returned = []
        thread = threading.Thread(target=lambda: returned.append(loop.run_steps(5, interrupter=interrupter)))
        thread.start()
        wait_until(lambda: loop._running is not None)
        interrupter.stop("enough")
        thread.join(5)
        assert [len(rows) for rows in returned] == [0] and not returned[0].complete
        (tmp_path / "0").touch()
        interrupter.reset()
        assert loop.run_steps(3, interrupter=interrupter).obs[:, 1].tolist() == [0, 1, 2]


def test_a_timeout_returns_what_there_is_in_time(tmp_path):
    with MultiAgentEnvLoop([P(Count, 0, 99, gate=str(tmp_path)), P(Count, 1, 99)], zeros, num_workers=2) as loop:
        began = time.monotonic()
        rows = loop.run_rollout(4, timeout=0.2)
        assert 0.2 <= time.monotonic() - began < 5 and rows.lengths.tolist() == [0, 4] and not rows.complete
        episodes = loop.run_episodes(2, timeout=0.2)
        assert len(episodes) <= 1 and not episodes.complete
        (tmp_path / "0").touch()
        after = loop.run_rollout(5)
        assert (np.diff(after.obs[:, 0, 1]) == 1).all()
    with MultiAgentEnvLoop(P(Count, 0, 99), zeros, 1) as loop:
        assert loop.run_steps(3, timeout=None).complete and loop.run_steps(3, timeout=60).complete


def test_a_failing_processor_loses_no_rows():
    class Fails(EventProcessor):
        seen = 0

        def process_train(self, event):
            if isinstance(event, EnvStep):
                self.seen += 1
                if self.seen == 5:
                    raise RuntimeError("the disk is full")

    with MultiAgentEnvLoop([P(Count, i, 4) for i in range(2)], zeros, ordered=True) as loop:
        with pytest.raises(RuntimeError, match="the disk is full"):
            loop.run_steps(40, processor=Fails())
        rows = loop.run_steps(40)
    for tag in range(2):
        mine = rows.obs[rows.env_id == tag]
        assert mine[:, 1].tolist() == [k % 4 for k in range(len(mine))]


@pytest.mark.parametrize("kind", [Start, End])
def test_a_processor_that_fails_at_either_end_of_a_call_leaves_the_loop_usable(kind):
    class Fails(EventProcessor):
        def process_train(self, event):
            if isinstance(event, kind):
                raise RuntimeError("the disk is full")

    with MultiAgentEnvLoop([P(Count, i, 4) for i in range(2)], zeros, ordered=True) as loop:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the disk is full"):
                loop.run_steps(3, processor=Fails())
        assert len(loop.run_steps(7)) == 7


@pytest.mark.parametrize("name", ["run_steps", "run_rollout", "run_episodes"])
def test_ctrl_c_when_the_rows_are_ready_loses_none(name, ctrl_c):
    class Presses(EventProcessor):
        def process_train(self, event):
            if isinstance(event, End):
                signal.raise_signal(signal.SIGINT)

    with MultiAgentEnvLoop([P(Count, i, 4) for i in range(2)], zeros, ordered=True) as loop:
        with pytest.raises(KeyboardInterrupt):
            getattr(loop, name)(4, processor=Presses())
        rows = loop.run_steps(40)
    for tag in range(2):
        mine = rows.obs[rows.env_id == tag]
        assert mine[:, 1].tolist() == [k % 4 for k in range(len(mine))] and mine[0, 2] == 0


def test_rows_of_an_earlier_failure_come_before_those_of_a_later_one():
    calls = []

    def fails_twice(obs):
        calls.append(len(obs))
        if len(calls) in (4, 8):
            raise RuntimeError("no answer today")
        return np.zeros(len(obs), np.int64)

    with MultiAgentEnvLoop([P(Count, i, 3) for i in range(2)], fails_twice, ordered=True) as loop:
        with pytest.raises(PolicyError):
            loop.run_steps(50)
        with pytest.raises(PolicyError):
            loop.run_episodes(9)
        rows = loop.run_steps(30)
    for tag in range(2):
        mine = rows.obs[rows.env_id == tag][:, 2] * 100 + rows.obs[rows.env_id == tag][:, 1]
        assert (np.diff(mine) > 0).all(), "episodes and steps in the order they were played"


def test_stats_add_up():
    with MultiAgentEnvLoop([P(Count, 0, 3), P(Count, 1, 4, end="truncated")], zeros, ordered=True) as loop:
        assert np.isnan(loop.stats.mean_batch_size)
        loop.run_rollout(12)
        stats = loop.stats
        assert (stats.steps, stats.episodes) == (24, 7)
        assert (stats.episodes_terminated, stats.episodes_truncated) == (4, 3)
        assert stats.batches == 13 and stats.mean_batch_size == 2
        assert loop.num_envs == 2 and loop.single_action_space.n == 2 and loop.single_observation_space.shape == (3,)
        assert repr(loop) == "MultiAgentEnvLoop(num_envs=2, closed=False, steps=24)"
