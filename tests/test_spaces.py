"""The record layout of a space: every fixed space there and back, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

from envrunner.spaces import Layout, Mismatch

SPACES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(0, 255, (2, 3, 4), np.uint8),
    spaces.Box(-np.inf, np.inf, (), np.float64),
    spaces.Box(0, 1, (0,), np.float32),
    spaces.Box(-(2**62), 2**62, (2,), np.int64),
    spaces.Discrete(7),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 5]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [-3, 0]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 2)),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
    spaces.Dict(
        {"b": spaces.Discrete(3), "a": spaces.Tuple((spaces.MultiBinary(2), spaces.Dict({"": spaces.Box(0, 1, (1,))})))}
    ),
]


def equal(a, b):
    return data_equivalence(a, b)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_fixed_space_goes_in_and_comes_out_equal(space):
    layout = Layout(space, "observation")
    columns = layout.allocate(5)
    write, read = layout.writer(columns), layout.reader(columns)
    space.seed(3)
    samples = [space.sample() for _ in range(5)]
    for index, sample in enumerate(samples):
        write(index, sample)
    for index, sample in enumerate(samples):
        value = read(index)
        assert space.contains(value) and equal(value, sample)
    assert all(a is b for a, b in zip(layout.flatten(layout.nest(columns)), columns, strict=True))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_read_is_the_readers_own(space):
    layout = Layout(space, "action")
    columns = layout.allocate(1)
    layout.writer(columns)(0, space.sample())
    value = layout.reader(columns)(0)
    flat = [leaf for leaf in layout.flatten(value) if isinstance(leaf, np.ndarray)]
    assert not any(np.shares_memory(leaf, column) for leaf in flat for column in columns)


def leaf_spaces():
    return st.sampled_from(SPACES[:11])


nested_spaces = st.recursive(
    leaf_spaces(),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)


@given(nested_spaces, st.integers(0, 2**31 - 1))
@settings(max_examples=60, deadline=None)
def test_any_nesting_goes_in_and_comes_out_equal(space, seed):
    space.seed(seed)
    layout = Layout(space, "observation")
    columns = layout.allocate(2)
    sample = space.sample()
    layout.writer(columns)(1, sample)
    assert equal(layout.reader(columns)(1), sample)


@pytest.mark.parametrize(
    "value",
    [[0.5, 1, 2], np.array([0.5, 1, 2]), np.array([0.5, 1, 2], ">f4"), np.arange(6, dtype=np.float32)[::2], (1, 2, 3)],
    ids=["list", "float64", "big-endian", "strided", "tuple"],
)
def test_safe_values_are_stored(value):
    columns = Layout(SPACES[0], "observation").allocate(1)
    Layout(SPACES[0], "observation").writer(columns)(0, value)
    np.testing.assert_array_equal(columns[0][0], np.asarray(value, np.float32))


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (SPACES[0], 1.0, r"observation has shape \(\); legal is \(3,\)"),
        (SPACES[0], np.zeros((1, 3), np.float32), r"shape \(1, 3\)"),
        (SPACES[0], np.zeros(4, np.float32), r"shape \(4,\)"),
        (SPACES[0], np.zeros(3, complex), "dtype complex128, which float32 cannot hold"),
        (SPACES[0], [[1], [2, 3]], "is no array|has shape"),
        (SPACES[0], None, "observation has shape"),
        (SPACES[1], np.full((2, 3, 4), 300), "dtype int64, which uint8 cannot hold"),
        (SPACES[5], 1.5, "dtype float64, which int64 cannot hold"),
        (SPACES[5], "3", "observation has dtype"),
        (SPACES[11], (1,), "legal is a tuple of 2 values"),
        (SPACES[12], {"a": 1}, r"missing: \['b'\]"),
        (SPACES[12], {"a": 1, "b": 1, "c": 2}, r"unknown: \['c'\]"),
        (SPACES[12], [1, 2], "legal is a dict with the keys"),
        (
            SPACES[12],
            {"a": (np.zeros(3, np.int8), {"": np.zeros(1)}), "b": 1},
            r"observation\['a'\]\[0\] has shape \(3,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(space, value, message):
    layout = Layout(space, "observation")
    with pytest.raises(Mismatch, match=message):
        layout.writer(layout.allocate(1))(0, value)


def test_keys_may_come_in_any_order():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Discrete(3)})
    columns = Layout(space, "observation").allocate(1)
    Layout(space, "observation").writer(columns)(0, {"b": 2, "a": 1})
    assert [int(column[0]) for column in columns] == [1, 2]


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (spaces.Discrete(2), np.array([0, 2]), "actions hold 2 in row 1; legal is Discrete.2.: from 0 to 1"),
        (spaces.Discrete(2, start=5), np.array([5, 0]), "hold 0 in row 1"),
        (spaces.Discrete(2), np.array([0.0, 1.0]), "dtype float64; legal is int64"),
        (spaces.Discrete(2), np.array([True, False]), "dtype bool"),
        (spaces.Discrete(2), np.array([0]), r"shape \(1,\); legal is \(2,\)"),
        (spaces.Discrete(2), np.array([[0], [1]]), r"shape \(2, 1\); legal is \(2,\)"),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [1, 3]]), r"hold \[1 3\] in row 1"),
        (spaces.MultiBinary(2), np.array([[0, 1], [2, 0]]), r"hold \[2 0\] in row 1"),
        (spaces.Box(-1, 1, (2,)), np.array([[0, 0], [np.nan, 0]]), "NaN or infinity in row 1"),
        (spaces.Box(-1, 1, (2,)), np.array([["a", "b"]] * 2), "dtype <U1"),
    ],
)
def test_actions_that_do_not_fit_are_refused_with_their_row(space, actions, message):
    with pytest.raises(Mismatch, match=message):
        Layout(space, "action").batch(actions, 2)


def test_only_bounded_boxes_are_clipped():
    space = spaces.Dict(
        {"free": spaces.Box(-np.inf, np.inf, (1,)), "half": spaces.Box(-np.inf, 1.0, (1,)), "k": spaces.Discrete(3)}
    )
    layout = Layout(space, "action")
    columns = layout.batch({"free": np.array([[99.0]]), "half": np.array([[99.0]]), "k": np.array([2])}, 1)
    assert [column.tolist() for column in layout.clip(columns)] == [[[99.0]], [[1.0]], [2]]


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Dict({"x": spaces.Text(3)})]
)
def test_a_space_without_a_fixed_record_is_refused(space):
    with pytest.raises(Mismatch, match="has no fixed record: observation.* is (Text|Sequence)"):
        Layout(space, "observation")
