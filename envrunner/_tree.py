"""Nested observations and actions: dicts and tuples of arrays, walked in one fixed order.

A tree is a leaf (anything that is neither dict nor tuple), or a dict or tuple of trees. Dict
keys are walked in the dict's own order: Gymnasium's Dict space has sorted out what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, left to right."""
    if isinstance(tree, dict):
        for child in tree.values():
            yield from leaves(child)
    elif isinstance(tree, tuple):
        for child in tree:
            yield from leaves(child)
    else:
        yield tree


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`function(leaf, *other_leaves)` at every leaf; the other trees have the shape of the first."""
    if isinstance(tree, dict):
        return {key: map_tree(function, child, *(o[key] for o in others)) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, child, *(o[i] for o in others)) for i, child in enumerate(tree))
    return function(tree, *others)


def first_leaf(tree: Any) -> Any:
    """The leftmost leaf: enough to ask for a batch size."""
    return next(leaves(tree))


def stack(trees: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """One tree whose leaves are `function([leaf of each tree])`: `stack(rows, np.stack)`."""
    return map_tree(lambda *column: function(list(column)), *trees)
