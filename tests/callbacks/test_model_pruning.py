"""`ModelPruning`: what is pruned, exact resume, several processes, what remains after the run, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import nn
from torch.nn.utils import prune

from trainkit import Callback
from trainkit.callbacks import ModelPruning
from trainkit.errors import ConfigurationError, ModuleError


class Layers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.body(inputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


def fit(*callbacks: Callback, module: Any = None, ckpt_path: Any = None, validates: bool = False, **options: Any) -> Any:
    module = Layers() if module is None else module
    trainer = make_trainer(*callbacks, **{"max_epochs": 4, **options})
    trainer.fit(module, tiny_loader(24, batch_size=8, shuffle=True), tiny_loader(8) if validates else None, ckpt_path=ckpt_path)
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
    trainer.strategy.shards_optimizer_state = True
    with pytest.raises(ConfigurationError, match="ModelPruning needs whole parameters .* Use strategy='ddp'"):
        pruning().setup(trainer, module, "fit")
