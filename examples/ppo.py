"""PPO (Schulman et al. 2017, arXiv:1707.06347) on a MultiAgentEnvLoop, in one file, top to bottom.

    python examples/ppo.py                                  # CartPole-v1, 200,000 steps
    python examples/ppo.py --env-id Acrobot-v1
    python examples/ppo.py --env-id Pendulum-v1 --gamma 0.9 --reward-scale 0.1 --normalize-obs

Flat Box observations; Discrete or Box actions. While this script computes gradients, every
environment already computes its next step: the first row of each column was therefore chosen by
the weights of one update ago. The ratio below is taken against the log-prob that was recorded
when the action was chosen, so those rows are treated rightly.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from envrunner import MultiAgentEnvLoop, Progress, TorchPolicy
from envrunner.returns import gae


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on any Gymnasium environment with flat observations.")
    flag = parser.add_argument
    flag("--env-id", default="CartPole-v1")
    flag("--total-steps", type=int, default=200_000)
    flag("--num-envs", type=int, default=8, help="environments side by side (N)")
    flag("--num-steps", type=int, default=128, help="steps per environment and update (T)")
    flag("--seed", type=int, default=0)
    flag("--learning-rate", type=float, default=1e-3, help="falls linearly to 0")
    flag("--num-epochs", type=int, default=10, help="passes over each block")
    flag("--minibatch-size", type=int, default=256)
    flag("--gamma", type=float, default=0.99)
    flag("--gae-lambda", type=float, default=0.95)
    flag("--clip", type=float, default=0.2, help="how far the ratio may leave 1")
    flag("--entropy-coef", type=float, default=0.0)
    flag("--value-coef", type=float, default=0.5)
    flag("--max-grad-norm", type=float, default=0.5)
    flag("--reward-scale", type=float, default=1.0, help="the learner sees reward * scale; reports do not")
    flag("--normalize-obs", action="store_true", help="by the running mean and deviation of each component")
    flag("--eval-episodes", type=int, default=20)
    flag("--curve", type=Path, help="write the learning curve to this PNG (needs matplotlib)")
    flag("--csv", type=Path, help="write every episode to this file: step, return, length")
    flag("--device", default="cpu")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------- the agent


def mlp(num_in: int, num_out: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers of 64, orthogonal weights."""
    sizes, gains = [num_in, 64, 64, num_out], [2**0.5, 2**0.5, last_gain]
    layers: list[nn.Module] = []
    for fan_in, fan_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """`forward` answers what TorchPolicy's heads expect: (logits, value) or (mean, log_std, value).

    The statistics of the observations are buffers, so they travel to the policy with the weights.
    """

    def __init__(self, obs_space: gym.Space, action_space: gym.Space) -> None:
        super().__init__()
        if not isinstance(obs_space, gym.spaces.Box):
            raise SystemExit(
                f"ppo.py needs Box observations, not {obs_space}; wrap the environment, or see custom_env.py"
            )
        num_obs = int(np.prod(obs_space.shape))
        self.act = "categorical" if isinstance(action_space, gym.spaces.Discrete) else "gaussian"
        num_actions = int(action_space.n) if self.act == "categorical" else int(np.prod(action_space.shape))
        self.actor = mlp(num_obs, num_actions, last_gain=0.01)
        self.critic = mlp(num_obs, 1, last_gain=1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.register_buffer("obs_mean", torch.zeros(num_obs))
        self.register_buffer("obs_var", torch.ones(num_obs))
        self.register_buffer("obs_count", torch.tensor(0.0))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.normalize(obs)
        value = self.critic(x).squeeze(-1)
        if self.act == "categorical":
            return self.actor(x), value
        mean = self.actor(x)
        return mean, self.log_std.expand_as(mean), value

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        x = (obs.flatten(1).float() - self.obs_mean) / torch.sqrt(self.obs_var + 1e-8)
        return x.clamp(-10.0, 10.0) if self.obs_count > 0 else x

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(self.normalize(obs)).squeeze(-1)

    def observe(self, obs: torch.Tensor) -> None:
        """Add a batch to the running mean and variance (Chan et al. 1979)."""
        x = obs.flatten(1).float()
        total = self.obs_count + len(x)
        delta = x.mean(0) - self.obs_mean
        spread = self.obs_var * self.obs_count + x.var(0, unbiased=False) * len(x)
        self.obs_var.copy_((spread + delta**2 * self.obs_count * len(x) / total) / total)
        self.obs_mean.add_(delta * len(x) / total)
        self.obs_count.copy_(total)

    def distribution(self, outputs: tuple[torch.Tensor, ...]) -> Distribution:
        if self.act == "categorical":
            return Categorical(logits=outputs[0])
        return Independent(Normal(outputs[0], outputs[1].exp()), 1)


def train(args: argparse.Namespace) -> tuple[list[tuple[int, float, int]], list[float]]:
    """Train, evaluate; returns (step, return, length) of every episode, and the evaluation's returns."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # nets this small are quickest on one thread, and the environments want the cores
    with gym.make(args.env_id) as env:
        agent = Agent(env.observation_space, env.action_space).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    num_updates = max(1, args.total_steps // (args.num_envs * args.num_steps))
    progress = Progress(items_total=num_updates * args.num_envs * args.num_steps, unit="steps")
    episodes: list[tuple[int, float, int]] = []

    # ------------------------------------------------------------------------ the loop
    policy = TorchPolicy(agent, act=agent.act, device=args.device)
    with (
        MultiAgentEnvLoop(args.env_id, policy, num_envs=args.num_envs, seed=args.seed) as loop,
        progress.bar(desc=f"PPO on {args.env_id}") as bar,
    ):
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / num_updates)

            # T steps of each environment, [T, N, ...].
            block = loop.run_rollout(args.num_steps, progress=progress)
            episodes += [(progress.items_processed, e.total_reward, e.length) for e in block.episodes]
            if episodes:
                return_100 = float(np.mean([episode_return for _, episode_return, _ in episodes[-100:]]))
                bar.set_postfix(return_100=f"{return_100:.1f}")
                if (
                    bar.disable and 10 * (update + 1) // num_updates > 10 * update // num_updates
                ):  # no terminal, so no bar
                    print(f"{progress.items_processed} steps: mean return of the last 100 episodes {return_100:.1f}")

            # next_obs is the environment's true last observation also where an episode was cut off,
            # so a truncated episode is bootstrapped from where it was, a terminated one not at all.
            obs = torch.as_tensor(block.obs, device=args.device).flatten(0, 1)
            next_obs = torch.as_tensor(block.next_obs, device=args.device).flatten(0, 1)
            with torch.no_grad():
                values, next_values = agent.value(obs), agent.value(next_obs)
            advantages = gae(
                block.reward * args.reward_scale,
                values.cpu().numpy().reshape(block.reward.shape),
                next_values.cpu().numpy().reshape(block.reward.shape),
                block.terminated,
                block.truncated,
                block.episode_id,
                gamma=args.gamma,
                lam=args.gae_lambda,
            )

            # The update: the block's rows in random order, a few times over.
            actions = torch.as_tensor(block.action, device=args.device).flatten(0, 1)
            old_log_probs = torch.as_tensor(block.action_context["log_prob"], device=args.device).flatten()
            advantages = torch.as_tensor(advantages, dtype=torch.float32, device=args.device).flatten()
            targets = advantages + values
            for _ in range(args.num_epochs):
                for rows in torch.randperm(len(obs), device=args.device).split(args.minibatch_size):
                    outputs = agent(obs[rows])
                    distribution, new_values = agent.distribution(outputs), outputs[-1]
                    ratio = torch.exp(distribution.log_prob(actions[rows]) - old_log_probs[rows])
                    advantage = advantages[rows]
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    clipped = ratio.clamp(1.0 - args.clip, 1.0 + args.clip)
                    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
                    value_loss = 0.5 * (new_values - targets[rows]).square().mean()
                    entropy = distribution.entropy().mean()
                    loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

            if args.normalize_obs:
                agent.observe(obs)
            loop.update_policy(agent.state_dict())

    # ------------------------------------------------------------------------ how good is it
    # Episode j is reset with seed 10,000 + j and acted greedily.
    with MultiAgentEnvLoop(
        args.env_id,
        TorchPolicy(agent, act=agent.act, device=args.device),
        num_envs=min(args.num_envs, args.eval_episodes),
        eval=True,
        deterministic=True,
    ) as eval_loop:
        played = eval_loop.run_episodes(args.eval_episodes, seeds=range(10_000, 10_000 + args.eval_episodes))
    return episodes, [episode.summary.total_reward for episode in played]


def draw_curve(path: Path, args: argparse.Namespace, episodes: list[tuple[int, float, int]], eval_mean: float) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no learning curve: matplotlib is missing (pip install 'envrunner-rl[plot]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, returns, _ = map(np.array, zip(*episodes, strict=True))
    mean_100 = [returns[max(0, i - 99) : i + 1].mean() for i in range(len(returns))]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, returns, ".", markersize=3, color="tab:blue", alpha=0.3, label="one episode")
    axes.plot(steps, mean_100, color="tab:blue", linewidth=2, label="mean of the last 100")
    axes.axhline(eval_mean, color="tab:orange", linestyle="--", label=f"evaluation after training: {eval_mean:.1f}")
    axes.set(title=f"PPO on {args.env_id}, seed {args.seed}", xlabel="environment steps", ylabel="return of an episode")
    axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"learning curve: {path}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    episodes, eval_returns = train(args)
    if episodes:
        last = [episode_return for _, episode_return, _ in episodes[-100:]]
        print(f"training:   mean return {np.mean(last):.1f} over the last {len(last)} of {len(episodes)} episodes")
    if eval_returns:
        print(
            f"evaluation: mean return {np.mean(eval_returns):.1f} over {len(eval_returns)} episodes, "
            f"from {min(eval_returns):.1f} to {max(eval_returns):.1f}"
        )
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("step", "return", "length"), *episodes])
        print(f"episodes: {args.csv}")
    if args.curve and episodes:
        draw_curve(args.curve, args, episodes, float(np.mean(eval_returns)))


if __name__ == "__main__":
    main()
