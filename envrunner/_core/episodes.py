"""Which step belongs to which episode, and which environment plays which episode. Pure.

The rule that must hold (DESIGN promise 5): episode j of a call is given to an environment before
anyone plays, so that fast environments and short episodes are never favoured.
"""

from __future__ import annotations

import heapq

import numpy as np


def assign(episodes_so_far: np.ndarray, num_episodes: int) -> np.ndarray:
    """Environment of each episode: the one with the fewest so far, lowest index first.

    Args:
        episodes_so_far: `[N] int`, whole episodes each environment has played in earlier calls.
        num_episodes: how many this call asks for.

    Returns:
        `[num_episodes] int64` environment indices.

    >>> assign(np.array([0, 2, 0]), 5).tolist()
    [0, 2, 0, 2, 0]
    """
    heap = [(int(count), env) for env, count in enumerate(episodes_so_far)]
    heapq.heapify(heap)
    chosen = np.empty(num_episodes, np.int64)
    for j in range(num_episodes):
        count, env = heap[0]
        chosen[j] = env
        heapq.heapreplace(heap, (count + 1, env))
    return chosen


class EpisodeBook:
    """Per environment: number, length and return of the episode its latest step belongs to.

    Attributes:
        episode_id: `[N] int64`, from 0, one more at every reset.
        length: `[N] int64`, steps of this episode so far.
        total_reward: `[N] float64`, their rewards summed in order.
    """

    def __init__(self, num_envs: int) -> None:
        self.episode_id = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.total_reward = np.zeros(num_envs, np.float64)

    def stepped(self, ids: np.ndarray, rewards: np.ndarray) -> None:
        """These environments (each named once) finished a step."""
        self.length[ids] += 1
        self.total_reward[ids] += rewards

    def next_episode(self, ids: np.ndarray) -> None:
        """These environments begin another episode; nobody needs the last one's numbers any more."""
        self.episode_id[ids] += 1
        self.length[ids] = 0
        self.total_reward[ids] = 0.0
