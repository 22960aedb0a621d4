"""Steps per second of the complete acting loop, against a plain loop and gymnasium's vector environments.

Question: what does a trainer get per second, when every step is an observation, a policy call
(sampled action, log-prob, value) and a row in arrays `[T, N, ...]`?
Prediction: on cheap environments gymnasium's AsyncVectorEnv pays more for its pipes than for the
environments; MultiAgentEnvLoop pays little enough to keep up with a plain loop on two cores, or pass it.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --env-id HalfCheetah-v5 --num-envs 8 --json runs/throughput.json

All contestants run in this process in turn, window by window, so that a noisy machine is noisy for
all of them; ratios are taken within a round of windows. `plain` is the loop that people write: all
environments in this process, an eager torch policy, `torch.distributions`. `plain, lean policy` is the
same with the policy head of TorchPolicy: what is left is the loop's own doing. Torch has one thread
for every contestant, which is quickest for a network this small, and by far so on a busy machine.
Environments come from `gymnasium.make`, with its default wrappers, for every contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import envrunner
from envrunner import MultiAgentEnvLoop, TorchPolicy


class Net(nn.Module):
    """Two hidden layers of 64, a policy head and a value head."""

    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        super().__init__()
        self.is_discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        num_outputs = int(action_space.n) if self.is_discrete else int(np.prod(action_space.shape))
        num_inputs = int(np.prod(observation_space.shape))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, num_outputs), nn.Linear(64, 1)
        self.log_std = nn.Parameter(torch.full((num_outputs,), -0.5))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(obs.float())
        value = self.value(hidden).squeeze(-1)
        return (self.policy(hidden), value) if self.is_discrete else (self.policy(hidden), self.log_std, value)


Act = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]  # obs -> actions, log_probs, values


def eager_policy(net: Net) -> Act:
    """What most training scripts do."""

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with torch.no_grad():
            outputs = net(torch.as_tensor(obs))
            if net.is_discrete:
                distribution = torch.distributions.Categorical(logits=outputs[0])
                action = distribution.sample()
                log_prob = distribution.log_prob(action)
            else:
                normal = torch.distributions.Normal(outputs[0], outputs[1].exp())
                action = normal.sample()
                log_prob = normal.log_prob(action).sum(-1)
        return action.numpy(), log_prob.numpy(), outputs[-1].numpy()

    return act


def lean_policy(policy: TorchPolicy) -> Act:
    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        output = policy.action(obs, False)
        return output.actions, output.context["log_prob"], output.context["value"]

    return act


class Storage:
    """`[T, N, ...]` arrays, as CleanRL keeps them."""

    def __init__(self, num_steps: int, num_envs: int, envs: Any) -> None:
        shape = (num_steps, num_envs)
        self.obs = np.zeros((*shape, *envs.single_observation_space.shape), envs.single_observation_space.dtype)
        self.actions = np.zeros((*shape, *envs.single_action_space.shape), np.float32)
        self.log_probs, self.values, self.rewards = (np.zeros(shape, np.float32) for _ in range(3))
        self.dones = np.zeros(shape, np.bool_)


class PlainVector:
    """N environments in this process, stepped one after the other: the plain loop."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        self.envs = [gymnasium.make(env_id) for _ in range(num_envs)]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self._low = getattr(self.single_action_space, "low", None)
        self._high = getattr(self.single_action_space, "high", None)

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        return np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        num_envs = len(self.envs)
        obs = np.empty((num_envs, *self.single_observation_space.shape), self.single_observation_space.dtype)
        rewards = np.empty(num_envs)
        terminations, truncations = np.empty(num_envs, np.bool_), np.empty(num_envs, np.bool_)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminations[i], truncations[i], _ = env.step(actions[i])
            if terminations[i] or truncations[i]:
                obs[i], _ = env.reset()
        return obs, rewards, terminations, truncations, {}

    def close(self) -> None:
        for env in self.envs:
            env.close()


def vector_contestant(envs: Any, act: Act, num_envs: int, num_steps: int) -> Iterator[int]:
    """Yields the number of steps after every block of `num_steps`."""
    storage = Storage(num_steps, num_envs, envs)
    obs, _ = envs.reset(seed=0)
    low, high = getattr(envs.single_action_space, "low", None), getattr(envs.single_action_space, "high", None)
    while True:
        for step in range(num_steps):
            actions, log_probs, values = act(obs)
            storage.obs[step], storage.actions[step] = obs, actions
            storage.log_probs[step], storage.values[step] = log_probs, values
            env_actions = actions if low is None else np.clip(actions, low, high)
            obs, rewards, terminations, truncations, _ = envs.step(env_actions)
            storage.rewards[step], storage.dones[step] = rewards, terminations | truncations
        yield num_envs * num_steps


def loop_contestant(loop: MultiAgentEnvLoop, num_envs: int, num_steps: int) -> Iterator[int]:
    while True:
        loop.run_rollout(num_steps)
        yield num_envs * num_steps


def measure(contestant: Iterator[int], seconds: float) -> float:
    """Steps per second over whole blocks for at least `seconds`."""
    steps, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds or steps == 0:
        steps += next(contestant)
    return steps / took


def ratio_to(rates: dict[str, list[float]], name: str, other: str) -> tuple[float, float, float]:
    """Median, lowest and highest of the ratio within each round."""
    ratios = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=None, help="of MultiAgentEnvLoop; default: its own choice")
    parser.add_argument("--num-steps", type=int, default=64, help="length of a block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="per window")
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    args = parser.parse_args()

    torch.set_num_threads(1)
    n, t = args.num_envs, args.num_steps
    sync_envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(args.env_id)] * n)
    net = Net(sync_envs.single_observation_space, sync_envs.single_action_space)
    head = "categorical" if net.is_discrete else "gaussian"
    began = time.perf_counter()
    loop = MultiAgentEnvLoop(args.env_id, TorchPolicy(net, head), n, num_workers=args.num_workers, seed=0)
    start_up = time.perf_counter() - began
    async_envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make(args.env_id)] * n)
    plain, plain_lean = PlainVector(args.env_id, n), PlainVector(args.env_id, n)
    contestants = {
        "plain loop": vector_contestant(plain, eager_policy(net), n, t),
        "plain loop, lean policy": vector_contestant(plain_lean, lean_policy(TorchPolicy(net, head)), n, t),
        "gymnasium SyncVectorEnv": vector_contestant(sync_envs, eager_policy(net), n, t),
        "gymnasium AsyncVectorEnv": vector_contestant(async_envs, eager_policy(net), n, t),
        "envrunner MultiAgentEnvLoop": loop_contestant(loop, n, t),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(-1, args.rounds):  # one round to warm up
        for name, contestant in contestants.items():
            rate = measure(contestant, args.seconds)
            if round_number >= 0:
                rates[name].append(rate)
        if sys.stderr.isatty():
            print(f"\rround {round_number + 1} of {args.rounds}", end="", file=sys.stderr, flush=True)

    facts = {
        "command": " ".join(["python", *sys.argv]),
        "env_id": args.env_id,
        "num_envs": n,
        "num_steps": t,
        "num_workers": loop.num_workers,
        "rounds": args.rounds,
        "seconds_per_window": args.seconds,
        "mean_batch_size": loop.stats.mean_batch_size,
        "start_up_seconds": start_up,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "envrunner": envrunner.__version__,
            "gymnasium": gymnasium.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
    print(f"\r{args.env_id}, {n} environments, {facts['cores']} cores, {loop.num_workers} workers; {facts['versions']}")
    print(f"{args.rounds} rounds of {args.seconds:g} s each; median (lowest to highest)\n")
    print(f"{'':30}{'steps/s':>28}{'x plain loop':>24}")
    for name in contestants:
        median, ratios = statistics.median(rates[name]), ratio_to(rates, name, "plain loop")
        spread = f"{median:,.0f} ({min(rates[name]):,.0f} to {max(rates[name]):,.0f})"
        print(f"{name:30}{spread:>28}{f'{ratios[0]:.2f} ({ratios[1]:.2f} to {ratios[2]:.2f})':>24}")
    ours = "envrunner MultiAgentEnvLoop"
    print(
        f"\nenvrunner is {ratio_to(rates, ours, 'gymnasium AsyncVectorEnv')[0]:.1f} x gymnasium AsyncVectorEnv, ",
        end="",
    )
    print(
        f"{ratio_to(rates, ours, 'plain loop, lean policy')[0]:.2f} x a plain loop with the same policy head; ", end=""
    )
    print(
        f"{n} environments were ready in {start_up:.2f} s; {loop.stats.mean_batch_size:.1f} environments per forward pass."
    )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**facts, "steps_per_second": rates}, indent=2))
        print(f"wrote {args.json}")

    loop.close()
    for envs in (sync_envs, async_envs, plain, plain_lean):
        envs.close()


if __name__ == "__main__":
    main()
