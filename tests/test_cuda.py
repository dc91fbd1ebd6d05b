"""Complete runs on a CUDA device: results, precisions, and no training step that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Callback, Precision, TrainModule
from trainkit.callbacks import NonFiniteGuard
from trainkit.utils import load, load_checkpoint_in_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Net(TrainModule):
    """Two layers with optional dropout. It keeps its losses on the device."""

    def __init__(self, dropout: float = 0.0, optimizer: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4))
        self.losses: list[Tensor] = []
        self.optimizer = optimizer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr={"SGD": 0.3, "AdamW": 1e-2}[self.optimizer])


def loader(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(320, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32, shuffle=True, **options)


def trained(*callbacks: Callback, accelerator: str = "gpu", dropout: float = 0.0, loaded: Any = None, **arguments: Any) -> Net:
    module = Net(dropout, arguments.pop("optimizer", "AdamW"))
    trainer = make_trainer(*callbacks, accelerator=accelerator, seed=7, max_epochs=3, **arguments)
    trainer.fit(module, loader() if loaded is None else loaded, loader())
    return module


def losses(module: Net) -> Tensor:
    return torch.stack(module.losses).double().cpu()


def test_losses_are_those_of_the_cpu() -> None:
    on_cpu, on_gpu = losses(trained(accelerator="cpu", optimizer="SGD")), losses(trained(optimizer="SGD"))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_every_precision_learns(name: str) -> None:
    module = trained(precision=name, optimizer="SGD")  # AdamW's eps is 0 in float16
    kept = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(name, torch.float32)
    assert {p.dtype for p in module.parameters()} == {kept}
    assert {p.device.type for p in module.parameters()} == {"cuda"}
    assert losses(module)[-5:].mean() < 0.8 * losses(module)[:5].mean()


def test_an_overflow_skips_the_update() -> None:
    module = Net()
    before = [p.detach().clone() for p in module.parameters()]
    trainer = make_trainer(accelerator="gpu", precision=Precision("16-mixed", init_scale=2.0**40), max_epochs=1)
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 0  # after ten halvings, the scale is still too large
    assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, module.parameters(), strict=True))


def test_dropout_is_the_same_for_any_worker_and_from_run_to_run() -> None:
    runs = [trained(dropout=0.5, loaded=loader(num_workers=workers)) for workers in (0, 0, 2)]
    assert torch.equal(losses(runs[0]), losses(runs[1]))
    assert torch.equal(losses(runs[0]), losses(runs[2]))


class NoWaiting(Callback):
    """Makes torch raise an error for each operation that waits for the device, except in steps that log."""

    def __init__(self) -> None:
        self.watched = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 3:  # in the first steps, libraries create their handles
            torch.cuda.set_sync_debug_mode("error")
            self.watched += 1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.should_log:
            torch.cuda.set_sync_debug_mode("default")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def _default_sync_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("_default_sync_mode")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_waits_for_the_device(precision: str) -> None:
    watch = NoWaiting()
    trained(
        watch,
        NonFiniteGuard(),
        dropout=0.1,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
    )
    assert watch.watched > 15


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("_default_sync_mode")
def test_a_step_that_waits_is_noticed() -> None:
    # The callback `NoWaiting` can fail: it finds a `.item()` in a training step.

    class CollectiveTracker(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    trainer = make_trainer(NoWaiting(), accelerator="gpu")
    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer.fit(CollectiveTracker(), loader())


# torch's tracer reads .grad of the loss that a graph passes to log
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_learns() -> None:
    plain = losses(trained())
    module = Net()
    trainer = make_trainer(accelerator="gpu", seed=7, max_epochs=3)
    trainer.fit(torch.compile(module, backend="aot_eager"), loader(), loader())
    torch.testing.assert_close(losses(module), plain, rtol=1e-3, atol=1e-4)


def test_an_own_loop_is_the_trainer() -> None:
    """Your own training loop gives the same parameters as the Trainer, bit by bit."""
    module, model = trained(dropout=0.2), Net(dropout=0.2)
    accelerator = Accelerator()
    accelerator.seed = 7
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader())
    for _ in range(3):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), model.parameters(), strict=True))


def test_weights_and_objects_of_a_device() -> None:
    """Saved weights and objects are loaded to the device, into a model on the meta device or on the CPU."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(net := Net().net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 16, device=accelerator.device)).sum())
    optimizer.step()
    expected = {name: tensor.cpu().clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.save(model.state_dict(), "state.safetensors")
    accelerator.save({"weights": [*model.parameters()], "step": 1}, "object")
    assert all(torch.equal(load("state.safetensors", "cuda")[name].cpu(), tensor) for name, tensor in expected.items())
    assert {tensor.device.type for tensor in load("object", map_location="cuda:0")["weights"]} == {"cuda"}
    for source in ("meta", "cpu"):
        with torch.device(source):
            other = Net().net
        kept = [*other.parameters()]
        load_checkpoint_in_model(other, "state.safetensors", device_map={"": 0}, dtype="bfloat16", strict=True)
        assert {(p.device.type, p.dtype) for p in other.parameters()} == {("cuda", torch.bfloat16)}
        assert all(torch.equal(p.cpu(), expected[name].bfloat16()) for name, p in other.named_parameters())
        assert source == "meta" or all(p is before for p, before in zip(other.parameters(), kept, strict=True))
    load_checkpoint_in_model(other, "state.safetensors", device_map={"0": "cuda", "1": "cpu", "2": "cpu", "3": "cpu"})
    assert [p.device.type for p in other.parameters()] == ["cuda", "cuda", "cpu", "cpu"]


class Split(Net):
    """The layers of `Net` on two devices."""

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__(dropout=0.2)
        self.first, self.second = self.net[:2].to(devices[0]), self.net[2:].to(devices[1])
        del self.net
        self.devices = devices

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).to(self.devices[1]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0], batch[1].to(self.devices[1])], batch_idx)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices() -> None:
    """They stay there, train as on one device with the same dropout, and resume exactly."""

    def fitted(second: str, epochs: int, path: str | None = None) -> Split:
        module = Split(("cuda:0", second))
        before = [torch.cuda.get_rng_state(device) for device in module.devices]
        trainer = make_trainer(accelerator="gpu", devices=1, seed=7, max_epochs=epochs, gradient_clip_val=0.1)
        trainer.fit(module, loader(), ckpt_path=path)
        trainer.save_checkpoint(f"{second[-1]}-{epochs}-{path}")
        assert {p.device for p in module.second.parameters()} == {torch.device(second)}
        after = [torch.cuda.get_rng_state(device) for device in module.devices]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return module

    whole, split, begun = fitted("cuda:0", 2), fitted("cuda:1", 2), fitted("cuda:1", 1)
    torch.testing.assert_close(losses(split), losses(whole), rtol=1e-5, atol=0)
    resumed = fitted("cuda:1", 2, "1-1-None")
    assert torch.equal(torch.cat([losses(begun), losses(resumed)]), losses(split))
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), split.parameters(), strict=True))
