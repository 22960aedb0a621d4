"""Replay: which rows stay, which are drawn, whose memory they are, and what a checkpoint brings back."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from envrunner._tree import leaves
from envrunner.buffer import TransitionBuffer
from envrunner.types import StepBatch


def rows(first: int, last: int, nested: bool = False) -> StepBatch:
    """Rows numbered first..last - 1: reward is the number, every third terminates, every fifth is truncated."""
    number = np.arange(first, last)

    def obs(numbers: np.ndarray) -> Any:
        if not nested:
            return np.stack([numbers, -numbers], axis=1).astype(np.float32)
        return {"camera": numbers[:, None, None].astype(np.uint8), "pair": (numbers.copy(), numbers * 0.5)}

    return StepBatch(
        env_id=number % 2,
        episode_id=number // 10,
        obs=obs(number),
        action=number % 4,
        reward=number.astype(float),
        next_obs=obs(number + 1),
        terminated=number % 3 == 0,
        truncated=number % 5 == 0,
        ep_len=number % 10 + 1,
        cum_reward=number * 2.0,
        action_context={"state": {"h": np.stack([number, number], axis=1)}},
        policy_version=number // 7,
        infos={0: {"note": first}} if last > first else {},
    )


def held(buffer: TransitionBuffer) -> list[int]:
    """The numbers of all rows it holds, sorted."""
    state = buffer.state_dict()
    return sorted(int(reward) for reward in state["columns"]["reward"]) if state["columns"] else []


def arrays(batch: StepBatch) -> list[np.ndarray]:
    return [column for _, column in batch.columns()]


def assert_equal(one: StepBatch, other: StepBatch) -> None:
    for (name, a), (_, b) in zip(one.columns(), other.columns(), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b), name


# --- which rows stay


def test_a_new_buffer_is_empty():
    buffer = TransitionBuffer(capacity=5)
    assert (len(buffer), buffer.capacity, repr(buffer)) == (0, 5, "TransitionBuffer(len=0, capacity=5)")


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("size", range(10))
def test_the_last_rows_stay_at_every_offset(offset, size):
    """Capacity 7: after 0..7 rows a batch of 0..9 more, which may wrap around or be larger than the buffer."""
    buffer = TransitionBuffer(capacity=7)
    buffer.extend(rows(0, offset))
    buffer.extend(rows(offset, offset + size))
    assert len(buffer) == min(offset + size, 7)
    assert held(buffer) == list(range(max(0, offset + size - 7), offset + size))


def test_many_batches_in_a_row_leave_the_last_rows():
    buffer, total = TransitionBuffer(capacity=7), 0
    for size in (3, 5, 1, 20, 2, 7, 0, 6):
        buffer.extend(rows(total, total + size))
        total += size
        assert held(buffer) == list(range(max(0, total - 7), total))


def test_a_buffer_of_one_holds_the_last_row():
    buffer = TransitionBuffer(capacity=1)
    buffer.extend(rows(0, 4))
    assert held(buffer) == [3]


# --- what is drawn


@pytest.mark.parametrize("nested", [False, True])
def test_a_sampled_row_is_whole(nested):
    """Whatever is drawn, all its columns belong to the same row: number k has reward k."""
    buffer = TransitionBuffer(capacity=20, seed=1)
    buffer.extend(rows(0, 15, nested))
    buffer.extend(rows(15, 30, nested))
    sample = buffer.sample(16)
    everything = rows(0, 30, nested)
    assert_equal(sample, everything[sample.reward.astype(int)])
    assert min(sample.reward) >= 10 and sample.complete


def test_a_sample_can_bootstrap_at_a_truncation():
    buffer = TransitionBuffer(capacity=10, seed=0)
    buffer.extend(rows(5, 6))
    (row,) = buffer.sample(1)
    assert (row.terminated, row.truncated) == (False, True)
    assert row.next_obs.tolist() == [6, -6]


def test_infos_are_not_stored():
    buffer = TransitionBuffer(capacity=10, seed=0)
    buffer.extend(rows(0, 1))
    assert buffer.sample(1).info == [{}]


def test_rows_are_drawn_uniformly_and_only_from_those_it_holds():
    """30,000 draws from 10 rows of a buffer for 1,000: each 3,000 times, give or take 5 deviations of 52."""
    buffer = TransitionBuffer(capacity=1000, seed=0)
    buffer.extend(rows(0, 10))
    draws = np.concatenate([buffer.sample(10).reward for _ in range(3000)]).astype(int)
    counts = np.bincount(draws, minlength=10)
    assert len(counts) == 10 and abs(counts - 3000).max() < 260


def test_a_given_generator_decides_what_is_drawn():
    buffer = TransitionBuffer(capacity=50, seed=0)
    buffer.extend(rows(0, 50))
    numbers = np.random.default_rng(7).integers(0, 50, 20)
    assert buffer.sample(20, np.random.default_rng(7)).reward.tolist() == numbers.tolist()


def test_its_own_generator_is_seeded():
    def draws(seed: int) -> list[float]:
        buffer = TransitionBuffer(capacity=50, seed=seed)
        buffer.extend(rows(0, 50))
        return [*buffer.sample(20).reward, *buffer.sample(20).reward]

    assert draws(3) == draws(3) != draws(4)


def test_a_given_generator_leaves_its_own_alone():
    one, other = TransitionBuffer(capacity=50, seed=0), TransitionBuffer(capacity=50, seed=0)
    for buffer in (one, other):
        buffer.extend(rows(0, 50))
    one.sample(20, np.random.default_rng(7))
    assert one.sample(20).reward.tolist() == other.sample(20).reward.tolist()


# --- whose memory


@pytest.mark.parametrize("nested", [False, True])
def test_what_goes_in_and_what_comes_out_is_copied(nested):
    buffer = TransitionBuffer(capacity=4, seed=0)
    batch = rows(0, 4, nested)
    buffer.extend(batch)
    sample, again = buffer.sample(4, np.random.default_rng(0)), buffer.sample(4, np.random.default_rng(0))
    assert not any(np.shares_memory(a, b) for a in arrays(sample) for b in arrays(batch) + arrays(again))
    for array in arrays(batch) + arrays(again):
        array[...] = True  # 1 in every number
    assert_equal(buffer.sample(4, np.random.default_rng(0)), sample)
    kept = pickle.loads(pickle.dumps(sample))
    buffer.extend(rows(4, 8, nested))
    assert_equal(sample, kept)


def test_the_buffer_keeps_what_it_was_given_when_the_batch_changes_later():
    buffer = TransitionBuffer(capacity=4)
    batch = rows(0, 4)
    buffer.extend(batch)
    batch.reward[:] = 99
    assert held(buffer) == [0, 1, 2, 3]


# --- what is refused


@pytest.mark.parametrize("batch_size", [4, 0, -1])
def test_what_is_asked_beyond_its_length_is_an_error(batch_size):
    buffer = TransitionBuffer(capacity=10)
    buffer.extend(rows(0, 3))
    with pytest.raises(ValueError, match=rf"sample: batch_size is {batch_size}; legal is 1\.\.3, the rows it holds"):
        buffer.sample(batch_size)
    assert len(buffer.sample(3)) == 3


def test_an_empty_buffer_cannot_be_sampled():
    with pytest.raises(ValueError, match=r"batch_size is 1; legal is 1\.\.0"):
        TransitionBuffer(capacity=10).sample(1)


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_capacity_below_one_is_refused(capacity):
    with pytest.raises(ValueError, match=rf"capacity is {capacity}; legal is an int >= 1"):
        TransitionBuffer(capacity)


def test_other_columns_than_the_first_are_refused_by_name():
    buffer = TransitionBuffer(capacity=10)
    buffer.extend(rows(0, 3, nested=True))
    good = rows(3, 6, nested=True)
    camera, pair = good.obs["camera"], good.obs["pair"]
    cases = {
        r"obs\['camera'\] is float32 \[1, 1\], but .* uint8 \[1, 1\]": {
            "obs": {"camera": camera.astype(np.float32), "pair": pair}
        },
        r"obs\['pair'\]\[1\] is float64 \[1\], but .* float64 \[\]": {
            "obs": {"camera": camera, "pair": (pair[0], pair[1][:, None])}
        },
        r"obs\['camera'\] is missing, but .* uint8 \[1, 1\]": {"obs": {"pair": pair}},
        r"action_context\['value'\] is float64 \[\], but .* missing": {
            "action_context": {**good.action_context, "value": np.zeros(3)}
        },
    }
    for message, change in cases.items():
        with pytest.raises(ValueError, match=rf"TransitionBuffer\.extend: column {message}"):
            buffer.extend(dataclasses.replace(good, **change))
    assert held(buffer) == [0, 1, 2]


def test_tensors_are_refused():
    with pytest.raises(TypeError, match="column env_id is a Tensor; legal are numpy arrays"):
        TransitionBuffer(capacity=10).extend(rows(0, 3).to_torch())


def test_a_batch_without_rows_does_not_fix_the_columns():
    buffer = TransitionBuffer(capacity=10)
    buffer.extend(rows(0, 0, nested=True))
    buffer.extend(rows(0, 3))
    buffer.extend(rows(0, 0, nested=True))
    assert held(buffer) == [0, 1, 2]


# --- checkpoints


@pytest.mark.parametrize("num_rows", [0, 3, 7, 10, 18])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_brings_back_the_same_buffer_and_the_same_next_samples(num_rows, nested):
    buffer = TransitionBuffer(capacity=7, seed=5)
    buffer.extend(rows(0, num_rows, nested))
    if num_rows:
        buffer.sample(2)
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    resumed = TransitionBuffer(capacity=7, seed=99)
    resumed.extend(rows(50, 55))  # whatever it held before is gone
    resumed.load_state_dict(state)
    assert len(resumed) == len(buffer)
    for first in (20, 24, 28):  # the next rows fall on the same slots, too
        for one in (buffer, resumed):
            one.extend(rows(first, first + 4, nested))
        assert held(resumed) == held(buffer)
        assert_equal(resumed.sample(4), buffer.sample(4))


def test_a_checkpoint_holds_only_the_rows_there_are():
    buffer = TransitionBuffer(capacity=1_000_000)
    buffer.extend(rows(0, 3))
    assert {len(column) for column in leaves(buffer.state_dict()["columns"])} == {3}


def test_a_checkpoint_does_not_change_with_the_buffer():
    buffer = TransitionBuffer(capacity=3, seed=0)
    buffer.extend(rows(0, 3))
    state = buffer.state_dict()
    kept = pickle.loads(pickle.dumps(state))
    buffer.extend(rows(3, 6))
    buffer.sample(3)
    assert state["columns"]["reward"].tolist() == kept["columns"]["reward"].tolist() == [0, 1, 2]
    assert state["generator"] == kept["generator"]


def test_a_checkpoint_of_another_capacity_is_refused():
    state = TransitionBuffer(capacity=5).state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict: the state has capacity 5; legal is 7"):
        TransitionBuffer(capacity=7).load_state_dict(state)
