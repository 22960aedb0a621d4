"""A space as columns: where each of its leaves lies in a record, and how values get in and out.

Decided here: which spaces have a fixed record (Box, Discrete, MultiDiscrete, MultiBinary, and Dict
and Tuple of those, nested), what counts as a legal value, what an environment is handed. Not here:
where the memory comes from (`_transport/slots.py`).
The rule that must hold: a value is stored as it is or refused; it is never broadcast, cut or guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from gymnasium import Space, spaces

from envrunner import _tree

Columns = list[np.ndarray]


class Mismatch(ValueError):
    """A value does not fit its space; the message says which leaf, what was got, what is legal."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a record: its place in the nesting, and what one environment's value looks like."""

    path: tuple[str | int, ...]
    space: Space[Any]
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return "".join(f"[{key!r}]" for key in self.path)

    def __str__(self) -> str:
        return f"{self.space}"


class Layout:
    """The record of one space: its leaves in order, and conversions between nested values and columns.

    Args:
        space: what one environment observes or is given.
        what: "observation" or "action": the word that messages use.
    """

    def __init__(self, space: Space[Any], what: str) -> None:
        self.space = space
        self.what = what
        self.leaves: tuple[Leaf, ...] = tuple(_find_leaves(space, (), what))
        self._skeleton = _skeleton(space, iter(range(len(self.leaves))))

    @property
    def signature(self) -> list[tuple[tuple[str | int, ...], str, tuple[int, ...]]]:
        """What two spaces must share to share a record: paths, dtypes and shapes."""
        return [(leaf.path, leaf.dtype.str, leaf.shape) for leaf in self.leaves]

    def allocate(self, *prefix: int) -> Columns:
        """Fresh zeroed columns, one per leaf: `[*prefix, *leaf.shape]`."""
        return [np.zeros((*prefix, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def nest(self, columns: Sequence[Any]) -> Any:
        """One value per leaf -> the space's own nesting of them."""
        return _tree.map_tree(lambda index: columns[index], self._skeleton)

    def flatten(self, tree: Any) -> list[Any]:
        """The space's nesting -> one value per leaf.

        Raises:
            Mismatch: a key is missing, one too many, or a dict or tuple is something else.
        """
        flat: list[Any] = []
        self._collect(self.space, tree, (), flat)
        return flat

    def _collect(self, space: Space[Any], value: Any, path: tuple[str | int, ...], flat: list[Any]) -> None:
        where = self.what + "".join(f"[{key!r}]" for key in path)
        if isinstance(space, spaces.Dict):
            if not isinstance(value, dict):
                raise Mismatch(f"{where} is {_describe(value)}; legal is a dict with the keys {list(space.spaces)}")
            if value.keys() != space.spaces.keys():
                missing, extra = space.spaces.keys() - value.keys(), value.keys() - space.spaces.keys()
                raise Mismatch(
                    f"{where} has the keys {list(value)}; legal are {list(space.spaces)}"
                    + (f"; missing: {sorted(map(str, missing))}" if missing else "")
                    + (f"; unknown: {sorted(map(str, extra))}" if extra else "")
                )
            for key, child in space.spaces.items():
                self._collect(child, value[key], (*path, key), flat)
        elif isinstance(space, spaces.Tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(space.spaces):
                raise Mismatch(f"{where} is {_describe(value)}; legal is a tuple of {len(space.spaces)} values")
            for index, child in enumerate(space.spaces):
                self._collect(child, value[index], (*path, index), flat)
        else:
            flat.append(value)

    def writer(self, columns: Sequence[np.ndarray]) -> Callable[[int, Any], None]:
        """`write(index, value)`: stores one environment's value in row `index` of the columns, strictly."""
        writers = [_leaf_writer(leaf, column, self.what) for leaf, column in zip(self.leaves, columns, strict=True)]
        if not isinstance(self.space, (spaces.Dict, spaces.Tuple)):
            return writers[0]

        def write(index: int, value: Any) -> None:
            for write_leaf, leaf_value in zip(writers, self.flatten(value), strict=True):
                write_leaf(index, leaf_value)

        return write

    def reader(self, columns: Sequence[np.ndarray]) -> Callable[[int], Any]:
        """`read(index)`: row `index` as a value the space contains, and the caller's own."""
        readers = [_leaf_reader(leaf, column) for leaf, column in zip(self.leaves, columns, strict=True)]
        if not isinstance(self.space, (spaces.Dict, spaces.Tuple)):
            return readers[0]
        return lambda index: self.nest([read_leaf(index) for read_leaf in readers])

    def batch(self, tree: Any, size: int) -> Columns:
        """A policy's answer for `size` environments as columns `[size, *leaf.shape]`, checked.

        Raises:
            Mismatch: wrong nesting, batch axis, shape or kind of number, NaN, or a discrete value
                outside its space. Box values beyond the bounds are legal here; `clip` is separate.
        """
        return [
            _check_batch(leaf, value, size, self.what)
            for leaf, value in zip(self.leaves, self.flatten(tree), strict=True)
        ]

    def clip(self, columns: Columns) -> Columns:
        """The columns with every bounded Box brought within its bounds; others untouched."""
        return [
            np.clip(column, leaf.space.low, leaf.space.high) if _is_bounded_box(leaf.space) else column
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]


def _find_leaves(space: Space[Any], path: tuple[str | int, ...], what: str) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, child in space.spaces.items() for leaf in _find_leaves(child, (*path, key), what)]
    if isinstance(space, spaces.Tuple):
        return [leaf for key, child in enumerate(space.spaces) for leaf in _find_leaves(child, (*path, key), what)]
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        assert space.dtype is not None and space.shape is not None
        return [Leaf(path, space, np.dtype(space.dtype), tuple(space.shape))]
    where = what + "".join(f"[{key!r}]" for key in path)
    raise Mismatch(
        f"the {what} space has no fixed record: {where} is {type(space).__name__}; legal are Box, Discrete, "
        "MultiDiscrete, MultiBinary, and Dict and Tuple of those. Encode it as one of them, for instance with "
        "gymnasium.wrappers.TransformObservation"
    )


def _skeleton(space: Space[Any], counter: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _skeleton(child, counter) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_skeleton(child, counter) for child in space.spaces)
    return next(counter)


def _leaf_writer(leaf: Leaf, column: np.ndarray, what: str) -> Callable[[int, Any], None]:
    dtype, shape, ndarray = leaf.dtype, leaf.shape, np.ndarray

    def write(index: int, value: Any) -> None:
        if type(value) is not ndarray or value.dtype != dtype or value.shape != shape:
            value = _check_value(leaf, value, what)
        column[index] = value

    return write


def _leaf_reader(leaf: Leaf, column: np.ndarray) -> Callable[[int], Any]:
    if isinstance(leaf.space, spaces.Discrete):
        return column.__getitem__  # a NumPy scalar, as in gymnasium.vector
    return lambda index: column[index, ...].copy()  # with `...` an array also where the shape is ()


def _check_value(leaf: Leaf, value: Any, what: str) -> np.ndarray:
    """The slow path of a write: an array of the leaf's shape and dtype, or a Mismatch."""
    where = what + leaf.name
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise Mismatch(f"{where} is {_describe(value)}, which is no array ({error}); legal is {leaf}") from None
    if array.shape != leaf.shape:
        raise Mismatch(f"{where} has shape {array.shape}; legal is {leaf.shape}, as its space {leaf} says")
    if np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        return array.astype(leaf.dtype, copy=False)
    if array.dtype.kind in "iub" and leaf.dtype.kind in "iub":
        cast = array.astype(leaf.dtype)
        if np.array_equal(cast, array):
            return cast
    raise Mismatch(f"{where} has dtype {array.dtype}, which {leaf.dtype} cannot hold; legal is {leaf}")


def _check_batch(leaf: Leaf, value: Any, size: int, what: str) -> np.ndarray:
    where = f"{what}s{leaf.name}"
    array = value if type(value) is np.ndarray else np.asarray(value)
    if array.shape != (size, *leaf.shape):
        raise Mismatch(
            f"{where} have shape {array.shape}; legal is {(size, *leaf.shape)}: "
            f"one {leaf.space} for each of the {size} environments asked about"
        )
    legal_kinds = "iu" if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)) else "iub"
    legal_kinds = "fiu" if leaf.dtype.kind == "f" else legal_kinds
    if array.dtype.kind not in legal_kinds:
        raise Mismatch(f"{where} have dtype {array.dtype}; legal is {leaf.dtype}, as in {leaf.space}")
    if array.dtype.kind == "f":
        if np.count_nonzero(np.isfinite(array)) != array.size:
            raise Mismatch(f"{where} hold NaN or infinity in row {_first_bad_row(~np.isfinite(array))}: {array!r:.200}")
        return array
    low, high = _integer_bounds(leaf.space)
    if low is not None and np.count_nonzero((array < low) | (array > high)):
        bad = _first_bad_row((array < low) | (array > high))
        raise Mismatch(f"{where} hold {array[bad]} in row {bad}; legal is {leaf.space}: {_range(low, high)}")
    return array


def _integer_bounds(space: Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None, None


def _range(low: Any, high: Any) -> str:
    return f"from {low} to {high}" if np.ndim(low) == 0 else f"from {np.ravel(low)} to {np.ravel(high)}"


def _first_bad_row(bad: np.ndarray) -> int:
    return int(np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))[0])


def _is_bounded_box(space: Space[Any]) -> TypeGuard[spaces.Box]:
    return isinstance(space, spaces.Box) and bool(space.bounded_below.any() or space.bounded_above.any())


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r:.60}"
