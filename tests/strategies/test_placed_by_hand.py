"""Modules whose layers the user, or `device_map`, has placed on several devices: they train in one process, and stay there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.devices.host_devices import FIRST, SECOND, build, load
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import trainkit.distributed.parameter_placement
import trainkit.metrics.record
import trainkit.strategy
from trainkit import Accelerator, Precision, Strategy, TrainModule
from trainkit.callbacks import NonFiniteGuard
from trainkit.distributed.requested_devices import other_generators
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.strategies import DDPStrategy, ZeROStrategy

Devices = tuple[str, str]
BOTH: Devices = (FIRST, SECOND)
CPU: Devices = ("cpu", "cpu")


class OnHost(Strategy):
    """A strategy for the first of the two devices, which `Strategy` does not know."""

    def resolve_device(self, device: str | torch.device) -> torch.device:
        return torch.device(FIRST if device == "auto" else device)


class Averaged(nn.Module):
    """Keeps a running mean of its inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs - self.mean


class Split(TrainModule):
    """Two layers, each on a device; logs a value of each device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(4, 8), Averaged()).to(devices[0])
        self.second = nn.Linear(8, 1).to(devices[1])
        self.seen: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh().to(self.second.weight.device))

    def loss(self, batch: Any, name: str) -> Tensor:
        self.seen.append(str(batch[0].device))
        outputs = self(batch[0])
        loss = (outputs - batch[1].to(outputs.device)).square().mean()
        self.log(name, loss, on_epoch=True)
        self.log(f"{name}_inputs", batch[0].mean(), on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val_loss")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=0.05)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def places(module: nn.Module) -> dict[str, str]:
    return {name: str(value.device) for name, value in module.state_dict().items()}


def trainer_for(devices: Devices, *callbacks: Any, **arguments: Any) -> Any:
    strategy = OnHost() if devices != CPU else Strategy("cpu")
    settings = {"strategy": strategy, "max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    return make_trainer(*callbacks, accelerator="auto", **{**settings, **arguments})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("devices"))


@pytest.fixture
def there(library: str) -> Callable[..., Any]:
    """Runs a function in a new process that has the two devices."""
    return lambda function, *args: run_world(1, _with_devices, library, function, *args)[0]


def _with_devices(library: str, function: Callable[..., Any], *args: Any) -> Any:
    load(library)
    return function(*args)


# ------------------------------------------------------------------------------------------------------------ training


def _fit(devices: Devices) -> tuple[Any, ...]:
    module, trainer = Split(devices), trainer_for(devices, NonFiniteGuard())
    before, same = places(module), list(module.parameters())
    trainer.fit(module, tiny_loader(22), tiny_loader(8))
    assert all(one is other for one, other in zip(module.parameters(), same, strict=True))
    assert places(module) == before
    assert set(module.seen) == {devices[0]}
    state = trainer.optimizers[0].state
    assert all(state[p]["exp_avg"].device == p.device for p in module.parameters())
    predicted = torch.cat(trainer.predict(module, tiny_loader(8)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, tiny_loader(8))[0]
    assert places(module) == before
    return tensors(module), metrics, predicted.cpu(), validated


@pytest.mark.slow
def test_a_fit_is_that_of_one_device(there: Any) -> None:
    """Clipping, accumulation, buffers, metrics of both devices, validation and prediction."""
    torch.testing.assert_close(there(_fit, BOTH), _fit(CPU), rtol=2e-6, atol=2e-6)


def _norms() -> None:
    gradients = [torch.tensor([3.0, 0.0], device=FIRST), torch.tensor([4.0], device=SECOND)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = Strategy("cpu").clip_grad_norm_(parameters, 1.0)
    assert (norm.device, norm.item()) == (torch.device(FIRST), 5.0)
    values = [p.grad.tolist() for p in parameters]  # type: ignore[union-attr]
    torch.testing.assert_close(values, [[0.6, 0.0], [0.8]])


def test_the_norm_is_that_of_all_gradients(there: Any) -> None:
    there(_norms)


def _overflow() -> None:
    module, strategy = Split(BOTH), OnHost(precision=Precision("16-mixed", init_scale=4.0))
    optimizer = AdamW(strategy.prepare_module(module).parameters())
    before = tensors(module)
    for bad in (True, False):
        strategy.precision.scale(torch.zeros((), device=SECOND))
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        if bad:
            module.second.bias.grad = torch.full_like(module.second.bias, torch.inf)
        assert strategy.optimizer_step(optimizer) is not bad
        changed = {name for name, value in tensors(module).items() if not value.equal(before[name])}
        assert changed == (set() if bad else {name for name, _ in module.named_parameters()})
    assert strategy.precision.scaler is not None
    assert strategy.precision.scaler.get_scale() == 2.0  # one overflow


def test_an_overflow_on_one_device_skips_the_step_on_both(there: Any) -> None:
    there(_overflow)


# -------------------------------------------------------------------------------------------------------------- resume


class Stopping(Split):
    """Stops in the middle of the second epoch, if `stops` is set."""

    stops = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.stops and self.trainer.global_step == 4 and batch_idx % 2:
            self.trainer.save_checkpoint("middle")
            self.trainer.should_stop = True


def _resume() -> None:
    trainkit.metrics.record._CHUNK = 2  # type: ignore[attr-defined]  # so that the sums of both devices are used
    runs = []
    for stops, path in ((False, None), (True, None), (False, "middle")):
        module, trainer = Stopping(BOTH), trainer_for(BOTH)
        module.stops = stops
        trainer.fit(module, tiny_loader(22), ckpt_path=path)
        assert set(places(module).values()) == set(BOTH)
        runs.append((tensors(module), {name: float(value) for name, value in trainer.callback_metrics.items()}))
    torch.testing.assert_close(runs[2], runs[0], rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    module, trainer = Stopping(CPU), trainer_for(CPU)  # the checkpoint does not know where the layers were
    trainer.fit(module, tiny_loader(22), ckpt_path="middle")
    torch.testing.assert_close(tensors(module), runs[0][0], rtol=2e-6, atol=2e-6)


def test_resume_is_exact_and_independent_of_the_devices(there: Any) -> None:
    there(_resume)


@contextlib.contextmanager
def _generators() -> Iterator[dict[str, torch.Generator]]:
    """Within it each device has a generator."""
    made = {name: torch.Generator().manual_seed(0) for name in BOTH}
    original = trainkit.strategy.generators_of
    trainkit.strategy.generators_of = lambda device: (made[str(device)],)
    try:
        yield made
    finally:
        trainkit.strategy.generators_of = original


def _seeded() -> None:
    with _generators() as made:
        seeds = []

        class Drawing(Split):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                seeds.append([generator.initial_seed() for generator in (torch.default_generator, *made.values())])
                return super().training_step(batch, batch_idx)

        trainer_for(BOTH).fit(Drawing(BOTH), tiny_loader(8))
        assert all(len(set(step)) == 1 for step in seeds)
        assert len({step[0] for step in seeds}) == len(seeds) == 4
        accelerator = Accelerator(strategy=OnHost())
        loader = accelerator.prepare(tiny_loader(8))  # before the model
        accelerator.prepare(Split(BOTH))
        for _ in loader:
            assert {generator.initial_seed() for generator in made.values()} == {torch.initial_seed()}
        accelerator.free_memory()
        assert accelerator.strategy.placed_on == ()


def test_the_generators_of_all_devices_are_seeded(there: Any) -> None:
    there(_seeded)


def test_the_generators_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run seeds them before configure_model, and restores them."""
    gpus = [SimpleNamespace(device=torch.device("cuda", index)) for index in range(3)]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    assert other_generators(torch.device("cuda", 1)) == (gpus[0], gpus[2])
    assert other_generators(torch.device("cpu")) == ()


# -------------------------------------------------------------------------------------------------- your own training loop


def _own_loop(devices: Devices, moved: bool) -> dict[str, Tensor]:
    accelerator = Accelerator(strategy=OnHost() if devices == BOTH else Strategy("cpu"), device_placement=moved)
    module = Split(devices)
    model, optimizer = accelerator.prepare(module, AdamW(module.parameters(), lr=0.05))
    loader = accelerator.prepare(tiny_loader(16), device_placement=[True])
    before = places(module)
    for _ in range(2):
        for inputs, targets in loader:
            outputs = model(inputs)
            accelerator.backward((outputs - targets.to(outputs.device)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("state")
    trained = tensors(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    accelerator.load_state("state")
    torch.testing.assert_close(tensors(module), trained, rtol=0, atol=0)
    assert places(module) == before
    return trained


@pytest.mark.parametrize("moved", [True, False])
def test_prepare_leaves_the_layers_where_they_are(there: Any, moved: bool) -> None:
    torch.testing.assert_close(there(_own_loop, BOTH, moved), _own_loop(CPU, moved), rtol=2e-6, atol=2e-6)


# ------------------------------------------------------------------------------------------- what is said, moved and refused


def _described() -> tuple[str, str]:
    trainer, module = trainer_for(BOTH), Split(BOTH)
    before = trainer.explain(module)
    trainer.fit(module, tiny_loader(8))
    assert trainer.explain() != before
    return before, trainer.explain()


def test_explain_names_the_devices(there: Any) -> None:
    for text in there(_described):
        assert re.search(r"^  devices        host:0, host:1 \(placed by hand\)$", text, re.MULTILINE)
    trainer, module = trainer_for(CPU), Split(CPU)
    assert "placed by hand" not in trainer.explain(module)


class Metric(nn.Module):
    """Moves its state as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Metric:
        self.total = fn(self.total)
        return self


def _said() -> list[str]:
    module = Split(BOTH)
    module.third, module.mean = nn.Linear(1, 1), Metric()
    module.register_buffer("scale", torch.ones(()))
    said: list[str] = []
    trainkit.distributed.parameter_placement.notice = said.append
    strategy = OnHost()
    strategy.prepare_module(module)
    assert strategy.where == "host:0, host:1 (placed by hand)"
    assert places(module)["third.bias"] == places(module)["scale"] == str(module.mean.total.device) == FIRST
    assert places(module)["second.bias"] == SECOND
    whole = nn.Linear(1, 1).to(SECOND)  # on one device: moved, as ever
    strategy.prepare_module(whole)
    assert places(whole)["bias"] == FIRST
    strategy.teardown()
    assert strategy.where == FIRST
    ddp = DDPStrategy(device="cpu")
    ddp.placed_on = tuple(map(torch.device, BOTH))
    ddp.teardown()
    assert (ddp.where, ddp.placed_on) == ("cpu", ())
    return said


def test_what_is_on_the_cpu_is_moved_to_the_first_device(there: Any) -> None:
    assert there(_said) == ["Split has layers on several devices, and third.weight, third.bias moved to host:0."]


def _refused() -> None:
    several, module = OnHost(), Split(BOTH)
    several.world = World(size=2)
    before = places(module)
    with pytest.raises(
        ConfigurationError, match=r"Split has layers on host:0 and host:1, but there are 2 processes.*devices=1"
    ):
        several.prepare_module(module)
    for stage in (1, 3):
        zero = make_trainer(strategy=ZeROStrategy(stage))
        with pytest.raises(ConfigurationError, match=r"ZeROStrategy needs a module on one device.*no strategy") as caught:
            zero.fit(module, tiny_loader(8))
        advice = "" if stage == 3 else ", and shard it: strategy='fsdp' or 'zero3'"  # what stage 3 does anyway
        assert str(caught.value).endswith(f"without .to(device) and device_map{advice}")
    elsewhere = r"moved to host:1, the device of this process.*parameter, host:0.*devices=\[0\].*Strategy\('host:0'\)"
    with pytest.raises(ConfigurationError, match=elsewhere):
        OnHost(SECOND).prepare_module(module)
    with pytest.raises(ConfigurationError, match="batches are moved to cpu"):
        make_trainer(strategy=DDPStrategy(device="cpu"), devices=1).fit(module, tiny_loader(8))
    assert places(module) == before


def test_what_cannot_train_is_refused(there: Any) -> None:
    there(_refused)


@pytest.mark.parametrize(
    ("device_map", "named"),
    [
        ({"0": 0, "1": "cpu"}, r"1 \(cpu\)"),
        ({"0": torch.device("cuda:0"), "1": "disk"}, r"1 \(disk\)"),
        ({"": "disk"}, r"all \(disk\)"),
    ],
)
def test_layers_that_device_map_has_offloaded_are_refused(device_map: Any, named: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.ModuleDict({"model": model})
    model.hf_device_map = device_map
    with pytest.raises(ConfigurationError, match=f"offloaded 1 parts of Sequential: {named}.*strategy='fsdp_cpu_offload'"):
        Accelerator(strategy=Strategy("cpu")).prepare(outer)
    model.hf_device_map = dict.fromkeys(device_map, "cpu")
    Accelerator(strategy=Strategy("cpu")).prepare(outer)


# ----------------------------------------------------------------------------------------------------- transformers


MAP = {"embed_tokens": FIRST, "rotary_emb": FIRST, "layers.0": FIRST, "layers.1": SECOND, "norm": SECOND}


class Language(TrainModule):
    """A model of transformers, loaded with `device_map`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained("llama", **options).train()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.5)


@pytest.fixture
def llama() -> None:
    """A tiny Llama, saved in the working directory."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")


def _language(device_map: Any, devices: Devices = CPU, precision: str = "32-true", **options: Any) -> tuple[Any, ...]:
    text = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
    module = Language(device_map=device_map, **options)
    trainer = trainer_for(devices, max_epochs=1, precision=precision)
    trainer.fit(module, torch.utils.data.DataLoader(text, batch_size=2))
    trainer.save_checkpoint("trained", weights_only=True)
    saved = load_file(*Path("trained").rglob("*.safetensors"))
    hooked = [name for name, part in module.named_modules() if hasattr(part, "_hf_hook")]
    return module.losses, saved, sorted(set(places(module).values())), hooked


@pytest.mark.usefixtures("llama")
def test_a_model_loaded_with_device_map_trains(there: Any) -> None:
    whole = _language("auto")
    assert whole[2:] == (["cpu"], [])
    names = {f"model.{name}": device for name, device in MAP.items()} | {"lm_head": SECOND}
    split = there(_language, names, BOTH)
    assert split[2] == [FIRST, SECOND]
    assert "model.model.layers.1" in split[3]  # the hooks move what a layer gets to its device, and stay
    torch.testing.assert_close(split[:2], whole[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_a_model_loaded_in_bf16_stays_so(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = _language("auto", precision=precision, dtype=torch.bfloat16)[1]
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    said = "precision='32-true' does not convert parameters, and some are torch.bfloat16"
    assert (said in caplog.text) is (precision == "32-true")
