"""A DeepSpeed configuration and the run: a value in both must be equal, and a value in only the configuration is used."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Noisy, RegressionModule, train
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader

import trainkit
from trainkit import Accelerator, Callback, Trainer, TrainModule
from trainkit.errors import ConfigurationError, MissingMethodError
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero.config_file import RunSettings, read_config
from trainkit.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

CLIP = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.05}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.98]}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"}}


class WithoutOptimizer(RegressionModule):
    """A module without an optimizer; its configuration has one."""

    configure_optimizers = TrainModule.configure_optimizers


class Same(RegressionModule):
    """Creates the optimizer that the configuration also has."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupLR

        made = torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.0)
        scheduler = WarmupLR(made, warmup_min_lr=0.0, warmup_max_lr=0.01, warmup_num_steps=4, warmup_type="linear")
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def config(stage: int = 2, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **sections}


def case(make: type = RegressionModule, **arguments: Any) -> Case:
    return Case(samples=24, batch_size=2, window=1, make=make, arguments={"precision": "32-true", **arguments})


def test_optimizer_and_scheduler_of_the_configuration() -> None:
    """The same as if `configure_optimizers` had created them. Adam has no weight decay by default, as in DeepSpeed."""
    told = config(3, optimizer=ADAM, scheduler=WARMUP)
    mine = train(case(WithoutOptimizer), strategy=ZeROStrategy(config=told, device="cpu"))
    other = train(case(Same), strategy=ZeROStrategy(stage=3, device="cpu"))
    assert mine.losses == other.losses
    assert mine.rates == other.rates
    assert other.rates[:5] == pytest.approx([0.0, 0.0, 0.0025, 0.005, 0.0075])


class SaveAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint("saved")


def test_configured_optimizer_and_scheduler_resume() -> None:
    told = config(optimizer=ADAM, scheduler=WARMUP)
    whole = train(case(WithoutOptimizer), SaveAt(3), strategy=ZeROStrategy(config=told, device="cpu"))
    rest = train(case(WithoutOptimizer), strategy=ZeROStrategy(config=told, device="cpu"), ckpt_path="saved")
    assert rest.losses == {key: loss for key, loss in whole.losses.items() if key[0] >= 3}
    assert rest.rates == whole.rates[3:]


class OfDeepSpeed:
    """What DeepSpeed's engine reads of its configuration to create an optimizer."""

    zenflow = False

    def __init__(self, section: dict[str, Any], offloaded: bool) -> None:
        self._section, self._offloaded = section, offloaded

    def optimizer_name(self) -> str:
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

        name: str = self._section["type"]
        return name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name

    def optimizer_params(self) -> dict[str, Any]:
        return dict(self._section["params"])

    def zero_use_cpu_optimizer(self) -> bool:
        return self._offloaded

    def bf16_optimizer_states(self) -> bool:
        return False

    def get_optimizer_configuration(self, *args: Any) -> Any:
        from deepspeed.runtime.engine import DeepSpeedEngine

        return DeepSpeedEngine.get_optimizer_configuration(self, *args)

    def create(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        from deepspeed.runtime.engine import DeepSpeedEngine

        return DeepSpeedEngine._configure_basic_optimizer(self, list(module.parameters()))  # type: ignore[no-any-return]


TORCH_ADAMS = [
    {"type": name, "params": {"lr": 0.01, "torch_adam": True, **more}}
    for name in ("Adam", "AdamW", "adamw")
    for more in ({}, {"adam_w_mode": False}, {"weight_decay": 0.2, "betas": [0.8, 0.9]}, {"amsgrad": True, "eps": 1e-5})
]
OF_TORCH = [
    {"type": name, "params": {"lr": 0.01}}
    for name in ("SGD", "Adagrad", "adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD")
]


@pytest.mark.parametrize("section", [*TORCH_ADAMS, *OF_TORCH], ids=str)
def test_defaults_of_optimizers_are_those_of_deepspeed(section: dict[str, Any]) -> None:
    """Among them the weight decay of 0.01 of PyTorch's AdamW, where DeepSpeed uses that class."""
    module = WithoutOptimizer()
    settings = RunSettings(read_config(config(optimizer=section)), offloaded=False)
    mine, theirs = settings.configure_optimizers(module, torch.device("cpu")), OfDeepSpeed(section, False).create(module)
    assert type(mine) is type(theirs)
    assert mine.defaults == theirs.defaults


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1}, {"adam_w_mode": False}])
def test_defaults_of_fused_adam_on_a_cpu(name: str, more: dict[str, Any]) -> None:
    """Where DeepSpeed would use its own class, which a CPU without offload does not have."""
    from deepspeed.ops.adam import FusedAdam

    section = {"type": name, "params": {"lr": 0.01, **more}}
    settings = RunSettings(read_config(config(optimizer=section)), offloaded=False)
    mine = settings.configure_optimizers(WithoutOptimizer(), torch.device("cpu"))
    expected = {key: one.default for key, one in inspect.signature(FusedAdam.__init__).parameters.items()} | section["params"]
    assert {key: mine.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        key: expected[key] for key in ("lr", "betas", "eps", "weight_decay")
    }
    assert mine.defaults["decoupled_weight_decay"] is (name == "AdamW" or more.get("adam_w_mode", True))


@pytest.mark.zero
@pytest.mark.parametrize("name", ["Adam", "adamw"])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1}, {"adam_w_mode": False}, {"fp32_optimizer_states": False}])
def test_defaults_of_an_offloaded_adam(name: str, more: dict[str, Any]) -> None:
    module, section = WithoutOptimizer(), {"type": name, "params": {"lr": 0.01, **more}}
    settings = RunSettings(read_config(config(optimizer=section)), offloaded=True)
    mine, theirs = settings.configure_optimizers(module, torch.device("cpu")), OfDeepSpeed(section, True).create(module)
    assert type(mine) is type(theirs)
    assert mine.defaults == theirs.defaults
    assert (mine.adam_w_mode, mine.fp32_optimizer_states) == (theirs.adam_w_mode, theirs.fp32_optimizer_states)


def test_the_warm_up_of_a_run_whose_length_is_known(caplog: pytest.LogCaptureFixture) -> None:
    told = config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}})
    rates = train(case(max_epochs=4), strategy=ZeROStrategy(config=told, device="cpu")).rates
    assert len(rates) == 48
    assert 'the scheduler\'s "warmup_num_steps" is "auto": 5, which is 10% of the 48 optimizer steps of the run' in caplog.text
    fixed = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
    assert rates == train(case(max_epochs=4), strategy=ZeROStrategy(config=config(scheduler=fixed), device="cpu")).rates


@pytest.mark.parametrize(
    "told, arguments, message",
    [
        (
            CLIP,
            {},
            r"'gradient_clipping': 0.05, but the run has Trainer\(gradient_clip_val=0.0\). Use Trainer\(gradient_clip_val=0",
        ),
        (CLIP, {"gradient_clip_val": 1.0}, r"0.05, but the run has Trainer\(gradient_clip_val=1.0\)"),
        (config(gradient_accumulation_steps=4), {}, r"4, but the run has Trainer\(accumulate_grad_batches=1\)"),
        (config(train_batch_size=64), {"global_batch_size": 32}, r"64, but the run has Trainer\(global_batch_size=32\)"),
    ],
)
def test_contradictions_to_the_trainer(told: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(strategy=ZeROStrategy(config=told), accelerator="cpu", **arguments)


@pytest.mark.parametrize(
    "told, make, message",
    [
        (config(train_micro_batch_size_per_gpu=4), None, "4, but the run has the loader's batch_size=2"),
        (config(gradient_accumulation_steps=3), None, "3, but the run has 2 micro-batches per optimizer step"),
        (config(optimizer=ADAM), None, "has the 'optimizer' 'Adam', but the run has SGD. Use the same in both"),
        (config(optimizer={"type": "SGD", "params": {"lr": 0.1}}), None, "has 'lr': 0.1 for the optimizer, .* SGD has 0.05"),
        (
            config(optimizer={"type": "SGD", "params": {"lr": 0.05, "betas": 1}}),
            None,
            "has 'betas' for the optimizer, but SGD has no such argument",
        ),
        (
            config(scheduler=WARMUP),
            Same,
            "the 'scheduler' 'WarmupLR', but configure_optimizers also returned a WarmupLR. Remove one",
        ),
        (
            config(optimizer={"type": "Adam"}),
            WithoutOptimizer,
            "'lr' is missing or \"auto\", but the module has no configure_optimizers",
        ),
        (
            config(optimizer={"type": "Adm", "params": {"lr": 1}}),
            WithoutOptimizer,
            "there is no optimizer 'Adm'. Did you mean 'Adam'",
        ),
        (
            config(optimizer={"type": "Muon", "params": {"lr": 1}}),
            WithoutOptimizer,
            "optimizer 'Muon', which is Muon for matrices and Adam for the rest, is not supported",
        ),
        (
            config(optimizer={"type": "SGD", "params": {"lr": 1, "x": 2}}),
            WithoutOptimizer,
            "SGD does not accept its 'params'. Fix them: .*'x'",
        ),
        (config(scheduler={"type": "WarmupRL"}), None, "there is no scheduler 'WarmupRL'. Did you mean 'WarmupLR'"),
        (
            config(scheduler={"type": "WarmupLR", "params": {"warmup_type": "auto"}}),
            None,
            '"auto", but the run has no such value',
        ),
    ],
)
def test_contradictions_to_the_run(told: Any, make: type | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train(
            case(make or RegressionModule, global_batch_size=4),
            strategy=ZeROStrategy(config=told, device="cpu"),
        )


def test_the_product_of_the_sizes() -> None:
    arguments = {"accumulate_grad_batches": 2, "global_batch_size": None}
    with pytest.raises(ConfigurationError, match="8, but the run has batch_size × micro-batches × processes = 2 × 2 × 1 = 4"):
        train(case(**arguments), strategy=ZeROStrategy(config=config(train_batch_size=8), device="cpu"))


def of(kind: str, decay: float) -> type:
    """A module with this optimizer of torch."""

    class Module(RegressionModule):
        def configure_optimizers(self) -> Any:
            return getattr(torch.optim, kind)(self.parameters(), lr=0.01, weight_decay=decay)

    return Module


@pytest.mark.parametrize(
    "kind, decay, told",
    [
        ("Adam", 0.0, {"type": "Adam"}),  # without decay both are the same
        ("Adam", 0.0, {"type": "AdamW", "params": {"torch_adam": True}}),
        ("Adam", 0.1, {"type": "Adam", "params": {"adam_w_mode": False}}),
        ("Adam", 0.1, {"type": "Adam", "params": {"adam_w_mode": "auto", "bias_correction": "auto"}}),
        ("AdamW", 0.1, {"type": "Adam", "params": {"weight_decay": 0.1, "bias_correction": True}}),
        ("AdamW", 0.1, {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}),
    ],
)
def test_an_adam_that_both_have(kind: str, decay: float, told: Any) -> None:
    strategies = [ZeROStrategy(config=config(optimizer=told), device="cpu"), ZeROStrategy(stage=2, device="cpu")]
    assert len({str(train(case(of(kind, decay)), strategy=strategy).losses) for strategy in strategies}) == 1


@pytest.mark.parametrize(
    "kind, told, message",
    [
        ("Adam", {"type": "Adam"}, r"has 'Adam' with 'adam_w_mode': True \(DeepSpeed's default\) .* Adam has False"),
        ("Adam", {"type": "AdamW"}, r"has 'AdamW' with 'adam_w_mode': True \(DeepSpeed's default.* the run's Adam has False"),
        ("AdamW", {"type": "Adam", "params": {"adam_w_mode": False}}, "has 'Adam' with 'adam_w_mode': False .* AdamW has True"),
        ("Adam", {"type": "Adam", "params": {"bias_correction": False}}, "has 'bias_correction': False .* Adam has True"),
        (
            "SGD",
            {"type": "SGD", "params": {"torch_adam": True}},
            "has 'torch_adam' for the optimizer, but SGD has no such argument",
        ),
    ],
)
def test_another_adam(kind: str, told: Any, message: str) -> None:
    """An Adam with another kind of weight decay, of the same or an equivalent class."""
    with pytest.raises(ConfigurationError, match=message):
        train(case(of(kind, 0.1)), strategy=ZeROStrategy(config=config(optimizer=told), device="cpu"))


def test_a_precision_that_is_set_twice_keeps_its_scale() -> None:
    half = config(torch_autocast={"enabled": True, "dtype": "float16"}, fp16={"initial_scale_power": 5})
    trainer = Trainer(strategy=ZeROStrategy(config=half), precision="16-mixed", accelerator="cpu")
    assert trainer.scaler is not None
    assert trainer.scaler.get_scale() == 32.0


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream of complete batches, so that the loader does not know the batch size."""

    def __iter__(self) -> Any:
        yield from DataLoader(Noisy(8), 2)


def test_a_notice_about_sizes_that_cannot_be_compared(caplog: pytest.LogCaptureFixture) -> None:
    strategy = ZeROStrategy(config=config(train_micro_batch_size_per_gpu=4), device="cpu")
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(RegressionModule(), DataLoader(Stream(), batch_size=None))
    assert "train_micro_batch_size_per_gpu of config cannot be checked: the loader has no batch_size" in caplog.text


def test_auto_takes_the_value_of_the_run() -> None:
    every = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    auto = {"type": "SGD", "params": {"lr": "auto", "momentum": "auto"}}
    total = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 3, "warmup_max_lr": "auto"}}
    told = config(gradient_clipping="auto", bf16={"enabled": "auto"}, optimizer=auto, scheduler=total, **every)
    rates = train(case(gradient_clip_val=1.0), strategy=ZeROStrategy(config=told, device="cpu")).rates
    assert max(rates) == pytest.approx(0.05)
    assert 0 < rates[-1] < 0.005, "it ends after the last update"


def test_a_module_without_any_optimizer() -> None:
    with pytest.raises(MissingMethodError, match="WithoutOptimizer has no configure_optimizers"):
        train(case(WithoutOptimizer), strategy=ZeROStrategy(config=config(), device="cpu"))


def own_loop(told: Any, clip: float | None, plugin: bool = False) -> list[float]:
    trainkit.seed_everything(5)
    if plugin:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(told), cpu=True)
    else:
        accelerator = Accelerator(strategy=ZeROStrategy(config=told, device="cpu") if told else ZeROStrategy(2, device="cpu"))
    net = RegressionModule().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model, prepared, loader = accelerator.prepare(net, optimizer, DataLoader(Noisy(16), 2))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch["x"].float()) - batch["y"].float()).square().mean()
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            prepared.zero_grad()
        losses.append(loss.item())
    return losses


def refused(told: Any, clip: float | None) -> str:
    """Train; returns the error message."""
    with pytest.raises(ConfigurationError) as caught:
        own_loop(told, clip)
    return str(caught.value)


def loops() -> dict[str, list[float]]:
    """Losses of runs that are clipped by the configuration, by the loop, by both or not at all."""
    return {
        "configuration": own_loop(CLIP, None),
        "both": own_loop(CLIP, 0.05),
        "loop": own_loop(None, 0.05),
        "none": own_loop(None, None),
    }


def plugins() -> tuple[dict[str, list[float]], list[str]]:
    """Losses of loops with and without clipping, with a plugin that clips by 0.05 or 0, and the notices about clipping."""
    texts: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logging.getLogger("trainkit").addHandler(said := Said())
    found = {
        "configuration": own_loop(CLIP, None, plugin=True),
        "both": own_loop(CLIP, 0.05, plugin=True),
        "another": own_loop(CLIP, 1.0, plugin=True),
        "auto": own_loop({**CLIP, "gradient_clipping": "auto"}, 0.05, plugin=True),
        "zero": own_loop({**CLIP, "gradient_clipping": 0.0}, 0.05, plugin=True),
    }
    logging.getLogger("trainkit").removeHandler(said)
    return found, [text for text in texts if "clip" in text]


def test_a_training_loop_is_clipped_by_the_configuration() -> None:
    """Also if the loop itself clips by the same value. A different value is an error."""
    losses, _ = run_world(2, loops)
    assert losses["configuration"] == losses["both"] == losses["loop"] != losses["none"]
    assert "'gradient_clipping': 0.05, but the run has clip_grad_norm_(..., 1.0)" in run_world(1, refused, CLIP, 1.0)[0]
    # the plugin's number is used, as in Accelerate, with one notice on the main process
    (found, said), (_, other_said) = run_world(2, plugins)
    for name in ("configuration", "both", "another", "auto"):
        assert found[name] == losses["loop"], name
    assert found["zero"] == losses["none"]
    assert other_said == []
    assert said == [
        f"DeepSpeedPlugin sets gradient_clipping: {here}, but the training loop calls clip_grad_norm_(..., {loop}): gradients "
        f"{effect}. Use the same number in both, or set gradient_clipping: auto, which uses the loop's."
        for here, loop, effect in [(0.05, 1.0, "are clipped by 0.05 in each optimizer step"), (0.0, 0.05, "are not clipped")]
    ]


@pytest.mark.parametrize(
    "told, message",
    [
        (config(gradient_accumulation_steps=2), "2, but the run has 1 micro-batches per optimizer step"),
        (config(train_micro_batch_size_per_gpu=8), "8, but the run has the loader's batch_size=2"),
        (config(optimizer=ADAM), "has the 'optimizer' 'Adam', but the run has SGD"),
        (config(scheduler=WARMUP), "has the 'scheduler' 'WarmupLR', but your own training loop has not prepared it. Write:"),
    ],
)
def test_contradictions_to_a_training_loop(told: Any, message: str) -> None:
    assert message in run_world(1, refused, told, None)[0]


def by_placeholders(placeholders: bool) -> tuple[list[float], list[float], str]:
    """Losses and learning rates of a loop, and the optimizer, of a configuration or created by the loop itself."""
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    trainkit.seed_everything(5)
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    told = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}},
        "gradient_accumulation_steps": "auto",
    }
    plugin = DeepSpeedPlugin(config(3, **(told if placeholders else {})))
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
    net = RegressionModule().net
    groups = [
        {"params": [net[0].weight], "weight_decay": 0.0},
        {"params": [p for p in net.parameters() if p is not net[0].weight]},
    ]
    optimizer: Any
    if placeholders:
        optimizer = DummyOptim(groups, lr=0.05, weight_decay=0.1)
        scheduler: Any = DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1, eps=1e-6)
        total = -(-9 // accelerator.num_processes)
        scheduler = DummyScheduler(
            optimizer, lr_scheduler_callable=lambda one: WarmupDecayLR(one, total, 0.0, 0.05, 2, warmup_type="linear")
        )
    model, prepared, loader, schedule = accelerator.prepare(net, optimizer, DataLoader(Noisy(32), 2), scheduler)
    assert accelerator.prepare(optimizer, scheduler) == (prepared, schedule)
    losses, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch["x"].float()) - batch["y"].float()).square().mean()
            accelerator.backward(loss)
            rates.append(prepared.param_groups[0]["lr"])
            prepared.step()
            schedule.step()
            prepared.zero_grad()
        losses.append(loss.item())
    return losses, rates, type(prepared.optimizer).__name__


def test_a_training_loop_with_the_optimizer_and_the_scheduler_of_the_configuration() -> None:
    """The same as if the loop had created both. The schedule advances once with each optimizer step, on any number of ranks."""
    for size in (1, 2):
        mine, other = run_world(size, by_placeholders, True)[0], run_world(size, by_placeholders, False)[0]
        assert mine == other
        assert mine[2] == "AdamW"
        assert max(mine[1]) == pytest.approx(0.05)
        assert mine[1][::2] == mine[1][1::2], "it advances when the window is full"


def test_what_a_placeholder_adds_to_the_configuration() -> None:
    """The configuration's values count; what is missing there or "auto" is the placeholder's."""
    weight, told = torch.nn.Parameter(torch.ones(1)), {"type": "AdamW", "params": {"lr": 0.5, "eps": "auto"}}
    strategy = ZeROStrategy(config=config(optimizer=told), device="cpu")
    made = DummyOptim([weight], lr=0.1, betas=(0.5, 0.6), eps=1e-3).create(strategy)
    assert isinstance(made, torch.optim.AdamW)
    assert {name: made.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.0
    }  # fmt: skip


def test_placeholders_without_a_configuration() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, torchs = DummyOptim([weight]), torch.optim.SGD([weight], lr=0.1)
    plain = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="no such configuration: it uses Strategy. Create the optimizer"):
        plain.prepare(optimizer)
    with pytest.raises(ConfigurationError, match="no such configuration: it uses Strategy. Create the scheduler"):
        plain.prepare(torchs, DummyScheduler(torchs))
    with pytest.raises(ConfigurationError, match="a DummyScheduler was passed without its DummyOptim"):
        plain.prepare(DummyScheduler(optimizer))
    halved = DummyScheduler(torchs, lr_scheduler_callable=lambda one: torch.optim.lr_scheduler.ConstantLR(one, 0.5))
    assert plain.prepare(torchs, halved)[1].get_last_lr() == [0.05]

    def prepare(told: dict[str, Any], *objects: Any) -> None:
        Accelerator(strategy=ZeROStrategy(config=told, device="cpu")).prepare(*objects)

    with pytest.raises(ConfigurationError, match=r"but config has no section 'optimizer'\. Add one"):
        prepare(config(), optimizer)
    with pytest.raises(ConfigurationError, match="config has no section 'scheduler', and the DummyScheduler without"):
        prepare(config(), torchs, DummyScheduler(torchs))
    with pytest.raises(
        ConfigurationError, match="has a section 'scheduler', and the DummyScheduler also has an lr_scheduler_c"
    ):
        prepare(config(scheduler=WARMUP), torchs, DummyScheduler(torchs, lr_scheduler_callable=lambda one: one))
    total = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    with pytest.raises(ConfigurationError, match=r"'total_num_steps' is \"auto\", but the DummyScheduler has no such value"):
        prepare(config(scheduler=total), torchs, DummyScheduler(torchs))


def test_the_plan_uses_the_optimizer_of_the_configuration() -> None:
    """The plan counts two tensors of Adam's state per parameter."""
    total = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 3, "warmup_max_lr": "auto"}}
    trainer = Trainer(
        strategy=ZeROStrategy(config=config(optimizer=ADAM, scheduler=total)), accelerator="cpu", max_steps=5, logger=False
    )
    made, parameters = trainer.plan(WithoutOptimizer(), processes=[1]), sum(p.numel() for p in RegressionModule().parameters())
    (own,) = [row for row in made.rows if row.own]
    assert own.footprint.device.optimizer == 2 * 4 * parameters
