"""`TransformersModule.from_arguments`: each argument of `TrainingArguments` is read, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from trainkit import Callback, Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.integrations.transformers import TransformersData, TransformersModule
from trainkit.integrations.transformers.from_arguments import run_length
from trainkit.integrations.transformers.hf_callbacks import HuggingFaceEvents
from trainkit.names import table

TABLE: dict[str, list[str]] = table("hugging_face")["training_arguments"]
Parts = tuple[Any, TransformersData, Trainer]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


def rows(count: int = 20) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (count, 5), generator=generator)]


def made(given: dict[str, Any], **more: Any) -> Parts:
    """The parts of a run with some arguments; `evaluates` and `saves` are off if they are not given."""
    kind = Seq2SeqTrainingArguments if given.keys() & {"predict_with_generate", "generation_config"} else TrainingArguments
    kind = Seq2SeqTrainingArguments if any(name.startswith("generation") for name in given) else kind
    settings = {"output_dir": "out", "use_cpu": True, "save_strategy": "no", "report_to": "none", **given}
    args = kind(**settings)
    data = {"train_dataset": rows(), "eval_dataset": rows(8), **more}
    return TransformersModule.from_arguments(model(), args, **data)


def checkpoint(parts: Parts) -> Any:
    return next(iter(parts[2].checkpoint_callbacks), None)


def intervals(parts: Parts) -> Any:
    """Epochs and optimizer steps between two saves; `None` if nothing is saved."""
    found = checkpoint(parts)
    return None if found is None else (found.every_n_epochs, found.every_n_train_steps)


def compiled(parts: Parts) -> dict[str, Any]:
    compilation = parts[2]._run.compilation
    return {} if compilation is None else dict(compilation.options)


def of_ddp(name: str) -> Callable[[Parts], Any]:
    return lambda parts: getattr(parts[2].strategy, name, None)


def events(parts: Parts) -> HuggingFaceEvents:
    return next(one for one in parts[2].callbacks if isinstance(one, HuggingFaceEvents))


def hparam(name: str) -> Callable[[Parts], Any]:
    return lambda parts: parts[0].hparams[name]


def argument(name: str) -> Callable[[Parts], Any]:
    return lambda parts: getattr(parts[2]._arguments, name)


def fitted(parts: Parts, read: Callable[[Parts], Any]) -> Any:
    module, data, trainer = parts
    trainer.fit(module, data)
    return read(parts)


FIT = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
# Argument → what else is given, its value, what is read of the parts, and what that is.
READ: dict[str, tuple[dict[str, Any], Any, Callable[[Parts], Any], Any]] = {
    "output_dir": ({}, "there", lambda p: Path(p[2].default_root_dir).name, "there"),
    "per_device_train_batch_size": ({}, 3, lambda p: p[1].train_batch_size, 3),
    "per_device_eval_batch_size": ({}, 5, lambda p: p[1].eval_batch_size, 5),
    "num_train_epochs": ({}, 7.0, argument("max_epochs"), 7),
    "max_steps": ({}, 9, argument("max_steps"), 9),
    "learning_rate": ({}, 0.5, hparam("learning_rate"), 0.5),
    "lr_scheduler_type": ({}, "cosine", lambda p: p[0]._schedule(None)["scheduler"], "cosine"),
    "lr_scheduler_kwargs": (
        {"lr_scheduler_type": "cosine"},
        {"num_cycles": 2},
        lambda p: p[0]._schedule(None).get("num_cycles"),
        2,
    ),
    "warmup_steps": ({}, 0.25, lambda p: p[0]._schedule(None).get("warmup_ratio"), 0.25),
    "optim": ({}, "sgd", lambda p: type(p[0].configure_optimizers()["optimizer"]), torch.optim.SGD),
    "optim_args": (
        {"optim": "sgd"},
        "momentum=0.5",
        lambda p: p[0].configure_optimizers()["optimizer"].param_groups[0]["momentum"],
        0.5,
    ),
    "weight_decay": ({}, 0.2, lambda p: p[0].configure_optimizers()["optimizer"].param_groups[0]["weight_decay"], 0.2),
    "adam_beta1": ({}, 0.7, lambda p: p[0].configure_optimizers()["optimizer"].param_groups[0]["betas"][0], 0.7),
    "adam_beta2": ({}, 0.8, lambda p: p[0].configure_optimizers()["optimizer"].param_groups[0]["betas"][1], 0.8),
    "adam_epsilon": ({}, 1e-3, lambda p: p[0].configure_optimizers()["optimizer"].param_groups[0]["eps"], 1e-3),
    "gradient_accumulation_steps": ({}, 3, argument("accumulation"), 3),
    "max_grad_norm": ({}, 0.5, argument("gradient_clip_val"), 0.5),
    "label_smoothing_factor": ({}, 0.1, hparam("label_smoothing_factor"), 0.1),
    "bf16": ({}, True, lambda p: p[2].precision, "bf16-mixed"),
    "fp16": ({}, True, lambda p: p[2].precision, "16-mixed"),
    "activation_checkpointing": ({}, True, lambda p: p[0].model.is_gradient_checkpointing, True),
    "activation_checkpointing_kwargs": (
        {"activation_checkpointing": True},
        {"every_n_layers": 2},
        argument("activation_checkpointing"),
        {"every": 2},
    ),
    "torch_compile": ({}, True, lambda p: p[2]._run.compilation is not None, True),
    "torch_compile_backend": ({}, "eager", lambda p: compiled(p).get("backend"), "eager"),
    "torch_compile_mode": ({}, "default", lambda p: compiled(p).get("mode"), "default"),
    "use_cache": ({}, True, lambda p: p[0].model.config.use_cache, True),
    "neftune_noise_alpha": ({}, 5.0, hparam("neftune_noise_alpha"), 5.0),
    "auto_find_batch_size": ({}, True, argument("auto_micro_batch"), True),
    "logging_strategy": (
        {**FIT, "max_steps": -1, "num_train_epochs": 2},
        "epoch",
        lambda p: fitted(p, lambda p: [e["step"] for e in events(p).state.log_history if "loss" in e]),
        [5, 10],
    ),
    "logging_steps": ({}, 0.1, argument("log_every_n_steps"), 1),
    "logging_first_step": (
        {**FIT, "logging_steps": 2, "max_steps": 4},
        True,
        lambda p: fitted(p, lambda p: [e["step"] for e in events(p).state.log_history if "grad_norm" in e]),
        [1, 2, 4],
    ),
    "include_num_input_tokens_seen": (
        FIT,
        "all",
        lambda p: fitted(p, lambda p: [e.get("num_input_tokens_seen") for e in events(p).state.log_history]),
        [20, 40, 40],
    ),
    "disable_tqdm": ({}, True, lambda p: p[2].progress_bar_callback, None),
    "report_to": ({}, ["tensorboard"], lambda p: type(p[2].logger).__name__, "TensorBoardLogger"),
    "eval_strategy": ({}, "epoch", argument("validate_at_end"), True),
    "eval_steps": ({"eval_strategy": "steps"}, 4, argument("val_every_n_steps"), 4),
    "prediction_loss_only": ({}, True, lambda p: p[0].compute_metrics, None),
    "eval_on_start": (
        FIT,
        True,
        lambda p: fitted(p, lambda p: [e["step"] for e in events(p).state.log_history if "eval_loss" in e]),
        [0],
    ),
    "include_for_metrics": ({}, ["loss"], hparam("include_for_metrics"), ("loss",)),
    "save_strategy": ({}, "epoch", intervals, (1, 0)),
    "save_steps": ({"save_strategy": "steps", "max_steps": 8}, 0.25, lambda p: checkpoint(p).every_n_train_steps, 2),
    "save_only_model": ({"save_strategy": "epoch"}, True, lambda p: checkpoint(p).save_weights_only, True),
    "save_total_limit": ({"save_strategy": "epoch"}, 4, argument("save_total_limit"), 4),
    "enable_jit_checkpoint": ({}, True, intervals, (0, 0)),
    "load_best_model_at_end": (
        {**BEST, "load_best_model_at_end": False},
        True,
        lambda p: argument("restore_best")(p) is checkpoint(p),
        True,
    ),
    "metric_for_best_model": (BEST, "f1", lambda p: checkpoint(p).monitor, "eval_f1"),
    "greater_is_better": (BEST, True, lambda p: checkpoint(p).mode, "max"),
    "full_determinism": ({}, True, lambda p: p[2]._flags[0], True),
    "seed": ({}, 7, lambda p: p[2].seed, 7),
    "use_cpu": ({}, True, lambda p: p[2].device.type, "cpu"),
    "dataloader_drop_last": ({}, True, lambda p: p[1].drop_last, True),
    "dataloader_num_workers": ({}, 2, lambda p: p[1].loader_options["num_workers"], 2),
    "dataloader_persistent_workers": (
        {"dataloader_num_workers": 1},
        True,
        lambda p: p[1].loader_options["persistent_workers"],
        True,
    ),
    "dataloader_multiprocessing_context": (
        {"dataloader_num_workers": 1},
        "spawn",
        lambda p: p[1].loader_options["multiprocessing_context"],
        "spawn",
    ),
    "dataloader_prefetch_factor": ({"dataloader_num_workers": 1}, 5, lambda p: p[1].loader_options["prefetch_factor"], 5),
    "remove_unused_columns": ({}, False, lambda p: p[1].remove_unused_columns, False),
    "label_names": ({}, ["answers"], lambda p: (p[0]._label_names, p[1].label_names), (["answers"], ["answers"])),
    "train_sampling_strategy": ({}, "group_by_length", lambda p: p[1].train_sampling_strategy, "group_by_length"),
    "length_column_name": ({}, "size", lambda p: p[1].length_column_name, "size"),
    "ddp_find_unused_parameters": ({}, True, of_ddp("find_unused_parameters"), True),
    "ddp_bucket_cap_mb": ({}, 7, of_ddp("bucket_cap_mb"), 7),
    "ddp_static_graph": ({}, True, of_ddp("static_graph"), True),
    "fsdp": ({}, True, lambda p: p[2].strategy.name, "fsdp"),
    "fsdp_config": (
        {"fsdp": True},
        {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": False},
        lambda p: (p[2].strategy.options.wrap, p[2].strategy.options.reshard_after_forward),
        (["LlamaDecoderLayer"], False),
    ),
    "skip_memory_metrics": ({}, False, lambda p: [type(c).__name__ for c in p[2].callbacks].count("MemoryMonitor"), 1),
    "torch_empty_cache_steps": ({}, 3, lambda p: events(p).args.torch_empty_cache_steps, 3),
    "predict_with_generate": ({}, True, hparam("predict_with_generate"), True),
    "generation_max_length": ({}, 9, hparam("generation_max_length"), 9),
    "generation_num_beams": ({}, 2, hparam("generation_num_beams"), 2),
}
READ["gradient_checkpointing"] = READ["activation_checkpointing"]
READ["gradient_checkpointing_kwargs"] = ({"gradient_checkpointing": True}, *READ["activation_checkpointing_kwargs"][1:])
# Those whose effect has a test of its own below, or needs a package, a service or several processes.
ELSEWHERE = {
    "dataloader_pin_memory": "test_page_locked_memory_can_be_turned_off",
    "debug": "test_hooks_of_transformers_look_for_overflows",
    "deepspeed": "test_a_deepspeed_configuration",
    "generation_config": "test_a_generation_config",
    "liger_kernel_config": "test_kernels_of_liger",
    "log_level": "test_log_levels",
    "log_level_replica": "test_log_levels",
    "parallelism_config": "test_parallelism",
    "project": "test_loggers_of_services",
    "run_name": "test_loggers_of_services",
    "use_liger_kernel": "test_kernels_of_liger",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token"), "test_hf_trainer.py"
    ),
}
OLD_NAMES = "ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"


@pytest.mark.filterwarnings(OLD_NAMES)
@pytest.mark.parametrize("name", READ)
def test_an_argument_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another value than the default, the module, the data or the Trainer is another one."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # TrainingArguments sets it for fsdp.
    others, value, read, expected = READ[name]
    with_value = read(made({**others, name: value}))
    assert with_value == expected
    if name not in ("use_cpu", "prediction_loss_only"):  # The one is always given, the other has a default of None.
        assert read(made(others)) != expected


def test_each_argument_that_the_table_calls_read_has_a_test() -> None:
    here = {name for name, entry in TABLE.items() if entry[0] == "here"}
    assert here - READ.keys() - ELSEWHERE.keys() == set()
    assert (READ.keys() | ELSEWHERE.keys()) - here == set()
    source = Path(__file__).read_text("utf-8")
    for test in ELSEWHERE.values():
        assert f"def {test}(" in source or (Path(__file__).parent / test).exists(), test


def value_of(name: str) -> Any:
    values = {
        "optim_target_modules": ["q"],
        "ddp_broadcast_buffers": False,
        "accelerator_config": {"split_batches": True},
        "eval_delay": 2,
        "data_seed": 3,
    }
    if name in values:
        return values[name]
    (field,) = [field for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.name == name]
    return not field.default if isinstance(field.default, bool) else "x"


REFUSED = [name for name, entry in TABLE.items() if entry[0] == "refused"]


def test_all_that_is_refused_is_named_in_one_error() -> None:
    given = {name: value_of(name) for name in REFUSED if name != "fp16_full_eval"}
    args = Seq2SeqTrainingArguments(output_dir="out", use_cpu=True, report_to=["swanlab", "tensorboard"], **given)
    with pytest.raises(UnsupportedArgumentError) as caught:
        TransformersModule.from_arguments(model(), args, train_dataset=rows())
    lines = str(caught.value).splitlines()[1:]
    assert {line[2:].split("=")[0] for line in lines} == {*given, "report_to"}
    for name in given:
        assert any(line.startswith(f"- {name}=") and TABLE[name][1] in line for line in lines)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"eval_strategy": "epoch"}, "eval_strategy='epoch': there is no eval_dataset"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "lr_scheduler_type='greedy'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance'"),
        ({"optim": "apollo_adamw"}, "optim='apollo_adamw'"),
        ({"debug": "tpu_metrics_debug"}, "debug='tpu_metrics_debug'"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
            "activation_checkpointing_kwargs",
        ),
        ({"push_to_hub": True}, r"module\.push_to_hub\(repo_id\)"),
    ],
)
def test_values_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=text):
        made(given, eval_dataset=None)


def test_values_without_effect_are_accepted() -> None:
    for name, entry in TABLE.items():
        if entry[0] in ("no effect", "script") and name not in ("local_rank", "ddp_backend"):
            made({name: 60 if name == "ddp_timeout" else 4 if name == "eval_accumulation_steps" else True} | _needed(name))


def _needed(name: str) -> dict[str, Any]:
    return {"tf32": {"tf32": False}, "resume_from_checkpoint": {"resume_from_checkpoint": "there"}}.get(name, {})


def test_the_length_of_a_run() -> None:
    """Fractions are those of all optimizer steps, as transformers counts them."""
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        num_train_epochs=2.5,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        logging_steps=0.1,
        eval_steps=0.25,
        save_steps=7,
    )
    assert run_length(args, rows(20)) == (10, 1, 3, 7)  # 7 batches, 4 steps in an epoch
    args.dataloader_drop_last = True
    assert run_length(args, rows(20)).steps == 8
    with pytest.raises(ConfigurationError, match="max_steps=1000"):
        run_length(args, iter(()))


def test_a_fraction_of_an_epoch_is_trained() -> None:
    module, data, trainer = made({"num_train_epochs": 1.5, "per_device_train_batch_size": 4, "eval_strategy": "epoch"})
    trainer.fit(module, data)
    state = events((module, data, trainer)).state
    assert (state.global_step, state.epoch, state.max_steps) == (8, pytest.approx(1.6), 8)
    assert [entry["step"] for entry in state.log_history if "eval_loss" in entry] == [5, 8]


def test_checkpoints_are_named_as_transformers_names_them(tmp_path: Path) -> None:
    given = {**FIT, "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    module, data, trainer = made(given)
    trainer.fit(module, data)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-1", "checkpoint-2"]
    made(given)[2].fit(*made(given)[:2])  # Another run in the same folder replaces them, as with transformers.
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-1", "checkpoint-2"]


def test_the_best_alone_is_saved(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "best"}
    values = iter([1.0, 3.0, 2.0])
    given |= {"metric_for_best_model": "score", "load_best_model_at_end": True, "per_device_train_batch_size": 10}
    module, data, trainer = made(given, compute_metrics=lambda found: {"score": next(values)})
    trainer.fit(module, data)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-4"]
    state = events((module, data, trainer)).state
    assert (state.best_metric, state.best_global_step) == (3.0, 4)
    assert Path(state.best_model_checkpoint or "").name == "checkpoint-4"


def test_callbacks_of_both_kinds_are_accepted() -> None:
    class Theirs(TrainerCallback):
        pass

    parts = made({}, callbacks=[Theirs, EarlyStopping("eval_loss")])
    assert any(isinstance(one, Theirs) for one in events(parts).handler.callbacks)
    assert any(isinstance(one, EarlyStopping) for one in parts[2].callbacks)
    with pytest.raises(ConfigurationError, match="TrainerCallback or a trainkit.Callback"):
        made({}, callbacks=[object()])


def test_optimizers_of_the_user_are_used() -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    args = TrainingArguments(output_dir="out", use_cpu=True, save_strategy="no", report_to="none", **FIT)

    class Mine(TransformersModule):
        pass

    module, data, trainer = Mine.from_arguments(own, args, train_dataset=rows(), optimizers=(optimizer, schedule))
    assert isinstance(module, Mine)
    trainer.fit(module, data)
    assert [entry["learning_rate"] for entry in events((module, data, trainer)).state.log_history[:2]] == [0.4, 0.2]


def test_something_else_than_training_arguments_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected TrainingArguments"):
        TransformersModule.from_arguments(model(), {"output_dir": "out"})  # type: ignore[arg-type]


def test_fields_of_a_subclass_are_named(caplog: pytest.LogCaptureFixture) -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        beta: float = 0.0

    args = Mine(output_dir="out", use_cpu=True, save_strategy="no", report_to="none", beta=0.5)
    TransformersModule.from_arguments(model(), args, train_dataset=rows())
    assert "does not read beta, which Mine adds" in caplog.text


def test_hooks_of_transformers_look_for_overflows() -> None:
    before = sum(len(part._forward_hooks) for part in model().modules())
    after = sum(len(part._forward_hooks) for part in made({"debug": "underflow_overflow"})[0].model.modules())
    assert after > before


def test_page_locked_memory_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert made({})[1].loader_options["pin_memory"] is False  # use_cpu: TrainingArguments turns it off
    args = TrainingArguments(output_dir="out", use_cpu=True, save_strategy="no", report_to="none")
    for pin in (True, False):
        args.dataloader_pin_memory = pin
        _, data, _ = TransformersModule.from_arguments(model(), args, train_dataset=rows())
        assert data.loader_options["pin_memory"] is pin


def test_a_generation_config() -> None:
    from transformers import GenerationConfig

    assert made({"generation_config": GenerationConfig(max_length=17)})[0].model.generation_config.max_length == 17


def test_kernels_of_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", lambda *given: called.append(given[1]))
    made({"use_liger_kernel": True, "liger_kernel_config": {"rope": False}})
    assert called == [{"rope": False}]


def test_log_levels() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    try:
        made({"log_level": "error", "log_level_replica": "critical"})
        assert logging.get_verbosity() == logging.ERROR
    finally:
        logging.set_verbosity(before)


def test_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # TrainingArguments sets it for fsdp.
    from accelerate import ParallelismConfig

    with pytest.raises(UnsupportedArgumentError, match="it needs fsdp"):
        made({"parallelism_config": ParallelismConfig()})
    with pytest.raises(UnsupportedArgumentError, match="context parallelism"):
        made({"parallelism_config": ParallelismConfig(cp_size=2), "fsdp": True})


def test_a_deepspeed_configuration() -> None:
    pytest.importorskip("deepspeed")
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    assert made({"deepspeed": config})[2].strategy.stage == 2


def test_loggers_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    made_with: dict[str, dict[str, Any]] = {}

    def make(name: str, /, **options: Any) -> Any:
        made_with[name] = options
        return False

    monkeypatch.setattr("trainkit.loggers.logger_setup.make_logger", make)
    monkeypatch.setattr("trainkit.integrations.transformers.from_arguments.Trainer", lambda **values: values["logger"])
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    made({"report_to": ["wandb", "mlflow", "comet_ml"], "run_name": "one", "project": "all"})
    assert made_with == {"wandb": {"name": "one", "project": "all"}, "mlflow": {"run_name": "one"}, "comet_ml": {"name": "one"}}
    monkeypatch.setenv("WANDB_PROJECT", "other")
    made({"report_to": ["wandb"]})
    assert made_with["wandb"]["project"] == "other"


def test_the_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append(1))
    module, data, trainer = made({**FIT, "max_steps": 5, "torch_empty_cache_steps": 2})
    trainer.fit(module, data)
    assert len(calls) == 2


def test_loggers_get_the_learning_rate(tmp_path: Path) -> None:
    module, data, trainer = made({**FIT, "output_dir": str(tmp_path)})
    trainer.fit(module, data)
    assert float(trainer.logged_metrics["learning_rate"]) == pytest.approx(2.5e-5)


def test_json_of_the_state_can_be_written(tmp_path: Path) -> None:
    parts = made(FIT)
    parts[2].fit(*parts[:2])
    events(parts).state.save_to_json(str(tmp_path / "state.json"))
    assert json.loads((tmp_path / "state.json").read_text("utf-8"))["global_step"] == 2


def test_the_parts_are_those_of_trainkit() -> None:
    module, data, trainer = made({"save_strategy": "epoch"})
    assert isinstance(module, nn.Module)
    assert isinstance(data, TransformersData)
    assert isinstance(trainer, Trainer)
    assert all(isinstance(one, Callback) for one in trainer.callbacks)
    assert isinstance(checkpoint((module, data, trainer)), ModelCheckpoint)


def test_functions_and_data_reach_the_parts() -> None:
    def function(*given: Any, **more: Any) -> Any:
        raise AssertionError

    names = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
    processor = SimpleNamespace(save_pretrained=function)
    train, val = rows(3), rows(2)
    given = {**dict.fromkeys(names, function), "data_collator": function, "processing_class": processor}
    module, data, _ = made({}, train_dataset=train, eval_dataset=val, **given)
    assert [getattr(module, name) for name in names] == [function] * 3
    assert data.data_collator is function
    assert module.processing_class is data.processing_class is processor
    assert data.datasets["train"] is train
    assert data.datasets["val"] is val
