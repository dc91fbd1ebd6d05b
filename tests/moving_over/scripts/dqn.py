"""Deep Q-learning (Mnih et al. 2015): an iterable dataset over a replay buffer, which `training_step` fills."""

import collections
import json
import random

import lightning.pytorch as pl
import torch
from cart_pole import CartPole
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

Experience = collections.namedtuple("Experience", "state action reward done new_state")


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = collections.deque(maxlen=capacity)
        self.random = random.Random(1)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, size):
        return [self.buffer[i] for i in self.random.sample(range(len(self.buffer)), size)]


class ReplayDataset(IterableDataset):
    def __init__(self, buffer, samples):
        self.buffer, self.samples = buffer, samples

    def __iter__(self):
        for one in self.buffer.sample(self.samples):
            yield (
                torch.tensor(one.state),
                one.action,
                torch.tensor(one.reward),
                one.done,
                torch.tensor(one.new_state),
            )


class DQN(pl.LightningModule):
    def __init__(self, batch_size: int = 16, lr: float = 1e-2, gamma: float = 0.99, sync_rate: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target_net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target_net.load_state_dict(self.net.state_dict())
        self.env, self.buffer, self.random = CartPole(), ReplayBuffer(500), random.Random(2)
        self.state = self.env.reset()
        self.losses, self.rewards, self.episode = [], [], 0.0
        for _ in range(200):
            self.play(epsilon=1.0)

    @torch.no_grad()
    def play(self, epsilon):
        if self.random.random() < epsilon:
            action = self.random.randrange(2)
        else:
            action = int(self.net(torch.tensor(self.state, device=self.device)).argmax())
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        self.episode += reward
        if done:
            self.rewards.append(self.episode)
            self.episode = 0.0

    def training_step(self, batch, batch_idx):
        self.play(max(0.05, 1.0 - self.global_step / 50))
        states, actions, rewards, dones, new_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            following = self.target_net(new_states).max(1)[0]
            following[dones] = 0.0
        loss = nn.functional.mse_loss(values, rewards + self.hparams.gamma * following)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"train_loss": loss, "reward": self.episode})
        self.log("steps", float(self.global_step), logger=False, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)

    def train_dataloader(self):
        return DataLoader(ReplayDataset(self.buffer, 64), batch_size=self.hparams.batch_size)


def main():
    pl.seed_everything(0)
    model = DQN()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=25, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model)
    print(json.dumps({"losses": model.losses, "rewards": model.rewards}))


if __name__ == "__main__":
    main()
