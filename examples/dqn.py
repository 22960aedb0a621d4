"""Double DQN (van Hasselt et al. 2015, arXiv:1509.06461) on a MultiAgentEnvLoop, in one file.

    python examples/dqn.py                                  # CartPole-v1, 150,000 steps
    python examples/dqn.py --stop-at 400                    # end once the last 100 episodes average that
    python examples/dqn.py --env-id Acrobot-v1
    python examples/dqn.py --checkpoint runs/dqn.pt         # stop it when you like, then
    python examples/dqn.py --checkpoint runs/dqn.pt --resume

Flat Box observations, Discrete actions. Every environment explores at a rate of its own, as in
Ape-X (Horgan et al. 2018, arXiv:1803.00933): the policy is told which environments its rows
belong to (`env_ids`), and the rate travels to it with the weights.

On CartPole the mean return of the last 100 episodes passes 400 after 70,000 to 105,000 steps (five
seeds), and mostly falls again later: a network that sees nothing but success forgets what failure
looks like. Stop when it is good, or take the best checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from envrunner import MultiAgentEnvLoop, PolicyOutput, Progress, TransitionBuffer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Double DQN on any Gymnasium environment with flat observations.")
    flag = parser.add_argument
    flag("--env-id", default="CartPole-v1")
    flag("--total-steps", type=int, default=150_000)
    flag("--num-envs", type=int, default=8, help="environments side by side")
    flag("--seed", type=int, default=0)
    flag("--learning-rate", type=float, default=1e-3, help="falls linearly to a tenth")
    flag("--buffer-size", type=int, default=100_000)
    flag("--learning-starts", type=int, default=2_000, help="steps before the first gradient")
    flag("--steps-per-update", type=int, default=64, help="steps of all environments together between updates")
    flag("--gradients-per-update", type=int, default=16)
    flag("--batch-size", type=int, default=64)
    flag("--gamma", type=float, default=0.99)
    flag("--target-rate", type=float, default=0.01, help="how far the target network follows Q at each gradient")
    flag("--epsilon-last", type=float, default=0.05, help="exploration of environment 0 once it has fallen from 1")
    flag("--epsilon-steps", type=int, default=10_000, help="steps over which it falls")
    flag(
        "--epsilon-spread",
        type=float,
        default=3.0,
        help="environment i of N explores at epsilon ** (1 + spread * i / (N - 1))",
    )
    flag("--stop-at", type=float, help="end when the mean return of the last 100 episodes has reached this")
    flag("--eval-every", type=int, default=25_000)
    flag("--eval-episodes", type=int, default=10)
    flag("--checkpoint", type=Path, help="written here after every evaluation and at the end")
    flag("--resume", action="store_true", help="go on from --checkpoint")
    flag("--csv", type=Path, help="write every episode to this file: step, return, length")
    flag("--device", default="cpu")
    args = parser.parse_args(argv)
    if args.resume and (args.checkpoint is None or not args.checkpoint.exists()):
        parser.error(f"--resume goes on from --checkpoint, but there is no file {args.checkpoint}")
    return args


# ---------------------------------------------------------------------------- how it acts


def q_network(obs_space: gym.Space, action_space: gym.Space) -> nn.Sequential:
    if not isinstance(obs_space, gym.spaces.Box) or not isinstance(action_space, gym.spaces.Discrete):
        raise SystemExit(f"dqn.py needs Box observations and Discrete actions, not {obs_space} and {action_space}")
    num_obs = int(np.prod(obs_space.shape))
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_obs, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, int(action_space.n)),
    )


class EpsilonGreedy:
    """A policy of our own: all that a loop needs is `action`, `forward`, `update` and `state`."""

    def __init__(self, q: nn.Module, num_envs: int, spread: float, device: str) -> None:
        self.q = copy.deepcopy(q)
        self.exponents = 1.0 + spread * np.arange(num_envs) / max(1, num_envs - 1)
        self.device = device
        self.epsilon = 1.0
        self.generator = np.random.default_rng()

    def forward(self, obs: np.ndarray) -> np.ndarray:
        """Q-values, `[B, num_actions]`."""
        with torch.inference_mode():
            return self.q(torch.as_tensor(obs, dtype=torch.float32, device=self.device)).cpu().numpy()

    def action(self, obs: np.ndarray, deterministic: bool, *, env_ids: np.ndarray | None = None) -> PolicyOutput:
        q_values = self.forward(obs)
        actions = q_values.argmax(axis=1)
        if not deterministic:
            exponents = self.exponents[0] if env_ids is None else self.exponents[env_ids]
            explore = self.generator.random(len(actions)) < self.epsilon**exponents
            actions = np.where(explore, self.generator.integers(q_values.shape[1], size=len(actions)), actions)
        return PolicyOutput(actions)

    def seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def update(self, state: dict[str, Any]) -> None:
        self.q.load_state_dict(state["q"])
        self.epsilon = state["epsilon"]
        if "generator" in state:  # only when going on from a checkpoint
            self.generator.bit_generator.state = state["generator"]

    def state(self) -> dict[str, Any]:
        return {"q": self.q.state_dict(), "epsilon": self.epsilon, "generator": self.generator.bit_generator.state}


# ---------------------------------------------------------------------------- how it learns


def train(args: argparse.Namespace) -> tuple[list[tuple[int, float, int]], list[float]]:
    """Train; returns (step, return, length) of every episode, and the last evaluation's returns."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # nets this small are quickest on one thread, and the environments want the cores
    with gym.make(args.env_id) as env:
        q = q_network(env.observation_space, env.action_space).to(args.device)
    target_q = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    buffer = TransitionBuffer(args.buffer_size, seed=args.seed)
    step = 0
    episodes: list[tuple[int, float, int]] = []
    eval_returns: list[float] = []

    # Everything that learns goes on exactly where the checkpoint was made; the environments begin
    # fresh episodes, on seeds that no earlier part of the run has used.
    saved = torch.load(args.checkpoint, map_location=args.device, weights_only=False) if args.resume else None
    if saved is not None:
        q.load_state_dict(saved["q"])
        target_q.load_state_dict(saved["target_q"])
        optimizer.load_state_dict(saved["optimizer"])
        buffer.load_state_dict(saved["buffer"])  # with the generator that it samples by
        step, episodes, eval_returns = saved["step"], saved["episodes"], saved["eval_returns"]

    def epsilon() -> float:
        return max(args.epsilon_last, 1.0 - (1.0 - args.epsilon_last) * step / args.epsilon_steps)

    progress = Progress(items_total=args.total_steps, unit="steps")
    progress.advance(step)
    policy = EpsilonGreedy(q, args.num_envs, args.epsilon_spread, args.device)
    greedy = EpsilonGreedy(q, args.num_envs, args.epsilon_spread, args.device)
    with (
        MultiAgentEnvLoop(args.env_id, policy, num_envs=args.num_envs, seed=args.seed + step) as loop,
        MultiAgentEnvLoop(args.env_id, greedy, num_envs=args.eval_episodes, eval=True, deterministic=True) as eval_loop,
        progress.bar(desc=f"DQN on {args.env_id}") as bar,
    ):
        if saved is not None:
            loop.update_policy(saved["policy"])

        while step < args.total_steps:
            # A few steps of whichever environments are ready; all of them compute on while we learn.
            steps = loop.run_steps(min(args.steps_per_update, args.total_steps - step), progress=progress)
            buffer.extend(steps)
            previous, step = step, step + len(steps)
            episodes += [(step, e.total_reward, e.length) for e in steps.episodes]
            return_100 = float(np.mean([e[1] for e in episodes[-100:]])) if episodes else float("-inf")
            bar.set_postfix(return_100=f"{return_100:.1f}")
            is_over = step == args.total_steps
            if args.stop_at is not None and len(episodes) >= 100:
                is_over |= return_100 >= args.stop_at

            if step >= args.learning_starts:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - 0.9 * step / args.total_steps)
                for _ in range(args.gradients_per_update):
                    batch = buffer.sample(args.batch_size).to_torch(args.device)
                    with torch.no_grad():
                        # Q picks the next action, the target network says what it is worth. Only a
                        # terminated row has nothing after it; a truncated one goes on from next_obs.
                        next_actions = q(batch.next_obs.float()).argmax(1, keepdim=True)
                        next_values = target_q(batch.next_obs.float()).gather(1, next_actions).squeeze(1)
                        targets = batch.reward + args.gamma * next_values * ~batch.terminated
                    values = q(batch.obs.float()).gather(1, batch.action.view(-1, 1)).squeeze(1)
                    loss = nn.functional.smooth_l1_loss(values, targets)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    with torch.no_grad():
                        for follower, leader in zip(target_q.parameters(), q.parameters(), strict=True):
                            follower.lerp_(leader, args.target_rate)
            loop.update_policy({"q": q.state_dict(), "epsilon": epsilon()})

            if step // args.eval_every > previous // args.eval_every or is_over:
                eval_loop.update_policy({"q": q.state_dict(), "epsilon": 0.0})
                played = eval_loop.run_episodes(args.eval_episodes, seeds=range(10_000, 10_000 + args.eval_episodes))
                eval_returns = [episode.summary.total_reward for episode in played]
                bar.write(f"{step:>8} steps: evaluation, mean return {np.mean(eval_returns):.1f}")
                if args.checkpoint:
                    save(
                        args.checkpoint,
                        q=q.state_dict(),
                        target_q=target_q.state_dict(),
                        optimizer=optimizer.state_dict(),
                        policy=loop.policy(),
                        buffer=buffer.state_dict(),
                        step=step,
                        episodes=episodes,
                        eval_returns=eval_returns,
                    )
            if is_over:
                break
    return episodes, eval_returns


def save(path: Path, **state: Any) -> None:
    """The file is there whole or not at all: an end in the middle of writing leaves the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    episodes, eval_returns = train(args)
    if episodes:
        last = [episode_return for _, episode_return, _ in episodes[-100:]]
        print(f"training:   mean return {np.mean(last):.1f} over the last {len(last)} of {len(episodes)} episodes")
    if eval_returns:
        print(f"evaluation: mean return {np.mean(eval_returns):.1f} over {len(eval_returns)} episodes")
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("step", "return", "length"), *episodes])
        print(f"episodes: {args.csv}")


if __name__ == "__main__":
    main()
