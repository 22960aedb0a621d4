"""Advantages and returns: numbers worked out by hand, then random blocks against a naive reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from envrunner.returns import gae, n_step_returns


def column(*numbers: float) -> np.ndarray:
    """`[T, 1] float64`."""
    return np.array(numbers, float).reshape(-1, 1)


def flags(*numbers: int) -> np.ndarray:
    """`[T, 1] bool`."""
    return np.array(numbers, bool).reshape(-1, 1)


NO = flags(0, 0, 0)
ONES, ZEROS, TENS = column(1, 1, 1), column(0, 0, 0), column(10, 10, 10)


# --- gae by hand


def test_a_termination_does_not_bootstrap():
    # t2: 1 + 0.5 * 10 = 6; t1 terminated: 1; t0: 1 + 0.5 * 10 + 0.5 * A1 = 6.5
    advantages = gae(ONES, ZEROS, TENS, flags(0, 1, 0), NO, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages, column(6.5, 1, 6), rtol=0)


def test_a_truncation_bootstraps_and_stops_the_recursion():
    # t2: 6; t1 truncated: 1 + 5 = 6 without A2; t0: 1 + 5 + 0.5 * 6 = 9
    advantages = gae(ONES, ZEROS, TENS, NO, flags(0, 1, 0), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages, column(9, 6, 6), rtol=0)


def test_a_new_episode_id_cuts_as_a_truncation_does():
    advantages = gae(ONES, ZEROS, TENS, NO, NO, column(0, 0, 1), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages, column(9, 6, 6), rtol=0)


def test_a_row_with_both_flags_does_not_bootstrap():
    advantages = gae(ONES, ZEROS, TENS, flags(0, 1, 0), flags(0, 1, 0), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(advantages, column(6.5, 1, 6), rtol=0)


def test_the_target_at_a_cut_includes_nine_tenths_of_ten_and_at_a_termination_does_not():
    # cleanrl #198, #457: gamma 0.9, V = 10 everywhere, reward 1; the target is A + V.
    # truncated: 1 + 0.9 * 10 = 10; terminated: 1.
    for terminated, truncated, target in ((0, 1, 10.0), (1, 0, 1.0)):
        advantage = gae([1.0], [10.0], [10.0], [terminated], [truncated], gamma=0.9, lam=0.95)
        np.testing.assert_allclose(advantage + 10.0, [target])
        np.testing.assert_allclose(n_step_returns([1.0], [10.0], [terminated], [truncated], gamma=0.9, n=1), [target])


def test_an_advantage_never_includes_the_next_episodes_rewards():
    # skrl #224: truncation at t = 2, V = 0, rewards 1 | 100. With gamma = lam = 1: 3, 2, 1 | 100.
    advantages = gae([1, 1, 1, 100], [0] * 4, [0] * 4, [0] * 4, [0, 0, 1, 0], gamma=1.0, lam=1.0)
    assert advantages.tolist() == [3, 2, 1, 100]


def test_the_bootstrap_is_the_value_of_next_obs():
    # EmbodiChain #610: V(obs) = obs[1] = t, so V(next_obs) = t + 1; at the truncation in t = 2 it
    # is V of the true last observation, 3, not of the reset's, 0. Rewards 0, gamma 0.5, lam 0:
    # t0: 0.5 * 1 - 0; t1: 0.5 * 2 - 1; t2: 0.5 * 3 - 2; then t = 0 again: 0.5 * 1 - 0
    advantages = gae([0] * 4, [0, 1, 2, 0], [1, 2, 3, 1], [0] * 4, [0, 0, 1, 0], gamma=0.5, lam=0.0)
    assert advantages.tolist() == [0.5, 0.0, -0.5, 0.5]


def test_lambda_discounts_what_lies_ahead():
    # deltas: 1 + 0.5 * 4 - 2 = 1 each; A1 = 1; A0 = 1 + 0.5 * 0.5 * 1 = 1.25
    assert gae([1, 1], [2, 2], [4, 4], [0, 0], [0, 0], gamma=0.5, lam=0.5).tolist() == [1.25, 1.0]


def test_each_column_ends_at_its_own_length():
    # Column 0 has two rows, column 1 none, column 2 three. gamma 0.5, lam 1, V' = 10, r = 1:
    # the last row of each: 1 + 5 = 6; the one before: 6 + 0.5 * 6 = 9; the first of three: 6 + 4.5 = 10.5
    block = np.ones((3, 3))
    advantages = gae(block, 0 * block, 10 * block, 0 * block, 0 * block, lengths=[2, 0, 3], gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[9, 0, 10.5], [6, 0, 9], [0, 0, 6]]


# --- n-step returns by hand


def test_two_rewards_then_a_bootstrap():
    # t0: 1 + 0.5 * 2 + 0.25 * 8 = 4; t1: 2 + 0.5 * 4 + 0.25 * 8 = 6; t2, the last: 4 + 0.5 * 8 = 8
    assert n_step_returns([1, 2, 4], [8, 8, 8], [0, 0, 0], [0, 0, 0], gamma=0.5, n=2).tolist() == [4, 6, 8]


def test_n_step_sums_stop_at_a_termination_without_bootstrap():
    # t1 terminated: 2; t0: 1 + 0.5 * 2 = 2; t2: 4 + 0.5 * 8 = 8
    assert n_step_returns([1, 2, 4], [8, 8, 8], [0, 1, 0], [0, 0, 0], gamma=0.5, n=3).tolist() == [2, 2, 8]


def test_n_step_sums_stop_at_a_truncation_with_its_own_bootstrap():
    # t1 truncated: 2 + 0.5 * 6 = 5; t0: 1 + 0.5 * 2 + 0.25 * 6 = 3.5; t2: 4 + 0.5 * 8 = 8
    assert n_step_returns([1, 2, 4], [0, 6, 8], [0, 0, 0], [0, 1, 0], gamma=0.5, n=3).tolist() == [3.5, 5, 8]


def test_n_step_sums_stop_where_the_episode_id_changes():
    assert n_step_returns([1, 2, 4], [0, 6, 8], [0] * 3, [0] * 3, [4, 4, 5], gamma=0.5, n=3).tolist() == [3.5, 5, 8]


def test_n_step_sums_stop_at_each_columns_length():
    # Column 0 has one row: 1 + 0.5 * 8 = 5; column 1 two: 1 + 0.5 + 0.25 * 8 = 3.5 and 1 + 0.5 * 8 = 5
    block = np.ones((3, 2))
    returns = n_step_returns(block, 8 * block, 0 * block, 0 * block, lengths=[1, 2], gamma=0.5, n=9)
    assert returns.tolist() == [[5, 3.5], [0, 5], [0, 0]]


def test_one_step_returns_are_reward_plus_discounted_next_value():
    returns = n_step_returns([1, 2, 4], [10, 20, 30], [0, 0, 0], [0, 0, 0], gamma=0.5, n=1)
    assert returns.tolist() == [1 + 5, 2 + 10, 4 + 15]


# --- against a naive reference, written forward and per segment


def segments(block: dict[str, np.ndarray], env: int) -> list[range]:
    """The rows of one column, cut after each end, before each new episode_id and at its length."""
    found, begin = [], 0
    for t in range(int(block["lengths"][env])):
        last = t + 1 == block["lengths"][env]
        ended = block["terminated"][t, env] or block["truncated"][t, env]
        if last or ended or block["episode_id"][t + 1, env] != block["episode_id"][t, env]:
            found.append(range(begin, t + 1))
            begin = t + 1
    return found


def naive_gae(block: dict[str, np.ndarray], gamma: float, lam: float) -> np.ndarray:
    """The forward sum of discounted deltas: A_t = sum_l (gamma lam)^l delta_{t+l} within its segment."""
    result = np.zeros_like(block["rewards"])
    for env in range(result.shape[1]):
        for segment in segments(block, env):
            for t in segment:
                for later in range(t, segment.stop):
                    delta = block["rewards"][later, env] - block["values"][later, env]
                    if not block["terminated"][later, env]:
                        delta += gamma * block["next_values"][later, env]
                    result[t, env] += (gamma * lam) ** (later - t) * delta
    return result


def naive_n_step(block: dict[str, np.ndarray], gamma: float, n: int) -> np.ndarray:
    result = np.zeros_like(block["rewards"])
    for env in range(result.shape[1]):
        for segment in segments(block, env):
            for t in segment:
                used = range(t, min(t + n, segment.stop))
                result[t, env] = sum(gamma ** (later - t) * block["rewards"][later, env] for later in used)
                if not block["terminated"][used[-1], env]:
                    result[t, env] += gamma ** len(used) * block["next_values"][used[-1], env]
    return result


def random_block(seed: int) -> dict[str, np.ndarray]:
    """Ends, cuts and lengths at random; what nobody may look at is NaN."""
    rng = np.random.default_rng(seed)
    num_steps, num_envs = int(rng.integers(0, 12)), int(rng.integers(1, 5))
    shape = (num_steps, num_envs)
    terminated, truncated, cut = (rng.random(shape) < rate for rate in (0.15, 0.15, 0.1))
    begins = np.vstack([np.zeros((1, num_envs), bool), (terminated | truncated | cut)])[:num_steps]
    lengths = rng.integers(0, num_steps + 1, num_envs) if seed % 2 else np.full(num_envs, num_steps)
    block = {name: rng.normal(size=shape) for name in ("rewards", "values", "next_values")}
    beyond = np.arange(num_steps)[:, None] >= lengths
    for numbers in block.values():
        numbers[beyond] = np.nan
    block["next_values"][terminated] = np.nan
    return block | {
        "terminated": terminated,
        "truncated": truncated,
        "episode_id": np.cumsum(begins, axis=0),
        "lengths": lengths,
    }


@pytest.mark.parametrize("seed", range(100))
def test_random_blocks_equal_the_naive_sums(seed):
    block = random_block(seed)
    gamma, lam, n = [(0.9, 0.8, 3), (1.0, 1.0, 1), (0.5, 0.0, 50), (0.0, 0.9, 2)][seed % 4]
    advantages = gae(**block, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, naive_gae(block, gamma, lam), rtol=1e-12, atol=1e-12)
    without_values = {name: numbers for name, numbers in block.items() if name != "values"}
    returns = n_step_returns(**without_values, gamma=gamma, n=n)
    np.testing.assert_allclose(returns, naive_n_step(block, gamma, n), rtol=1e-12, atol=1e-12)


# --- what goes in and what comes out


def test_nan_where_nobody_may_look_does_not_leak():
    nan = float("nan")
    # Row 1 terminated, so its next value counts for nothing; row 2 lies beyond the column's length.
    # t1: 1; t0: 1 + 0.5 * 10 + 0.5 * 1 = 6.5 and, as a sum of two rewards, 1 + 0.5 = 1.5
    block = ([1, 1, nan], [10, nan, nan], [0, 1, nan], [0, 0, nan], [0, 0, nan], [2])
    rewards, next_values, *rest = block
    assert gae(rewards, [0, 0, nan], next_values, *rest, gamma=0.5, lam=1.0).tolist() == [6.5, 1, 0]
    assert n_step_returns(*block, gamma=0.5, n=2).tolist() == [1.5, 1, 0]


@pytest.mark.parametrize("convert", [list, np.float32, torch.tensor])
def test_lists_float32_and_tensors_give_float64(convert):
    # 0.1 is not exact in float32, so a sum kept in float32 would differ from this one in float64.
    rewards = convert([0.1, 0.1])
    exact = np.asarray(rewards, dtype=np.float64) + 0.9 * 3.0
    advantages = gae(rewards, convert([0.0, 0.0]), convert([3.0, 3.0]), [0, 0], [0, 0], gamma=0.9, lam=0.0)
    assert isinstance(advantages, np.ndarray) and advantages.dtype == np.float64
    assert advantages.tolist() == exact.tolist()
    returns = n_step_returns(rewards, convert([3.0, 3.0]), [0, 0], [0, 0], gamma=0.9, n=1)
    assert returns.dtype == np.float64 and returns.tolist() == exact.tolist()


def test_a_vector_is_one_environment_and_comes_back_as_a_vector():
    block = (ONES, ZEROS, TENS, flags(0, 1, 0), NO)
    vector = gae(*(array[:, 0] for array in block), lengths=[3], gamma=0.5, lam=1.0)
    assert vector.shape == (3,) and vector.tolist() == gae(*block, gamma=0.5, lam=1.0)[:, 0].tolist()


def test_the_inputs_are_left_as_they_were():
    block = random_block(1)
    before = {name: numbers.copy() for name, numbers in block.items()}
    gae(**block, gamma=0.9, lam=0.9)
    assert all(np.array_equal(block[name], before[name], equal_nan=True) for name in block)


@pytest.mark.parametrize("name", ["values", "next_values", "terminated", "truncated", "episode_id"])
def test_another_shape_is_refused_by_name(name):
    arguments: dict[str, Any] = {"rewards": ONES, "values": ZEROS, "next_values": TENS, "terminated": NO}
    arguments |= {"truncated": NO, "episode_id": ZEROS, name: np.zeros((3, 2))}
    with pytest.raises(ValueError, match=rf"gae: {name} has shape \(3, 2\); legal is \(3, 1\)"):
        gae(**arguments, gamma=0.9, lam=0.9)


def test_a_vector_of_values_is_not_broadcast_over_the_environments():
    block = np.ones((3, 3))
    with pytest.raises(ValueError, match=r"next_values has shape \(3,\); legal is \(3, 3\)"):
        n_step_returns(block, block[0], 0 * block, 0 * block, gamma=0.9, n=1)


def test_rewards_with_a_third_axis_are_refused():
    block = np.ones((3, 3, 1))
    with pytest.raises(ValueError, match=r"rewards has shape \(3, 3, 1\); legal is \[T, N\]"):
        gae(block, block, block, block, block, gamma=0.9, lam=0.9)


@pytest.mark.parametrize("lengths", [[4], [-1], [1, 1], [1.0], [[1]]])
def test_lengths_that_fit_no_column_are_refused(lengths):
    with pytest.raises(ValueError, match="gae: lengths .* legal"):
        gae(ONES, ZEROS, TENS, NO, NO, lengths=lengths, gamma=0.9, lam=0.9)


def test_factors_out_of_bounds_are_refused():
    nan = float("nan")
    for gamma, lam, name in ((1.1, 0.9, "gamma"), (-0.1, 0.9, "gamma"), (nan, 0.9, "gamma"), (0.9, 1.5, "lam")):
        with pytest.raises(ValueError, match=rf"gae: {name} is .*; legal is 0\.\.1"):
            gae(ONES, ZEROS, TENS, NO, NO, gamma=gamma, lam=lam)
    with pytest.raises(ValueError, match="n_step_returns: n is 0; legal is an int >= 1"):
        n_step_returns(ONES, TENS, NO, NO, gamma=0.9, n=0)
