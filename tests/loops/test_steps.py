"""run_steps, run_rollout and run_episodes over real processes: promises 1 to 5 of the design."""

from __future__ import annotations

import functools
import os
import random

import numpy as np
import pytest
from envs import Count, wait_for_file, zeros
from processes import wait_until

from envrunner import (
    AgentEnvBaseLoop,
    AsyncAgentEnvLoop,
    Interrupter,
    MultiAgentEnvLoop,
    PolicyError,
    PolicyOutput,
)

P = functools.partial


def counts(num_envs, **options):
    return [P(Count, i, 3 + i, **options) for i in range(num_envs)]


def keys(rows):
    """(env, episode, t) of each row, as the environments themselves counted."""
    return [(int(tag), int(episode), int(t)) for tag, t, episode in rows.obs]


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "batch", [1, pytest.param(3, marks=pytest.mark.slow), 7, pytest.param(19, marks=pytest.mark.slow)]
)
def test_every_call_returns_exactly_what_was_asked_for(num_envs, batch):
    with MultiAgentEnvLoop(counts(num_envs), zeros, max_batch_size=batch) as loop:
        for n in range(17):
            assert len(loop.run_steps(n)) == n
            episodes = loop.run_episodes(n)
            assert len(episodes) == n
            assert all(episode.summary.length == 3 + episode.summary.env_id for episode in episodes)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_row_is_lost_or_comes_twice_over_any_mix_of_calls(steps_ahead):
    rng, seen, last = random.Random(5), set(), {}
    with MultiAgentEnvLoop(counts(5), zeros, max_batch_size=2, steps_ahead=steps_ahead) as loop:
        for _ in range(80):
            kind, n = rng.choice("srre"), rng.randint(0, 12)
            if kind == "s":
                rows = loop.run_steps(n)
            elif kind == "r":
                rows = loop.run_rollout(n).flatten()
            else:
                for episode in loop.run_episodes(n):
                    assert keys(episode) == [(*keys(episode)[0][:2], t) for t in range(len(episode))]
                    seen.update(keys(episode))
                last = {}  # episodes that had begun were abandoned
                continue
            for key, row in zip(keys(rows), rows, strict=True):
                assert key not in seen
                seen.add(key)
                tag, episode, t = key
                assert row.env_id == tag and row.next_obs.tolist() == [tag, t + 1, episode]
                assert (row.ep_len, row.cum_reward) == (t + 1, t + 1)
                if tag in last:
                    before_episode, before_t, ended = last[tag]
                    assert (episode, t) == ((before_episode + 1, 0) if ended else (before_episode, before_t + 1))
                last[tag] = (episode, t, row.done)


def test_a_rollout_has_exactly_its_shape_and_its_columns_are_environments():
    with MultiAgentEnvLoop(counts(4), zeros) as loop:
        for _ in range(3):
            block = loop.run_rollout(10)
            assert block.reward.shape == (10, 4) and block.complete
            assert (block.obs[:, :, 0] == np.arange(4)).all() and (block.env_id == np.arange(4)).all()
            assert (block.next_obs[:, :, 1] == block.obs[:, :, 1] + 1).all()
            assert (block.next_obs[:, :, 2] == block.obs[:, :, 2]).all()
            assert (block.last_obs == block.next_obs[-1]).all()
            assert (block.lengths == 10).all()


# -- interrupted, timed out, raised -----------------------------------------------------------------


class StopAfter:
    """A policy that stops an interrupter (or raises) at its k-th batch."""

    def __init__(self, calls, action):
        self.calls, self.do = calls, action

    def action(self, obs, deterministic):
        self.calls -= 1
        if self.calls == 0:
            self.do()
        return PolicyOutput(np.zeros(len(obs), np.int64))

    def forward(self, obs):
        return obs

    def update(self, state):
        pass

    def state(self):
        return None


def test_an_interrupted_call_returns_what_it_has_and_the_next_one_goes_on_from_there():
    interrupter = Interrupter()
    with MultiAgentEnvLoop(counts(3), StopAfter(10, interrupter.stop), ordered=True) as loop:
        first = loop.run_steps(1000, interrupter=interrupter)
        assert not first.complete and 0 < len(first) < 1000
        assert len(loop.run_steps(5, interrupter=interrupter)) == 0
        interrupter.reset()
        second = loop.run_steps(60, interrupter=interrupter)
    rows = keys(first) + keys(second)
    for tag in range(3):
        mine = [(episode, t) for env, episode, t in rows if env == tag]
        assert mine == [divmod(k, 3 + tag) for k in range(len(mine))]


def test_a_rollout_that_times_out_keeps_its_shape_and_says_lengths(tmp_path):
    gated = [P(Count, 0, 50, gate=str(tmp_path)), P(Count, 1, 50)]
    with MultiAgentEnvLoop(gated, zeros, num_workers=2) as loop:
        block = loop.run_rollout(20, timeout=0.3)  # environment 0 does not move
        assert not block.complete and block.reward.shape == (20, 2)
        assert block.lengths.tolist() == [0, 20]
        assert keys(block.flatten()) == [(1, 0, t) for t in range(20)]
        (tmp_path / "0").touch()
        rest = loop.run_rollout(3)
        assert rest.complete and rest.obs[:, :, 1].tolist() == [[0, 20], [1, 21], [2, 22]]


def test_interrupted_episodes_are_returned_whole_and_the_rest_is_abandoned_and_counted():
    interrupter = Interrupter()
    envs = [P(Count, 0, 2), P(Count, 1, 100)]
    with MultiAgentEnvLoop(envs, StopAfter(9, interrupter.stop), ordered=True) as loop:
        episodes = loop.run_episodes(4, interrupter=interrupter)
        assert not episodes.complete
        assert [episode.summary.env_id for episode in episodes] == [0, 0]
        stats = loop.stats
        assert stats.episodes_abandoned == 1 and stats.rows_lost >= 4
        interrupter.reset()
        rows = loop.run_steps(8)
        assert (1, 1, 0) in keys(rows) and all(episode > 0 for env, episode, _ in keys(rows) if env == 1)


def test_a_policy_that_raises_loses_no_rows():
    def explode():
        raise RuntimeError("no answer today")

    with MultiAgentEnvLoop(counts(3), StopAfter(4, explode), ordered=True) as loop:
        with pytest.raises(PolicyError, match="no answer today"):
            loop.run_steps(50)
        rows = loop.run_steps(60)
        assert len(rows) == 60
    for tag in range(3):
        mine = [(episode, t) for env, episode, t in keys(rows) if env == tag]
        assert mine == [divmod(k, 3 + tag) for k in range(len(mine))]


def test_rows_of_a_call_that_raised_come_first_also_in_a_rollout():
    def explode():
        raise RuntimeError("no answer today")

    with MultiAgentEnvLoop([P(Count, i, 100) for i in range(3)], StopAfter(4, explode), ordered=True) as loop:
        with pytest.raises(PolicyError):
            loop.run_rollout(50)
        block = loop.run_rollout(2)
        assert block.obs[:, :, 1].tolist() == [[0, 0, 0], [1, 1, 1]]
        assert loop.run_rollout(4).obs[:, 0, 1].tolist() == [2, 3, 4, 5]


# -- one step ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_at_rest_every_environment_is_exactly_so_many_steps_ahead(steps_ahead, tmp_path):
    logs = [tmp_path / str(i) for i in range(4)]
    for log in logs:
        log.touch()
    got = np.zeros(4, int)
    envs = [P(Count, i, 10**6, log=str(log)) for i, log in enumerate(logs)]
    with MultiAgentEnvLoop(envs, zeros, steps_ahead=steps_ahead, min_batch_size=4) as loop:
        for n in (40, 7, 1):
            np.add.at(got, loop.run_steps(n).env_id, 1)
            wait_until(lambda: [os.path.getsize(log) for log in logs] == (got + steps_ahead).tolist())
    assert [os.path.getsize(log) for log in logs] == (got + steps_ahead).tolist()


def test_a_resetting_environment_never_delays_a_return(tmp_path):
    envs = [P(Count, 0, 1, reset_gate=str(tmp_path)), P(Count, 1, 100)]
    with MultiAgentEnvLoop(envs, zeros, num_workers=2) as loop:
        assert len(loop.run_steps(30)) == 30  # environment 0 ended after one step and is held in its reset
        (tmp_path / "0").touch()
        assert 0 in loop.run_rollout(3).env_id


def test_a_straggler_holds_nobody(tmp_path):
    envs = [P(Count, 0, 100, gate=str(tmp_path)), *[P(Count, i, 100) for i in (1, 2, 3)]]
    with MultiAgentEnvLoop(envs, zeros, num_workers=4) as loop:
        assert set(loop.run_steps(60).env_id.tolist()) == {1, 2, 3}
        (tmp_path / "0").touch()


def test_the_base_loop_steps_only_when_asked(tmp_path):
    log = tmp_path / "log"
    log.touch()
    with AgentEnvBaseLoop(P(Count, 0, 5, log=str(log)), zeros) as loop:
        assert len(loop.run_steps(7)) == 7
        assert log.stat().st_size == 7
        assert [e.length for e in loop.run_steps(3).episodes] == [5]
    with AgentEnvBaseLoop(P(Count, 0, 5), zeros, steps_ahead=1) as loop:
        assert keys(loop.run_steps(7)) == [(0, 0, t) for t in range(5)] + [(0, 1, 0), (0, 1, 1)]


# -- right ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("reuse", [False, True])
def test_next_obs_at_an_end_is_the_true_last_observation(end, reuse):
    with MultiAgentEnvLoop([P(Count, 0, 3, end=end, reuse=reuse)], zeros) as loop:
        rows = loop.run_steps(30)
    assert rows.obs[:, 1].tolist() == [0, 1, 2] * 10
    assert rows.next_obs[:, 1].tolist() == [1, 2, 3] * 10
    assert rows.terminated.tolist() == [False, False, end != "truncated"] * 10
    assert rows.truncated.tolist() == [False, False, end != "terminated"] * 10
    assert (rows.reward == 1).all()
    assert [(e.length, e.total_reward) for e in rows.episodes] == [(3, 3.0)] * 10
    assert rows.episode_id.tolist() == [k // 3 for k in range(30)]


def test_episodes_of_one_step_keep_their_infos_apart():
    with MultiAgentEnvLoop([P(Count, 0, 1, info=True)], zeros, seed=4) as loop:
        rows = loop.run_steps(4)
    assert [info["t"] for info in rows.info] == [1, 1, 1, 1]
    assert [info["reset"] for info in rows.reset_info] == [0, 1, 2, 3]
    assert [info["seed"] for info in rows.reset_info] == [4, None, None, None]


def test_infos_arrive_as_they_were_sent_whatever_their_size():
    class Talks(Count):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            info = {"t": self.t, "big": np.arange(self.t * 5000), "function": lambda: self.t}
            return observation, reward, terminated, truncated, info

    with MultiAgentEnvLoop([P(Talks, i, 6) for i in range(3)], zeros, num_workers=1) as loop:
        for row in loop.run_rollout(10).flatten():
            assert row.info["t"] == row.ep_len and len(row.info["big"]) == 5000 * row.ep_len
            assert row.info["function"]() >= row.ep_len


def test_a_large_info_of_a_dropped_row_is_not_taken_for_a_later_one():
    class Talks(Count):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            return (
                observation,
                reward,
                terminated,
                truncated,
                {"episode": self.episode, "t": self.t, "big": bytes(5000)},
            )

    with MultiAgentEnvLoop([P(Talks, i, 9) for i in range(2)], zeros) as loop:
        for _ in range(10):
            loop.run_steps(5)  # begins episodes; run_episodes then drops the steps that are under way
            for episode in loop.run_episodes(2):
                told = [(info["episode"], info["t"]) for info in episode.info]
                assert told == [(int(episode.obs[0, 2]), t) for t in range(1, 10)]


# -- unbiased episodes ------------------------------------------------------------------------------------


def test_short_episodes_are_not_favoured():
    with MultiAgentEnvLoop([P(Count, 0, 2)] * 4 + [P(Count, 1, 40)] * 4, zeros) as loop:
        episodes = loop.run_episodes(40)
        assert np.mean([len(episode) for episode in episodes]) == 21
        assert [episode.summary.env_id for episode in episodes] == list(range(8)) * 5
        more = [episode.summary.env_id for call in range(4) for episode in loop.run_episodes(3)]
        assert more == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


def test_seeded_episodes_are_the_same_whoever_plays_them():
    def first_and_last(num_envs, num_workers):
        with MultiAgentEnvLoop("CartPole-v1", upright, num_envs=num_envs, num_workers=num_workers) as loop:
            loop.run_steps(17)
            return [e.obs.tobytes() for e in loop.run_episodes(7, seeds=range(100, 107))]

    assert first_and_last(1, 1) == first_and_last(3, 2) == first_and_last(4, 1)


def test_after_seeded_episodes_environments_rest_and_then_go_on():
    with MultiAgentEnvLoop(counts(3, info=True), zeros) as loop:
        episodes = loop.run_episodes(4, seeds=[10, 11, 12, 13])
        assert [episode.reset_info[0]["seed"] for episode in episodes] == [10, 11, 12, 13]
        rows = loop.run_steps(30)
        assert all(info is None or info["seed"] is None for info in rows.reset_info)
        assert all(t == 0 for env, _, t in keys(rows)[:3])


def test_an_episode_begun_by_run_steps_is_abandoned_and_a_fresh_one_continued():
    with MultiAgentEnvLoop([P(Count, i, 10) for i in range(3)], zeros) as loop:
        loop.run_steps(14)
        assert [keys(episode) for episode in loop.run_episodes(3)] == [
            [(env, 1, t) for t in range(10)] for env in range(3)
        ]
        assert loop.stats.episodes_abandoned == 3
        again = loop.run_episodes(3)  # their first steps were under way: nothing is given up
        assert [keys(episode)[0] for episode in again] == [(env, 2, 0) for env in range(3)]
        assert loop.stats.episodes_abandoned == 3


# -- bit for bit --------------------------------------------------------------------------------------------


def upright(obs):
    return (np.asarray(obs)[:, 2] > 0).astype(np.int64)


def plain_cartpole(seed, num_steps):
    import gymnasium

    env, rows = gymnasium.make("CartPole-v1"), []
    obs, _ = env.reset(seed=seed)
    while len(rows) < num_steps:
        action = int(obs[2] > 0)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs.tobytes(), action, reward, next_obs.tobytes(), terminated, truncated))
        obs = next_obs
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    return rows


def as_tuples(rows, env_id):
    return [
        (r.obs.tobytes(), int(r.action), r.reward, r.next_obs.tobytes(), r.terminated, r.truncated)
        for r in rows
        if r.env_id == env_id
    ]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_environment_equals_a_plain_loop_bit_for_bit(workers):
    with MultiAgentEnvLoop("CartPole-v1", upright, num_envs=5, seed=11, num_workers=workers) as loop:
        rows = loop.run_steps(1500)
        block = loop.run_rollout(40).flatten()
    for env_id in range(5):
        mine = as_tuples(rows, env_id) + as_tuples(block, env_id)
        assert mine == plain_cartpole(11 + env_id, len(mine))


@pytest.mark.parametrize("Loop", [AgentEnvBaseLoop, AsyncAgentEnvLoop])
def test_the_loops_of_one_environment_equal_a_plain_loop_bit_for_bit(Loop):
    with Loop("CartPole-v1", upright, seed=3) as loop:
        mine = as_tuples(loop.run_steps(400), 0)
        for episode in loop.run_episodes(2):
            assert episode.summary.length == len(episode)
    assert mine == plain_cartpole(3, 400)


def test_batches_that_were_returned_never_change():
    with MultiAgentEnvLoop(counts(3, reuse=True), zeros) as loop:
        steps, block, episodes = loop.run_steps(9), loop.run_rollout(4), loop.run_episodes(2)
        before = [a.copy() for a in (steps.obs, steps.next_obs, block.obs, block.next_obs, episodes[0].obs)]
        loop.run_steps(100), loop.run_rollout(20)
        after = [steps.obs, steps.next_obs, block.obs, block.next_obs, episodes[0].obs]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_reset_that_is_unexpectedly_slow_does_not_hold_back_the_row_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("envrunner._transport.wakeup._MOST_LOOKS", 0)  # sleep at once: looking would find the row

    class SlowAtLast(Count):
        def reset(self, *, seed=None, options=None):
            if self.episode == 19:
                wait_for_file(str(tmp_path / "gate"))
            return super().reset(seed=seed)

    with AsyncAgentEnvLoop(P(SlowAtLast, 0, 2), zeros) as loop:
        loop._pool._waiter.looks = 0
        rows = loop.run_steps(40)  # twenty quick resets have been seen; the one after the last row does not end
        assert rows.terminated.tolist() == [False, True] * 20
        (tmp_path / "gate").touch()
        assert loop.run_steps(1).episode_id.tolist() == [20]
