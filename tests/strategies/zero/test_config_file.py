"""Reading DeepSpeed configurations: the option of each key, and errors that name unsupported keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.checks import argument_texts, arguments_of
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.launch.environment import local_rank
from trainkit.strategies import ZeROStrategy
from trainkit.strategies.zero.config_file import _MISSING, deepspeed_config, read_config
from trainkit.strategies.zero.deepspeed_config import ZeROConfig

# A configuration as in the documentation of DeepSpeed, Accelerate and transformers.
USUAL = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False, "buffer_count": 5, "buffer_size": 1e8},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "allgather_bucket_size": 5e8,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "reduce_scatter": True,
        "stage3_prefetch_bucket_size": 1e6,
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
}


# From DeepSpeed's documentation, with every method off.
COMPRESSION = {
    "layer_reduction": {"enabled": False, "keep_number_layer": 5},
    "weight_quantization": {
        "shared_parameters": {"enabled": False, "quantize_groups": 64},
        "different_groups": {"wq1": {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["attention"]}},
    },
}


def changed(**sections: Any) -> dict[str, Any]:
    """A small configuration with other sections; those of `zero` are added to "zero_optimization"."""
    zero = {"stage": 3, **sections.pop("zero", {})}
    return {"zero_optimization": zero, **sections}


def test_the_usual_file() -> None:
    found = read_config(USUAL)
    assert found.options == {
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_params": "cpu",
        "pin_memory": False,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "allgather_bucket_size": 5e8,
        "sub_group_size": 1e9,
        "prefetch_bucket_size": 1e6,
        "max_live_parameters": 1e9,
        "max_reuse_distance": 1e9,
        "zero3_save_16bit_model": True,
    }
    assert found.run_settings == {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 4}
    assert found.precision is None
    assert found.optimizer is not None
    assert found.optimizer["type"] == "AdamW"
    assert found.scheduler is not None
    assert found.scheduler["params"]["warmup_num_steps"] == 10
    assert found.without_effect == [
        "steps_per_print",
        "wall_clock_breakdown",
        "offload_param.buffer_size",
        "offload_param.buffer_count",
        "fp16.hysteresis",
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
    ]


def test_a_file_with_comments(caplog: pytest.LogCaptureFixture) -> None:
    """Comments are allowed, as in DeepSpeed. A notice names keys that have no effect in this stage."""
    Path("ds.json").write_text("// ours\n" + json.dumps(USUAL) + "\n")
    strategy = ZeROStrategy(config="ds.json")
    assert strategy.config == ZeROConfig(
        3,
        offload_optimizer="cpu",
        offload_params="cpu",
        pin_memory=False,
        overlap_comm=True,
        prefetch_bucket_size=1_000_000,
        sub_group_size=1_000_000_000,
        max_reuse_distance=1_000_000_000,
        zero3_save_16bit_model=True,
    )
    assert "these keys of ds.json have no effect: " in caplog.text
    assert "allgather_bucket_size" in caplog.text, "which is of stages 1 and 2"
    assert strategy.has_optimizer


@pytest.mark.parametrize(
    "sections, name, more",
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16-true", {}),
        ({"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50}}, "16-true", {"init_scale": 1024.0}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16-mixed", {}),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "16-mixed", {"init_scale": 65536.0}),
    ],
)
def test_precisions(sections: dict[str, Any], name: str, more: dict[str, float]) -> None:
    found = read_config(changed(**sections)).precision
    assert found is not None
    assert found.name == name
    assert found._scaling["init_scale"] == more.get("init_scale", 2.0**16)
    assert found._scaling["growth_interval"] == (50 if name == "16-true" else 2000)


def test_nvme_and_aio() -> None:
    nvme = {"device": "nvme", "nvme_path": "/disk", "buffer_count": 4}
    aio = {"block_size": 1048576, "thread_count": 2, "queue_depth": 16, "single_submit": True, "overlap_events": False}
    zero = {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 1e9}}
    assert read_config(changed(zero=zero, aio=aio)).options == {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_params": "nvme",
        "nvme_path": "/disk",
        "pin_memory": True,
        "optimizer_buffer_count": 4,
        "param_buffer_count": 4,
        "max_params_in_cpu": 1e9,
        "aio_block_size": 1048576,
        "aio_threads": 2,
        "aio_queue_depth": 16,
        "aio_single_submit": True,
        "aio_overlap_events": False,
    }


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, 'config: "zero_optimization" has no "stage": DeepSpeed then shards nothing, which is DDP. Use strategy=\'ddp\''),
        (changed(zero={"stage": 0}), "\"stage\": 0: DeepSpeed then shards nothing, which is DDP. Use strategy='ddp'"),
        (changed(zero={"stage": "auto"}), '"stage": auto: DeepSpeed then shards nothing'),
        (changed(zero={"stage": 5}), "stage must be 1, 2 or 3, not 5"),
        (changed(zero={"stgae3": 1}), "'zero_optimization': 'stgae3' is not a key that trainkit reads. Did you mean 'stage'"),
        (changed(zero={"cpu_offload": True}), "'cpu_offload' is from an old version of DeepSpeed. Write \"offload_optimizer\""),
        (changed(zero={"legacy_stage1": True}), "'zero_optimization.legacy_stage1' is True, but only False is supported"),
        (
            changed(zero={"offload_optimizer": {"device": "cpu", "ratio": 0.3}}),
            "'offload_optimizer.ratio' is 0.3, but only 1.0",
        ),
        (changed(zero={"offload_optimizer": "cpu"}), "'offload_optimizer' must be an object, .* not 'cpu'"),
        (changed(zero={"offload_param": {"device": "disk"}}), "offload_params must be None, 'cpu' or 'nvme', not 'disk'"),
        (changed(zero={"overlap_comm": "yes"}), "overlap_comm must be True or False, not 'yes'"),
        (changed(amp={"enabled": True}), "'amp' is not supported. Remove it, and use \"torch_autocast\": .*'16-mixed'"),
        (
            changed(tensorboard={"enabled": True, "job_name": "x"}),
            r"Remove it, and use Trainer\(logger='tensorboard'\), or Acce",
        ),
        (changed(wandb={"enabled": True}), r"Remove it, and use Trainer\(logger='wandb'\), or Accelerator\(log_with='wandb'\)"),
        (
            changed(csv_monitor={"enabled": True}),
            r"Remove it, and use Trainer\(logger='csv'\), or Accelerator\(",
        ),
        (changed(comet={"enabled": True}), r"Remove it, and use Trainer\(logger='comet'\)"),
        (changed(flops_profiler={"enabled": True}), r"Remove it, and use callbacks=\[ThroughputMonitor\(\)\]"),
        (changed(comms_logger={"enabled": True}), r"Remove it, and use Trainer\(profiler='pytorch'\)"),
        (changed(autotuning={"enabled": True}), r"Remove it, and use callbacks=\[BatchSizeFinder\(\)\]"),
        (changed(compile={"deepcompile": True}), r"Remove it, and use Trainer\(compile=True\)"),
        (
            changed(tensor_parallel={"autotp_size": 2}),
            r"Remove it, and use FSDPStrategy\(tensor_parallel=2\) instead of ZeRO: DeepSpeed's AutoTP replaces layers",
        ),
        (
            changed(zero={"stage": 2, "zenflow": {"topk_ratio": 0.1}}),
            "ZenFlow, which applies a part of each gradient in a later",
        ),
        (
            changed(zero={"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}),
            "SuperOffload, whose optimizer state lies in a process of its own",
        ),
        (changed(lr=0.1), '\'lr\' is not supported. Remove it, and write it in the optimizer: "optimizer": {"type": "AdamW"'),
        (changed(tokens=3), "config: 'tokens' is not a key that trainkit reads. Correct its name, or remove it."),
        (
            changed(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}}),
            '"max_grad_norm": 1.0, which is no option of an optimizer. .* "gradient_clipping": 1.0',
        ),
        (
            changed(gradient_cliping=1.0),
            "'gradient_cliping' is not a key that trainkit reads. Did you mean 'gradient_clipping'",
        ),
        (changed(gradient_clipping="1"), "'gradient_clipping' must be a number or 'auto', not '1'"),
        (changed(sparse_gradients=True), "'sparse_gradients' is True, but only False is supported"),
        (changed(bf16={"enabled": True}, torch_autocast={"enabled": True}), "'bf16' and 'torch_autocast' are both enabled"),
        (changed(fp16={"enabled": True, "loss_scale": 128}), "'loss_scale' is 128, but loss scaling is always dynamic"),
        (changed(torch_autocast={"enabled": True, "dtype": "int8"}), "'dtype' must be 'bfloat16' or 'float16', not 'int8'"),
        (changed(bf16={"enable": True}), "'bf16': 'enable' is not a key that trainkit reads. Did you mean 'enabled'"),
        (changed(bf16={"enabled": "true"}), "'bf16': 'enabled' must be true, false or 'auto', not 'true'"),
        (
            changed(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}),
            "'lower_precision_safe_modules' is not",
        ),
        (changed(optimizer={"type": "Adam", "legacy_fusion": True}), "legacy_fusion' is True, but only False is supported"),
        (changed(optimizer={"params": {}}), "'optimizer' needs a 'type'. Add one, such as 'AdamW'"),
        (
            changed(scheduler={"type": "WarmupLR", "param": {"warmup_num_steps": 3}}),
            "'param' is not a key that trainkit reads. Did you mean 'params'",
        ),
        (
            changed(activation_checkpointing={"cpu_checkpoint": True}),
            "activation_checkpointing has no key 'cpu_checkpoint'. Use one of .* Did you mean",
        ),
        (
            changed(activation_checkpointing={"contiguous_memory_optimization": True}),
            "needs two more keys. Add 'partition_activations': True and",
        ),
        (changed(communication_data_type="int8"), "communication_dtype must be None, 'fp32', 'bf16' or 'fp16', not 'int8'"),
        (changed(zero={"zero_quantized_weights": True}), "quantized_weights=True needs a GPU, but torch finds none"),
        ("missing.json", "config='missing.json' cannot be read: No such file"),
        (3, "config must be the path of a DeepSpeed JSON file or a dict, not 3"),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ZeROStrategy(config=config, device="cpu")


@pytest.mark.parametrize("section, key", [(section, key) for section, keys in _MISSING.items() for key in keys])
def test_features_that_trainkit_does_not_implement(section: str, key: str) -> None:
    """The message says what they are."""
    feature = _MISSING[section][key]
    content = {key: {"enabled": True, "x": 1}} if not section else {section: {key: 0.5, "enabled": True}}
    if section == "offload_optimizer":
        content = {"zero": {section: {"device": "cpu", key: 0.5}}}
    elif section == "zero_optimization":
        content = {"zero": {key: {"x": 1}}}
    with pytest.raises(ConfigurationError, match=rf"'(\S*\.)?{key}' .*: trainkit does not implement {feature}\. Remove it\.$"):
        read_config(changed(**content))


def test_float16_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a CPU without float16, which the CPU of this machine may have."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)
    with pytest.raises(ConfigurationError, match="precision='16-true' under ZeRO needs a device on which DeepSpeed supports"):
        ZeROStrategy(config=changed(fp16={"enabled": True}), device="cpu")


@pytest.mark.parametrize(
    "sections, without_effect",
    [
        ({"amp": {"enabled": False}, "curriculum_learning": {"enabled": False, "a": 1}}, ["amp", "curriculum_learning"]),
        ({"wandb": {"enabled": False, "team": "x"}, "tensorboard": None}, ["wandb", "tensorboard"]),
        ({"data_types": {"grad_accum_dtype": None}}, ["data_types"]),
        ({"elasticity": {}, "compression_training": []}, ["elasticity", "compression_training"]),
        ({"cuda_visible_devices": False, "sparse_attention": "none"}, ["cuda_visible_devices", "sparse_attention"]),
        ({"zero": {"zenflow": None, "stage": 2}}, ["zero_optimization.zenflow"]),
        ({"tensor_parallel": {"autotp_size": 1}}, ["tensor_parallel"]),
        ({"bf16": {"enabled": False, "check_grad_overflow": True}}, ["bf16.check_grad_overflow"]),
        ({"bf16": {"loss_scale": 0, "hysteresis": 2}}, ["bf16.loss_scale", "bf16.hysteresis"]),
        ({"fp16": {"enabled": False, "loss_scale": 128, "opt_level": "O2"}}, ["fp16.opt_level"]),
        ({"nebula": {"enabled": True}, "timers": {"throughput": {"enabled": True}}}, ["nebula", "timers"]),
        ({"compression_training": COMPRESSION}, ["compression_training"]),
        ({"prescale_gradients": True, "gradient_predivide_factor": 8}, ["prescale_gradients", "gradient_predivide_factor"]),
        ({"fp16": False, "bf16": None, "torch_autocast": "no"}, []),
        ({"fp16": {"enabled": "false"}, "bf16": {"enabled": None}}, []),
        ({"optimizer": None, "scheduler": {}, "activation_checkpointing": False, "aio": None}, []),
        ({"gradient_clipping": None, "train_batch_size": None}, []),
        ({"zero": {"offload_optimizer": "none", "offload_param": None}}, []),
        ({"zero": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": None, "pin_memory": True}}}, []),
        ({"zero": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}}, ["offload_param"]),
        ({"zero": {"stage": 1, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}}, ["offload_param"]),
    ],
)  # fmt: skip
def test_what_is_off_is_accepted(sections: dict[str, Any], without_effect: list[str]) -> None:
    """Lines of other people's files that turn something off, or have no effect in this stage."""
    stage = sections.get("zero", {}).get("stage", 3)
    found = read_config(changed(**sections))
    assert (found.options, found.run_settings, found.precision) == ({"stage": stage}, {}, None)
    assert (found.optimizer, found.scheduler) == (None, None)
    assert found.without_effect == without_effect


@pytest.mark.parametrize(
    "name, kind", [("Adamw", "AdamW"), ("ADAM", "Adam"), ("adamw", "AdamW"), ("sgd", "SGD"), ("Lion", "Lion")]
)
def test_names_of_optimizers_are_read_in_any_case(name: str, kind: str) -> None:
    """As DeepSpeed does for its own."""
    found = read_config(changed(optimizer={"type": name, "params": {"lr": 0.1, "max_grad_norm": None}}))
    assert found.optimizer == {"type": kind, "params": {"lr": 0.1}}


@pytest.mark.parametrize(
    "text, message",
    [("{", "is not valid JSON"), ("[1]", "contains a list"), ('{"a": 1, "a": 2}', "the key 'a' occurs twice")],
)
def test_files_that_are_not_configurations(text: str, message: str) -> None:
    Path("ds.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_config("ds.json")


def test_options_in_addition_to_a_configuration() -> None:
    with pytest.raises(
        ConfigurationError, match=r"ZeROStrategy got both config= and stage=2. Write these into the configuration"
    ):
        ZeROStrategy(2, config=USUAL)
    with pytest.raises(ConfigurationError, match=r"two precisions: .*'bf16-true'.* and precision='32-true'"):
        ZeROStrategy(config=changed(bf16={"enabled": True}), precision="32-true", device="cpu")


def test_an_option_with_its_default_value_is_in_addition_too() -> None:
    """The configuration may have another value. Only a parser, which passes every option, does not state the defaults."""
    with pytest.raises(ConfigurationError, match="both config= and param_persistence_threshold=100000"):
        ZeROStrategy(config={"zero_optimization": {"stage": 3}}, param_persistence_threshold=100_000)
    kept = [name for name, argument in arguments_of(ZeROConfig).items() if argument.kept]
    defaults = {name: getattr(ZeROConfig, name) for name in kept}
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7}}
    assert ZeROStrategy(config=config, **defaults).config.param_persistence_threshold == 7
    with pytest.raises(ConfigurationError, match="both config= and hpz_partition_size=2"):
        ZeROStrategy(config=config, **{**defaults, "hpz_partition_size": 2})


def test_an_unknown_option() -> None:
    with pytest.raises(UnknownNameError, match="ZeROStrategy has no argument 'offload_optimiser'.*'offload_optimizer'"):
        ZeROStrategy(offload_optimiser="cpu")  # type: ignore[call-arg]


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {  # option → another value than the default, and the others that it needs
    "offload_optimizer": ("cpu", {"stage": 2}),
    "offload_params": ("cpu", {"stage": 3}),
    "pin_memory": (False, {"stage": 2, "offload_optimizer": "cpu"}),
    "reduce_bucket_size": (2, {"stage": 2}),
    "allgather_bucket_size": (2, {"stage": 2}),
    "overlap_comm": (True, {"stage": 2}),
    "contiguous_gradients": (False, {"stage": 2}),
    "round_robin_gradients": (True, {"stage": 2}),
    "sub_group_size": (7, {"stage": 3}),
    "prefetch_bucket_size": (7, {"stage": 3}),
    "param_persistence_threshold": (7, {"stage": 3}),
    "max_live_parameters": (7, {"stage": 3}),
    "max_reuse_distance": (7, {"stage": 3}),
    "hpz_partition_size": (2, {"stage": 3}),
    "quantized_weights": (True, {"stage": 3}),
    "quantized_nontrainable_weights": (True, {"stage": 3}),
    "quantized_gradients": (True, {"stage": 3}),
    "communication_dtype": ("bf16", {"stage": 2}),
    "max_params_in_cpu": (7, {"stage": 3, "offload_params": "nvme", "nvme_path": "."}),
    "param_buffer_count": (7, {"stage": 3, "offload_params": "nvme", "nvme_path": "."}),
    "optimizer_buffer_count": (7, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    "aio_block_size": (4096, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    "aio_queue_depth": (7, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    "aio_threads": (7, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    "aio_single_submit": (True, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    "aio_overlap_events": (False, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_changes_deepspeeds_configuration(option: str) -> None:
    value, others = OPTIONS[option]
    made, default = ZeROConfig(**others, **{option: value}), ZeROConfig(**others)
    assert made.for_model([10, 20], {}, ".") != default.for_model([10, 20], {}, ".")


def test_each_argument_has_a_text() -> None:
    assert sorted(argument_texts(ZeROConfig)) == sorted(arguments_of(ZeROConfig))


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("line, expected", [
    ("", None),
    ("--deepspeed", None),
    ("--local_rank=0 --deepspeed --deepspeed_config ds.json --epochs 3", "ds.json"),
    ("--deepspeed_config=conf/a=b.json", "conf/a=b.json"),
    ("--deepspeed-config ds.json", "ds.json"),
    ("--deepspeed_config a.json --deepspeed_config=b.json", "b.json"),
    ("--deepspeed_config -", "-"),
    ("--deepspeed_config_file ds.json --my_deepspeed_config x", None),
    ("-- --deepspeed_config ds.json", None),
    ("deepspeed_config ds.json", None),
])  # fmt: skip
def test_the_file_with_deepspeeds_configuration(line: str, expected: str | None) -> None:
    assert deepspeed_config(line.split()) == expected


@pytest.mark.parametrize("line", ["--deepspeed_config", "--deepspeed_config=", "--deepspeed_config --epochs 3"])
def test_no_file_with_deepspeeds_configuration(line: str) -> None:
    with pytest.raises(ConfigurationError, match="--deepspeed_config has no value. Pass the path of a file"):
        deepspeed_config(line.split())


def test_the_arguments_are_those_that_deepspeed_adds() -> None:
    """DeepSpeed's own parser accepts the same arguments."""
    import argparse

    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--local_rank", type=int, default=-1)
    line = ["--local_rank=1", "--deepspeed", "--deepspeed_config", "ds.json"]
    parsed = parser.parse_args(line)
    assert (parsed.deepspeed_config, parsed.local_rank) == (deepspeed_config(line), local_rank(line)) == ("ds.json", 1)
