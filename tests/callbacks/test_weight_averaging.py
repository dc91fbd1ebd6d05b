"""WeightAveraging: what is averaged and when, what validation sees, what a checkpoint contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Watching, make_trainer, parameters_of, same
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from trainkit import Accelerator, Callback
from trainkit.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.errors import ConfigurationError


class Normed(TinyModule):
    """With BatchNorm, a mask with infinities, a layer that is never trained, and two names for one parameter."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(0.05)
        generator = torch.Generator().manual_seed(5)
        self.layer = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))  # type: ignore[assignment]
        for parameter in self.layer[0].parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.layer[2].weight.data.fill_(0.3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.again = self.layer[2]


def expected(after: list[tuple[int, float, dict[str, Tensor]]], **options: Any) -> dict[str, Tensor]:
    """The average by torch, of the weights that were recorded after each step."""
    states = [{name: value for name, value in state.items() if name != "mask"} for _, _, state in after]
    model = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(v.float()) for name, v in states[0].items()})
    average = AveragedModel(model, **options)
    for state in states:
        for name, value in state.items():
            model[name.replace(".", "/")].data.copy_(value)
        average.update_parameters(model)
    return {name.replace("/", "."): value.detach() for name, value in average.module.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"avg_fn": get_ema_avg_fn(0.7)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.6)}],
    ids=["mean", "avg_fn", "multi_avg_fn"],
)
def test_the_average_is_that_of_torch(options: dict[str, Any]) -> None:
    """After fit the module has it: of parameters and buffers."""
    watching, average, module = Watching(), WeightAveraging(**options), Normed()
    make_trainer(watching, average, max_epochs=2).fit(module, tiny_loader())
    assert len(watching.after) == 8
    whole = expected(watching.after, **options)
    for name, value in module.state_dict().items():
        if value.is_floating_point() and name != "mask":
            torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7)
    assert module.mask.tolist() == [0.0, float("-inf")]
    assert module.layer[1].num_batches_tracked == 8
    assert "frozen.weight" not in average._average
    assert "again.weight" not in average._average


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_averaged_unless_told(use_buffers: bool) -> None:
    watching, module = Watching(), Normed()
    make_trainer(watching, WeightAveraging(use_buffers=use_buffers)).fit(module, tiny_loader())
    trained = watching.after[-1][2]["layer.1.running_mean"]
    assert torch.equal(trained, module.layer[1].running_mean) is not use_buffers
    assert not torch.equal(watching.after[-1][2]["layer.0.weight"], module.layer[0].weight)


class Shown(Callback):
    """Records the weights in each validation batch, and around validations."""

    def __init__(self) -> None:
        self.inside: list[dict[str, Tensor]] = []
        self.before: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.before.append(parameters_of(module))

    def on_validation_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.inside.append(parameters_of(module))


def test_validation_uses_the_average_and_training_does_not() -> None:
    """Training is the same as without the callback, and the trained weights are back after each validation."""
    shown, plain, alone = Shown(), Watching(), TinyModule()
    torch.manual_seed(1)
    module = TinyModule()
    alone.load_state_dict(module.state_dict())
    loaders = tiny_loader(), tiny_loader(4)
    trainer = make_trainer(shown, WeightAveraging(), max_epochs=2)
    trainer.fit(module, *loaders)
    make_trainer(plain, max_epochs=2).fit(alone, *loaders)
    for ours, (_, _, theirs) in zip(shown.before, plain.after, strict=True):
        assert same(ours, theirs)
    for number, seen in zip((4, 8), shown.inside, strict=True):
        weights = [state["layer.weight"] for state in shown.before[:number]]
        torch.testing.assert_close(seen["layer.weight"], torch.stack(weights).mean(0))
    assert same(shown.inside[-1], module.state_dict())  # and stays after fit
    before = parameters_of(module)
    assert trainer.test(module, tiny_loader(4), verbose=False)
    trainer.validate(module, tiny_loader(4), verbose=False)
    assert same(before, module.state_dict())


class Twice(WeightAveraging):
    """Averages after the steps 2 and 5, and at the end of the second epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self.asked = [*getattr(self, "asked", []), (step_idx, epoch_idx)]
        return step_idx in (2, 5) or epoch_idx == 1


def test_should_update_is_asked_once_per_step_and_epoch() -> None:
    """With windows of two micro-batches; until the first average validation uses the trained weights."""
    shown, average, module = Shown(), Twice(), TinyModule()
    make_trainer(shown, average, max_epochs=2, accumulate_grad_batches=2, val_every_n_steps=1).fit(
        module, tiny_loader(32), tiny_loader(4)
    )
    steps = [(step, None) for step in range(8)]
    assert average.asked == [*steps[:4], (None, 0), *steps[4:], (None, 1)]
    trained = [state["layer.weight"] for state in shown.before[1::2]]
    inside = [state["layer.weight"] for state in shown.inside]
    for number, third in enumerate(inside):
        if number < 5:
            assert torch.equal(third, trained[number if number < 2 else 2])
    torch.testing.assert_close(inside[7], (trained[2] + trained[5]) / 2)
    torch.testing.assert_close(module.layer.weight.detach(), (trained[2] + trained[5] + trained[7]) / 3)


def test_a_parameter_that_is_unfrozen_later_is_averaged_from_then_on() -> None:
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.layer.bias.requires_grad = trainer.current_epoch > 0

    watching, average, module = Watching(), WeightAveraging(), TinyModule()
    make_trainer(Unfreeze(), watching, average, max_epochs=2).fit(module, tiny_loader())
    assert not torch.equal(watching.after[-1][2]["layer.bias"], module.layer.bias)
    assert set(average._average) == {"layer.weight", "layer.bias"}


def test_only_one_callback_averages() -> None:
    """And one function: what contradicts each other is refused before training."""
    watching = Watching()
    for other in (WeightAveraging(), StochasticWeightAveraging(0.1)):
        with pytest.raises(ConfigurationError, match="two callbacks average the weights"):
            make_trainer(WeightAveraging(), other, watching).fit(TinyModule(), tiny_loader())
    assert watching.after == []
    with pytest.raises(ConfigurationError, match="got avg_fn and multi_avg_fn"):
        WeightAveraging(avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())


def test_a_checkpoint_has_both_weights(run_dir: Path) -> None:
    """The averaged ones are the model's, but fit continues with the trained ones, also without the callback."""
    watching, module = Watching(), TinyModule()
    trainer = make_trainer(watching, WeightAveraging(), max_epochs=2)
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    trainer.save_checkpoint("both")
    trainer.save_checkpoint("weights", weights_only=True)
    averaged, trained = parameters_of(module), watching.after[-1][2]
    assert not torch.equal(averaged["layer.weight"], trained["layer.weight"])
    for path in ("both", "weights"):
        assert same(TinyModule.load_from_checkpoint(path).state_dict(), averaged)
        other = TinyModule()
        make_trainer().test(other, tiny_loader(4), ckpt_path=path, verbose=False)
        assert same(other.state_dict(), averaged)
    assert "current_model_state" not in open_checkpoint("weights").read({"state"}).state.get("user", {})
    for callbacks in ([], [WeightAveraging()]):
        resumed, seen = TinyModule(), Watching()
        make_trainer(seen, *callbacks, max_epochs=3).fit(resumed, tiny_loader(), ckpt_path="both")
        straight, reference = TinyModule(), Watching()
        straight.load_state_dict(trained)
        make_trainer(reference, max_epochs=1).fit(straight, tiny_loader())
        assert same(seen.after[0][2], reference.after[0][2])


def test_a_loop_of_ones_own_continues_with_the_trained_weights(run_dir: Path) -> None:
    watching = Watching()
    trainer = make_trainer(watching, WeightAveraging())
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint("both")
    accelerator, module = Accelerator(cpu=True), TinyModule()
    module, _ = accelerator.prepare(module, module.configure_optimizers())
    accelerator.load_state("both", restore={"model", "optimizer"})
    assert same(accelerator.unwrap_model(module).state_dict(), watching.after[-1][2])


def test_checkpoints_of_trained_parameters(run_dir: Path) -> None:
    """The frozen ones are in none; the average and the trained weights of the others are."""
    average, module = WeightAveraging(), Normed()
    saving = ModelCheckpoint(dirpath="saved", save="trainable", keep_last=-1)
    make_trainer(average, saving, max_epochs=3, enable_checkpointing=True).fit(module, tiny_loader())
    middle = Path("saved", "step-00000008")
    assert "frozen.weight" not in open_checkpoint(middle).read({"model"}).tensors["model"]
    again, resumed = WeightAveraging(), Normed()
    resumed.frozen.load_state_dict(module.frozen.state_dict())
    make_trainer(again, max_epochs=3).fit(resumed, tiny_loader(), ckpt_path=str(middle))
    assert same(resumed.state_dict(), module.state_dict())
    assert same(again._trained or {}, average._trained or {})


def test_loaded_weights_replace_the_average(run_dir: Path) -> None:
    """After test(ckpt_path=...) a save has the weights that were loaded, as without the callback."""
    trainer, module = make_trainer(WeightAveraging(), max_epochs=2), TinyModule()
    trainer.fit(module, tiny_loader())
    other = TinyModule()
    first = make_trainer()
    first.fit(other, tiny_loader())
    first.save_checkpoint("other")
    trainer.test(module, tiny_loader(4), ckpt_path="other", verbose=False)
    trainer.save_checkpoint("again")
    assert same(TinyModule.load_from_checkpoint("again").state_dict(), other.state_dict())


def test_a_second_fit_starts_over() -> None:
    average, trainer_options = WeightAveraging(), {"max_epochs": 1}
    make_trainer(average, **trainer_options).fit(TinyModule(), tiny_loader())
    watching, module = Watching(), TinyModule()
    make_trainer(watching, average, **trainer_options).fit(module, tiny_loader())
    weights = torch.stack([state["layer.weight"] for _, _, state in watching.after])
    torch.testing.assert_close(module.layer.weight.detach(), weights.mean(0))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed", "64-true"])
def test_every_precision(precision: str, run_dir: Path) -> None:
    """Weights of 16 bits have an average of 32; a scaled step that overflows is not averaged."""
    average, module, watching = WeightAveraging(), TinyModule(0.01), Watching()
    trainer = make_trainer(average, watching, precision=precision, max_epochs=2)
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    assert average._updates == trainer.global_step
    kept = average._average["layer.weight"]
    assert kept.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    by_step = {step: state["layer.weight"].to(kept.dtype) for step, _, state in watching.after if step}
    torch.testing.assert_close(kept, torch.stack(list(by_step.values())).mean(0))
    assert torch.equal(module.layer.weight.detach(), kept.to(module.layer.weight.dtype))


def test_the_average_can_be_kept_on_another_device() -> None:
    class Kept(WeightAveraging):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            """Nothing: there are no values on the device meta."""

    average = Kept(device="meta")
    make_trainer(average).fit(TinyModule(), tiny_loader())
    assert {value.device.type for value in average._average.values()} == {"meta"}
