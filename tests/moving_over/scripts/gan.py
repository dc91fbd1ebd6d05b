"""A GAN of points on a ring: two optimizers under manual optimization, toggled in turns."""

import json

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(pl.LightningModule):
    def __init__(self, latent: int = 4):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.noise = torch.Generator().manual_seed(5)
        self.losses = []

    def adversarial_loss(self, logits, real):
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (points,) = batch
        z = torch.randn(len(points), self.latent, generator=self.noise)
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_generator)
        g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), True)
        for_generator.zero_grad()
        self.manual_backward(g_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        real = self.adversarial_loss(self.discriminator(points), True)
        fake = self.adversarial_loss(self.discriminator(self.generator(z).detach()), False)
        d_loss = (real + fake) / 2
        for_discriminator.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(for_discriminator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        self.losses.append([g_loss.item(), d_loss.item()])

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (first, second)]


def main():
    pl.seed_everything(3)
    angle = torch.rand(512, generator=torch.Generator().manual_seed(1)) * 2 * torch.pi
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    model = GAN()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, DataLoader(TensorDataset(ring), batch_size=64))
    print(json.dumps({"losses": model.losses}))


if __name__ == "__main__":
    main()
