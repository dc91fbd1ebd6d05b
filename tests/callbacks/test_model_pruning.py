"""`ModelPruning`: what is pruned, exact resume, several processes, what remains after the run, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune

from trainkit import Callback
from trainkit.callbacks import (
    ExponentialMovingAverage,
    LayerFreezing,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from trainkit.errors import ConfigurationError, ModuleError, StateMismatchError


class Layers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.body(inputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


def fit(
    *callbacks: Callback,
    module: Any = None,
    ckpt_path: Any = None,
    restore: Any = None,
    validates: bool = False,
    **options: Any,
) -> Any:
    module = Layers() if module is None else module
    trainer = make_trainer(*callbacks, **{"max_epochs": 4, **options})
    loaders = tiny_loader(24, batch_size=8, shuffle=True), tiny_loader(8) if validates else None
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, restore=restore)
    return module


def zeros(module: nn.Module) -> dict[str, int]:
    return {name: int((value == 0).sum()) for name, value in parameters_of(module).items()}


class Seen(Callback):
    """The number of zeros in each parameter as it is in each epoch."""

    def __init__(self) -> None:
        self.zeros: list[dict[str, int]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        pairs = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        self.zeros.append({name: int((layer.weight == 0).sum()) for name, layer in pairs})


def pruning(**options: Any) -> ModelPruning:
    return ModelPruning(**{"pruning_fn": "l1_unstructured", "amount": 0.2, "use_lottery_ticket_hypothesis": False, **options})


def test_each_epoch_prunes_a_part_of_what_is_left() -> None:
    seen = Seen()
    module = fit(pruning(parameter_names=["weight"], amount=lambda epoch: 8 if epoch else 4), seen, max_epochs=3)
    assert [sum(found.values()) for found in seen.zeros] == [0, 4, 12]
    assert sum(zeros(module).values()) == 20
    assert parameters_of(module).keys() == parameters_of(Layers()).keys()  # permanent
    masked = fit(pruning(make_pruning_permanent=False), max_epochs=1)
    assert isinstance(masked.layer.weight_orig, nn.Parameter)


def test_which_parameters() -> None:
    found = Layers()
    fit(pruning(parameters_to_prune=[(found.body[0], "weight")], amount=0.5), module=found, max_epochs=1)
    assert zeros(found) == {**zeros(Layers()), "body.0.weight": 16}
    each = fit(pruning(use_global_unstructured=False, parameter_names=["weight"], amount=0.5), max_epochs=1)
    assert [zeros(each)[f"{name}.weight"] for name in ("body.0", "body.2", "layer")] == [16, 16, 2]

    class OnlyBody(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
            return [pair for pair in parameters_to_prune if pair[0].in_features == 8]

    body = fit(OnlyBody("l1_unstructured", amount=0.5), max_epochs=1)
    assert zeros(body)["body.0.weight"] == 0 < zeros(body)["body.2.weight"]
    rows = fit(
        pruning(
            pruning_fn="ln_structured", use_global_unstructured=False, parameter_names=["weight"], pruning_dim=0, pruning_norm=2
        ),
        max_epochs=1,
    )
    assert (rows.body[0].weight == 0).all(dim=1).sum() == 2


def test_when_it_prunes() -> None:
    assert sum(zeros(fit(pruning(apply_pruning=False))).values()) == 0
    assert sum(zeros(fit(pruning(apply_pruning=lambda epoch: epoch == 1, amount=10))).values()) == 10
    twice = fit(pruning(prune_on_train_epoch_end=False, amount=5), validates=True, val_check_interval=1, max_epochs=1)
    assert sum(zeros(twice).values()) == 15


def test_values_of_the_start() -> None:
    """In the last epoch nothing is trained any more, so the remaining elements are those of the start."""
    start = parameters_of(Layers())
    module = fit(pruning(use_lottery_ticket_hypothesis=True))
    assert all((value[value != 0] == start[name][value != 0]).all() for name, value in parameters_of(module).items())
    resampled = fit(pruning(use_lottery_ticket_hypothesis=lambda epoch: True, resample_parameters=True))
    assert not any(torch.isin(value[value != 0], start[name]).any() for name, value in parameters_of(resampled).items())


def test_a_method_without_an_amount() -> None:
    class FirstHalf(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: Any, default_mask: Any) -> Any:
            mask = default_mask.clone()
            mask[: len(mask) // 2] = 0
            return mask

    module = fit(pruning(pruning_fn=FirstHalf, parameter_names=["weight"]), max_epochs=1)
    assert sum(zeros(module).values()) == 34


def test_methods_to_override() -> None:
    class Counting(ModelPruning):
        calls: tuple[float, ...] = ()

        def apply_pruning(self, amount: float) -> None:
            super().apply_pruning(amount / 2)
            self.calls += (amount,)

        def apply_lottery_ticket_hypothesis(self) -> None:
            super().apply_lottery_ticket_hypothesis()
            self.calls += (0,)

    half, whole = Counting("l1_unstructured", amount=0.4), pruning(amount=0.2, use_lottery_ticket_hypothesis=True)
    assert same(parameters_of(fit(half, max_epochs=2)), parameters_of(fit(whole, max_epochs=2)))
    assert half.calls == (0.4, 0, 0.4, 0)
    module = Layers()
    found = ModelPruning.sanitize_parameters_to_prune(module, parameter_names=("bias", "training"))
    assert [name for _, name in found] == ["bias"] * 3
    assert ModelPruning.sanitize_parameters_to_prune(module, [(module.layer, "weight")]) == [(module.layer, "weight")]
    assert len(ModelPruning.sanitize_parameters_to_prune(module)) == 6


def test_what_it_prints(caplog: Any) -> None:
    fit(pruning(verbose=2, amount=5), max_epochs=2)
    assert "epoch 1: ModelPruning: 5 → 10 of 81 elements are zero (12.3%)." in caplog.text
    assert "  layer.weight: " in caplog.text


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_lottery_ticket_hypothesis": True},
        {"use_lottery_ticket_hypothesis": True, "resample_parameters": True, "prune_on_train_epoch_end": False},
        {"pruning_fn": "random_unstructured", "use_global_unstructured": False},
        {"pruning_fn": "random_structured", "use_global_unstructured": False, "pruning_dim": -1, "parameter_names": ["weight"]},
        {"pruning_fn": prune.L1Unstructured},
    ],
)
def test_a_resumed_run_is_bit_identical(options: Any) -> None:
    validates = not options.get("prune_on_train_epoch_end", True)
    expected = parameters_of(fit(pruning(make_pruning_permanent=False, **options), validates=validates))
    places = [("on_train_batch_end", number) for number in (2, 3, 5, 9)] + [("on_train_epoch_end", 2)]
    for hook, number in [*places, ("on_validation_start", 3)] if validates else places:
        fit(pruning(**options), SaveIn(hook, number), validates=validates)
        again = fit(pruning(make_pruning_permanent=False, **options), ckpt_path="there", validates=validates)
        assert same(parameters_of(again), expected), (hook, number)


def on_processes(fn: str) -> list[dict[str, Any]]:
    def run(*callbacks: Callback, **arguments: Any) -> Any:
        own = pruning(pruning_fn=fn, use_lottery_ticket_hypothesis=lambda epoch: epoch == 1)
        return parameters_of(fit(own, *callbacks, strategy="ddp", **arguments))

    found = [run()]
    for hook, number in (("on_before_zero_grad", 4), ("on_train_epoch_end", 2)):
        run(SaveIn(hook, number))
        found.append(run(ckpt_path="there"))
    return found


def both_kinds() -> list[list[dict[str, Any]]]:
    return [on_processes(fn) for fn in ("l1_unstructured", "random_unstructured")]


def test_on_two_processes() -> None:
    for first, second in zip(*run_world(2, both_kinds), strict=True):
        assert all(same(found, first[0]) for found in first + second)
        assert sum(int((value == 0).sum()) for value in first[0].values()) > 40


def test_evaluating_a_checkpoint_with_masks() -> None:
    fit(pruning(amount=10), SaveIn("on_train_batch_end", 5), max_epochs=2)
    module = Layers()
    make_trainer(pruning()).validate(module, tiny_loader(8), ckpt_path="there", verbose=False)
    assert sum(zeros(module).values()) == 10
    assert parameters_of(module).keys() == parameters_of(Layers()).keys()


# -------------------------------------------------------------------------------------------------- without the callback


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.body[2].weight = self.body[0].weight


def saved_pruned(kind: type[Layers] = Layers, **options: Any) -> dict[str, Any]:
    """The parameters that a forward uses when `there` is saved."""
    found: dict[str, Any] = {}

    class Used(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 8:
                copied = copy.deepcopy(module.state_dict())
                for name in [name.removesuffix("_mask") for name in copied if name.endswith("_mask")]:
                    if f"{name}_orig" in copied:
                        found[name] = copied[f"{name}_orig"] * copied[f"{name}_mask"]

    fit(pruning(**options), SaveIn("on_train_batch_end", 8), Used(), module=kind())
    return found


def begins_with(*callbacks: Callback, module: Any = None, **options: Any) -> dict[str, Any]:
    """The parameters that training begins with."""
    found: dict[str, Any] = {}

    class Begun(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.update(parameters_of(module))

    fit(*callbacks, Begun(), module=module, ckpt_path="there", **options)
    return found


@pytest.mark.parametrize("kind", [Layers, Tied])
def test_a_checkpoint_is_that_of_a_plain_model(kind: type[Layers]) -> None:
    expected = saved_pruned(kind)
    assert load_file("there/model.safetensors").keys() == kind().state_dict().keys()
    assert same(parameters_of(kind.load_from_checkpoint("there")), expected)
    assert sum(zeros(kind.load_from_checkpoint("there")).values()) > 15
    for stage in ("validate", "test", "predict"):
        module = kind()
        getattr(make_trainer(), stage)(module, tiny_loader(8), ckpt_path="there")
        assert same(parameters_of(module), expected), stage
    assert same(begins_with(module=kind(), restore={"model"}), expected)
    assert same(begins_with(module=kind()), expected)  # the optimizer and the loop continue too


def test_weights_only(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=8)
    fit(pruning(), best, max_epochs=3, enable_checkpointing=True)
    assert sum(zeros(Layers.load_from_checkpoint(best.last_model_path)).values()) > 20
    assert not (Path(best.last_model_path) / "state.safetensors").exists()
    module = fit(pruning(), ckpt_path=best.last_model_path, restore={"model"}, max_epochs=1)
    assert 10 < sum(zeros(module).values()) < 20


def test_a_module_that_is_still_pruned() -> None:
    expected = saved_pruned()
    trainer = make_trainer(pruning(make_pruning_permanent=False), max_epochs=1)
    module = Layers()
    trainer.fit(module, tiny_loader(24, batch_size=8))
    trainer.validate(module, tiny_loader(8), ckpt_path="there", verbose=False)
    layer: Any = module.layer
    assert torch.equal(layer.weight_orig * layer.weight_mask, expected["layer.weight"])
    trainer.save_checkpoint("again")
    assert same(parameters_of(Layers.load_from_checkpoint("again")), expected)


class Masked(Layers):
    """Prunes in its own `__init__`, so that its checkpoints have the names that it has."""

    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.layer, "weight", amount=2)


class ByHand(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            prune.l1_unstructured(module.layer, "weight", amount=2)


def test_pruning_of_the_user() -> None:
    """Of a callback: the weights can be loaded without it, but a run that continues needs the mask."""
    fit(pruning(parameters_to_prune=()), SaveIn("on_train_batch_end", 5), module=Masked())
    assert {"layer.weight_orig", "layer.weight_mask"} < Masked.load_from_checkpoint("there").state_dict().keys()
    fit(ByHand(), SaveIn("on_train_batch_end", 5), max_epochs=2)
    assert zeros(Layers.load_from_checkpoint("there"))["layer.weight"] == 2
    assert (begins_with(restore={"model"})["layer.weight"] == 0).sum() == 2
    with pytest.raises(StateMismatchError, match=r"identity\(layer, 'weight'\); a callback does so in on_load_checkpoint"):
        fit(ByHand(), ckpt_path="there")


def test_freezing_by_name() -> None:
    """The names of parameters stay those of the module when they are pruned."""
    schedule: Any = {0: ["body", "layer"], 2: ["layer.*"]}
    trained: list[list[bool]] = []

    class Trained(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trained.append([p.requires_grad for p in module.parameters()])

    fit(pruning(parameter_names=["weight"]), LayerFreezing(schedule), Trained(), SaveIn("on_train_batch_end", 5), max_epochs=3)
    assert [sum(found) for found in trained] == [6, 6, 2]
    fit(pruning(parameter_names=["weight"]), LayerFreezing(schedule), Trained(), ckpt_path="there", max_epochs=3)
    assert [sum(found) for found in trained[3:]] == [6, 2]


def save_on_two() -> dict[str, Any]:
    fit(pruning(pruning_fn="random_unstructured"), SaveIn("on_train_epoch_end", 3), strategy="ddp")
    plain = begins_with(restore={"model"}, strategy="ddp")
    module = Layers()
    make_trainer(strategy="ddp").validate(module, tiny_loader(16), ckpt_path="there", verbose=False)
    assert same(plain, parameters_of(module))
    return plain


def test_a_checkpoint_of_two_processes_without_the_callback() -> None:
    first, second = run_world(2, save_on_two)
    assert same(first, second)
    assert same(parameters_of(Layers.load_from_checkpoint("there")), first)

    class Masks(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            stored = load_file("there/state.safetensors")
            for name, value in module.state_dict().items():
                assert torch.equal(value, stored[f"user/pruned_parameters/{name}"])

    fit(pruning(), Masks(), ckpt_path="there", max_epochs=3)  # on one process


def test_what_is_refused(trainer: Any, module: Any) -> None:
    for arguments, match in (
        ({"pruning_fn": "l1"}, "pruning_fn.* must be one of 'l1_unstructured'"),
        ({"pruning_fn": nn.Linear}, "must be one of l1_unstructured, .* or a subclass of BasePruningMethod"),
        ({"pruning_fn": "random_structured"}, "needs pruning_dim="),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "needs pruning_norm="),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "is not unstructured. Add: use_global_unstructured=False"),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "needs use_global_unstructured=True"),
        ({"parameter_names": ["kernel"]}, "parameter_names"),
        ({"amount": "half"}, "amount"),
        ({"verbose": 3}, "verbose=.* must be 0, 1 or 2"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            pruning(**arguments)
    with pytest.raises(ModuleError, match=r"Layers has no layer Linear with a parameter 'weight'. Pass layers of the module"):
        fit(pruning(parameters_to_prune=[(nn.Linear(2, 2), "weight")]))
    for averaging in (ExponentialMovingAverage(decay=0.9), StochasticWeightAveraging(0.1)):
        with pytest.raises(ConfigurationError, match=f"ModelPruning and {type(averaging).__name__} cannot be combined"):
            fit(pruning(), averaging)
    trainer.strategy.shards_optimizer_state = True
    with pytest.raises(ConfigurationError, match="ModelPruning needs whole parameters .* Use strategy='ddp'"):
        pruning().setup(trainer, module, "fit")
