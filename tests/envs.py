"""Environments of the tests: small, exact, and odd in one way each."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Count(gymnasium.Env):
    """Observation `[tag, t, episode]`, reward 1, an end at `t == length`.

    Args:
        end: "terminated", "truncated" or "both".
        reuse: hand out the same array every time.
        log: a file that gets one byte per step, and `<log>.closed` when closed.
        gate: a directory; a step waits until the file `<gate>/<tag>` is there.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, tag=0, length=5, *, end="terminated", reuse=False, log=None, gate=None, reset_gate=None, info=False
    ):
        self.tag, self.length, self.end, self.reuse, self.log, self.info = tag, length, end, reuse, log, info
        self.gate, self.reset_gate = gate, reset_gate
        self.episode, self.t = -1, 0
        self.buffer = np.zeros(3, np.float32)

    def _observation(self):
        if self.reuse:
            self.buffer[:] = (self.tag, self.t, self.episode)
            return self.buffer
        return np.array([self.tag, self.t, self.episode], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        if self.reset_gate and self.episode > 0:
            wait_for_file(os.path.join(self.reset_gate, str(self.tag)))
        return self._observation(), {"reset": self.episode, "seed": seed} if self.info else {}

    def step(self, action):
        if self.gate:
            wait_for_file(os.path.join(self.gate, str(self.tag)))
        self.t += 1
        if self.log:
            with open(self.log, "ab") as file:
                file.write(b"s")
        over = self.t >= self.length
        info = {"t": self.t, "text": "x" * 10} if self.info else {}
        return self._observation(), 1.0, over and self.end != "truncated", over and self.end != "terminated", info

    def close(self):
        if self.log:
            open(self.log + ".closed", "w").close()


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.001)


class Breaks(Count):
    """A Count that goes wrong in step `at` of its first episode (or in its constructor, or a reset)."""

    def __init__(self, tag=0, *, how, at=3, **options):
        super().__init__(tag, 1000, **options)
        self.how, self.at = how, at
        if how == "constructor":
            raise ValueError("boom-7421 in the constructor")

    def reset(self, *, seed=None, options=None):
        if self.how == "reset":
            raise ValueError("boom-7421 in reset")
        if self.how == "reset without info":
            return super().reset(seed=seed)[0]
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self.t != self.at:
            return observation, reward, terminated, truncated, info
        how = self.how
        if how == "raise":
            raise ValueError("boom-7421")
        if how == "unpicklable":
            raise Unpicklable("boom-7421", lambda: None)
        if how == "system exit":
            sys.exit(3)
        if how == "keyboard interrupt":
            raise KeyboardInterrupt
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "os._exit":
            os._exit(7)
        broken = {
            "shape": (observation[:2], reward, terminated, truncated, info),
            "broadcast": (np.float32(1.0), reward, terminated, truncated, info),
            "dtype": (observation.astype(np.complex64), reward, terminated, truncated, info),
            "none": (None, reward, terminated, truncated, info),
            "reward array": (observation, np.ones(2), terminated, truncated, info),
            "reward nan": (observation, np.nan, terminated, truncated, info),
            "reward none": (observation, None, terminated, truncated, info),
            "flag none": (observation, reward, None, truncated, info),
            "info none": (observation, reward, terminated, truncated, None),
            "four": (observation, reward, terminated, info),
        }
        return broken[how]


class Unpicklable(Exception):
    def __init__(self, text, extra):
        super().__init__(text)
        self.extra = extra

    def __reduce__(self):
        raise TypeError("this exception does not travel")


class Noise(gymnasium.Env):
    """Everything random there is: its own stream, its action space, and the global generators."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self, length=3, use_globals=True):
        self.length, self.use_globals, self.t = length, use_globals, 0

    def _observation(self):
        shared = (random.random(), np.random.random()) if self.use_globals else (0.0, 0.0)
        return np.array([self.np_random.random(), self.action_space.sample(), *shared])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        return self._observation(), self.np_random.random(), False, self.t >= self.length, {}


class Spaces(gymnasium.Env):
    """Samples from any observation space; checks that it gets actions its action space contains."""

    def __init__(self, observation_space, action_space, length=4):
        self.observation_space, self.action_space, self.length, self.t = observation_space, action_space, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), float(self.t), False, self.t >= self.length, {}


class WhatIsLoaded(Count):
    """Its info tells what its process has imported and where it runs."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        main = sys.modules["__main__"]
        return observation, reward, terminated, truncated, {
            "torch": "torch" in sys.modules,
            "main": getattr(main, "__file__", None),
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "pid": os.getpid(),
        }  # fmt: skip


def zeros(observations):
    """Action 0 for every row."""
    first = observations
    while isinstance(first, (dict, tuple)):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return np.zeros(len(first), np.int64)
