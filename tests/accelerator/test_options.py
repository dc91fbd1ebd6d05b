"""The arguments of `Accelerator`, which are Accelerate's: each has its effect, or its error says what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit import Accelerator, Precision, Strategy, Trainer
from trainkit.config.compiling import Compilation, TorchDynamoPlugin
from trainkit.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from trainkit.config.settings import Settings, carry
from trainkit.errors import ConfigurationError, TrainkitError, UnknownNameError, UnsupportedArgumentError
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.registry import StrategyInfo
from trainkit.strategies import DDPStrategy
from trainkit.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig


def refused(error: type[Exception], **arguments: Any) -> str:
    with pytest.raises(error) as raised:
        Accelerator(**arguments)
    return str(raised.value)


def told(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Set the environment variables of a process that `trainkit launch` has started with a configuration."""
    for name, value in carry(Settings(**sections, source="there.yaml")).items():
        monkeypatch.setenv(name, value)


# ---------------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("mixed, name", [("no", "32-true"), ("fp16", "16-mixed"), ("bf16", "bf16-mixed")])
def test_mixed_precision(mixed: str, name: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    assert accelerator.strategy.precision.name == name
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == mixed


def test_precisions_that_are_none_here() -> None:
    """Unsupported, unknown and duplicate precisions are errors."""
    assert "Use precision='bf16-mixed'; or, to try it" in refused(ConfigurationError, mixed_precision="fp8")
    assert "must be one of 'no', 'fp16', 'bf16', 'fp8', not 'half'" in refused(ConfigurationError, mixed_precision="half")
    text = refused(ConfigurationError, mixed_precision="bf16", precision="bf16-mixed")
    assert "precision= and mixed_precision= were given. Give one of them" in text


def test_the_loss_scale() -> None:
    handler = GradScalerKwargs(init_scale=8.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
    scaler = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]).strategy.precision.scaler
    assert scaler is not None
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (8.0, 4.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 3)
    off = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    assert off.strategy.precision.scaler is None
    text = refused(ConfigurationError, precision=Precision("16-mixed"), kwargs_handlers=[handler])
    assert "precision= is an object. Pass the options to it" in text


# ----------------------------------------------------------------------------------------------------------------- strategy


def test_where_it_runs() -> None:
    assert Accelerator(cpu=True).device == torch.device("cpu")
    mine = Strategy("cpu")
    assert Accelerator(strategy=mine).strategy is mine
    assert "strategy= and deepspeed_plugin= were given" in refused(
        ConfigurationError, strategy="ddp", deepspeed_plugin=_plugin(zero_stage=2)
    )
    assert "strategy='fsdp'" in refused(UnsupportedArgumentError, megatron_lm_plugin=object())
    assert "ParallelismConfig(tp_size=" in refused(UnsupportedArgumentError, torch_tp_plugin=object())
    assert "must be a DeepSpeedPlugin, not 3" in refused(ConfigurationError, deepspeed_plugin=3)


def _plugin(**options: Any) -> Any:
    from trainkit.config.deepspeed_plugin import DeepSpeedPlugin

    return DeepSpeedPlugin(**options)


class Recorded(Strategy):
    """Keeps its options, in the place of the strategy that a plugin names."""

    owns_masters = True

    def __init__(self, device: Any = "auto", **options: Any) -> None:
        super().__init__(device)
        self.options = options


def made_by(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[str, dict[str, Any], Accelerator]:
    """The name and the options of the strategy that an `Accelerator` makes of a plugin."""
    names: list[str] = []
    monkeypatch.setattr("trainkit.accelerator.options.load_strategy", lambda name: names.append(name) or Recorded)
    accelerator = Accelerator(cpu=True, **arguments)
    return names[0], accelerator.strategy.options, accelerator  # type: ignore[attr-defined]


def test_options_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=77), backend="gloo")
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True, reshard_after_forward=False, activation_checkpointing=True)
    name, options, accelerator = made_by(monkeypatch, fsdp_plugin=plugin, kwargs_handlers=[group], mixed_precision="bf16")
    assert name == "fsdp"
    assert options == {
        "reshard_after_forward": False,
        "offload_params": "cpu",
        "process_group_backend": "gloo",
        "timeout": timedelta(seconds=77),
    }
    assert accelerator.fsdp_plugin is accelerator.state.fsdp_plugin is plugin
    assert accelerator.deepspeed_plugin is None
    assert accelerator.options.activation_checkpointing == checkpointing_choice(True)
    assert accelerator.strategy.precision.name == "bf16-true", "the strategy has float32 masters"


@pytest.mark.world_size(2)
def test_sizes_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    sizes = ParallelismConfig(tp_size=2, dp_shard_size=1)
    name, options, accelerator = made_by(monkeypatch, fsdp_plugin=plugin, parallelism_config=sizes)
    assert (name, options) == ("fsdp", {"wrap": ["Block"], "tensor_parallel": 2})
    assert accelerator.fsdp_plugin is not plugin, "which another Accelerator may use without these sizes"
    assert made_by(monkeypatch, parallelism_config=ParallelismConfig(dp_shard_size=2))[:2] == ("fsdp", {})
    with pytest.raises(ConfigurationError, match="dp_shard_size=4 × tp_size=1 does not fit the number of processes, 2"):
        made_by(monkeypatch, parallelism_config=ParallelismConfig(dp_shard_size=4))
    assert Accelerator(parallelism_config=ParallelismConfig()).strategy.name == "ddp", "no size, no FSDP"


def test_one_argument_chooses_the_strategy() -> None:
    plugins = {"strategy": "ddp", "deepspeed_plugin": _plugin(zero_stage=2), "fsdp_plugin": FullyShardedDataParallelPlugin()}
    for first, second in (("strategy", "fsdp_plugin"), ("deepspeed_plugin", "fsdp_plugin"), ("strategy", "deepspeed_plugin")):
        text = refused(ConfigurationError, **{name: plugins[name] for name in (first, second)})
        assert f"{first}= and {second}= were given. Give one of them." in text
    for name in ("strategy", "deepspeed_plugin"):
        text = refused(ConfigurationError, parallelism_config=ParallelismConfig(tp_size=2), **{name: plugins[name]})
        assert f"{name}= and parallelism_config= were given" in text


@pytest.mark.world_size(2)
def test_options_of_ddp() -> None:
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7, comm_hook="bf16")
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=77), backend="gloo")
    strategy = Accelerator(kwargs_handlers=[ddp, group]).strategy
    assert isinstance(strategy, DDPStrategy)
    assert (strategy.find_unused_parameters, strategy.bucket_cap_mb) == (True, 7)
    assert (strategy.timeout, strategy.process_group_backend) == (timedelta(seconds=77), "gloo")
    assert "DistributedDataParallelKwargs, but strategy= is an object" in refused(
        ConfigurationError, strategy=DDPStrategy(), kwargs_handlers=[ddp]
    )


def test_the_runtime_of_xla_connects_the_processes() -> None:
    handlers = [InitProcessGroupKwargs(backend="nccl")]
    text = refused(UnsupportedArgumentError, strategy="xla", kwargs_handlers=handlers)
    assert "backend='nccl') is not supported on XLA, whose runtime connects the processes. Fix: remove backend" in text


class WithoutOptions(Strategy):
    def __init__(self, device: Any = "auto") -> None:
        super().__init__(device)


@pytest.mark.parametrize(
    ("options", "given", "missing"),
    [
        ({"timeout": timedelta(seconds=77)}, "timeout=datetime.timedelta(seconds=77)", "timeout"),
        ({"backend": "gloo"}, "backend='gloo'", "process_group_backend"),
    ],
)
def test_a_strategy_without_the_options_of_the_process_group(
    options: dict[str, Any], given: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.registry._registered", [StrategyInfo(f"{__name__}:WithoutOptions", {"own": {}})])
    text = refused(ConfigurationError, strategy="own", kwargs_handlers=[InitProcessGroupKwargs(**options)])
    assert f"InitProcessGroupKwargs({given}): strategy='own' has no option '{missing}'. Expected a strategy whose " in text
    assert f"if WithoutOptions is yours, add the option: def __init__(self, *, {missing}=None, " in text


def test_options_of_ddp_count_for_nothing_on_one_process() -> None:
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs()]
    assert Accelerator(cpu=True, kwargs_handlers=handlers).num_processes == 1


# ----------------------------------------------------------------------------------------- loaders and accumulation windows


def test_how_loaders_are_sharded() -> None:
    accelerator = Accelerator(cpu=True)
    assert (accelerator.split_batches, accelerator.even_batches) == (False, True)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False))
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)
    text = refused(ConfigurationError, dataloader_config=DataLoaderConfiguration(), split_batches=True)
    assert "dataloader_config and split_batches were given" in text
    assert "each process reads its own batches" in refused(UnsupportedArgumentError, dispatch_batches=True)
    assert Accelerator(cpu=True, dispatch_batches=False, use_seedable_sampler=True).num_processes == 1
    assert "Accelerator(even_batches=...) must be True or False, not 'yes'" in refused(ConfigurationError, even_batches="yes")
    assert "must be a DataLoaderConfiguration" in refused(ConfigurationError, dataloader_config={})
    for name, kind in {
        "dataloader_config": DataLoaderConfiguration,
        "deepspeed_plugin": DeepSpeedPlugin,
        "dynamo_plugin": TorchDynamoPlugin,
        "gradient_accumulation_plugin": GradientAccumulationPlugin,
        "project_config": ProjectConfiguration,
    }.items():
        assert f"Did you forget to make an instance: {kind.__name__}()?" in refused(ConfigurationError, **{name: kind})
    wrong = refused(ConfigurationError, kwargs_handlers=[InitProcessGroupKwargs])
    assert "Did you forget to make an instance: InitProcessGroupKwargs()?" in wrong


def test_windows() -> None:
    assert Accelerator(cpu=True).gradient_accumulation_steps == 1
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3
    text = refused(ConfigurationError, gradient_accumulation_plugin=plugin, gradient_accumulation_steps=2)
    assert "Give one of them" in text
    assert "must be a GradientAccumulationPlugin" in refused(ConfigurationError, gradient_accumulation_plugin=2)


# ---------------------------------------------------------------------------------------------------------- other arguments


def test_the_project() -> None:
    assert Accelerator(cpu=True).project_dir is None
    accelerator = Accelerator(cpu=True, project_dir="there")
    assert (accelerator.project_dir, accelerator.logging_dir) == ("there", "there")
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("there", logging_dir="logs"))
    assert (accelerator.project_dir, accelerator.logging_dir) == ("there", "logs")
    text = refused(ConfigurationError, project_dir="one", project_config=ProjectConfiguration("other"))
    assert "project_dir='one', but project_config has 'other'. Give one" in text
    assert "must be a ProjectConfiguration" in refused(ConfigurationError, project_config="there")


def test_trackers(tmp_path: Path) -> None:
    text = refused(UnknownNameError, log_with="tensorbord", project_dir=str(tmp_path))
    assert "Did you mean 'tensorboard'?" in text
    assert "logging_dir" in refused(ConfigurationError, log_with="tensorboard")


def test_generators_need_no_telling() -> None:
    """`rng_types` is accepted and has no effect; unknown names are errors."""
    assert Accelerator(cpu=True, rng_types=["torch", "cuda", "generator", "python", "numpy"]).num_processes == 1
    text = refused(ConfigurationError, rng_types=["numpi"])
    assert "rng_types must be some of torch, cuda, xla, generator, python, numpy, hpu" in text


def test_none_means_the_default() -> None:
    names = [name for name in NAMES if name not in ("device_placement", "step_scheduler_with_optimizer")]
    accelerator = Accelerator(**dict.fromkeys(names))
    assert (accelerator.device.type, accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == ("cpu", 1, "no")


def test_how_loaders_are_sharded_can_be_read_and_changed() -> None:
    given = DataLoaderConfiguration(split_batches=True, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=given)
    assert accelerator.dataloader_config is given
    assert (accelerator.split_batches, accelerator.even_batches) == (True, True)
    accelerator.dataloader_config.even_batches = False
    assert not accelerator.even_batches
    accelerator.even_batches = True
    assert given.even_batches
    assert Accelerator(cpu=True, split_batches=True).dataloader_config == DataLoaderConfiguration(split_batches=True)


def test_handlers() -> None:
    both = [AutocastKwargs(cache_enabled=False), ProfileKwargs(activities=["cpu"])]
    options = Accelerator(cpu=True, kwargs_handlers=both).options
    assert [options.autocast, options.profile] == both
    assert "kwargs_handlers contains two AutocastKwargs" in refused(ConfigurationError, kwargs_handlers=[both[0], both[0]])
    assert "from trainkit.utils, not" in refused(ConfigurationError, kwargs_handlers=[{"init_scale": 2.0}])


def test_models_are_compiled() -> None:
    graphs = []

    def noting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(noting, name="noting")
    accelerator = Accelerator(cpu=True, dynamo_backend="noting")
    mine = nn.Linear(2, 1)
    model = accelerator.prepare(mine)
    model(torch.ones(1, 2))
    assert len(graphs) == 1
    assert accelerator.unwrap_model(model) is mine
    assert Accelerator(cpu=True, dynamo_backend="no").options.compile is None
    text = refused(ConfigurationError, cpu=True, dynamo_backend="inducter")
    assert "dynamo_backend='inducter'" in text
    assert "Did you mean 'inductor'?" in text


def test_positions_are_accelerates() -> None:
    """Positional arguments have the same order as in Accelerate."""
    accelerator = Accelerator(True, False, "bf16", 4, True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)


def test_an_unknown_argument() -> None:
    text = refused(UnknownNameError, mixed_precison="bf16")
    assert "Accelerator has no argument 'mixed_precison'. Did you mean 'mixed_precision'?" in text


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_precision_by_its_old_argument_is_named(name: str) -> None:
    text = refused(UnsupportedArgumentError, **{name: True})
    assert f"Accelerator({name}=...): write mixed_precision='{name}'" in text


# ---------------------------------------------------------------------------------- the configuration of `trainkit launch`


def test_a_bare_one_is_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Accelerator()` without arguments uses the configuration of `trainkit launch`."""
    values = {"mixed_precision": "bf16", "gradient_accumulation_steps": 3, "use_cpu": True}
    told(monkeypatch, values=values, dynamo={"dynamo_backend": "eager", "dynamo_mode": "default"})
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device.type == "cpu"
    assert accelerator.options.compile == Compilation({"backend": "eager"}, source="dynamo_backend='eager'")


def test_arguments_beat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments take precedence over the configuration of `trainkit launch`."""
    told(monkeypatch, values={"mixed_precision": "bf16", "gradient_accumulation_steps": 3, "use_cpu": True})
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=1)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert Accelerator(precision="64-true").strategy.precision.name == "64-true"
    assert Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(2)).gradient_accumulation_steps == 2


def test_deepspeeds_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    told(
        monkeypatch,
        values={
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "use_cpu": True,
            "gradient_accumulation_steps": 2,
        },
        backend={"zero_stage": 2, "gradient_clipping": 0.5},
    )
    accelerator = Accelerator()
    assert accelerator.distributed_type == "DEEPSPEED"
    assert accelerator.state.deepspeed_plugin.zero_stage == 2
    assert accelerator.strategy.precision.name == "bf16-true"
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 2
    assert Accelerator(strategy=Strategy("cpu")).distributed_type == "NO"
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), [torch.ones(4, 2)] * 3)
    assert accelerator.gradient_accumulation_steps == 3
    accelerator.free_memory()


ZERO = {"distributed_type": "DEEPSPEED", "use_cpu": True}
SAYS_ZERO = "distributed_type: DEEPSPEED, use_cpu: true"


@pytest.mark.parametrize("make", [Accelerator, Trainer])
@pytest.mark.parametrize(
    "sections, said",
    [
        ({"values": {**ZERO, "mixed_precision": "fp16"}}, [SAYS_ZERO, "mixed_precision: fp16", "precision='16-true' under"]),
        (
            {"values": ZERO, "backend": {"zero_stage": 3, "offload_param_device": "nvme"}},
            [f"({SAYS_ZERO}, zero_stage: 3, offload_param_device: nvme): offload to NVMe needs a folder on a fast"],
        ),
        (
            {"values": ZERO, "dynamo": {"dynamo_backend": "eager", "dynamo_use_regional_compilation": False}},
            [SAYS_ZERO, "dynamo_backend: eager", "does not work with"],
        ),
        (
            {"values": {"use_cpu": True}, "dynamo": {"dynamo_backend": "egaer"}},
            ["dynamo_backend: egaer", "Did you mean 'eager'"],
        ),
        pytest.param(
            {"values": {"distributed_type": "MULTI_GPU"}},
            ["(distributed_type: MULTI_GPU): device 'cuda': torch sees no"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_the_configuration_says_wrong_is_its_own(
    make: Any, sections: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the configuration names the file and its keys, and no argument that was not passed."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: False)  # as on most CPUs
    told(monkeypatch, **sections)
    with pytest.raises(ConfigurationError) as raised:
        make()
    text = str(raised.value)
    assert text.startswith("there.yaml (")
    assert [part for part in said if part not in text] == []


def test_what_arguments_say_wrong_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in an argument names the argument, also if there is a configuration."""
    told(monkeypatch, values={**ZERO, "mixed_precision": "bf16"}, dynamo={"dynamo_backend": "no"})
    assert refused(ConfigurationError, mixed_precision="half").startswith("mixed_precision must be one of")
    assert refused(ConfigurationError, strategy="ddp", dynamo_backend="egaer").startswith("dynamo_backend='egaer': ")
    assert refused(ConfigurationError, strategy=Strategy("cpu"), precision="64-tru").startswith("unknown precision '64-tru'")


def test_the_trainers_engine_ignores_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, values={"gradient_accumulation_steps": 3})
    assert Accelerator.of_trainer(Strategy("cpu")).gradient_accumulation_steps == 1


# For each argument: a value other than the default, and the attribute that it changes or the text of its error.
EFFECTS: dict[str, tuple[Any, Callable[[Accelerator], Any] | str]] = {
    "device_placement": (False, lambda a: a.options.device_placement),
    "split_batches": (True, lambda a: (a.split_batches, a.steps_of_scheduler)),
    "mixed_precision": ("bf16", lambda a: a.mixed_precision),
    "gradient_accumulation_steps": (4, lambda a: a.gradient_accumulation_steps),
    "cpu": (True, lambda a: a.device.type),
    "dataloader_config": (DataLoaderConfiguration(split_batches=True), lambda a: a.split_batches),
    "deepspeed_plugin": (3, "must be a DeepSpeedPlugin"),
    "fsdp_plugin": (3, "must be a FullyShardedDataParallelPlugin, not 3: from trainkit.utils import"),
    "megatron_lm_plugin": (object(), "strategy='fsdp'"),
    "rng_types": (["dice"], "must be some of torch, cuda, xla, generator, python"),
    "log_with": ("no_tracker", "no_tracker"),
    "project_dir": ("there", lambda a: a.project_dir),
    "project_config": (ProjectConfiguration("there"), lambda a: a.project_dir),
    "gradient_accumulation_plugin": (GradientAccumulationPlugin(4), lambda a: a.gradient_accumulation_steps),
    "dispatch_batches": (True, "each process reads its own batches"),
    "even_batches": (False, lambda a: a.even_batches),
    "use_seedable_sampler": (False, lambda a: a.even_batches),  # documented to have no effect
    "step_scheduler_with_optimizer": (False, lambda a: a.steps_of_scheduler),
    "kwargs_handlers": ([AutocastKwargs(cache_enabled=False)], lambda a: a.options.autocast),
    "dynamo_backend": ("eager", lambda a: a.options.compile),
    "dynamo_plugin": (TorchDynamoPlugin(backend="eager"), lambda a: a.options.compile),
    "parallelism_config": (3, "must be a ParallelismConfig, not 3: from trainkit.utils import ParallelismConfig"),
    "strategy": ("no_strategy", "unknown strategy 'no_strategy'"),
    "precision": ("64-true", lambda a: a.strategy.precision.name),
    "activation_checkpointing": (True, lambda a: a.options.activation_checkpointing),
}


NAMES = [name for name in inspect.signature(Accelerator.__init__).parameters if name not in ("self", "unknown")]


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_has_its_effect(name: str) -> None:
    value, effect = EFFECTS[name]
    if isinstance(effect, str):
        assert effect in refused(TrainkitError, **{name: value})
        return
    said, unsaid = effect(Accelerator(**{name: value})), effect(Accelerator())
    if name == "use_seedable_sampler" or (name == "cpu" and not torch.cuda.is_available()):
        assert said == unsaid
    else:
        assert said != unsaid
