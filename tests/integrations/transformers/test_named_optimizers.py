"""Optimizers and schedules by name: those of the Hugging Face Trainer, or an error that says why not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.hugging_face.tiny_models import loader, make_model, rows_for
from torch import nn

from trainkit import Trainer
from trainkit.errors import MissingPackageError, OptimizerError, UnknownNameError
from trainkit.integrations.transformers import TransformersModule
from trainkit.integrations.transformers.named_optimizers import OPTIMIZERS, UNSUPPORTED, decay_groups, read_optim_args
from trainkit.optim import make_schedule

SETTINGS = {
    "learning_rate": 3e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
}
BITSANDBYTES = [name for name, known in OPTIMIZERS.items() if known.path.startswith("bitsandbytes.")]


def test_every_name_of_transformers_is_here_or_says_why() -> None:
    from transformers.training_args import OptimizerNames

    names = {name.value for name in OptimizerNames}
    assert names - OPTIMIZERS.keys() == set(UNSUPPORTED)
    assert OPTIMIZERS.keys() - names == {"lion", "muon"}


def theirs(model: nn.Module, optim: str, optim_args: str | None) -> torch.optim.Optimizer:
    """What the Trainer of transformers creates."""
    import transformers

    arguments = transformers.TrainingArguments("out", optim=optim, optim_args=optim_args, use_cpu=True, **SETTINGS)  # type: ignore[arg-type]
    return transformers.Trainer(model, arguments).create_optimizer()


def groups_of(optimizer: torch.optim.Optimizer) -> list[tuple[list[int], dict[str, Any]]]:
    groups = optimizer.param_groups
    return [([id(p) for p in g["params"]], {key: repr(g[key]) for key in g if key != "params"}) for g in groups]


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_torch", None),
        ("adamw_torch_fused", None),
        ("adafactor", None),
        ("sgd", "momentum=0.9, nesterov=True"),
        ("adagrad", "lr_decay=0.01,eps=1e-7"),
        ("rmsprop", "alpha=0.9,centered=True"),
        ("adamw_torch_8bit", None),
        ("adamw_torch_4bit", None),
    ],
)
def test_optimizers_are_those_of_transformers(kind: str, optim: str, optim_args: str | None) -> None:
    model = make_model(kind)
    module = TransformersModule(model, optim=optim, optim_args=optim_args, lr_scheduler_type="constant", **SETTINGS)  # type: ignore[arg-type]
    ours, expected = module.configure_optimizers()["optimizer"], theirs(model, optim, optim_args)
    assert type(ours) is type(expected)
    assert groups_of(ours) == groups_of(expected)


def test_no_decay_for_biases_and_norms() -> None:
    model = make_model("bert")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in decay_groups(model, 0.1))
    assert others == {name for name in names.values() if "bias" in name or "LayerNorm" in name}
    assert decayed | others == set(names.values())


def test_frozen_parameters_are_left_out() -> None:
    model = make_model("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert [len(group["params"]) for group in decay_groups(model, 0.1)] == [1]


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name not in BITSANDBYTES and "bit" not in name and name != "muon"]
)
def test_every_optimizer_trains(name: str) -> None:
    model, rows = make_model("bert"), rows_for("bert", 4)
    before = model.classifier.weight.detach().clone()
    run = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    run.fit(TransformersModule(model, optim=name, learning_rate=1e-2), loader(rows, 2))
    assert not torch.equal(model.classifier.weight, before)


class Settings(torch.optim.SGD):
    """Keeps what it was created with."""

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, lr)
        self.settings = settings


@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is replaced, because it needs a GPU: what is tested is what it gets."""
    found: list[Any] = []

    class Manager:
        @classmethod
        def get_instance(cls) -> Any:
            return cls()

        def register_module_override(self, *arguments: Any) -> None:
            found.append(arguments)

    package, optim = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    package.optim = optim  # type: ignore[attr-defined]
    kind = OPTIMIZERS[name].path.rpartition(".")[2]
    setattr(optim, kind, Settings)
    optim.GlobalOptimManager = Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    model = make_model("llama")
    module = TransformersModule(model, optim=name, lr_scheduler_type="constant", **SETTINGS)  # type: ignore[arg-type]
    settings = module.configure_optimizers()["optimizer"].settings
    assert settings["optim_bits"] == (8 if "8bit" in name else 32)
    assert settings.get("is_paged", False) is name.startswith("paged")
    betas = {"AdamW": (0.8, 0.95), "Lion": (0.8, 0.95), "AdEMAMix": (0.8, 0.95, 0.9999), "RMSprop": None}
    assert settings.get("betas") == betas[kind]
    assert found == ([(model.model.embed_tokens, "weight", {"optim_bits": 32})] if "8bit" in name else [])


def test_a_missing_package_names_its_installation() -> None:
    module = TransformersModule(make_model("bert"), optim="lion", lr_scheduler_type="constant")
    with pytest.raises(MissingPackageError, match="pip install bitsandbytes"):
        module.configure_optimizers()


def test_a_package_that_cannot_be_imported_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitsandbytes.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = TransformersModule(make_model("bert"), optim="lion", lr_scheduler_type="constant")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_it_needs"):
        module.configure_optimizers()


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ("adamw_torhc", "Did you mean 'adamw_torch'"),
        ("galore_adamw", "is not supported: it projects"),
        ("lomo", "backward pass"),
    ],
)
def test_unknown_optimizers(optim: str, words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        TransformersModule(make_model("bert"), optim=optim)


def test_unknown_options() -> None:
    module = TransformersModule(make_model("bert"), optim="sgd", optim_args="momentun=0.9", lr_scheduler_type="constant")
    with pytest.raises(UnknownNameError, match="Did you mean 'momentum'"):
        module.configure_optimizers()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        ("a=1, b=0.5,c=True,d=none,e=text,f=1e-8", {"a": 1, "b": 0.5, "c": True, "d": None, "e": "text", "f": 1e-8}),
    ],
)
def test_optim_args(given: Any, expected: dict[str, Any]) -> None:
    assert read_optim_args(given) == expected


def test_optim_args_without_a_value() -> None:
    with pytest.raises(OptimizerError, match="expected name=value"):
        read_optim_args("momentum")


# ------------------------------------------------------------------------------------------------------------------ schedules

OPTIONS: dict[str, dict[str, Any]] = {
    "cosine": {"num_cycles": 0.75},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": {"timescale": 5},
    "warmup_stable_decay": {"num_decay_steps": 4},
}
STEPS = 10


def rates(optimizer: torch.optim.Optimizer, schedule: Any) -> list[list[float]]:
    found = []
    for _ in range(STEPS):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 3, 0.25])
@pytest.mark.parametrize("name", ["linear", "constant", "constant_with_warmup", *OPTIONS.keys()])
def test_schedules_are_those_of_transformers(name: str, warmup: float) -> None:
    from transformers import SchedulerType, TrainingArguments, get_scheduler

    warmup = 0 if name == "constant" else warmup
    options, model = OPTIONS.get(name), make_model("bert")
    module = TransformersModule(model, lr_scheduler_type=SchedulerType(name), warmup_steps=warmup, lr_scheduler_kwargs=options)  # type: ignore[arg-type]
    returned = module.configure_optimizers()
    optimizer = returned["optimizer"]
    schedule = dict(returned["lr_scheduler"])
    ours = rates(optimizer, make_schedule(schedule.pop("scheduler"), optimizer, total_steps=STEPS, **schedule))
    other = torch.optim.AdamW(model.parameters(), lr=5e-5)
    steps = TrainingArguments("out", warmup_steps=warmup, use_cpu=True).get_warmup_steps(STEPS)  # type: ignore[arg-type]
    expected = rates(other, get_scheduler(name, other, steps, STEPS, options))
    assert [row[0] for row in ours] == [row[0] for row in expected]


def test_a_schedule_that_follows_the_evaluation() -> None:
    module = TransformersModule(
        make_model("bert"),
        learning_rate=1e-3,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"},
    )
    run = Trainer(accelerator="cpu", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False)
    run.fit(module, loader(rows_for("bert", 4), 2), loader(rows_for("bert", 4), 2))
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [2.5e-4] * 2  # after the second and the third epoch


def test_another_metric_may_be_followed() -> None:
    module = TransformersModule(
        make_model("bert"), lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"monitor": "eval_f1", "mode": "max"}
    )
    schedule = module.configure_optimizers()["lr_scheduler"]
    assert (schedule["monitor"], schedule["scheduler"].mode) == ("eval_f1", "max")


def test_a_schedule_that_follows_each_step() -> None:
    module = TransformersModule(make_model("bert"), lr_scheduler_type="greedy")
    with pytest.raises(OptimizerError, match="Use 'reduce_lr_on_plateau'"):
        module.configure_optimizers()
