"""Speech synthesis in the shape of GAN vocoders: a generator and a discriminator, an average of the weights, and a file a stop.

The trainer saves with `accelerator.save` on the main process, and the next run loads the file with `torch.load`.
"""

import copy
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

MELS, FRAMES, HOP, EPOCHS = 8, 10, 4, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(MELS, 16, 3, padding=1)
        self.up = nn.ConvTranspose1d(16, 8, HOP, stride=HOP)
        self.last = nn.Conv1d(8, 1, 3, padding=1)

    def forward(self, mel):
        return torch.tanh(self.last(F.leaky_relu(self.up(F.leaky_relu(self.first(mel), 0.1)), 0.1)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 8, 5, stride=2, padding=2))
        self.last = nn.Conv1d(8, 1, 3, padding=1)

    def forward(self, wave):
        features = F.leaky_relu(self.first(wave), 0.1)
        return self.last(features).flatten(1), features


def dataset():
    generator = torch.Generator().manual_seed(7)
    mels = torch.randn(32, MELS, FRAMES, generator=generator)
    waves = torch.tanh(mels.mean(1, keepdim=True).repeat_interleave(HOP, dim=2))
    return TensorDataset(mels, waves)


class Trainer:
    def __init__(self, folder):
        set_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.path = os.path.join(folder, "model_last.pt")
        generator, discriminator = Generator(), Discriminator()
        optimizers = [torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.8, 0.99)) for net in (generator, discriminator)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9) for optimizer in optimizers]
        prepared = self.accelerator.prepare(generator, discriminator, *optimizers, DataLoader(dataset(), batch_size=4))
        self.generator, self.discriminator, self.g_optimizer, self.d_optimizer, self.loader = prepared
        self.schedulers = schedulers  # one step each epoch, by hand
        self.average = copy.deepcopy(self.accelerator.unwrap_model(self.generator)).requires_grad_(False)
        self.epoch = 0

    def save(self):
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint = {
                "generator": self.accelerator.unwrap_model(self.generator).state_dict(),
                "discriminator": self.accelerator.unwrap_model(self.discriminator).state_dict(),
                "ema": self.average.state_dict(),
                "optimizers": [self.g_optimizer.state_dict(), self.d_optimizer.state_dict()],
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
                "epoch": self.epoch,
            }
            self.accelerator.save(checkpoint, self.path)

    def load(self):
        if not os.path.exists(self.path):
            return
        checkpoint = torch.load(self.path, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.generator).load_state_dict(checkpoint["generator"])
        self.accelerator.unwrap_model(self.discriminator).load_state_dict(checkpoint["discriminator"])
        self.average.load_state_dict(checkpoint["ema"])
        for optimizer, state in zip((self.g_optimizer, self.d_optimizer), checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(self.schedulers, checkpoint["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.epoch = checkpoint["epoch"]

    def train(self, epochs):
        losses = []
        self.load()
        while self.epoch < epochs:
            for mel, wave in self.loader:
                fake = self.generator(mel)
                self.d_optimizer.zero_grad()
                real_score, fake_score = self.discriminator(wave)[0], self.discriminator(fake.detach())[0]
                d_loss = (1 - real_score).pow(2).mean() + fake_score.pow(2).mean()
                self.accelerator.backward(d_loss)
                self.d_optimizer.step()

                self.g_optimizer.zero_grad()
                score, features = self.discriminator(fake)
                matched = F.l1_loss(features, self.discriminator(wave)[1].detach())
                g_loss = (1 - score).pow(2).mean() + 2 * matched + 10 * F.l1_loss(fake, wave)
                self.accelerator.backward(g_loss)
                self.accelerator.clip_grad_norm_(self.generator.parameters(), 5.0)
                self.g_optimizer.step()
                with torch.no_grad():
                    for kept, new in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                        kept.lerp_(new, 0.1)
                losses.append(self.accelerator.gather(torch.stack([d_loss, g_loss]).detach()[None]).mean(0).tolist())
            for scheduler in self.schedulers:
                scheduler.step()
            self.epoch += 1
            self.save()
        weights = [p.double().sum().item() for net in (self.generator, self.average) for p in net.parameters()]
        self.accelerator.free_memory()
        return {"losses": losses, "weights": weights}


if __name__ == "__main__":
    root = os.environ["EXAMPLES_FOLDER"]
    whole = Trainer(os.path.join(root, "whole"))
    os.makedirs(os.path.join(root, "whole"), exist_ok=True)
    found = {"whole": whole.train(EPOCHS)}
    os.makedirs(os.path.join(root, "halves"), exist_ok=True)
    found["first"] = Trainer(os.path.join(root, "halves")).train(EPOCHS // 2)
    found["second"] = Trainer(os.path.join(root, "halves")).train(EPOCHS)
    if whole.accelerator.is_main_process:
        print(json.dumps(found))
