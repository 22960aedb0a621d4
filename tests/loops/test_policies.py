"""Policies in loops: versions, batches, determinism, recurrent state, seeds, and what they may answer."""

from __future__ import annotations

import functools
import threading

import gymnasium
import numpy as np
import pytest
import torch
from envs import Count, Noise, Spaces, zeros
from gymnasium import spaces
from torch import nn

from envrunner import (
    AgentEnvBaseLoop,
    AsyncAgentEnvLoop,
    AsyncPolicy,
    MultiAgentEnvLoop,
    PolicyError,
    PolicyOutput,
    TorchPolicy,
)

P = functools.partial


def counts(num_envs, length=9):
    return [P(Count, i, length) for i in range(num_envs)]


class Weighted:
    """A policy whose weights are one number, shown in the context of every row it decides."""

    def __init__(self):
        self.weight, self.sizes, self.flags, self.env_ids = 0, [], [], []

    def action(self, obs, deterministic, *, env_ids=None):
        self.sizes.append(len(obs))
        self.flags.append(deterministic)
        self.env_ids.append(env_ids.tolist())
        return PolicyOutput(np.zeros(len(obs), np.int64), {"weight": np.full(len(obs), self.weight, np.float32)})

    def forward(self, obs):
        return obs

    def update(self, state):
        self.weight = state

    def state(self):
        return self.weight


# -- versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: AsyncPolicy(p, max_batch_size=2)])
def test_every_row_carries_the_version_that_chose_its_action(wrap):
    with MultiAgentEnvLoop(counts(4), wrap(Weighted())) as loop:
        stale = 0
        for weight in range(1, 6):
            loop.update_policy(weight)
            rows = loop.run_rollout(6).flatten()
            assert (rows.policy_version == rows.action_context["weight"]).all()
            assert (rows.policy_version <= weight).all()
            stale += int((rows.policy_version < weight).sum())
        assert loop.policy() == 5 and loop.stats.policy_version == 5
    assert stale == 5 * 4, "each update finds one step under way in each environment"


def test_without_a_step_ahead_every_row_is_on_policy():
    with MultiAgentEnvLoop(counts(4), Weighted(), steps_ahead=0) as loop:
        for weight in range(1, 4):
            loop.update_policy(weight)
            assert (loop.run_rollout(6).policy_version == weight).all()


def test_an_update_first_serves_the_environments_that_wait():
    policy = Weighted()
    with MultiAgentEnvLoop(counts(3), policy) as loop:
        loop.update_policy(1)  # nobody has acted yet: all three wait with their first observation
        rows = loop.run_steps(3)
    assert rows.policy_version.tolist() == [0, 0, 0] and policy.sizes[0] == 3


def test_a_policy_may_be_updated_from_another_thread_during_a_run():
    policy = Weighted()
    with MultiAgentEnvLoop(counts(4, 50), policy) as loop:
        done = threading.Event()

        def keep_updating():
            weight = 0
            while not done.is_set():
                weight += 1
                loop.update_policy(weight)

        thread = threading.Thread(target=keep_updating)
        thread.start()
        try:
            rows = loop.run_steps(3000)
        finally:
            done.set()
            thread.join()
    assert (rows.policy_version == rows.action_context["weight"]).all()
    assert rows.policy_version.max() > 0


def test_an_update_right_after_a_forward_pass_does_not_reach_its_rows():
    class UpdatesAtOnce(AsyncPolicy):
        def run_batch(self, *arguments, **options):
            answer = super().run_batch(*arguments, **options)
            self.update(self.version + 1)
            return answer

    with MultiAgentEnvLoop(counts(2), UpdatesAtOnce(Weighted(), max_batch_size=2)) as loop:
        rows = loop.run_steps(20)
    assert (rows.policy_version == rows.action_context["weight"]).all() and rows.policy_version.max() > 3


# -- batches ----------------------------------------------------------------------------------------


def test_batches_respect_their_bounds_and_name_their_environments():
    policy = Weighted()
    with MultiAgentEnvLoop(counts(6), policy, max_batch_size=4, min_batch_size=2) as loop:
        loop.run_steps(300)
    assert max(policy.sizes) <= 4
    assert all(len(set(ids)) == len(ids) and set(ids) <= set(range(6)) for ids in policy.env_ids)


def test_an_environment_that_resets_does_not_hold_the_batch_back(tmp_path):
    envs = [P(Count, 0, 1, reset_gate=str(tmp_path)), P(Count, 1, 100), P(Count, 2, 100)]
    with MultiAgentEnvLoop(envs, zeros, min_batch_size=3, num_workers=3) as loop:
        assert len(loop.run_steps(30)) == 30
        (tmp_path / "0").touch()


def test_max_wait_ends_the_wait_for_company(tmp_path):
    envs = [P(Count, 0, 100, gate=str(tmp_path)), P(Count, 1, 100)]
    with MultiAgentEnvLoop(envs, AsyncPolicy(Weighted(), 2, max_wait=0.01), num_workers=2) as loop:
        assert set(loop.run_steps(5).env_id.tolist()) == {1}
        (tmp_path / "0").touch()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_loop_asks_for_what_it_was_told(deterministic):
    policy = Weighted()
    with MultiAgentEnvLoop(counts(2), policy, deterministic=deterministic) as loop:
        loop.run_steps(5)
    assert set(policy.flags) == {deterministic}


def test_two_loops_may_share_one_async_policy():
    policy = AsyncPolicy(Weighted(), max_batch_size=8)
    with MultiAgentEnvLoop(counts(3), policy) as train, MultiAgentEnvLoop(counts(2), policy, eval=True) as valid:
        assert len(train.run_steps(20)) == 20 and len(valid.run_episodes(3)) == 3
        train.update_policy(7)
        assert valid.policy() == 7
        assert (valid.run_episodes(1)[0].policy_version == 1).all()
    assert max(policy.policy.sizes) <= 3, "batches of two loops must not mix"


# -- recurrent --------------------------------------------------------------------------------------


class CountsSteps:
    """Its state is the number of steps it has seen in this episode."""

    def initial_state(self, batch_size):
        return np.zeros((batch_size, 1), np.int64)

    def action(self, obs, deterministic, *, state=None, env_ids=None):
        return PolicyOutput(np.zeros(len(obs), np.int64), {}, state + 1)

    def forward(self, obs):
        return obs

    def update(self, state):
        pass

    def state(self):
        return None


def test_recurrent_state_starts_afresh_with_every_episode():
    with MultiAgentEnvLoop([P(Count, i, 3 + i) for i in range(4)], CountsSteps(), max_batch_size=3) as loop:
        rows = loop.run_steps(100)
        assert rows.action_context["state"][:, 0].tolist() == rows.obs[:, 1].tolist()
        block = loop.run_rollout(7)
        assert (block.action_context["state"][..., 0] == block.obs[..., 1]).all()
        assert block.last_state[:, 0].tolist() == block.last_obs[:, 1].tolist()
        for episode in loop.run_episodes(6):
            assert episode.action_context["state"][:, 0].tolist() == list(range(len(episode)))
        for episode in loop.run_episodes(4, seeds=[1, 2, 3, 4]):
            assert episode.action_context["state"][:, 0].tolist() == list(range(len(episode)))


# -- seeds ------------------------------------------------------------------------------------------


def streams(num_workers, seed, num_envs=4):
    with MultiAgentEnvLoop(P(Noise, 3, use_globals=False), zeros, num_envs, seed=seed, num_workers=num_workers) as loop:
        block = loop.run_rollout(9)
    return [block.obs[:, i].tolist() for i in range(num_envs)]


def test_streams_are_the_same_whatever_the_number_of_workers_and_no_two_are_shared():
    one = streams(1, 5)
    assert one == streams(2, 5) == streams(4, 5)
    assert len({str(stream) for stream in one}) == 4
    assert one[1] == streams(2, 6)[0], "environment i is seeded with seed + i"
    assert streams(2, None) != streams(2, None)


def test_global_generators_are_seeded_per_worker_and_differ_between_workers():
    def shared(seed):
        with MultiAgentEnvLoop(Noise, zeros, 4, seed=seed, num_workers=4, ordered=True) as loop:
            rows = loop.run_steps(12)
        return [rows.obs[rows.env_id == i][:, 2:].tolist() for i in range(4)]

    first = shared(3)
    assert first == shared(3) and len({str(stream) for stream in first}) == 4
    assert shared(None) != shared(None)


def test_torch_is_seeded_per_worker_where_an_environment_brings_it():
    class Draws(Count):
        def __init__(self):
            import torch

            self.torch = torch
            super().__init__()

        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            return observation, reward, terminated, truncated, {"draw": float(self.torch.rand(()))}

    def draws(seed):
        with MultiAgentEnvLoop(Draws, zeros, 2, seed=seed, num_workers=2, ordered=True) as loop:
            return [info["draw"] for info in loop.run_steps(4).info]

    first = draws(3)
    assert first == draws(3) and first[0] != first[1]


def make_net(observations=4, actions=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(observations, 16), nn.Tanh(), nn.Linear(16, actions))


def test_ordered_runs_repeat_bit_for_bit():
    def run():
        policy = TorchPolicy(make_net(), "categorical")
        with MultiAgentEnvLoop("CartPole-v1", policy, 6, seed=9, num_workers=3, max_batch_size=4, ordered=True) as loop:
            parts = [loop.run_steps(50), loop.run_rollout(11).flatten(), *loop.run_episodes(5)]
            loop.update_policy({key: value * 1.1 for key, value in loop.policy().items()})
            parts += [loop.run_steps(3), loop.run_steps(40)]
        return [
            (p.env_id.tolist(), p.obs.tobytes(), p.action.tobytes(), p.action_context["log_prob"].tobytes(), p.policy_version.tolist())
            for p in parts
        ]  # fmt: skip

    assert run() == run()


def test_ordered_rows_come_in_rounds():
    with MultiAgentEnvLoop(counts(4, 3), zeros, ordered=True) as loop:
        assert loop.run_steps(12).env_id.tolist() == [0, 1, 2, 3] * 3


# -- actions and answers ------------------------------------------------------------------------------


ACTION_SPACES = {
    "discrete with start": spaces.Discrete(3, start=5),
    "multi-discrete 2-d": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
    "dict": spaces.Dict({"move": spaces.Discrete(4, start=-2), "aim": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))),
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_environments_see_actions_that_their_space_contains(name):
    space = ACTION_SPACES[name]
    vector = gymnasium.vector.utils.batch_space(space, 3)
    vector.seed(1)
    sampler = {3: vector}

    def sample(obs):
        size = len(obs)
        if size not in sampler:
            sampler[size] = gymnasium.vector.utils.batch_space(space, size)
            sampler[size].seed(size)
        return sampler[size].sample()

    with MultiAgentEnvLoop(P(Spaces, spaces.Box(0, 1, (2,)), space), sample, 3) as loop:
        rows = loop.run_steps(60)
    assert len(rows) == 60


def test_a_torch_policy_plays_a_discrete_space_that_starts_elsewhere():
    with MultiAgentEnvLoop(
        P(Spaces, spaces.Box(0, 1, (4,)), spaces.Discrete(2, start=5)), TorchPolicy(make_net(), "categorical"), 3
    ) as loop:
        assert set(loop.run_steps(60).action.tolist()) == {0, 1}, "the row keeps what log_prob belongs to"


def test_box_actions_are_clipped_for_the_environment_and_kept_in_the_row():
    def too_far(obs):
        return np.full((len(obs), 1), 7.5, np.float32)

    with MultiAgentEnvLoop(P(Spaces, spaces.Box(0, 1, (2,)), spaces.Box(-1, 1, (1,))), too_far, 2) as loop:
        assert (loop.run_steps(8).action == 7.5).all()
    with MultiAgentEnvLoop("Pendulum-v1", too_far, 2, seed=1) as clipped:
        with MultiAgentEnvLoop("Pendulum-v1", lambda o: np.full((len(o), 1), 2.0, np.float32), 2, seed=1) as legal:
            assert clipped.run_rollout(20).obs.tobytes() == legal.run_rollout(20).obs.tobytes()


def test_gaussian_policies_of_every_loop_give_log_prob_and_value():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_std, self.value = nn.Linear(3, 1), nn.Parameter(torch.zeros(1)), nn.Linear(3, 1)

        def forward(self, obs):
            return self.mean(obs), self.log_std, self.value(obs).squeeze(-1)

    for make in (
        lambda p: AgentEnvBaseLoop("Pendulum-v1", p, seed=1),
        lambda p: AsyncAgentEnvLoop("Pendulum-v1", p, seed=1),
        lambda p: MultiAgentEnvLoop("Pendulum-v1", p, 3, seed=1),
    ):
        with make(TorchPolicy(Net(), "gaussian")) as loop:
            rows = loop.run_steps(12)
        assert rows.action.shape == (12, 1) and rows.action.dtype == np.float32
        assert rows.action_context["log_prob"].shape == rows.action_context["value"].shape == (12,)


BAD_ANSWERS = {
    "drops the batch axis": (lambda o: np.zeros((), np.int64), r"shape \(\); legal is \(3,\)"),
    "one too few": (lambda o: np.zeros(len(o) - 1, np.int64), r"shape \(2,\); legal is \(3,\)"),
    "floats for a discrete space": (lambda o: np.zeros(len(o)), "dtype float64; legal is int64"),
    "outside the space": (lambda o: np.full(len(o), 2), "hold 2 in row 0; legal is Discrete"),
    "nothing": (lambda o: None, "None"),
    "raises": (lambda o: 1 / 0, "ZeroDivisionError"),
    "context without rows": (
        lambda o: PolicyOutput(np.zeros(len(o), np.int64), {"value": np.float32(1)}),
        r"context\['value'\].*legal is \(3, ...\)",
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_wrong_answer_is_a_policy_error_that_says_what_is_legal(name):
    answer, message = BAD_ANSWERS[name]
    with MultiAgentEnvLoop(counts(3), answer) as loop:
        for _ in range(2):  # the loop stays usable
            with pytest.raises(PolicyError, match=message):
                loop.run_steps(3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_actions_must_be_finite(value):
    with MultiAgentEnvLoop("Pendulum-v1", lambda o: np.full((len(o), 1), value, np.float32), 2) as loop:
        with pytest.raises(PolicyError, match="NaN or infinity in row 0"):
            loop.run_steps(3)


def test_a_context_that_changes_its_shape_is_an_error():
    sizes = iter(range(1, 100))

    def grows(obs):
        return PolicyOutput(np.zeros(len(obs), np.int64), {"h": np.zeros((len(obs), next(sizes)))})

    with MultiAgentEnvLoop(counts(2), grows) as loop:
        with pytest.raises(PolicyError, match="legal is the same names and row shapes every time"):
            loop.run_steps(20)


def test_dict_observations_and_context_are_nested_columns():
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, (4, 4), np.uint8), "pair": spaces.Tuple((spaces.Discrete(4, start=-2), spaces.MultiBinary(3)))}
    )  # fmt: skip

    def policy(obs):
        return PolicyOutput(np.zeros(len(obs["image"]), np.int64), {"nested": {"x": obs["pair"][0] * 2}})

    with MultiAgentEnvLoop(P(Spaces, space, spaces.Discrete(2)), policy, 3, seed=0) as loop:
        rows, block = loop.run_steps(20), loop.run_rollout(6)
    assert rows.obs["image"].shape == (20, 4, 4) and rows.obs["image"].dtype == np.uint8
    assert (rows.action_context["nested"]["x"] == 2 * rows.obs["pair"][0]).all()
    assert block.obs["pair"][1].shape == (6, 3, 3) and block.next_obs["image"].shape == (6, 3, 4, 4)
    for row in rows:
        assert space.contains(row.obs) and space.contains(row.next_obs)
