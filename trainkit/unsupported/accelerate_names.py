"""Names of Accelerate that trainkit does not have, and what to use instead."""

from __future__ import annotations

__all__ = ["ACCELERATOR", "ACCELERATOR_ATTRIBUTES", "ACCELERATOR_STATE", "IMPORTS", "LOG_KWARGS", "TRACKERS"]

# Arguments of Accelerate's save_state and load_state, and of the functions that they call.
ACCELERATOR_STATE: dict[str, str] = {
    "exclude_frozen_parameters": "remove it: of a model with PEFT adapters only trainable parameters are saved",
    "load_kwargs": "remove it: nothing is unpickled, and parameters are loaded to their devices",
    "load_lr_scheduler_states": "write load_state(folder, restore={'model', 'optimizer'}), and add what else to restore",
    "load_module_only": "write load_state(folder, restore={'model'})",
    "load_module_strict": "write load_state(folder, strict=False)",
    "load_optimizer_states": "write load_state(folder, restore={'model'}), and add what else to restore",
    "map_location": "remove it: parameters are loaded to their devices",
    "max_shard_size": "is for save_model(model, folder, max_shard_size=...); a checkpoint of several GB is split automatically",
    "save_latest": "remove it: trainkit.checkpoint.list_checkpoints(folder) finds the newest",
    "tag": "remove it: each checkpoint is a folder, load_state('checkpoints/step_100')",
}

# Arguments of Accelerate's Accelerator.
ACCELERATOR: dict[str, str] = {
    "deepspeed_plugins": "is not supported. An accelerator has one set of options: deepspeed_plugin=DeepSpeedPlugin(...)",
    "bf16": "write mixed_precision='bf16'",
    "fp16": "write mixed_precision='fp16'",
    "logging_dir": "write project_config=ProjectConfiguration(project_dir=..., logging_dir=...)",
    "torch_tp_plugin": "write parallelism_config=ParallelismConfig(tp_size=...)",
}

_SEEDED = "nothing: all generators are seeded for each micro-batch, by a key that is equal on all ranks"
_SIZES = "accelerator.strategy, an FSDPStrategy, which has the sizes; sequences are not sharded"
_TORCHAO = "AORecipeKwargs in kwargs_handlers: torchao is the only backend for mixed_precision='fp8'"
_ITS_OPTIONS = "accelerator.options, the arguments of the accelerator"
_YOUR_HANDLER = "the object that you passed in kwargs_handlers"

# Attributes of Accelerate's Accelerator.
ACCELERATOR_ATTRIBUTES = {
    "ao_recipe_handler": _YOUR_HANDLER,
    "autocast_handler": _YOUR_HANDLER,
    "context_parallel_rank": _SIZES,
    "data_parallel_rank": "accelerator.process_index",
    "data_parallel_shard_rank": "accelerator.process_index",
    "dataloader_config": "accelerator.even_batches, accelerator.split_batches, or the object that you passed",
    "ddp_handler": _YOUR_HANDLER,
    "deepspeed_ulysses_dl_adapter": _SIZES,
    "delayed_fp8_autocast": "nothing: float8 layers compute each scale from the values of the tensor",
    "device_placement": _ITS_OPTIONS,
    "dispatch_batches": "nothing: each process reads its own batches, as with dispatch_batches=False",
    "flag_tensor": "accelerator.check_trigger()",
    "fp8_backend": _TORCHAO,
    "fp8_enabled": "accelerator.mixed_precision == 'fp8'",
    "fp8_recipe_handler": _YOUR_HANDLER,
    "gradient_state": "accelerator.sync_gradients",
    "has_fp8_handler": _YOUR_HANDLER,
    "has_lomo_optimizer": "an optimizer of torch's",
    "init_handler": _YOUR_HANDLER,
    "is_composable_parallelism_enabled": "accelerator.distributed_type",
    "log_with": "accelerator.trackers",
    "lomo_backward": "accelerator.backward(loss) and an optimizer of torch's",
    "maybe_context_parallel": _SIZES,
    "msamp_recipe_handler": _TORCHAO,
    "multi_device": "accelerator.num_processes > 1",
    "non_blocking": "nothing: copies from pinned memory never block",
    "parallelism_config": _SIZES,
    "pipeline_parallel_rank": _SIZES,
    "profile_handler": _YOUR_HANDLER,
    "register_load_state_pre_hook": "accelerator.register_for_checkpointing(object), or load_state(folder, restore={'model'})",
    "register_save_state_pre_hook": "accelerator.register_for_checkpointing(object), or save_model(model, folder)",
    "rng_types": _SEEDED,
    "scaler": "accelerator.strategy.precision.scaler",
    "scaler_handler": _YOUR_HANDLER,
    "should_save_model": "nothing: save_state always writes the model",
    "step_scheduler_with_optimizer": _ITS_OPTIONS,
    "te_recipe_handler": _TORCHAO,
    "tensor_parallel_rank": _SIZES,
    "torch_device_mesh": _SIZES,
    "torch_tp_plugin": _SIZES,
    "trigger_sync_in_backward": "accelerator.accumulate(model), which synchronizes gradients once per accumulation window",
    "use_seedable_sampler": "nothing: the order is always a function of the seed and the epoch",
    "use_stateful_dataloader": "load_state(folder, resume_loaders=True), which resumes each prepared loader at its position",
    "verify_device_map": "nothing: prepare leaves a model as it is whose layers are on several devices",
}

# Accelerate's trackers, and arguments of their log.
TRACKERS = dict.fromkeys(
    ("aim", "clearml", "dvclive", "swanlab", "trackio"),
    "is a tracker of Accelerate's that trainkit does not have. Fix: use one of comet_ml, csv, jsonl, mlflow, tensorboard, "
    "wandb, or pass an object of your own, trainkit.tracking.GeneralTracker",
)
LOG_KWARGS = {"commit": "log all values of a step in one call, which is a row: accelerator.log({...}, step=step)"}

# Names that scripts import from Accelerate.
_SHARD = "to shard parameters, Accelerator(strategy='fsdp') or 'zero3'"
_FP8 = "Accelerator(mixed_precision='fp8'), which converts layers with torchao in prepare"
_STATE = "an Accelerator has num_processes, process_index, device, is_main_process, wait_for_everyone, print"
_DIVIDE = "a strategy that shards a model larger than one device: Accelerator(strategy='fsdp') or 'zero3'"
_OFFLOAD = "ZeROStrategy(stage=3, offload_params='cpu')"
_COPY = "load_checkpoint_in_model(model, folder, device_map={'': 'cuda:0'})"
_TREE = "map the tensors of the batch yourself: {name: f(tensor) for name, tensor in batch.items()}"
_DEVICE = "nothing, remove the import: trainkit runs on CPUs, CUDA, MPS and XLA"
_INSTALLED = "importlib.util.find_spec('the_package') is not None"
_NO_TRACKER = (
    "nothing, remove the import: log_with accepts tensorboard, wandb, mlflow, comet_ml, csv, jsonl and your own trackers"
)
_FILES = "a checkpoint has other files: trainkit.checkpoint.open_checkpoint(folder); save_model writes model.safetensors"
_ENVIRONMENT = "os.environ"
_LAUNCH = "trainkit launch, which reads Accelerate's configuration files; in Python trainkit.notebook_launcher"
_ENGINE = "the objects that Accelerator.prepare returns, also under ZeRO"
_QUANTIZED = "quantize with transformers, from_pretrained(..., quantization_config=...), and train adapters (peft)"
_COMPILE = "Accelerator(dynamo_plugin=TorchDynamoPlugin(backend='inductor', use_regional_compilation=True))"

_FAMILIES = {
    _SHARD: """
        MegatronLMPlugin TorchTensorParallelPlugin TorchTensorParallelConfig
        TorchContextParallelConfig DeepSpeedSequenceParallelConfig AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep
        MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
        fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler get_model_tp_size is_megatron_lm_available is_pippy_available load_fsdp_model load_fsdp_optimizer
        merge_fsdp_weights model_has_dtensor prepare_pippy save_fsdp_model save_fsdp_optimizer""",
    _FP8: """
        apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers
        has_ao_layers has_transformer_engine_layers""",
    _TORCHAO: "FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    _STATE: """
        AcceleratorState PartialState get_cpu_distributed_information TORCH_DISTRIBUTED_OPERATION_TYPES""",
    _DIVIDE: """
        align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_on_same_device compute_module_sizes
        dispatch_model dtype_byte_size get_balanced_memory get_max_layer_size has_offloaded_params
        infer_auto_device_map""",
    _OFFLOAD: """
        OffloadedWeightsLoader PrefixedDataset cpu_offload cpu_offload_with_hook extract_submodules_state_dict
        load_offloaded_weight load_offloaded_weights offload_state_dict offload_weight save_offload_index""",
    _COPY: "load_checkpoint_and_dispatch",
    _TREE: """
        CannotPadNestedTensorWarning TensorInformation copy_tensor_to_devices find_device get_data_structure honor_type
        initialize_tensors is_tensor_information pad_input_tensors recursively_apply slice_tensors""",
    _SEEDED: "RNGType synchronize_rng_state synchronize_rng_states",
    _DEVICE: """
        check_cuda_p2p_ib_support get_current_device_type get_gpu_info is_amdsmi_available is_habana_gaudi1 is_hpu_available
        is_mlu_available is_musa_available is_neuron_available is_rocm_available is_sdaa_available is_xccl_available""",
    _INSTALLED: """
        are_libraries_initialized is_boto3_available is_import_timer_available is_lomo_available is_matplotlib_available
        is_pandas_available is_pynvml_available is_pytest_available is_rich_available is_sagemaker_available
        is_schedulefree_available is_timm_available is_torchdata_available is_torchdata_stateful_dataloader_available
        is_torchvision_available is_triton_available deepspeed_required is_fp8_available is_msamp_available
        is_torchao_available is_transformer_engine_available is_transformer_engine_mxfp8_available torchao_required""",
    _NO_TRACKER: """
        is_aim_available is_clearml_available is_dvclive_available is_swanlab_available is_trackio_available""",
    _FILES: """
        MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
        SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME
        WEIGHTS_PATTERN_NAME""",
    _ENVIRONMENT: """
        clear_environment convert_dict_to_env_variables get_int_from_env parse_choice_from_env parse_flag_from_env
        patch_environment purge_accelerate_environment str_to_bool""",
    _LAUNCH: """
        ComputeEnvironment PrepareForLaunch SageMakerDistributedType TORCH_LAUNCH_PARAMS prepare_deepspeed_cmd_env
        prepare_multi_gpu_env prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu set_numa_affinity
        install_xla check_os_kernel is_port_in_use""",
    _ENGINE: """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper map_pytorch_optim_to_deepspeed""",
    _QUANTIZED: """
        BnbQuantizationConfig CustomDtype has_4bit_bnb_layers is_4bit_bnb_available is_8bit_bnb_available
        is_bitsandbytes_multi_backend_available is_bnb_available load_and_quantize_model""",
    _COMPILE: """
        compile_regions compile_regions_deepspeed compile_regions_fsdp2 get_module_children_bottom_up
        has_compiled_regions""",
}

IMPORTS = {name: use for use, names in _FAMILIES.items() for name in names.split()} | {
    "fsdp2_apply_ac": "the argument: Accelerator(activation_checkpointing=True)",
    "DummyOptim": "create the optimizer; Trainer(strategy=ZeROStrategy(config=...)) creates that of a configuration",
    "DummyScheduler": "create the scheduler; Trainer(strategy=ZeROStrategy(config=...)) creates that of a configuration",
    "GatheredParameters": "accelerator.get_state_dict(model), which is whole under ZeRO too",
    "GradientState": "accelerator.sync_gradients",
    "HfDeepSpeedConfig": "DeepSpeedPlugin(zero3_init_flag=True), which shards models of transformers while they are built",
    "KwargsHandler": "the handlers of trainkit.utils, such as GradScalerKwargs",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION": _DEVICE,
    "PROFILE_PATTERN_NAME": "profile_{rank}.json in ProfileKwargs(output_trace_dir=...)",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION": _DEVICE,
    "check_tied_parameters_in_config": "nothing: tied weights stay tied",
    "check_cuda_fp8_capability": "torch.cuda.get_device_capability() >= (8, 9)",
    "clean_state_dict_for_safetensors": "accelerator.save(state_dict, file), which stores tied weights once",
    "compare_versions": "packaging.version.parse(torch.__version__) >= packaging.version.parse('2.4')",
    "concatenate": "torch.cat(tensors)",
    "convert_bytes": "f'{count / 2**30:.2f} GiB'",
    "convert_file_size_to_int": "save_model(model, folder, max_shard_size='5GB'), which accepts strings",
    "convert_outputs_to_fp32": "nothing: outputs of a prepared model are float32",
    "convert_to_fp32": "tensor.float(); outputs of a prepared model are float32",
    "debug_launcher": "notebook_launcher(function, args, num_processes=2)",
    "disk_offload": "ZeROStrategy(stage=3, offload_params='nvme', nvme_path=...)",
    "find_batch_size": "len(batch['labels']), of a tensor of the batch",
    "find_tied_parameters": "nothing: tied weights stay tied, and are stored once",
    "get_active_deepspeed_plugin": "accelerator.deepspeed_plugin",
    "get_grad_scaler": "accelerator.strategy.precision.scaler",
    "get_max_memory": "torch.cuda.mem_get_info()",
    "get_mixed_precision_context_manager": "accelerator.autocast()",
    "get_pretty_name": "type(obj).__name__",
    "id_tensor_storage": "tensor.untyped_storage().data_ptr()",
    "ignorant_find_batch_size": "len(batch['labels']), of a tensor of the batch",
    "init_empty_weights": "with torch.device('meta'): model = Net(); then " + _COPY,
    "init_on_device": "with torch.device('cuda'): model = Net()",
    "is_namedtuple": "hasattr(x, '_fields')",
    "is_peft_model": "isinstance(accelerator.unwrap_model(model), peft.PeftModel)",
    "is_torch_tensor": "isinstance(x, torch.Tensor)",
    "is_torch_version": "packaging.version.parse(torch.__version__) >= packaging.version.parse('2.4')",
    "is_weights_only_available": "nothing: no file is unpickled",
    "listify": "tensor.tolist()",
    "load_state_dict": "trainkit.utils.load(file), or safetensors.torch.load_file(file)",
    "merge_dicts": "{**first, **second}",
    "named_module_tensors": "model.named_parameters(), model.named_buffers()",
    "recursive_getattr": "operator.attrgetter('a.b')(x)",
    "retie_parameters": "nothing: tied weights stay tied",
    "save": "accelerator.save(obj, file)",
    "set_module_tensor_to_device": "parameter.data = value.to(device)",
}
