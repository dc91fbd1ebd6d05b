"""The rules for the code of this repository, checked on the syntax trees of all files.

Each rule is applied to the repository, and to small examples that break it, so that the tests of the rules can fail.
"""

from __future__ import annotations

import ast
import importlib
import os
import types

import pytest
from helpers import house
from helpers.support import run_python

from trainkit import Strategy
from trainkit.config.keys import FSDP
from trainkit.registry import StrategyInfo, strategy_infos

# The public names. A new name is a decision: add it here and to the changelog.
PUBLIC = {
    "trainkit": [
        "Accelerator",
        "AutocastKwargs",
        "Callback",
        "CombinedLoader",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DataModule",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "Float8Precision",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "LightningDataModule",
        "LightningModule",
        "ParallelismConfig",
        "Precision",
        "ProfileKwargs",
        "ProjectConfiguration",
        "Strategy",
        "TrainModule",
        "Trainer",
        "__version__",
        "errors",
        "find_executable_batch_size",
        "load_checkpoint_in_model",
        "notebook_launcher",
        "seed_everything",
        "set_seed",
        "skip_first_batches",
        "write_basic_config",
    ],
    "trainkit.callbacks": [
        "BackboneFinetuning",
        "BaseFinetuning",
        "BasePredictionWriter",
        "BatchSizeFinder",
        "Callback",
        "Checkpoint",
        "DeviceStatsMonitor",
        "EMAWeightAveraging",
        "EarlyStopping",
        "ExponentialMovingAverage",
        "GradientAccumulationScheduler",
        "GradientClipping",
        "LambdaCallback",
        "LayerFreezing",
        "LearningRateFinder",
        "LearningRateMonitor",
        "MemoryMonitor",
        "ModelCheckpoint",
        "ModelPruning",
        "ModelSummary",
        "NonFiniteGuard",
        "OnExceptionCheckpoint",
        "PredictionWriter",
        "ProgressBar",
        "RecompileMonitor",
        "RichModelSummary",
        "RichProgressBar",
        "SpikeDetection",
        "StochasticWeightAveraging",
        "TQDMProgressBar",
        "ThroughputMonitor",
        "Timer",
        "WeightAveraging",
    ],
    "trainkit.callbacks.progress": ["ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"],
    "trainkit.checkpoint": ["Checkpoint", "list_checkpoints", "open_checkpoint", "register"],
    "trainkit.cli": [
        "ArgsType",
        "LRSchedulerCallable",
        "LRSchedulerTypeUnion",
        "LightningArgumentParser",
        "LightningCLI",
        "OptimizerCallable",
        "ReduceLROnPlateau",
        "SaveConfigCallback",
        "TrainkitArgumentParser",
        "TrainkitCLI",
        "instantiate_class",
    ],
    "trainkit.cli.demo": ["ByteGPT", "SourceCode", "add_arguments", "bigram_bits", "run", "unigram_bits"],
    "trainkit.data": ["CombinedLoader", "PreparedLoader"],
    "trainkit.errors": [
        "CheckpointError",
        "CheckpointLockedError",
        "CheckpointNotFoundError",
        "CheckpointWriteError",
        "CollectiveError",
        "ConfigurationError",
        "CorruptCheckpointError",
        "DataError",
        "EmptyLoaderError",
        "HookError",
        "LossError",
        "MetricError",
        "MissingMethodError",
        "MissingMetricError",
        "MissingPackageError",
        "ModuleError",
        "NonFiniteError",
        "NotAvailableError",
        "OffloadError",
        "OptimizerError",
        "Preempted",
        "ProcessFailedError",
        "StateMismatchError",
        "TrainingSpikeException",
        "TrainkitError",
        "UnknownNameError",
        "UnsavableError",
        "UnsupportedArgumentError",
    ],
    "trainkit.loggers": [
        "CSVLogger",
        "CometLogger",
        "JSONLLogger",
        "Logger",
        "MLFlowLogger",
        "TensorBoardLogger",
        "WandbLogger",
    ],
    "trainkit.logging": ["MultiProcessAdapter", "get_logger"],
    "trainkit.optim": ["make_schedule"],
    "trainkit.strategies": ["DDPStrategy", "FSDPStrategy", "Strategy", "XLAStrategy", "ZeROStrategy"],
    "trainkit.tracking": ["GeneralTracker", "on_main_process"],
    "trainkit.utilities": [
        "AttributeDict",
        "CombinedLoader",
        "HyperparametersMixin",
        "grad_norm",
        "isolate_rng",
        "measure_flops",
        "move_data_to_device",
        "rank_prefixed_message",
        "rank_zero_debug",
        "rank_zero_deprecation",
        "rank_zero_info",
        "rank_zero_only",
        "rank_zero_warn",
        "seed_everything",
    ],
    "trainkit.utilities.exceptions": ["MisconfigurationException", "SIGTERMException"],
    "trainkit.utilities.rank_zero": [
        "rank_prefixed_message",
        "rank_zero_debug",
        "rank_zero_deprecation",
        "rank_zero_info",
        "rank_zero_only",
        "rank_zero_warn",
    ],
    "trainkit.utilities.summary": [
        "LEFTOVER_PARAMS_NAME",
        "NOT_APPLICABLE",
        "PARAMETER_NUM_UNITS",
        "UNKNOWN_SIZE",
        "LayerSummary",
        "ModelSummary",
        "Summary",
        "columns_as_text",
        "get_formatted_model_size",
        "get_human_readable_count",
        "parse_batch_shape",
        "summarize",
        "table_rows",
        "total_lines",
    ],
    "trainkit.utilities.types": [
        "EVAL_DATALOADERS",
        "STEP_OUTPUT",
        "TRAIN_DATALOADERS",
        "LRSchedulerConfigType",
        "LRSchedulerPLType",
        "LRSchedulerType",
        "LRSchedulerTypeTuple",
        "LRSchedulerTypeUnion",
        "OptimizerConfig",
        "OptimizerLRScheduler",
        "OptimizerLRSchedulerConfig",
    ],
    "trainkit.tuner": ["RangeTest", "Tuner"],
    "trainkit.profilers": ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"],
    "trainkit.trainer.states": ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"],
    "trainkit.utils": [
        "AORecipeKwargs",
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "DynamoBackend",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "LoggerType",
        "ParallelismConfig",
        "PrecisionType",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
        "broadcast",
        "broadcast_object_list",
        "extract_model_from_parallel",
        "find_executable_batch_size",
        "gather",
        "gather_object",
        "is_bf16_available",
        "is_comet_ml_available",
        "is_compiled_module",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_fp16_available",
        "is_mlflow_available",
        "is_mps_available",
        "is_npu_available",
        "is_peft_available",
        "is_tensorboard_available",
        "is_torch_xla_available",
        "is_transformers_available",
        "is_wandb_available",
        "is_xpu_available",
        "load",
        "load_checkpoint_in_model",
        "notebook_launcher",
        "pad_across_processes",
        "reduce",
        "release_memory",
        "send_to_device",
        "set_seed",
        "tqdm",
        "wait_for_everyone",
        "write_basic_config",
    ],
}

# Names for authors of strategies and precisions. Other names in these modules are for trainkit itself.
FOR_PLUG_INS = {
    "trainkit.distributed.requested_devices": ["RequestedDevices"],
    "trainkit.distributed.world": ["World"],
    "trainkit.launch.joining": ["device_of", "join"],
    "trainkit.micro_batch": ["WHOLE_WINDOW", "MicroBatch", "MicroBatchKind"],
    "trainkit.nested": ["map_tensors"],
    "trainkit.precision": ["PrecisionSpec", "register_precision"],
    "trainkit.registry": ["StrategyInfo", "register_strategy", "strategies"],
}

# Files ("trainkit/x.py") and functions ("trainkit/x.py:name") that may be longer than the limits, with the reason.
LONG: dict[str, str] = {
    "trainkit/trainer/trainer.py": "one class, whose arguments and attributes are documented where users look for them",
}

SOURCES = house.package_sources()
MODULES = {source.module for source in SOURCES}
PUBLIC_SOURCES = [s for s in SOURCES if house.is_public(s.module) and not s.path.endswith("__main__.py")]


def example(text: str, module: str = "trainkit.example") -> house.Source:
    return house.Source("example.py", module, text)


def report(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_three_folders_are_read_once() -> None:
    """The rules are applied to trainkit, callbacks and strategies, and to each module once."""
    names = [source.module for source in SOURCES]
    assert len(names) == len(set(names))
    assert {"trainkit", "trainkit.errors", "trainkit.callbacks", "trainkit.strategies"} <= MODULES


# ------------------------------------------------------------------------------------------- imports between layers


def test_import_directions() -> None:
    report([c for source in SOURCES for c in house.wrong_imports(source, MODULES)])


@pytest.mark.parametrize(
    "module, text",
    [
        ("trainkit.callbacks.x", "from trainkit.strategies import DDPStrategy"),
        ("trainkit.callbacks.x", "from trainkit import strategies"),
        ("trainkit.callbacks.x", "def f():\n    import trainkit.strategies.ddp.ddp_strategy"),
        ("trainkit.callbacks.x", "from trainkit import Callback"),
        ("trainkit.callbacks.x", "from .timer import Timer"),
        ("trainkit.callbacks.x", "import matplotlib"),
        ("trainkit.callbacks.x", "import rich"),
        ("trainkit.strategies.x", "from trainkit.callbacks import Timer"),
        ("trainkit.strategies.x", "import trainkit.trainer.trainer"),
        ("trainkit.strategies.x", "from trainkit import trainer"),
        ("trainkit.strategies.x", "from trainkit.trainer.train_loop import train_epoch"),
        ("trainkit.strategies.x", "if TYPE_CHECKING:\n    from trainkit.trainer.trainer import Trainer"),
        ("trainkit.strategies.x", "import deepspeed"),
        ("trainkit.x", "from trainkit.callbacks import Timer"),
        ("trainkit.x", "def f():\n    from trainkit.strategies.ddp.ddp_strategy import DDPStrategy"),
        ("trainkit.x", "import_module('trainkit.callbacks.timer')"),
        ("trainkit.x", "import trainkit"),
        ("trainkit.x", "def f():\n    import wandb"),
        ("trainkit.cli.x", "import jsonargparse"),
        ("trainkit.cli.for_scripts.x", "import matplotlib"),
        ("trainkit.x", "import pandas"),
        ("trainkit.loggers.x", "import wandb"),
        ("trainkit.loggers.x", "from torch.utils.tensorboard import SummaryWriter"),
        ("trainkit.loggers.x", "try:\n    import wandb\nexcept ImportError:\n    pass"),
    ],
)
def test_import_directions_can_fail(module: str, text: str) -> None:
    assert house.wrong_imports(example(text, module), MODULES)


@pytest.mark.parametrize(
    "module, text",
    [
        ("trainkit.callbacks.x", "import math, numpy, torch.nn\nfrom trainkit.errors import TrainkitError"),
        ("trainkit.callbacks.x", "from trainkit import errors"),
        ("trainkit.callbacks.x", "from trainkit.callbacks.timer import Timer"),
        ("trainkit.strategies.x", "def f():\n    import deepspeed"),
        ("trainkit.cli.for_scripts.x", "from jsonargparse import ArgumentParser"),
        ("trainkit.loggers.x", "def f():\n    import wandb"),
        ("trainkit.loggers.x", "if TYPE_CHECKING:\n    import wandb"),
        ("trainkit.registry", "import_module('trainkit.callbacks.timer')"),
    ],
)
def test_import_directions_can_pass(module: str, text: str) -> None:
    assert not house.wrong_imports(example(text, module), MODULES)


def test_rooms_name_lower_rooms_only() -> None:
    """A package imports only from packages in lower layers, also for type checking, except the names in `house.ANNOTATIONS`."""
    report([c for source in SOURCES for c in house.wrong_layers(source, MODULES)])


@pytest.mark.parametrize(
    "module, text",
    [
        ("trainkit.checkpoint.x", "from trainkit.state.parts import Parts"),
        ("trainkit.data.x", "from trainkit.metrics.store import MetricStore"),
        ("trainkit.strategy", "if TYPE_CHECKING:\n    from trainkit.trainer.trainer import Trainer"),
        ("trainkit.state.x", "def f():\n    from trainkit.trainer.trainer import Trainer"),
        ("trainkit.callbacks.x", "from trainkit.trainer.trainer import Trainer"),
        ("trainkit.callbacks.x", "if TYPE_CHECKING:\n    from trainkit.trainer.progress import RunProgress"),
        ("trainkit.strategies.x", "from trainkit.trainer import progress"),
        ("trainkit.errors", "from trainkit.console import notice"),
    ],
)
def test_wrong_layers_are_found(module: str, text: str) -> None:
    assert house.wrong_layers(example(text, module), MODULES)


@pytest.mark.parametrize(
    "module, text",
    [
        ("trainkit.trainer.x", "from trainkit.accelerator.core import Accelerator\nfrom trainkit.trainer.due import DueDates"),
        ("trainkit.callbacks.x", "if TYPE_CHECKING:\n    from trainkit.trainer.trainer import Trainer"),
        ("trainkit.strategies.x", "from trainkit.accelerator.core import Accelerator"),
        ("trainkit", "from trainkit.trainer import Trainer"),
        ("trainkit.cli.x", "from trainkit.trainer import Trainer"),
    ],
)
def test_lower_rooms_pass(module: str, text: str) -> None:
    assert not house.wrong_layers(example(text, module), MODULES)


def test_every_room_has_a_layer() -> None:
    rooms = {house.room_of(module) for module in MODULES} - {""}
    listed = [room for line in house.LAYERS for room in line]
    assert sorted(rooms) == sorted([*listed, *house.PLUG_INS])


# ------------------------------------------------------------------------- examples and documentation use public names


def test_examples_and_documents_use_public_names() -> None:
    """Examples and documentation, which users copy, import only the names in the tables above."""
    sources = house.user_sources("examples", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    assert {"README.md", "examples"} <= {source.path.partition("/")[0] for source in sources}
    report([c for source in sources for c in house.private_imports(source, {**PUBLIC, **FOR_PLUG_INS})])


def test_benchmarks_use_public_names() -> None:
    """Benchmarks may import any name in the `__all__` of a module, because they also measure parts that users do not call."""
    public = {source.module: house.exported(source.tree) or [] for source in PUBLIC_SOURCES}
    report([c for source in house.user_sources("benchmarks") for c in house.private_imports(source, public)])


@pytest.mark.parametrize(
    "text",
    [
        "from trainkit.trainer.train_loop import train_epoch",
        "from trainkit import nonsense",
        "from trainkit.callbacks.timer import Timer",
        "import trainkit.trainer.trainer",
        "import trainkit\ntrainkit.loop.train_epoch()",
        "import trainkit\ntrainkit.errors.nearest('x', [])",
        "import trainkit.callbacks\ntrainkit.callbacks.nonsense",
        "from trainkit import (",
    ],
)
def test_private_names_are_found(text: str) -> None:
    assert house.private_imports(example(text), PUBLIC)


def test_public_names_pass() -> None:
    text = """
        from trainkit import Trainer, errors
        from trainkit.callbacks import Timer
        import trainkit
        import trainkit.callbacks
        trainkit.Trainer(callbacks=[trainkit.callbacks.Timer("1h")]).fit
        trainkit.errors.TrainkitError.__doc__
    """
    assert not house.private_imports(example("if True:" + text), PUBLIC)


def test_blocks_of_a_document_keep_their_lines() -> None:
    text = "Text\n\n```python\nimport trainkit.rng\n```\n\n* item\n\n  ```python\n  x = (\n  ```\n\n```bash\nexit\n```\n"
    blocks = house.python_blocks("docs/x.md", text)
    assert [c for block in blocks for c in house.private_imports(block, PUBLIC)] == [
        "docs/x.md:4 imports trainkit.rng, which is not public",
        "docs/x.md:10 does not parse: '(' was never closed",
    ]


# --------------------------------------------------------------------------------------------------------- no pickle


def test_no_pickle() -> None:
    report([c for source in SOURCES for c in house.code_in_data(source)])


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from cloudpickle import dumps",
        "import torch\ntorch.load('x')",
        "import torch as t\nsave = t.save",
        "from torch import load",
        "from torch.serialization import load",
        "import torch\ntorch.serialization.load('x')",
        "eval('1')",
        "exec('x = 1')",
        "import builtins\nbuiltins.eval('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "import torch.distributed as dist\ndist.all_gather_object(values, value)",
        "import torch\ntorch.distributed.broadcast_object_list(values)",
        "from torch import distributed\nscatter = distributed.scatter_object_list",
        "from torch.distributed import gather_object",
        "from torch.distributed.distributed_c10d import all_gather_object as gather",
        "import torch.distributed as dist\ndist.recv_object_list(values)",
    ],
)
def test_pickle_is_found(text: str) -> None:
    assert house.code_in_data(example(text))


def test_what_is_no_pickle_passes() -> None:
    text = "import torch, yaml, numpy\nmodule.eval()\nyaml.safe_load('x')\nnumpy.load('x', allow_pickle=False)"
    assert not house.code_in_data(example(text))


def test_one_module_reads_files_of_other_programs() -> None:
    text = "import torch\nwith torch.serialization.safe_globals([]):\n    torch.load('x', weights_only=True)"
    assert not house.code_in_data(example(text, house.FOREIGN_FILES[0]))
    assert house.code_in_data(example(text, "trainkit.cli.checkpoint.foreign.read_foreign"))
    assert house.code_in_data(example("import torch\ntorch.save(1, 'x')", house.FOREIGN_FILES[0]))
    assert house.code_in_data(example("import torch\ntorch.load('x')", house.FOREIGN_FILES[0]))


def test_one_module_sends_objects_of_users_and_in_one_way() -> None:
    text = "import torch.distributed as dist\ndist.all_gather_object(values, value)"
    assert not house.code_in_data(example(text, "trainkit.distributed.user_objects"))
    assert house.code_in_data(example(text, "trainkit.distributed.world"))
    both = text + "\ndist.broadcast_object_list(values, 0)"
    assert not house.code_in_data(example(both, "trainkit.distributed.user_objects"))
    assert house.code_in_data(example(text.replace("all_gather", "gather"), "trainkit.distributed.user_objects"))
    assert not house.code_in_data(example("from trainkit.utils import gather_object\ngather_object([1])"))


def test_one_module_pickles_and_in_one_way() -> None:
    module = "trainkit.launch.pickling"
    assert not house.code_in_data(example("import cloudpickle", module))
    assert house.code_in_data(example("import cloudpickle", f"{module}.x"))
    assert house.code_in_data(example("import pickle", module))
    assert house.code_in_data(example("import torch\ntorch.load('x')", module))


# ------------------------------------------------------------------------------------------ torch's public API only


def test_one_function_prints() -> None:
    report([c for source in SOURCES for c in house.prints(source)])


@pytest.mark.parametrize(
    "text",
    [
        "print('x')",
        "def f(x):\n    print(x, file=sys.stderr)",
        "show = print",
        "import builtins\nbuiltins.print('x')",
        "from builtins import print as show",
        "import sys\nsys.stdout.write('x')",
        "import sys\nwrite = sys.__stderr__.writelines",
        "from sys import stderr\nstderr.write('x')",
    ],
)
def test_other_printing_is_found(text: str) -> None:
    assert house.prints(example(text))
    assert not house.prints(example(text, "trainkit.console"))
    assert not house.prints(example(text, "trainkit.cli.main"))


@pytest.mark.parametrize(
    "text", ["self.print('x')", "def print(self): ...", "'print(x)'", "sys.stdout.flush()", "file.write('x')"]
)
def test_what_does_not_print_passes(text: str) -> None:
    assert not house.prints(example(text))


def test_launch_and_distributed_use_the_public_api_of_torch() -> None:
    report([c for source in SOURCES for c in house.private_torch(source)])


SUBCLASS = """
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
class Agent(SimpleElasticAgent):
    def {name}(self, worker_group):
        pass
"""


@pytest.mark.parametrize(
    "text",
    [
        "from torch._C._distributed_c10d import TCPStore",
        "def f():\n    import torch._C",
        "from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo",
        SUBCLASS.format(name="_start_workers"),
    ],
)
@pytest.mark.parametrize("module", ["trainkit.launch.x", "trainkit.distributed.x"])
def test_private_torch_is_found(text: str, module: str) -> None:
    assert len(house.private_torch(example(text, module))) == 1


@pytest.mark.parametrize("name", ["run", "_ours", "__init__"])
def test_public_torch_passes(name: str) -> None:
    assert not house.private_torch(example(SUBCLASS.format(name=name), "trainkit.launch.x"))


# -------------------------------------------------------------------------- no code for single strategies in the core


def test_no_code_asks_for_the_class_of_a_strategy() -> None:
    report([c for s in SOURCES if not s.path.startswith("strategies/") for c in house.branches_on_strategy(s)])


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(x, DDPStrategy)",
        "isinstance(x, (str, trainkit.strategy.Strategy))",
        "isinstance(x, DDPStrategy | ZeROStrategy)",
        "issubclass(x, Strategy)",
        "isinstance(self.strategy, Sharded)",
        "type(x) is DDPStrategy",
        "DDPStrategy == x.__class__",
        "match x:\n    case DDPStrategy():\n        pass",
    ],
)
def test_a_question_for_the_class_is_found(text: str) -> None:
    assert house.branches_on_strategy(example(text))


@pytest.mark.parametrize("text", ["isinstance(strategy, str)", "isinstance(x, Callback)", "type(x) is int", "DDPStrategy()"])
def test_other_questions_pass(text: str) -> None:
    assert not house.branches_on_strategy(example(text))


# Files of the core that may contain names of strategies, and why. Other code uses StrategyInfo or a capability.
_PLUGIN = {"DeepSpeedPlugin", "trainkit.config.deepspeed_plugin", "trainkit.config.fsdp_plugin"}
_PLUGIN_ARGUMENTS = {*_PLUGIN, "deepspeed_plugin", "fsdp_plugin"}
NAMED: dict[str, tuple[set[str], str]] = {
    "trainkit/__init__.py": ({*_PLUGIN, "DDPCommunicationHookType"}, "public names of Accelerate's"),
    "trainkit/accelerator/core.py": ({"deepspeed_plugin", "fsdp_plugin"}, "arguments of Accelerate's Accelerator"),
    "trainkit/accelerator/facts.py": (_PLUGIN_ARGUMENTS, "attributes of Accelerate's Accelerator"),
    "trainkit/accelerator/plugins.py": (_PLUGIN_ARGUMENTS, "checks arguments of Accelerate's Accelerator"),
    "trainkit/accelerator/process_verbs.py": (
        {*_PLUGIN_ARGUMENTS, "FSDP", "is_fsdp2"},
        "attributes of Accelerate's Accelerator",
    ),
    "trainkit/cli/config.py": (
        {
            *("DEEPSPEED", "zero_stage", "zero3_init_flag", "zero3_save_16bit_model"),
            *("FSDP", "fsdp", "fsdp_activation_checkpointing", "fsdp_offload_params"),
        },
        "asks for keys of Accelerate's sections for DeepSpeed and FSDP, each in its own words",
    ),
    "trainkit/cli/checkpoint/foreign/read_foreign.py": ({"DeepSpeed"}, "a program whose checkpoints are imported"),
    "trainkit/cli/settings_flags.py": (
        {"DEEPSPEED", "FSDP", "XLA", "_FSDP", "use_deepspeed", "use_fsdp"},
        "flags of accelerate launch",
    ),
    "trainkit/config/inherited.py": ({"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"}, "variables of Accelerate's"),
    "trainkit/config/deepspeed_plugin.py": (
        {
            *("DeepSpeedPlugin", "deepspeed_config", "deepspeed_config_file", "hf_ds_config", "zero3_init_flag"),
            *("zero3_save_16bit_model", "zero_optimization", "zero_stage"),
        },
        "a public class of Accelerate's, with its arguments",
    ),
    "trainkit/config/distributed_type.py": ({"DEEPSPEED", "FSDP", "XLA"}, "members of a public enum of Accelerate's"),
    "trainkit/config/foreign.py": (
        {
            *("aot_torchxla_trace_once", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
            *("deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher", "torchxla_trace_once", "zero_stage"),
            *("fsdp_activation_checkpointing_offload", "fsdp_reshard_after_forward", "fsdp_sharding_strategy"),
        },
        "keys and values of Accelerate's files that are refused",
    ),
    "trainkit/config/fsdp_plugin.py": (
        {
            *("HYBRID_SHARD_ZERO2", "fsdp", "fsdp_", "fsdp_offload_params", "fsdp_plugin_of_keys", "fsdp_version"),
            *("fsdp_transformer_layer_cls_to_wrap", "torch.distributed.fsdp"),
        },
        "a public class of Accelerate's, with its arguments, and torch's classes for them",
    ),
    "trainkit/config/keys.py": (
        {
            *("deepspeed_config", "deepspeed_config_file", "deepspeed_hostfile", "deepspeed_multinode_launcher"),
            *("zero3_init_flag", "zero3_save_16bit_model", "zero_stage"),
            *("FSDP", "HYBRID_SHARD_ZERO2", "fsdp_config", *FSDP),
        },
        "keys of Accelerate's files",
    ),
    "trainkit/config/read.py": (
        {"fsdp_", "fsdp_config", "enable_fsdp_float8_all_gather"},
        "a section of Accelerate's files, the beginning of its keys, and an option of torchao's",
    ),
    "trainkit/config/wrap_policies.py": ({"torch.distributed.fsdp"}, "policies of torch's"),
    "trainkit/config/kwargs_handlers.py": (
        {"DDPCommunicationHookType", "enable_fsdp_float8_all_gather"},
        "a public name of Accelerate's, and an option of torchao's",
    ),
    "trainkit/float8_precision.py": (
        {"enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"},
        "an option and a function of torchao's",
    ),
    "trainkit/launch/devices.py": ({"deepspeed"}, "a launcher, whatever the strategy"),
    "trainkit/launch/environment.py": ({"_DEEPSPEED", "deepspeed"}, "a launcher, whatever the strategy"),
    "trainkit/launch/notebook.py": (
        {"_XLAC", "_check_xla", "_xla_runtime_is_initialized", "torch_xla"},
        "XLA's runtime starts processes itself",
    ),
    "trainkit/launch/notebook_child.py": ({"xla"}, "XLA's runtime starts processes itself"),
    "trainkit/launch/tpu.py": ({"TRAINKIT_XLA_REPLICA", "torch_xla", "xla"}, "the device: torch's type, and its runtime"),
    "trainkit/unsupported/__init__.py": ({"FSDPStrategy"}, "a class whose arguments have other names elsewhere"),
    "trainkit/unsupported/accelerate_names.py": (
        {
            *("HfDeepSpeedConfig", "accelerator.deepspeed_plugin", "ddp_handler", "deepspeed_plugins"),
            *("deepspeed_ulysses_dl_adapter", "fsdp2_apply_ac", "get_active_deepspeed_plugin"),
        },
        "names of Accelerate's that are refused",
    ),
    "trainkit/unsupported/lightning_arguments.py": (
        {"fsdp_version", "replace_sampler_ddp"},
        "names of Lightning's and Accelerate's that are refused",
    ),
    "trainkit/unsupported/lightning_names.py": (
        {"DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAProfiler", "torch_xla.debug.profiler"},
        "names of Lightning's that are refused",
    ),
    "trainkit/utils/__init__.py": (
        {*_PLUGIN, "DDPCommunicationHookType", "is_deepspeed_available", "is_torch_xla_available"},
        "public names of Accelerate's",
    ),
    "trainkit/utils/available.py": (
        {"deepspeed", "is_deepspeed_available", "is_torch_xla_available", "torch_xla"},
        "public functions of Accelerate's, and the packages that they ask for",
    ),
}


def test_the_core_names_no_strategy() -> None:
    names = house.strategy_names(strategy_infos()[1:])  # without the first one, which is in the core: a single device
    found = {s.path: house.names_of_strategies(s, names) for s in SOURCES if s.path.startswith("trainkit/")}
    allowed = {path: tokens for path, (tokens, _) in NAMED.items()}
    report([c for path, tokens in found.items() for token, c in tokens.items() if token not in allowed.get(path, ())])
    assert {path: set(tokens) for path, tokens in found.items() if tokens} == allowed, (
        "an exception that is not needed any more"
    )


@pytest.mark.parametrize(
    "text",
    [
        "x = 'ddp'",
        "x = strategy.name == 'zero3'",
        "x = 'zero3_offload'",
        "def f(deepspeed_config): ...",
        "f(use_deepspeed=True)",
        "from trainkit.x import XLAStrategy",
        "import torch_xla",
        "x.ds_shape",
        "hasattr(x, 'ds_numel')",
        "config['zero_optimization']",
        "DistributedType.DEEPSPEED",
        "class DDPThing: ...",
        "f'{x:>10}' + f(strategy='zero1')",
    ],
)
def test_the_name_of_a_strategy_is_found(text: str) -> None:
    assert house.names_of_strategies(example(text), house.strategy_names(strategy_infos()[1:]))


def test_the_names_of_a_new_strategy_are_found_too() -> None:
    info = StrategyInfo(path="other.package:Pipeline", names={"pipes": {}}, packages=("piper",))
    names = house.strategy_names([info])
    assert [bool(house.names_of_strategies(example(f"x = {n!r}"), names)) for n in ("pipes", "piper", "Pipeline")] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        '"""Under ddp."""',
        "raise ValueError('Use ddp.')",
        "raise ValueError(f'{x}ddp')",
        "plot.set_xlabel('loss')",
        "strategy.shards_parameters",
        "optimizer.zero_grad()",
    ],
)
def test_texts_and_other_names_pass(text: str) -> None:
    assert not house.names_of_strategies(example(text), house.strategy_names(strategy_infos()[1:]))


def test_what_is_asked_of_a_strategy_is_declared() -> None:
    declared = {*dir(Strategy), *vars(Strategy("cpu"))}
    report([c for s in SOURCES if not s.path.startswith("strategies/") for c in house.undeclared_attributes(s, declared)])


@pytest.mark.parametrize(
    "text",
    [
        "strategy.stage",
        "trainer.strategy.claims.lead(x)",
        "self._strategy.stage",
        "getattr(trainer.strategy, 'stage', None)",
        "hasattr(strategy, 'stage')",
        "strategy.stage = 3",
        "config: Any = self.strategy",
    ],
)
def test_an_undeclared_attribute_is_found(text: str) -> None:
    assert house.undeclared_attributes(example(text), dir(Strategy))


@pytest.mark.parametrize("text", ["strategy.world.rank", "module.stage", "hasattr(strategy, 'optimizer_step')", "x: Any = y"])
def test_declared_attributes_pass(text: str) -> None:
    assert not house.undeclared_attributes(example(text), dir(Strategy))


def test_capabilities_are_documented_and_read() -> None:
    flags = [name for name, kind in vars(Strategy)["__annotations__"].items() if kind == "ClassVar[bool]"]
    undocumented = [name for name in flags if f"        {name}: " not in (Strategy.__doc__ or "")]
    elsewhere = [s for s in SOURCES if not s.path.startswith("strategies/") and s.path != "trainkit/strategy.py"]
    read = {node.attr for source in elsewhere for node in house.all_of(source.tree, ast.Attribute)}
    assert len(flags) > 5
    assert (undocumented, [name for name in flags if name not in read]) == ([], [])


# ---------------------------------------------------------------------------------------------- names and docstrings


@pytest.mark.parametrize("module", FOR_PLUG_INS)
def test_the_names_for_plug_ins_are_there(module: str) -> None:
    assert module not in PUBLIC
    assert set(FOR_PLUG_INS[module]) <= set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_public_names_are_frozen(package: str) -> None:
    assert importlib.import_module(package).__all__ == PUBLIC[package]


def test_exports_are_sorted() -> None:
    report([c for source in PUBLIC_SOURCES for c in house.wrong_exports(source)])


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "__all__ = ['b', 'a']",
        "__all__ = ['a', 'a']",
        "__all__ = sorted(names)",
        "__all__: list[str] = ['b', 'a']",
    ],
)
def test_unsorted_exports_are_found(text: str) -> None:
    assert house.wrong_exports(example(text))


def test_exports_in_order_pass() -> None:
    assert not house.wrong_exports(example("__all__ = ['HOOKS', 'Alpha', 'Beta', '__version__', 'gamma']"))


def test_exported_names_exist() -> None:
    report(
        [
            f"{source.path} exports {name}, which it does not have"
            for source in PUBLIC_SOURCES
            for name in house.exported(source.tree) or []
            if not hasattr(importlib.import_module(source.module), name)
        ]
    )


def test_everything_public_is_documented() -> None:
    report([c for s in PUBLIC_SOURCES for c in house.undocumented(s, importlib.import_module(s.module))])


def test_missing_documentation_is_found() -> None:
    text = """
class Base:
    "Documented."

    def inherited(self):
        "Documented."

class Thing(Base):
    def inherited(self): ...
    def own(self): ...
    def _private(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, value): ...

class _Private:
    def method(self): ...

if True:
    def function(): ...
"""
    module = types.ModuleType("example")
    exec(compile(text, "example.py", "exec"), vars(module))
    assert house.undocumented(example(text), module) == [
        "example.py:8 Thing has no docstring",
        "example.py:10 Thing.own has no docstring",
        "example.py:13 Thing.size has no docstring",
        "example.py:21 function has no docstring",
    ]


def test_modules_begin_alike() -> None:
    report([c for source in SOURCES for c in house.wrong_beginning(source)])


@pytest.mark.parametrize("text", ["", '"""Doc."""\nimport os', "from __future__ import annotations"])
def test_another_beginning_is_found(text: str) -> None:
    assert house.wrong_beginning(example(text))


def test_files_and_classes_have_names_of_their_own() -> None:
    report(house.repeated_names(SOURCES))


def test_a_repeated_name_is_found() -> None:
    paths = ("data/plan.py", "trainer/plan.py")
    sources = [house.Source(path, "", "class Plan: ...") for path in paths]
    assert house.repeated_names(sources) == [f"{name}: {', '.join(paths)}" for name in ("Plan", "plan.py")]


# -------------------------------------------------------------------------------------------------------------- size


def test_nothing_is_too_long() -> None:
    found: dict[str, str] = {}
    for source in SOURCES:
        found |= house.too_long(source)
    report([complaint for key, complaint in found.items() if key not in LONG])
    assert set(LONG) <= set(found), "an exception that is not needed any more"


def test_length_is_found() -> None:
    doc = '    """' + "\n" * 30 + '"""\n'
    fits = "def f():\n" + doc + "    x = 1\n" * 59
    assert not house.too_long(example(fits))
    assert list(house.too_long(example(fits + "    x = 1\n"))) == ["example.py:f"]
    assert not house.too_long(example('"""One.\n\nTwo.\n"""\n' + "x = 1\n" * 700))
    assert list(house.too_long(example("x = 1\n" * 701))) == ["example.py"]


def test_only_its_own_room_writes_to_a_trainer() -> None:
    """Only modules in trainkit.trainer assign to attributes of a Trainer."""
    report([c for s in SOURCES if not s.module.startswith("trainkit.trainer.") for c in house.writes_to_trainer(s)])


@pytest.mark.parametrize(
    "text",
    ["trainer.x = 1", "trainer._run.x += 1", "self._trainer.x: int = 1", "self.trainer.x, y = 1, 2", "y = trainer.x = 1"],
)
def test_a_write_to_a_trainer_is_found(text: str) -> None:
    assert len(house.writes_to_trainer(example(text))) == 1


@pytest.mark.parametrize("text", ["trainer.should_stop = True", "trainer = 1", "self.trainer = trainer", "x = trainer.y"])
def test_what_is_no_write_to_a_trainer(text: str) -> None:
    assert house.writes_to_trainer(example(text)) == []


def test_nothing_is_too_complex() -> None:
    report([complaint for source in SOURCES for complaint in house.too_complex(source)])


def test_complexity_is_counted() -> None:
    def counted(body: str) -> int:
        function = ast.parse(f"def f(x):\n    {body}").body[0]
        assert isinstance(function, ast.FunctionDef)
        return house.complexity(function)

    assert counted("return x") == 1
    assert counted("return 1 if x else 2") == 2
    assert counted("return x and x and x or x") == 4
    assert counted("return [y for y in x if y]") == 3
    assert counted("while x:\n        with x:\n            assert x") == 4
    assert counted("try:\n        x()\n    except A: ...\n    except B: ...") == 3
    assert counted("def g():\n        if x: ...") == 1, "the function inside counts by itself"
    branches = "    if x: ...\n"
    assert not house.too_complex(example("def f(x):\n" + branches * 14))
    assert len(house.too_complex(example("def f(x):\n" + branches * 15))) == 1


# --------------------------------------------------------------------------------------------- the two mapped folders


@pytest.mark.parametrize("folder", ["callbacks", "strategies"])
def test_a_mapped_folder_refuses_its_bare_name(folder: str) -> None:
    done = run_python(f"import {folder}", cwd=house.ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert f"trainkit.{folder}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("folder", ["callbacks", "strategies"])
def test_a_mapped_folder_is_what_is_imported(folder: str) -> None:
    package = importlib.import_module(f"trainkit.{folder}")
    assert os.path.samefile(package.__path__[0], house.ROOT / folder)


def test_a_misspelt_callback_names_the_nearest() -> None:
    import trainkit.callbacks

    with pytest.raises(AttributeError, match=r"'EarlyStoping'\. Did you mean 'EarlyStopping'\?"):
        trainkit.callbacks.EarlyStoping


def test_callbacks_are_read_when_used() -> None:
    done = run_python(
        "import sys, trainkit.callbacks as c; print([m for m in sys.modules if m.startswith('trainkit.callbacks.')], "
        "'Timer' in dir(c), c.Timer.__module__)"
    )
    assert done.stdout.strip() == "[] True trainkit.callbacks.timer", done.stderr


def test_lazy_names_lead_to_their_files() -> None:
    """The imports that type checkers see in trainkit.callbacks are those that `__getattr__` does."""
    source = next(s for s in SOURCES if s.module == "trainkit.callbacks")
    typed = {item.name: item.module for item in house.imports(source.tree) if item.place == "typing"}
    package = importlib.import_module("trainkit.callbacks")
    assert typed == {name: getattr(package, name).__module__ for name in package.__all__}


def test_each_callback_has_a_file_of_its_own() -> None:
    package = importlib.import_module("trainkit.callbacks")
    classes = {getattr(package, name) for name in PUBLIC["trainkit.callbacks"]}  # one may have two names
    homes = [kind.__module__ for kind in classes]
    assert len(homes) == len(set(homes))
