"""A custom environment with an action mask, and a policy with a memory, in one file.

    python examples/custom_env.py           # about fifteen seconds

A corridor: its first cell shows one of four colours, and after two to five dark cells come four
doors, of which the one in that colour leads out. Two of the others are locked. Whoever does not
remember the colour gets out of every second corridor; whoever does, of every one.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from envrunner import MultiAgentEnvLoop, TorchPolicy

NUM_COLOURS = 4
WALK = NUM_COLOURS  # the last action; actions 0..3 open a door


class Corridor(gym.Env):
    """An ordinary gymnasium.Env. What is legal now is part of the observation."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "seen": gym.spaces.Box(0.0, 1.0, (NUM_COLOURS + 1,), np.float32),  # the colour, and: at the doors
                "action_mask": gym.spaces.MultiBinary(NUM_COLOURS + 1),
            }
        )
        self.action_space = gym.spaces.Discrete(NUM_COLOURS + 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.colour = int(self.np_random.integers(NUM_COLOURS))
        self.cells_left = int(self.np_random.integers(3, 7))
        return self.observe(first=True), {}

    def step(self, action):
        if not self.action_mask[action]:
            raise ValueError(f"Corridor: action {action} is masked; legal are {np.flatnonzero(self.action_mask)}")
        if action == WALK:
            self.cells_left -= 1
            return self.observe(), 0.0, False, False, {}
        return self.observe(), float(action == self.colour), True, False, {}

    def observe(self, first=False):
        seen = np.zeros(NUM_COLOURS + 1, np.float32)
        self.action_mask = np.zeros(NUM_COLOURS + 1, np.int8)
        if first:
            seen[self.colour] = 1.0
        if self.cells_left > 0:
            self.action_mask[WALK] = 1
        else:
            seen[-1] = 1.0
            others = [door for door in range(NUM_COLOURS) if door != self.colour]
            self.action_mask[[self.colour, self.np_random.choice(others)]] = 1
        return {"seen": seen, "action_mask": self.action_mask.copy()}


class Agent(nn.Module):
    """A recurrent module for TorchPolicy: `module(obs, state) -> (outputs, new_state)`.

    The loop keeps one row of state per environment, starts it afresh with each episode, and
    records the state that entered each step in `action_context["state"]`.
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(NUM_COLOURS + 1, hidden)
        self.head = nn.Linear(hidden, NUM_COLOURS + 1)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, self.hidden)

    def forward(self, obs: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.cell(obs["seen"], state)
        # exp(-1e9) is exactly 0, so a masked action has probability 0; -inf would make nan of 0 * log 0.
        logits = self.head(state).masked_fill(obs["action_mask"] == 0, -1e9)
        return logits, state


def main() -> None:
    parser = argparse.ArgumentParser(description="REINFORCE with a GRU and an action mask.")
    parser.add_argument("--num-updates", type=int, default=80)
    parser.add_argument("--episodes-per-update", type=int, default=64)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)

    # REINFORCE (Williams 1992) wants every action to come from the weights that it improves:
    # steps_ahead=0, so nothing is begun before the update. The class is all that workers need.
    loop = MultiAgentEnvLoop(
        Corridor, TorchPolicy(agent, act="categorical"), num_envs=args.num_envs, seed=args.seed, steps_ahead=0
    )
    with loop:
        for update in range(args.num_updates):
            # Whole episodes, first step to last, whichever environments are quicker.
            episodes = [episode.to_torch() for episode in loop.run_episodes(args.episodes_per_update)]
            returns = torch.tensor([episode.summary.total_reward for episode in episodes])

            # Episodes side by side, time first, the short ones padded: [T, B, ...].
            seen = pad_sequence([episode.obs["seen"] for episode in episodes])
            mask = pad_sequence([episode.obs["action_mask"] for episode in episodes], padding_value=1)
            actions = pad_sequence([episode.action for episode in episodes])
            states = pad_sequence([episode.action_context["state"] for episode in episodes])
            real = pad_sequence([torch.ones(len(episode)) for episode in episodes])
            assert (mask.gather(2, actions.unsqueeze(2)) == 1).all(), "a masked action was chosen"
            assert (states[0] == 0).all(), "an episode began with the memory of another one"

            # Through the episodes once more, now with gradients.
            log_probs, state = [], agent.initial_state(len(episodes))
            for t in range(len(seen)):
                # What the policy remembered then is what the learner works out now.
                assert torch.allclose(state * real[t, :, None], states[t] * real[t, :, None], atol=1e-4)
                logits, state = agent({"seen": seen[t], "action_mask": mask[t]}, state)
                log_probs.append(logits.log_softmax(-1).gather(1, actions[t, :, None]).squeeze(1))
            episode_log_probs = (torch.stack(log_probs) * real).sum(0)
            loss = -((returns - returns.mean()) * episode_log_probs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.update_policy(agent.state_dict())

            if (update + 1) % max(1, args.num_updates // 10) == 0:
                print(
                    f"update {update + 1:3d}: {returns.mean():.0%} of {len(episodes)} corridors left by the right door"
                )


if __name__ == "__main__":
    main()
