"""REINFORCE on eight CartPoles, each one step ahead in a worker process: the README's lines, and an evaluation."""

import torch
from torch import nn

from envrunner import MultiAgentEnvLoop, TorchPolicy

torch.set_num_threads(1)  # a net this small is quickest so, and the environments want the cores
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))  # observations -> logits
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

with MultiAgentEnvLoop("CartPole-v1", TorchPolicy(net, act="categorical"), num_envs=8, seed=0) as loop:
    for update in range(25):
        episodes = [episode.to_torch() for episode in loop.run_episodes(16)]  # whole ones, no favour to short ones
        returns = torch.tensor([episode.summary.total_reward for episode in episodes])
        log_probs = [net(e.obs).log_softmax(-1).gather(1, e.action[:, None]).sum() for e in episodes]
        loss = -((returns - returns.mean()) / returns.std() * torch.stack(log_probs)).mean()  # REINFORCE
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        loop.update_policy(net.state_dict())
        print(f"update {update}: mean return {returns.mean():.1f}")

# `eval=True`: nothing runs ahead; `deterministic=True`: the most likely action.
policy = TorchPolicy(net, act="categorical")
with MultiAgentEnvLoop("CartPole-v1", policy, num_envs=4, seed=1000, eval=True, deterministic=True) as loop:
    returns = [episode.summary.total_reward for episode in loop.run_episodes(20)]
    print(f"evaluation: {sum(returns) / 20:.1f} over 20 episodes")
