"""Proximal policy optimization (Schulman et al. 2017): a dataset that plays, two optimizers stepped by hand."""

import json

import lightning.pytorch as pl
import torch
from cart_pole import CartPole
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


class Experience(IterableDataset):
    def __init__(self, generate):
        self.generate = generate

    def __iter__(self):
        return iter(self.generate())


class PPO(pl.LightningModule):
    def __init__(self, gamma: float = 0.99, lam: float = 0.95, clip: float = 0.2, steps: int = 128, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.env, self.generator = CartPole(), torch.Generator().manual_seed(9)
        self.state = self.env.reset()
        self.losses, self.lengths = [], []

    @torch.no_grad()
    def generate(self):
        states, actions, logs, rewards, values, dones = [], [], [], [], [], []
        for _ in range(self.hparams.steps):
            state = torch.tensor(self.state)
            probabilities = self.actor(state).softmax(-1)
            action = torch.multinomial(probabilities, 1, generator=self.generator)
            new_state, reward, done = self.env.step(int(action))
            if done:
                self.lengths.append(self.env.steps)
            states.append(state)
            actions.append(action[0])
            logs.append(probabilities[action[0]].log())
            rewards.append(reward)
            values.append(float(self.critic(state)))
            dones.append(done)
            self.state = self.env.reset() if done else new_state
        values.append(float(self.critic(torch.tensor(self.state))))
        advantage, advantages = 0.0, []
        for t in reversed(range(len(rewards))):
            going = 0.0 if dones[t] else 1.0
            delta = rewards[t] + self.hparams.gamma * values[t + 1] * going - values[t]
            advantage = delta + self.hparams.gamma * self.hparams.lam * going * advantage
            advantages.insert(0, advantage)
        for t in range(len(rewards)):
            yield states[t], actions[t], logs[t], torch.tensor(advantages[t]), torch.tensor(advantages[t] + values[t])

    def training_step(self, batch, batch_idx):
        states, actions, old, advantages, targets = batch
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        first, second = self.optimizers()

        policy = Categorical(logits=self.actor(states))
        ratio = (policy.log_prob(actions) - old).exp()
        clipped = ratio.clamp(1 - self.hparams.clip, 1 + self.hparams.clip) * advantages
        actor_loss = -torch.min(ratio * advantages, clipped).mean()
        first.zero_grad()
        self.manual_backward(actor_loss)
        first.step()

        critic_loss = nn.functional.mse_loss(self.critic(states).squeeze(-1), targets)
        second.zero_grad()
        self.manual_backward(critic_loss)
        second.step()

        self.log("actor_loss", actor_loss, prog_bar=True)
        self.log("critic_loss", critic_loss, prog_bar=True)
        self.losses.append([actor_loss.item(), critic_loss.item()])

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters(), lr=3e-3), torch.optim.Adam(self.critic.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(Experience(self.generate), batch_size=self.hparams.batch_size)


def main():
    pl.seed_everything(0)
    model = PPO()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=6, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model)
    print(json.dumps({"losses": model.losses, "lengths": model.lengths}))


if __name__ == "__main__":
    main()
