"""Advantages and returns of a block `[T, N]`: one equation, one function.

Decided here: where a recursion stops, and what is bootstrapped there. Not here: the values, which
the trainer computes: `values = V(obs)`, `next_values = V(next_obs)`, each row's own.

The rule that must hold: only `terminated` removes the bootstrap. A truncated row, a row before a
cut and the last row of a column all bootstrap from their own `next_values`, and nothing of
another episode's rewards ever enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    episode_id: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    *,
    gamma: float,
    lam: float,
) -> NDArray[np.float64]:
    """Generalized advantage estimates.

        delta_t = r_t + gamma * V(next_obs_t) * (1 - terminated_t) - V(obs_t)
        A_t     = delta_t + gamma * lam * A_{t+1} * (row t + 1 continues row t)

    Row t + 1 continues row t unless t terminated or was truncated, `episode_id` changes between
    them, or t is the last row of its column.

    Args:
        rewards: `[T, N]`, or `[T]` for one environment; all others have the same shape.
        values: V(obs).
        next_values: V(next_obs); where `terminated`, it is not looked at.
        terminated: the task ended with the row.
        truncated: the episode was cut from outside with the row.
        episode_id: None if no episode was cut without either flag.
        lengths: `[N]` valid rows per column; None if all are.
        gamma: discount, 0..1.
        lam: lambda, 0..1.

    Returns:
        `[T, N] float64` (`[T]` if rewards were), 0 in rows beyond `lengths`.

    Raises:
        ValueError: shapes differ, or gamma, lam or lengths are out of bounds.

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16.

    >>> # Row 1 is truncated: it bootstraps, 1 + 0.5 * 10, and row 2's reward stays out of row 0.
    >>> no, yes = False, True
    >>> gae([1, 1, 1], [0, 0, 0], [10, 10, 10], [no, no, no], [no, yes, no], gamma=0.5, lam=1.0).tolist()
    [9.0, 6.0, 6.0]
    """
    _check_fraction("gae", "gamma", gamma)
    _check_fraction("gae", "lam", lam)
    block = _Block.of("gae", rewards, next_values, terminated, truncated, episode_id, lengths)
    deltas = block.rewards + gamma * block.bootstraps - block.column("gae", "values", values)
    advantages = np.zeros_like(deltas)
    next_advantage = np.zeros(deltas.shape[1])
    for t in reversed(range(len(deltas))):
        next_advantage = deltas[t] + gamma * lam * np.where(block.continues[t], next_advantage, 0.0)
        advantages[t] = next_advantage
    return advantages.reshape(block.shape)


def n_step_returns(
    rewards: ArrayLike,
    next_values: ArrayLike,
    terminated: ArrayLike,
    truncated: ArrayLike,
    episode_id: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    *,
    gamma: float,
    n: int,
) -> NDArray[np.float64]:
    """Returns over the next n rewards, then a bootstrap.

        R_t = sum_{j < k} gamma^j * r_{t+j}  +  gamma^k * V(next_obs_{t+k-1}) * (1 - terminated_{t+k-1})

    k is n, or fewer where rows t, t + 1, ... stop continuing one another before (see `gae`).

    Args:
        rewards: `[T, N]`, or `[T]` for one environment; all others have the same shape.
        next_values: V(next_obs); where `terminated`, it is not looked at.
        terminated: the task ended with the row.
        truncated: the episode was cut from outside with the row.
        episode_id: None if no episode was cut without either flag.
        lengths: `[N]` valid rows per column; None if all are.
        gamma: discount, 0..1.
        n: rewards at most, 1 or more; n >= T runs to the end of each episode or column.

    Returns:
        `[T, N] float64` (`[T]` if rewards were), 0 in rows beyond `lengths`.

    Raises:
        ValueError: shapes differ, or gamma, n or lengths are out of bounds.

    Source: Sutton and Barto 2018, equation 7.1.

    >>> # Two rewards, then 0.25 * 8; row 1 terminates: 1 alone; row 2 is the last: 1 + 0.5 * 8.
    >>> no, yes = False, True
    >>> n_step_returns([1, 1, 1], [8, 8, 8], [no, yes, no], [no, no, no], gamma=0.5, n=2).tolist()
    [1.5, 1.0, 5.0]
    """
    _check_fraction("n_step_returns", "gamma", gamma)
    if n < 1:
        raise ValueError(f"n_step_returns: n is {n}; legal is an int >= 1, and 1 is the one-step target")
    block = _Block.of("n_step_returns", rewards, next_values, terminated, truncated, episode_id, lengths)
    num_steps = len(block.rewards)
    returns = np.zeros_like(block.rewards)
    reaches = np.ones(block.rewards.shape, bool)  # row t's sum reaches row t + j
    for j in range(min(n, num_steps)):
        here, ahead = slice(0, num_steps - j), slice(j, num_steps)
        goes_on = block.continues[ahead] if j + 1 < n else np.zeros_like(block.continues[ahead])
        bootstraps = np.where(goes_on, 0.0, block.bootstraps[ahead])
        returns[here] += np.where(reaches[here], gamma**j * (block.rewards[ahead] + gamma * bootstraps), 0.0)
        reaches[here] &= goes_on
    return returns.reshape(block.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    """The inputs that every estimate needs, checked, as `[T, N]`; all 0 in rows beyond `lengths`.

    Attributes:
        shape: of the caller's rewards, `(T, N)` or `(T,)`.
        valid: the rows within `lengths`.
        rewards: float64.
        bootstraps: V(next_obs), and 0 where the row terminated.
        continues: row t + 1 continues row t.
    """

    shape: tuple[int, ...]
    valid: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    bootstraps: NDArray[np.float64]
    continues: NDArray[np.bool_]

    @staticmethod
    def of(
        who: str,
        rewards: ArrayLike,
        next_values: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        episode_id: ArrayLike | None,
        lengths: ArrayLike | None,
    ) -> _Block:
        shape = tuple(np.shape(rewards))
        if len(shape) not in (1, 2):
            raise ValueError(f"{who}: rewards has shape {shape}; legal is [T, N], or [T] for one environment")
        ends = _as_block(who, "terminated", terminated, shape).astype(bool)
        cuts = _as_block(who, "truncated", truncated, shape).astype(bool)
        num_steps, num_envs = ends.shape
        valid = np.arange(num_steps)[:, None] < _checked_lengths(who, lengths, num_steps, num_envs)
        continues = ~ends & ~cuts
        continues[:-1] &= valid[1:]
        continues[-1:] = False
        if episode_id is not None:
            episodes = _as_block(who, "episode_id", episode_id, shape)
            continues[:-1] &= episodes[1:] == episodes[:-1]
        return _Block(
            shape=shape,
            valid=valid,
            rewards=_where(valid, _as_block(who, "rewards", rewards, shape)),
            bootstraps=_where(valid & ~ends, _as_block(who, "next_values", next_values, shape)),
            continues=continues & valid,
        )

    def column(self, who: str, name: str, array: ArrayLike) -> NDArray[np.float64]:
        """Another input of the same shape, as float64, 0 in rows beyond `lengths`."""
        return _where(self.valid, _as_block(who, name, array, self.shape))


def _where(mask: NDArray[np.bool_], block: NDArray[Any]) -> NDArray[np.float64]:
    """`block` as float64, 0 outside `mask`: a choice, not a product, for NaN * 0 is NaN."""
    return np.where(mask, block.astype(np.float64), 0.0)


def _as_block(who: str, name: str, array: ArrayLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """`array` as `[T, N]`, whatever its dtype."""
    result = np.asarray(array)
    if result.shape != shape:
        raise ValueError(
            f"{who}: {name} has shape {result.shape}; legal is {shape}, the shape of rewards: "
            "pass one number per row, without broadcasting"
        )
    return result.reshape(shape if len(shape) == 2 else (*shape, 1))


def _checked_lengths(who: str, lengths: ArrayLike | None, num_steps: int, num_envs: int) -> NDArray[np.int64]:
    if lengths is None:
        return np.full(num_envs, num_steps)
    result = np.asarray(lengths)
    if result.size != num_envs or result.ndim > 1 or result.dtype.kind not in "iu":
        raise ValueError(
            f"{who}: lengths is {result.dtype} of shape {result.shape}; legal are {num_envs} ints, one for each column"
        )
    if result.size and not 0 <= result.min() <= result.max() <= num_steps:
        raise ValueError(f"{who}: lengths are {result.tolist()}; legal is 0..{num_steps}, the number of rows")
    return result.astype(np.int64).reshape(num_envs)


def _check_fraction(who: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{who}: {name} is {value}; legal is 0..1")
