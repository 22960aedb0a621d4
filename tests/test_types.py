"""Rows, batches, blocks and episodes: which row is which, whose memory it is, what torch gets."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from envrunner._tree import leaves
from envrunner.types import EpisodeSummary, PolicyOutput, RolloutBatch, StepBatch, TimeStep, Trajectory

# Environment 0 plays Count(3): its episode 0 terminates at t = 3, then episode 1 begins.
# Environment 1 plays one episode that is truncated at t = 2. Rewards are 0.5 a step.
#         env  ep  t  next  ends
ROWS = [
    (0, 0, 0, 1, ""),
    (1, 0, 0, 1, ""),
    (0, 0, 1, 2, ""),
    (1, 0, 1, 2, "truncated"),
    (0, 0, 2, 3, "terminated"),
    (0, 1, 0, 1, ""),
]


def plain(numbers: np.ndarray) -> Any:
    """Observations `[n, 2] float32`: (env, t)."""
    return numbers.astype(np.float32)


def nested(numbers: np.ndarray) -> Any:
    """The same in a dict that holds a tuple: a uint8 camera, an int64 count, a float64 vector."""
    return {
        "camera": np.repeat(numbers[:, :1, None], 3, axis=2).astype(np.uint8),
        "pair": (numbers[:, 1].astype(np.int64), numbers.astype(np.float64)),
    }


def make_batch(rows: list[tuple[int, int, int, int, str]] = ROWS, obs: Any = plain, **options: Any) -> StepBatch:
    def numbers(column: int) -> np.ndarray:
        return np.array([(row[0], row[column]) for row in rows]).reshape(len(rows), 2)

    steps = np.array([row[2] + 1 for row in rows], np.int64)
    return StepBatch(
        env_id=np.array([row[0] for row in rows], np.int64),
        episode_id=np.array([row[1] for row in rows], np.int64),
        obs=obs(numbers(2)),
        action=np.array([row[2] % 2 for row in rows], np.int64),
        reward=np.full(len(rows), 0.5),
        next_obs=obs(numbers(3)),
        terminated=np.array([row[4] == "terminated" for row in rows], bool),
        truncated=np.array([row[4] == "truncated" for row in rows], bool),
        ep_len=steps,
        cum_reward=steps * 0.5,
        action_context={"log_prob": np.arange(len(rows)) * -0.25, "state": {"h": np.ones((len(rows), 4))}},
        policy_version=np.arange(len(rows)) // 2,
        **options,
    )


def all_arrays(batch: Any) -> list[np.ndarray]:
    """Every array of a batch or block, tensors as the numpy arrays that share their memory."""
    names = [name for cls in type(batch).__mro__ for name in getattr(cls, "__slots__", ())]
    values = [getattr(batch, name) for name in names if name not in ("infos", "reset_infos", "complete")]
    arrays = [leaf for value in values for leaf in leaves(tuple(value) if isinstance(value, list) else value)]
    return [a.numpy() if isinstance(a, torch.Tensor) else a for a in arrays if a is not None]


def share_memory(one: Any, other: Any) -> bool:
    return any(np.shares_memory(a, b) for a in all_arrays(one) for b in all_arrays(other))


def steps_of(batch: Any) -> list[int]:
    """t of each row, from plain observations."""
    return [int(t) for t in batch.obs[:, 1]]


# --- one row


def test_a_row_holds_what_its_columns_hold_as_python_numbers():
    batch = make_batch(infos={4: {"goal": True}}, reset_infos={5: {"level": 2}})
    row = batch[4]
    assert (row.env_id, row.episode_id, row.ep_len, row.policy_version) == (0, 0, 3, 2)
    assert (row.reward, row.cum_reward) == (0.5, 1.5)
    assert (row.terminated, row.truncated, row.done) == (True, False, True)
    assert row.obs.tolist() == [0, 2] and row.next_obs.tolist() == [0, 3]
    assert row.action == 0
    assert row.action_context["log_prob"] == -1.0 and row.action_context["state"]["h"].tolist() == [1, 1, 1, 1]
    assert row.info == {"goal": True} and row.reset_info is None
    kinds = {name: type(getattr(row, name)) for name in ("env_id", "reward", "terminated", "ep_len", "cum_reward")}
    assert kinds == {"env_id": int, "reward": float, "terminated": bool, "ep_len": int, "cum_reward": float}


def test_a_row_of_nested_observations_is_nested_alike():
    row = make_batch(obs=nested)[3]
    assert row.obs["camera"].tolist() == [[1, 1, 1]]
    assert row.obs["pair"][0] == 1 and row.obs["pair"][1].tolist() == [1, 1]
    assert row.next_obs["pair"][0] == 2


def test_done_is_either_kind_of_end_and_never_stored():
    batch = make_batch()
    assert batch.done.tolist() == [False, False, False, True, True, False]
    assert [row.done for row in batch] == batch.done.tolist()
    assert "done" not in TimeStep.__slots__ and "done" not in StepBatch.__slots__


def test_iteration_gives_every_row_in_order():
    batch = make_batch()
    assert len(batch) == batch.num_rows == 6
    assert [(row.env_id, int(row.obs[1])) for row in batch] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 0)]


@pytest.mark.parametrize("index", [-1, np.int64(5), np.array(5), torch.tensor(5)])
def test_a_row_is_found_by_any_kind_of_integer(index):
    assert make_batch()[index].episode_id == 1


@pytest.mark.parametrize("index", [6, -7])
def test_a_row_beyond_the_batch_is_an_index_error(index):
    with pytest.raises(IndexError, match=rf"StepBatch: there is no row {index}; legal is -6\.\.5"):
        make_batch()[index]


def test_the_first_row_of_an_episode_has_a_reset_info_and_no_other_has():
    batch = make_batch(reset_infos={0: {"level": 1}})
    assert batch.reset_info == [{"level": 1}, {}, None, None, None, {}]
    assert [row.reset_info for row in batch] == batch.reset_info


def test_info_is_an_empty_dict_where_nothing_was_sent():
    batch = make_batch(infos={2: {"fuel": 3}})
    assert batch.info == [{}, {}, {"fuel": 3}, {}, {}, {}]
    assert [row.info for row in batch] == batch.info


# --- several rows


def picked_rows(index: Any) -> list[int]:
    """Which of rows 0..5 `batch[index]` has, read from log_prob = -row / 4."""
    return [round(-4 * v) for v in make_batch()[index].action_context["log_prob"].tolist()]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [5, 3, 1]),
        (slice(9, None), []),
        ([4, 0, 4], [4, 0, 4]),
        ([-1, 0], [5, 0]),
        ([], []),
        (np.array([3], np.uint8), [3]),
        (torch.tensor([2, 1]), [2, 1]),
        (np.array([False, True, False, False, False, True]), [1, 5]),
        ([True, False, False, False, False, False], [0]),
        (torch.tensor([False] * 6), []),
    ],
)
def test_a_slice_an_index_array_or_a_mask_picks_its_rows(index, rows):
    assert picked_rows(index) == rows


def test_an_index_array_of_one_picks_a_batch_and_not_a_row():
    for index in ([2], np.array([2]), torch.tensor([2])):
        assert len(make_batch()[index]) == 1


@pytest.mark.parametrize("index", [[0, 6], [-7], np.array([True, False]), [0.0, 1.0], [[0, 1]], "obs", None])
def test_an_index_that_fits_no_rows_is_an_index_error(index):
    with pytest.raises(IndexError, match="StepBatch: "):
        make_batch()[index]


@pytest.mark.parametrize("index", [slice(0, 6), slice(None, None, -1), np.arange(6), np.ones(6, bool)])
@pytest.mark.parametrize("obs", [plain, nested])
def test_picked_rows_are_memory_of_their_own(index, obs):
    batch = make_batch(obs=obs, infos={1: {"fuel": 3}})
    picked = batch[index]
    assert not share_memory(picked, batch)
    before = [array.copy() for array in all_arrays(picked)]
    for array in all_arrays(batch):
        array[...] = 1 if array.dtype == bool else 77
    batch.infos[1]["fuel"] = 0
    assert all((a == b).all() for a, b in zip(all_arrays(picked), before, strict=True))
    assert {"fuel": 3} in picked.info


def test_infos_follow_their_rows():
    batch = make_batch(infos={1: {"at": 1}, 4: {"at": 4}}, reset_infos={5: {"level": 2}})
    assert batch[4:].infos == {0: {"at": 4}} and batch[4:].reset_infos == {1: {"level": 2}}
    assert batch[::-1].infos == {1: {"at": 4}, 4: {"at": 1}}
    assert batch[[4, -2, 0]].infos == {0: {"at": 4}, 1: {"at": 4}}
    assert batch[batch.done].infos == {1: {"at": 4}}


def test_a_part_of_an_incomplete_batch_is_incomplete():
    assert not make_batch(complete=False)[:2].complete
    assert make_batch()[:2].complete


# --- episodes


def test_episodes_summarise_every_end_in_the_order_of_rows():
    # env 1: two steps of 0.5, truncated; env 0: three steps of 0.5, terminated.
    assert make_batch().episodes == (
        EpisodeSummary(env_id=1, episode_id=0, length=2, total_reward=1.0, terminated=False, truncated=True),
        EpisodeSummary(env_id=0, episode_id=0, length=3, total_reward=1.5, terminated=True, truncated=False),
    )
    assert not any(summary.aborted for summary in make_batch().episodes)


def test_a_summary_has_the_whole_length_though_the_episode_began_before_the_batch():
    # gym #1017: only the last of three rows is in the batch.
    (summary,) = make_batch()[4:].episodes
    assert (summary.length, summary.total_reward) == (3, 1.5)


def test_both_flags_on_one_row_are_both_in_the_summary():
    batch = make_batch([(0, 0, 0, 1, "terminated")])
    batch.truncated[0] = True
    assert batch.episodes == (EpisodeSummary(0, 0, 1, 0.5, terminated=True, truncated=True),)


# --- joined


def test_concatenate_keeps_rows_in_order_and_moves_infos():
    batch = make_batch(infos={0: {"at": 0}, 5: {"at": 5}}, reset_infos={5: {"level": 2}})
    joined = StepBatch.concatenate([batch[:2], batch[2:], batch[5:]])
    assert steps_of(joined) == [0, 0, 1, 1, 2, 0, 0]
    assert joined.infos == {0: {"at": 0}, 5: {"at": 5}, 6: {"at": 5}}
    assert joined.reset_infos == {5: {"level": 2}, 6: {"level": 2}}
    assert joined.action_context["state"]["h"].shape == (7, 4)


@pytest.mark.parametrize("count", [1, 2])
def test_concatenated_rows_are_memory_of_their_own(count):
    batch = make_batch(obs=nested)
    assert not share_memory(StepBatch.concatenate([batch] * count), batch)
    tensors = batch.to_torch()
    assert not share_memory(StepBatch.concatenate([tensors] * count), tensors)


def test_concatenate_is_complete_if_all_are():
    assert StepBatch.concatenate([make_batch(), make_batch()]).complete
    assert not StepBatch.concatenate([make_batch(complete=False), make_batch()]).complete


def test_concatenate_takes_nothing_from_a_batch_without_rows():
    empty = make_batch(rows=[], obs=nested)
    assert steps_of(StepBatch.concatenate([empty, make_batch(), empty])) == [0, 0, 1, 1, 2, 0]
    assert len(StepBatch.concatenate([empty, empty])) == 0


def test_concatenate_of_nothing_says_so():
    with pytest.raises(ValueError, match="no batches"):
        StepBatch.concatenate([])


def test_concatenate_names_the_column_that_differs():
    with pytest.raises(ValueError, match=r"column obs is missing, but .* float32 \[2\]"):
        StepBatch.concatenate([make_batch(), make_batch(obs=nested)])
    with pytest.raises(ValueError, match=r"column env_id is torch.int64 \[\], but .* int64 \[\]"):
        StepBatch.concatenate([make_batch(), make_batch().to_torch()])


def test_columns_of_different_lengths_are_refused_by_name():
    obs = {"camera": np.zeros((6, 2)), "pair": (np.zeros(6), np.zeros(5))}
    with pytest.raises(ValueError, match=r"StepBatch: obs\['pair'\]\[1\] has shape \(5,\); legal .* \(6,\)"):
        dataclasses.replace(make_batch(), obs=obs)


# --- torch


def test_to_torch_gives_float32_and_int64_actions_and_keeps_bytes_and_flags():
    batch = make_batch(obs=nested)
    tensors = batch.to_torch()
    assert tensors.reward.dtype == tensors.cum_reward.dtype == torch.float32
    assert tensors.action_context["log_prob"].dtype == tensors.action_context["state"]["h"].dtype == torch.float32
    assert tensors.obs["pair"][1].dtype == tensors.next_obs["pair"][1].dtype == torch.float32
    assert tensors.obs["camera"].dtype == torch.uint8 and tensors.obs["pair"][0].dtype == torch.int64
    assert tensors.terminated.dtype == tensors.truncated.dtype == tensors.done.dtype == torch.bool
    assert tensors.action.dtype == tensors.env_id.dtype == tensors.policy_version.dtype == torch.int64
    assert tensors.cum_reward.tolist() == [0.5, 0.5, 1.0, 1.0, 1.5, 0.5]


@pytest.mark.parametrize(
    ("dtype", "action", "other"),
    [
        ("int8", torch.int64, torch.int8),
        ("uint8", torch.int64, torch.uint8),
        ("int32", torch.int64, torch.int32),
        ("uint16", torch.int64, torch.int64),
        ("float16", torch.float16, torch.float16),
        (">f4", torch.float32, torch.float32),
        (">f8", torch.float32, torch.float32),
        (">i2", torch.int64, torch.int16),
        ("bool", torch.bool, torch.bool),
    ],
)
def test_to_torch_of_every_dtype(dtype, action, other):
    column = np.arange(12).reshape(6, 2).astype(dtype)
    tensors = dataclasses.replace(make_batch(), obs=column[:, ::-1], action=column).to_torch()
    assert (tensors.action.dtype, tensors.obs.dtype) == (action, other)
    assert tensors.action.tolist() == column.tolist() and tensors.obs.tolist() == column[:, ::-1].tolist()


def test_to_torch_leaves_what_torch_has_no_dtype_for():
    words = np.array(["go", "left", "", "a", "b", "c"], object)
    tensors = dataclasses.replace(make_batch(), obs={"text": words, "t": np.zeros(6)}).to_torch()
    assert isinstance(tensors.obs["t"], torch.Tensor)
    assert tensors.obs["text"].tolist() == words.tolist() and tensors.obs["text"] is not words
    assert tensors[[1, 0]].obs["text"].tolist() == ["left", "go"]


@pytest.mark.parametrize("obs", [plain, nested])
def test_tensors_share_no_memory_with_the_batch_they_came_from(obs):
    batch = make_batch(obs=obs)
    tensors = batch.to_torch()
    assert not share_memory(tensors, batch)
    assert not share_memory(tensors.to_torch(), tensors)


def test_to_torch_takes_columns_that_are_read_only():
    batch = make_batch()
    for array in all_arrays(batch):
        array.setflags(write=False)
    tensors = batch.to_torch()
    tensors.reward.add_(1)
    assert batch.reward.tolist() == [0.5] * 6


def test_a_batch_of_tensors_is_used_like_one_of_arrays():
    batch = make_batch(infos={4: {"goal": True}}, reset_infos={5: {"level": 2}}, complete=False)
    tensors = batch.to_torch("cpu")
    assert (len(tensors), tensors.complete, tensors.episodes) == (6, False, batch.episodes)
    assert (tensors.infos, tensors.reset_info) == (batch.infos, batch.reset_info)
    row = tensors[3]
    assert isinstance(row.obs, torch.Tensor) and row.obs.tolist() == [1, 1]
    assert type(row.reward) is float and type(row.truncated) is bool and type(row.env_id) is int
    for index in (slice(None, None, -2), [5, 3], np.array([4]), torch.tensor([4]), tensors.done, batch.done):
        picked = tensors[index]
        assert isinstance(picked.obs, torch.Tensor) and not share_memory(picked, tensors)
        assert picked.obs.tolist() == batch[index].obs.tolist()
        assert picked.infos == batch[index].infos


def test_importing_the_types_loads_no_torch():
    modules = ", ".join(f"envrunner.{name}" for name in ("types", "events", "returns", "buffer"))
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- whole episodes


def test_a_trajectory_is_one_episode_from_first_step_to_last():
    batch = make_batch(infos={4: {"goal": True}}, reset_infos={0: {"level": 1}}, complete=False)
    trajectory = Trajectory.from_rows(batch[[0, 2, 4]])
    assert len(trajectory) == 3 and steps_of(trajectory) == [0, 1, 2]
    assert trajectory.summary == EpisodeSummary(0, 0, 3, 1.5, terminated=True, truncated=False)
    assert trajectory.complete  # the episode is whole, though the call was cut
    assert trajectory[-1].info == {"goal": True} and trajectory.reset_info == [{"level": 1}, None, None]
    assert [row.ep_len for row in trajectory] == [1, 2, 3]
    assert isinstance(trajectory[1:], StepBatch) and len(trajectory[trajectory.reward > 0]) == 3
    assert trajectory.to_torch().action.dtype == torch.int64 and trajectory.to_torch().summary == trajectory.summary
    assert not share_memory(trajectory.to_torch(), trajectory)


@pytest.mark.parametrize(
    "rows",
    [
        [],  # nothing
        [0, 2],  # no end
        [2, 4],  # no beginning
        [0, 4],  # a row is missing
        [2, 0, 4],  # out of order
        [0, 3],  # two environments
        [0, 2, 4, 5],  # into the next episode
    ],
)
def test_rows_that_are_not_one_whole_episode_are_no_trajectory(rows):
    with pytest.raises(ValueError, match=r"Trajectory\.from_rows: .* is not one whole episode; legal are"):
        Trajectory.from_rows(make_batch()[rows])


def test_rows_of_two_episodes_are_no_trajectory():
    rows = make_batch([(0, 0, 0, 1, ""), (0, 1, 1, 2, "terminated")])
    with pytest.raises(ValueError, match="not one whole episode"):
        Trajectory.from_rows(rows)


def test_an_end_before_the_last_row_is_no_trajectory():
    rows = make_batch([(0, 0, 0, 1, "truncated"), (0, 0, 1, 2, "terminated")])
    with pytest.raises(ValueError, match="not one whole episode"):
        Trajectory.from_rows(rows)


# --- blocks


def make_block(**options: Any) -> RolloutBatch:
    """T = 3, N = 2, observations `[T + 1, N, 2]`: (env, t of the episode).

    Environment 0 terminates at t = 2 in row 1, then begins episode 1: rows t = 0 1 | 0.
    Environment 1 goes on throughout from t = 4, and is truncated at t = 7 in the last row.
    """
    observations = np.array([[[0, 0], [1, 4]], [[0, 1], [1, 5]], [[0, 0], [1, 6]], [[0, 1], [1, 0]]], np.float32)
    last_obs = np.array([[0, 1], [1, 7]], np.float32)
    columns: dict[str, Any] = {
        "observations": observations,
        "finals": (np.array([1, 2]), np.array([0, 1]), np.array([[0, 2], [1, 7]], np.float32)),
        "env_id": np.tile(np.arange(2), (3, 1)),
        "episode_id": np.array([[0, 3], [0, 3], [1, 3]]),
        "action": np.array([[0, 1], [2, 3], [4, 5]], np.int32),
        "reward": np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]),
        "terminated": np.array([[0, 0], [1, 0], [0, 0]], bool),
        "truncated": np.array([[0, 0], [0, 0], [0, 1]], bool),
        "ep_len": np.array([[1, 5], [2, 6], [1, 7]]),
        "cum_reward": np.array([[1.0, 50.0], [3.0, 70.0], [3.0, 100.0]]),
        "action_context": {"value": np.array([[0.0, 0.1], [0.2, 0.3], [0.4, 0.5]])},
        "policy_version": np.zeros((3, 2), np.int64),
        "lengths": np.array([3, 3]),
        "last_obs": last_obs,
        "last_state": {"h": np.zeros((2, 4))},
    }
    return RolloutBatch(**(columns | options))


def nested_block() -> RolloutBatch:
    block = make_block()

    def nest(column: np.ndarray) -> Any:
        return {"camera": column.astype(np.uint8), "pair": (column[..., 1].astype(np.int64), column.astype(np.float64))}

    step, env, final_obs = block.finals
    finals = (step, env, nest(final_obs))
    return make_block(observations=nest(block.observations), finals=finals, last_obs=nest(block.last_obs))


def test_a_block_is_time_major_and_chains():
    block = make_block()
    assert (len(block), block.num_envs, block.num_rows) == (3, 2, 6)
    assert block.obs[:, :, 1].tolist() == [[0, 4], [1, 5], [0, 6]]
    # Each next t is one more; at the two ends the last observation, not the reset's 0.
    assert block.next_obs[:, :, 1].tolist() == [[1, 5], [2, 6], [1, 7]]
    assert block.done.tolist() == [[False, False], [True, False], [False, True]]


def test_next_obs_is_built_once_and_on_memory_of_its_own():
    block = make_block()
    assert block.next_obs is block.next_obs
    assert not np.shares_memory(block.next_obs, block.observations)
    assert np.shares_memory(block.obs, block.observations)  # stored once


def test_next_obs_of_nested_observations_is_nested_alike():
    block = nested_block()
    assert block.next_obs["pair"][0].tolist() == [[1, 5], [2, 6], [1, 7]]
    assert block.next_obs["camera"].dtype == np.uint8 and block.obs["pair"][1].shape == (3, 2, 2)


def test_a_flattened_block_has_its_rows_by_time_then_environment():
    block = make_block(infos={(1, 0): {"goal": True}, (2, 1): {"late": 1}}, reset_infos={(2, 0): {"level": 2}})
    flat = block.flatten()
    assert flat.env_id.tolist() == [0, 1, 0, 1, 0, 1]
    assert flat.reward.tolist() == [1, 10, 2, 20, 3, 30] and flat.action.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.obs[:, 1].tolist() == [0, 4, 1, 5, 0, 6] and flat.next_obs[:, 1].tolist() == [1, 5, 2, 6, 1, 7]
    assert flat.action_context["value"].tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert flat.infos == {2: {"goal": True}, 5: {"late": 1}} and flat.reset_infos == {4: {"level": 2}}
    assert flat.complete and flat.episodes == block.episodes


def test_a_block_cut_short_has_its_valid_rows_only():
    # Environment 0 has one row, environment 1 two; nothing beyond them is looked at.
    block = make_block(
        lengths=np.array([1, 2]),
        complete=False,
        infos={(0, 1): {"a": 1}, (1, 1): {"b": 1}, (2, 0): {"beyond": 1}},
    )
    assert block.valid.tolist() == [[True, True], [False, True], [False, False]]
    assert block.num_rows == 3 and block.episodes == ()
    flat = block.flatten()
    assert flat.reward.tolist() == [1, 10, 20] and not flat.complete
    assert flat.infos == {1: {"a": 1}, 2: {"b": 1}}


def test_a_block_without_rows_flattens_to_none():
    flat = make_block(lengths=np.array([0, 0])).flatten()
    assert len(flat) == 0 and flat.obs.shape == (0, 2)


def test_the_episodes_of_a_block_are_summarised_by_time():
    assert make_block().episodes == (
        EpisodeSummary(env_id=0, episode_id=0, length=2, total_reward=3.0, terminated=True, truncated=False),
        EpisodeSummary(env_id=1, episode_id=3, length=7, total_reward=100.0, terminated=False, truncated=True),
    )


@pytest.mark.parametrize("build", [make_block, nested_block])
def test_a_flattened_block_and_its_tensors_are_memory_of_their_own(build):
    block = build()
    flat, tensors = block.flatten(), block.to_torch()
    assert not share_memory(flat, block) and not share_memory(tensors, block)
    assert not share_memory(tensors.flatten(), tensors)
    before = [array.copy() for array in all_arrays(flat)]
    assert block.next_obs is not None  # built, so that it is among the arrays
    for array in all_arrays(block):
        array[...] = 0
    assert all((a == b).all() for a, b in zip(all_arrays(flat), before, strict=True))


def test_a_block_of_tensors_is_used_like_one_of_arrays():
    block = make_block(lengths=np.array([3, 2]), infos={(1, 0): {"goal": True}}, complete=False)
    tensors = block.to_torch("cpu")
    assert tensors.reward.dtype == torch.float32 and tensors.action.dtype == torch.int64
    assert tensors.last_state["h"].dtype == torch.float32 and tensors.lengths.tolist() == [3, 2]
    assert isinstance(tensors.next_obs, torch.Tensor) and tensors.next_obs.tolist() == block.next_obs.tolist()
    assert tensors.obs.tolist() == block.obs.tolist() and tensors.last_obs.tolist() == block.last_obs.tolist()
    flat = tensors.flatten()
    assert isinstance(flat.obs, torch.Tensor) and flat.obs.tolist() == block.flatten().obs.tolist()
    assert (flat.infos, flat.complete, tensors.episodes) == ({2: {"goal": True}}, False, block.episodes)


def test_a_block_without_recurrent_state_has_none_as_tensors_too():
    assert make_block(last_state=None).to_torch().last_state is None


def test_a_block_with_observations_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"RolloutBatch: observations has shape \(3, 2, 2\); legal .* \(4, 2\)"):
        make_block(observations=make_block().obs)
    with pytest.raises(ValueError, match=r"finals observations has shape \(1, 2\); legal .* \(2,\)"):
        make_block(finals=(np.array([1, 2]), np.array([0, 1]), np.zeros((1, 2))))


# --- values


def test_batches_say_in_one_line_what_they_hold():
    assert repr(make_batch()) == "StepBatch(n=6, episodes=2, complete=True)"
    assert repr(make_batch().to_torch()) == "StepBatch(n=6, episodes=2, complete=True)"
    assert repr(make_block(complete=False)) == "RolloutBatch(T=3, N=2, episodes=2, complete=False)"
    assert repr(Trajectory.from_rows(make_batch()[[0, 2, 4]])) == (
        "Trajectory(env_id=0, episode_id=0, length=3, total_reward=1.5, terminated=True, truncated=False)"
    )


def test_batches_survive_pickle_and_deepcopy():
    for value in (make_batch(obs=nested), nested_block(), Trajectory.from_rows(make_batch()[[1, 3]])):
        for clone in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert repr(clone) == repr(value) and not share_memory(clone, value)
            assert all((a == b).all() for a, b in zip(all_arrays(clone), all_arrays(value), strict=True))


def test_values_cannot_be_reassigned():
    for value in (make_batch(), make_block(), make_batch()[0], make_batch().episodes[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.env_id = 0


def test_a_policy_output_has_an_empty_context_of_its_own():
    one, other = PolicyOutput(np.zeros(2)), PolicyOutput(np.zeros(2))
    assert one.context == {} and one.context is not other.context and one.state is None
