"""Who plays which episode, and the numbers of the episode under way."""

from __future__ import annotations

import random

import numpy as np
import pytest

from envrunner._core.episodes import EpisodeBook, assign


def shared_out(episodes_so_far: list[int], num_episodes: int) -> list[int]:
    """One by one to the environment with the fewest, lowest index first."""
    counts, chosen = list(episodes_so_far), []
    for _ in range(num_episodes):
        env = counts.index(min(counts))
        counts[env] += 1
        chosen.append(env)
    return chosen


def test_episodes_are_shared_out_in_turn() -> None:
    assert assign(np.zeros(3, np.int64), 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_who_has_played_fewer_episodes_comes_first() -> None:
    assert assign(np.array([3, 1, 2]), 4).tolist() == [1, 1, 2, 0]


def test_no_episode_is_given_to_nobody() -> None:
    assert assign(np.zeros(3, np.int64), 0).tolist() == []


def test_assign_is_the_brute_force_rule() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        so_far = [rng.randint(0, 6) for _ in range(rng.randint(1, 8))]
        num_episodes = rng.randint(0, 40)
        chosen = assign(np.array(so_far), num_episodes)
        assert chosen.dtype == np.int64
        assert chosen.tolist() == shared_out(so_far, num_episodes), f"seed {seed}"


def test_assign_leaves_the_counts_as_they_were() -> None:
    so_far = np.array([2, 0])
    assign(so_far, 3)
    assert so_far.tolist() == [2, 0]


def test_call_after_call_everybody_plays_as_many_episodes() -> None:
    so_far = np.zeros(5, np.int64)
    for num_episodes in (1, 3, 2, 7, 4, 1, 6):
        np.add.at(so_far, assign(so_far, num_episodes), 1)
        assert np.ptp(so_far) <= 1
    assert so_far.tolist() == [5, 5, 5, 5, 4]


def test_a_book_counts_the_steps_of_whom_it_is_told() -> None:
    book = EpisodeBook(3)
    book.stepped(np.array([0, 2]), np.array([1.0, -2.0]))
    book.stepped(np.array([2]), np.array([0.5]))
    assert book.length.tolist() == [1, 0, 2]
    assert book.total_reward.tolist() == [1.0, 0.0, -1.5]
    assert book.episode_id.tolist() == [0, 0, 0]


def test_the_next_episode_begins_at_zero_for_whom_it_begins() -> None:
    book = EpisodeBook(2)
    book.stepped(np.array([0, 1]), np.array([1.0, 2.0]))
    book.next_episode(np.array([1]))
    assert book.episode_id.tolist() == [0, 1]
    assert book.length.tolist() == [1, 0]
    assert book.total_reward.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_returns_are_the_sums_of_their_rewards_in_order_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    num_envs = rng.randint(1, 6)
    book = EpisodeBook(num_envs)
    totals, lengths, numbers = [0.0] * num_envs, [0] * num_envs, [0] * num_envs
    for _ in range(300):
        ids = [env for env in range(num_envs) if rng.random() < 0.6]
        rewards = [rng.uniform(-1, 1) * 10 ** rng.randint(-8, 8) for _ in ids]
        book.stepped(np.array(ids, np.int64), np.array(rewards))
        for env, reward in zip(ids, rewards, strict=True):
            totals[env] += reward
            lengths[env] += 1
        over = [env for env in ids if rng.random() < 0.05]
        book.next_episode(np.array(over, np.int64))
        for env in over:
            totals[env], lengths[env], numbers[env] = 0.0, 0, numbers[env] + 1
        assert book.total_reward.tolist() == totals
        assert book.length.tolist() == lengths
        assert book.episode_id.tolist() == numbers
