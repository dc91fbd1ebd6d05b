"""Every public name of Lightning 2.6: the same here, under another name, or not here and what to use.

The groups are the modules below `lightning.pytorch`; "" is `lightning.pytorch` itself. A group holds the names of all files
of its module.
"""

from __future__ import annotations

__all__ = ["ABSENT", "FABRIC", "MEMBERS", "MODULES", "OTHER", "SAME"]

# Group → module → the names that it has, for `from module import name`.
SAME: dict[str, dict[str, str]] = {
    "": {"trainkit": "Callback LightningDataModule LightningModule Trainer seed_everything"},
    "callbacks": {
        "trainkit.callbacks": """
            BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor
            EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder
            LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary
            RichProgressBar SpikeDetection StochasticWeightAveraging TQDMProgressBar ThroughputMonitor Timer WeightAveraging""",
        "trainkit.callbacks.early_stopping": "EarlyStoppingReason",
        "trainkit.callbacks.prediction_writer": "WriteInterval",
        "trainkit.callbacks.timer": "Interval",
    },
    "cli": {
        "trainkit.cli": """
            ArgsType LRSchedulerCallable LRSchedulerTypeUnion LightningArgumentParser LightningCLI OptimizerCallable
            ReduceLROnPlateau SaveConfigCallback instantiate_class"""
    },
    "core": {"trainkit": "LightningDataModule LightningModule", "trainkit.utilities": "HyperparametersMixin"},
    "loggers": {
        "trainkit.loggers": "CSVLogger CometLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
        "trainkit.loggers.base": "DummyLogger",
    },
    "plugins": {"trainkit": "Precision"},
    "profilers": {"trainkit.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler"},
    "strategies": {"trainkit.strategies": "DDPStrategy FSDPStrategy Strategy XLAStrategy"},
    "trainer": {
        "trainkit": "Trainer seed_everything",
        "trainkit.trainer.states": "RunningStage TrainerFn TrainerState TrainerStatus",
    },
    "tuner": {"trainkit.tuner": "Tuner"},
    "utilities": {
        "trainkit.utilities": """
            AttributeDict CombinedLoader grad_norm isolate_rng measure_flops move_data_to_device rank_prefixed_message
            rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn""",
        "trainkit.utilities.parsing": "get_init_args",
        "trainkit.utilities.summary": """
            LEFTOVER_PARAMS_NAME LayerSummary ModelSummary NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE
            get_formatted_model_size get_human_readable_count parse_batch_shape summarize""",
        "trainkit.utilities.exceptions": "MisconfigurationException SIGTERMException",
        "trainkit.utilities.types": """
            EVAL_DATALOADERS LRSchedulerConfigType LRSchedulerPLType LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion
            OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS""",
        "trainkit.utilities.warnings": "LightningDeprecationWarning PossibleUserWarning",
    },
}

# What projects import from `lightning.fabric`, or from modules of Lightning that import it themselves: name → module.
FABRIC = {
    "_DEVICE": "trainkit.utilities.types",
    "_EVALUATE_OUTPUT": "trainkit.utilities.types",
    "_MAP_LOCATION_TYPE": "trainkit.utilities.types",
    "_PATH": "trainkit.utilities.types",
    "_PREDICT_OUTPUT": "trainkit.utilities.types",
    "get_filesystem": "trainkit.utilities.cloud_io",
    "seed_everything": "trainkit",
}

# Group → name → the same thing of trainkit, under another name.
OTHER: dict[str, dict[str, str]] = {
    "": {"Fabric": "from trainkit import Accelerator"},
    "loggers": {"ExperimentWriter": "from trainkit.loggers import CSVLogger"},
    "strategies": {
        "DeepSpeedStrategy": "from trainkit.strategies import ZeROStrategy",
        "ModelParallelStrategy": "from trainkit.strategies import FSDPStrategy; FSDPStrategy(tensor_parallel=2)",
        "SingleDeviceStrategy": "from trainkit import Strategy; Strategy('cuda:0') is one device",
        "SingleDeviceXLAStrategy": "from trainkit.strategies import XLAStrategy",
        "ParallelStrategy": "from trainkit import Strategy",
    },
    "utilities": {
        "garbage_collection_cuda": "from trainkit.utils import release_memory",
        "download_model_from_registry": "Model.load_from_checkpoint(path)",
        "extract_batch_size": "self.log(name, value, batch_size=len(x))",
        "find_model_local_ckpt_path": "from trainkit.checkpoint import list_checkpoints",
    },
}

_DEVICE = "the argument: Trainer(accelerator='cpu'), 'cuda', 'mps' or 'xla'"
_PRECISION = "the argument: Trainer(precision='bf16-mixed'), '16-mixed', 'bf16-true' or '64-true'"
_CHECKPOINT_IO = "nothing: ModelCheckpoint writes folders of safetensors in a background thread"
_ENVIRONMENT = "nothing, remove the import: the launcher is recognized, also SLURM, MPI, Kubernetes and torchrun"
_OWN_MODULE = "a module of your own: class Net(TrainModule)"
_OWN_DATA = "a loader of your own: DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=8)"
_HOOKS = "TrainModule and DataModule, which have these hooks"
_HPARAMS = "self.save_hyperparameters() and self.hparams; a checkpoint stores them"
_THE_STRING = "the string itself: "
_TIED = "nothing: tied weights stay tied, and a checkpoint stores them once"
_INIT = "inspect.signature(cls).parameters, or self.save_hyperparameters()"
_OOM = "torch.OutOfMemoryError; find_executable_batch_size tries smaller batches"
_COMPILED = "trainer.fit(torch.compile(module)), which is accepted as it is"
_SUMMARY = "Trainer(callbacks=[ModelSummary(max_depth=2)])"
_ZERO_FILES = "nothing: a checkpoint is the same for every strategy, and load_from_checkpoint reads it"

_ABSENT: dict[str, dict[str, str]] = {
    "": {},
    "accelerators": {
        _DEVICE: "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator",
        "Trainer(devices='auto'), or a list of GPUs: Trainer(devices=[0, 1])": "find_usable_cuda_devices",
        "MemoryMonitor, or torch.cuda.memory_stats()": "get_cpu_stats get_device_stats get_nvidia_gpu_stats",
    },
    "callbacks": {
        "a function of your own: lambda epoch: 2.0": "multiplicative",
        "RichProgressBar": "RichProgressBarTheme",
        "trainer.progress_bar_metrics": "get_standard_metrics",
        "tqdm.auto.tqdm, or trainkit.callbacks.TQDMProgressBar": "Tqdm",
        "trainer.num_training_batches": "convert_inf",
    },
    "cli": {
        "torch.optim.lr_scheduler.LRScheduler": "LRSchedulerType LRSchedulerTypeTuple",
        "torch.nn.Module": "ModuleType",
        "instantiate_class((), config)": "instantiate_module",
    },
    "core": {
        _HOOKS: "CheckpointHooks DataHooks ModelHooks",
        "self.optimizers(); in annotations torch.optim.Optimizer": "LightningOptimizer MODULE_OPTIMIZERS do_nothing_closure",
        _HPARAMS: """
            CHECKPOINT_PAST_HPARAMS_KEYS convert load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_tags_csv
            save_hparams_to_yaml update_hparams""",
    },
    "demos": {
        _OWN_MODULE: """
            BoringModel DemoModel LightningLSTM LightningTransformer ManualOptimBoringModel Net PositionalEncoding SimpleLSTM
            Transformer""",
        _OWN_DATA: """
            BoringDataModule BoringDataModuleNoLen Dictionary IterableBoringDataModule RandomDataset RandomDictDataset
            RandomIterableDataset RandomIterableDatasetWithLen SequenceSampler WikiText2 tokenize""",
    },
    "loggers": {
        "Trainer(logger='csv'), or a logger of your own: docs/how-to/custom-logger.md": "LitLogger NeptuneLogger",
        "{**first, **second}": "merge_dicts",
        "rank_zero_only of trainkit.utilities": "rank_zero_experiment",
        "CometLogger.experiment": "FRAMEWORK_NAME comet_experiment",
        "MLFlowLogger(tracking_uri='file:./mlruns')": "LOCAL_FILE_URI_PREFIX",
    },
    "plugins": {
        _CHECKPOINT_IO: "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO",
        _PRECISION: """
            DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision LightningDoublePrecisionModule MixedPrecision
            XLAPrecision""",
        "transformers: from_pretrained(..., quantization_config=...), and docs/how-to/lora.md": "BitsandbytesPrecision",
        "the argument: Trainer(precision='fp8-mixed'), which uses torchao": "TransformerEnginePrecision",
        "the argument: Trainer(sync_batchnorm=True)": "LayerSync TorchSyncBatchNorm",
        _ENVIRONMENT: """
            ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment TorchElasticEnvironment
            XLAEnvironment""",
        "nothing: SLURM is recognized. For auto_requeue=True: Trainer(slurm_requeue=True)": "SLURMEnvironment",
    },
    "profilers": {
        "Trainer(profiler='pytorch')": "RegisterRecordFunction ScheduleWrapper",
        "torch_xla.debug.profiler": "XLAProfiler",
    },
    "serve": {
        "TrainModule.load_from_checkpoint(path).eval() in a server of your own": "ServableModule",
        "a request to that server, sent by a test": "ServableModuleValidator",
    },
    "strategies": {
        "nothing: ZeROStrategy owns its hooks": "remove_module_hooks",
        "typing.TypeVar": "TBroadcast TReduce",
    },
    "tuner": {},
    "utilities": {
        "enum.Enum": "LightningEnum",
        _THE_STRING + "gradient_clip_algorithm='norm'": "GradClipAlgorithmType",
        "warnings.simplefilter('ignore')": "disable_possible_user_warnings",
        "Python's warnings, which show a warning once for each line": "WarningCache",
        "logging.getLogger('trainkit')": "rank_zero_module",
        _TIED: "find_shared_parameters set_shared_parameters",
        "cloudpickle.dumps(x)": "is_picklable",
        "nothing: a run checks at its start that all processes see its folder": "is_shared_filesystem",
        "len(os.sched_getaffinity(0)) // torch.cuda.device_count()": "suggested_max_num_workers",
        _COMPILED: "from_compiled to_uncompiled",
        "Trainer, which agrees over all processes how many batches there are": "has_len_all_ranks",
        "typing.TypeVar": "BType",
        _ZERO_FILES: "CPU_DEVICE convert_zero_checkpoint_to_fp32_state_dict ds_checkpoint_dir",
        _OOM: "is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory",
        "tensor.detach().cpu()": "recursive_detach",
        "torchvision.models.get_model(name)": "get_torchvision_model",
        "'name' in vars(type(module))": "is_overridden",
        _SUMMARY: "DeepSpeedLayerSummary DeepSpeedSummary deepspeed_param_size",
        _INIT: "clean_namespace collect_init_args parse_class_init_keys save_hyperparameters",
        "getattr(module.hparams, name)": "lightning_getattr lightning_hasattr lightning_setattr",
        "inspect.signature(hook).parameters": "is_param_in_hook_signature",
        "trainer.lr_scheduler_configs": "LRSchedulerConfig",
        "torch.nn.parallel.DistributedDataParallel": "DistributedDataParallel",
        "docs/moving-over/lightning.md, which loads the weights of a .ckpt": "main",
    },
}

ABSENT: dict[str, dict[str, str]] = {
    group: {name: use for use, names in uses.items() for name in names.split()} for group, uses in _ABSENT.items()
}
"""Group → name → what to use."""

_NO_LOOPS = "trainer.current_epoch, trainer.global_step and trainer.batch_idx: the loops are functions"
_SAVED_HPARAMS = "checkpoint['hyper_parameters'] in on_load_checkpoint"

MEMBERS: dict[str, dict[str, str]] = {
    "Trainer": {
        "barebones": "nothing: features that you do not use cost nothing",
        "enable_autolog_hparams": "save_hyperparameters(logger=False)",
        "fit_loop": _NO_LOOPS,
        "predict_loop": _NO_LOOPS,
        "test_loop": _NO_LOOPS,
        "val_check_batch": "trainer.explain(), which prints when the run validates",
        "validate_loop": _NO_LOOPS,
    },
    "LightningModule": {
        **dict.fromkeys((f"CHECKPOINT_HYPER_PARAMS_{name}" for name in ("NAME", "TYPE")), _SAVED_HPARAMS),
        "configure_sharded_model": "configure_model",
        "on_validation_model_zero_grad": "on_validation_start: validation does not change the gradients",
        "remove_ignored_hparams": "self.save_hyperparameters(ignore=['name'])",
    },
    "LightningDataModule": {
        **dict.fromkeys((f"CHECKPOINT_HYPER_PARAMS_{name}" for name in ("NAME", "TYPE")), _SAVED_HPARAMS),
        "remove_ignored_hparams": "self.save_hyperparameters(ignore=['name'])",
    },
}
"""Class of Lightning → attribute or method that ours does not have → what to use."""

# Modules of Lightning, below `lightning.pytorch`, that are no modules of trainkit. `trainkit.callbacks.lr_monitor` and the like
# have the names of their group.
_MODULES = """
    accelerators accelerators.accelerator accelerators.cpu accelerators.cuda accelerators.mps accelerators.xla
    callbacks.batch_size_finder callbacks.callback callbacks.checkpoint callbacks.device_stats_monitor callbacks.finetuning
    callbacks.gradient_accumulation_scheduler callbacks.lambda_function callbacks.lr_finder callbacks.lr_monitor
    callbacks.on_exception_checkpoint callbacks.progress callbacks.progress.progress_bar callbacks.progress.rich_progress
    callbacks.progress.tqdm_progress callbacks.pruning callbacks.rich_model_summary callbacks.spike
    callbacks.stochastic_weight_avg callbacks.weight_averaging core core.datamodule core.hooks core.mixins
    core.mixins.hparams_mixin core.module core.optimizer core.saving demos demos.boring_classes demos.lstm
    demos.transformer loggers.comet loggers.litlogger loggers.logger loggers.mlflow loggers.neptune loggers.wandb plugins
    plugins.environments plugins.io plugins.io.async_plugin plugins.io.checkpoint_plugin plugins.io.torch_plugin
    plugins.io.xla_plugin plugins.layer_sync plugins.precision plugins.precision.amp plugins.precision.bitsandbytes
    plugins.precision.deepspeed plugins.precision.double plugins.precision.fsdp plugins.precision.half
    plugins.precision.precision plugins.precision.transformer_engine plugins.precision.xla profilers profilers.advanced
    profilers.base profilers.profiler profilers.pytorch profilers.simple profilers.xla serve serve.servable_module
    serve.servable_module_validator strategies.deepspeed strategies.model_parallel strategies.parallel
    strategies.single_device strategies.single_xla strategies.strategy
    trainer.states tuner tuner.tuning utilities.combined_loader utilities.compile utilities.data utilities.deepspeed
    utilities.enums utilities.memory utilities.model_helpers utilities.model_registry utilities.model_summary
    utilities.model_summary.model_summary utilities.model_summary.model_summary_deepspeed utilities.parameter_tying
    utilities.signature_utils utilities.upgrade_checkpoint
"""
_FABRIC_MODULES = """
    fabric fabric.accelerators fabric.loggers fabric.loggers.logger fabric.plugins fabric.plugins.environments fabric.strategies
    fabric.utilities fabric.utilities.apply_func fabric.utilities.cloud_io fabric.utilities.exceptions
    fabric.utilities.rank_zero fabric.utilities.seed fabric.utilities.throughput fabric.utilities.types
    fabric.utilities.warnings
"""
MODULES = frozenset(_MODULES.split() + _FABRIC_MODULES.split())
