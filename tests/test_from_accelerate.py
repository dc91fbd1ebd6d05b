"""Every public name of Accelerate 1.15 exists in trainkit, or raises an error that says what to use."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from trainkit import Accelerator
from trainkit.errors import UnsupportedArgumentError
from trainkit.names import advice_by_place

ADVICE = advice_by_place()


def listed(text: str) -> list[str]:
    return text.split()


# Arguments of Accelerate's `Accelerator`, in its order.
ARGUMENTS = listed("""
    device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config deepspeed_plugin
    fsdp_plugin torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir project_config
    gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin
    deepspeed_plugins parallelism_config
""")

# Attributes of Accelerate's `Accelerator` class and of its instances.
ATTRIBUTES = listed("""
    accumulate ao_recipe_handler autocast autocast_handler backward check_trigger clear clip_grad_norm_ clip_grad_value_
    context_parallel_rank data_parallel_rank data_parallel_shard_rank dataloader_config ddp_handler deepspeed_plugin
    deepspeed_ulysses_dl_adapter delayed_fp8_autocast device device_placement dispatch_batches distributed_type end_training
    even_batches flag_tensor fp8_backend fp8_enabled fp8_recipe_handler free_memory gather gather_for_metrics get_state_dict
    get_tracker gradient_accumulation_steps gradient_state has_fp8_handler has_lomo_optimizer init_handler init_trackers
    is_composable_parallelism_enabled is_fsdp2 is_last_process is_local_main_process is_main_process join_uneven_inputs
    load_state local_main_process_first local_process_index log log_with logging_dir lomo_backward main_process_first
    maybe_context_parallel mixed_precision msamp_recipe_handler multi_device native_amp no_sync non_blocking num_processes
    on_last_process on_local_main_process on_local_process on_main_process on_process optimizer_step_was_skipped
    pad_across_processes parallelism_config pipeline_parallel_rank prepare prepare_data_loader prepare_model
    prepare_optimizer prepare_scheduler print process_index profile profile_handler project_configuration project_dir reduce
    register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook rng_types save save_iteration
    save_model save_state scaler scaler_handler set_trigger should_save_model skip_first_batches split_batches
    split_between_processes state step step_scheduler_with_optimizer sync_gradients te_recipe_handler tensor_parallel_rank
    torch_device_mesh trackers trigger_sync_in_backward unscale_gradients unwrap_model use_distributed use_seedable_sampler
    use_stateful_dataloader verify_device_map wait_for_everyone
""")

# Names in the packages accelerate and accelerate.utils.
TOP = listed("""
    Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
    DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs
    ParallelismConfig PartialState ProfileKwargs cpu_offload cpu_offload_with_hook debug_launcher disk_offload
    dispatch_model find_executable_batch_size infer_auto_device_map init_empty_weights init_on_device is_rich_available
    load_checkpoint_and_dispatch load_checkpoint_in_model notebook_launcher prepare_pippy skip_first_batches
    synchronize_rng_states
""")

UTILS = listed("""
    AORecipeKwargs AbstractTrainStep AutocastKwargs BertTrainStep BnbQuantizationConfig CannotPadNestedTensorWarning
    ComputeEnvironment CustomDtype DDPCommunicationHookType DataLoaderConfiguration DeepSpeedEngineWrapper
    DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig
    DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler DynamoBackend FP8RecipeKwargs
    FullyShardedDataParallelPlugin GPTTrainStep GatheredParameters GradScalerKwargs GradientAccumulationPlugin
    HfDeepSpeedConfig InitProcessGroupKwargs KwargsHandler LoggerType MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME
    MSAMPRecipeKwargs MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper
    MegatronLMPlugin MegatronLMSchedulerWrapper OPTIMIZER_NAME OffloadedWeightsLoader PROFILE_PATTERN_NAME ParallelismConfig
    PrecisionType PrefixedDataset PrepareForLaunch ProfileKwargs ProjectConfiguration RNGType RNG_STATE_NAME SAFE_MODEL_NAME
    SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
    SageMakerDistributedType T5TrainStep TERecipeKwargs TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS
    TensorInformation TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig TorchTensorParallelPlugin
    WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    add_model_config_to_megatron_parser align_module_device apply_fp8_autowrap are_libraries_initialized
    avg_losses_across_data_parallel_group broadcast broadcast_object_list calculate_maximum_sizes check_cuda_fp8_capability
    check_cuda_p2p_ib_support check_device_map check_os_kernel check_tied_parameters_in_config
    check_tied_parameters_on_same_device clean_state_dict_for_safetensors clear_environment compare_versions compile_regions
    compile_regions_deepspeed compile_regions_fsdp2 compute_module_sizes concatenate contextual_fp8_autocast convert_bytes
    convert_dict_to_env_variables convert_file_size_to_int convert_model convert_model_to_fp8_ao convert_outputs_to_fp32
    convert_to_fp32 copy_tensor_to_devices deepspeed_required disable_fsdp_ram_efficient_loading dtype_byte_size
    enable_fsdp_ram_efficient_loading ensure_weights_retied extract_model_from_parallel extract_submodules_state_dict
    filter_first_and_last_linear_layers find_batch_size find_device find_executable_batch_size find_tied_parameters
    fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
    gather gather_across_data_parallel_groups gather_object get_active_deepspeed_plugin get_balanced_memory
    get_cpu_distributed_information get_current_device_type get_data_structure get_fsdp2_grad_scaler get_gpu_info
    get_grad_scaler get_int_from_env get_max_layer_size get_max_memory get_mixed_precision_context_manager get_model_tp_size
    get_module_children_bottom_up get_pretty_name has_4bit_bnb_layers has_ao_layers has_compiled_regions
    has_offloaded_params has_transformer_engine_layers honor_type id_tensor_storage ignorant_find_batch_size
    infer_auto_device_map initialize_tensors install_xla is_4bit_bnb_available is_8bit_bnb_available is_aim_available
    is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available
    is_clearml_available is_comet_ml_available is_compiled_module is_cuda_available is_datasets_available
    is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
    is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available is_mlflow_available
    is_mlu_available is_mps_available is_msamp_available is_musa_available is_namedtuple is_neuron_available
    is_npu_available is_pandas_available is_peft_available is_peft_model is_pippy_available is_port_in_use
    is_pynvml_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available
    is_schedulefree_available is_sdaa_available is_swanlab_available is_tensor_information is_tensorboard_available
    is_timm_available is_torch_tensor is_torch_version is_torch_xla_available is_torchao_available is_torchdata_available
    is_torchdata_stateful_dataloader_available is_torchvision_available is_trackio_available is_transformer_engine_available
    is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available
    is_weights_only_available is_xccl_available is_xpu_available listify load load_and_quantize_model
    load_checkpoint_in_model load_fsdp_model load_fsdp_optimizer load_offloaded_weight load_offloaded_weights
    load_state_dict map_pytorch_optim_to_deepspeed merge_dicts merge_fsdp_weights model_has_dtensor named_module_tensors
    offload_state_dict offload_weight pad_across_processes pad_input_tensors parse_choice_from_env parse_flag_from_env
    patch_environment prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs
    prepare_simple_launcher_cmd_env prepare_tpu purge_accelerate_environment recursive_getattr recursively_apply reduce
    release_memory retie_parameters save save_fsdp_model save_fsdp_optimizer save_offload_index send_to_device
    set_module_tensor_to_device set_numa_affinity set_seed slice_tensors str_to_bool synchronize_rng_state
    synchronize_rng_states torchao_required tqdm wait_for_everyone write_basic_config
""")


def test_every_argument_is_taken_or_refused_with_the_replacement() -> None:
    ours = inspect.signature(Accelerator).parameters
    absent = [name for name in ARGUMENTS if name not in ours]
    assert absent == ["torch_tp_plugin", "deepspeed_plugins"]
    for name in absent:
        with pytest.raises(UnsupportedArgumentError, match=rf"Accelerator\({name}=...\): .*=") as error:
            Accelerator(cpu=True, **{name: 1})
        assert Accelerator(cpu=True, **{name: None}).num_processes == 1
        assert any(use in str(error.value) for use in ("ParallelismConfig(tp_size=", "deepspeed_plugin="))
    by_place = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == ARGUMENTS[: len(by_place)], "by position an argument means what it means there"


def test_every_attribute_is_there_or_named_with_what_to_use() -> None:
    accelerator = Accelerator(cpu=True)
    refused: dict[str, str] = {}
    for name in ATTRIBUTES:
        try:
            getattr(accelerator, name)
        except AttributeError as error:
            refused[name] = str(error)
    assert refused == {name: f"an Accelerator has no {name!r}. Use {ADVICE['accelerator'][name]}." for name in refused}
    assert len(refused) < len(ATTRIBUTES) / 2


@pytest.mark.parametrize(("package", "names"), [("trainkit", TOP), ("trainkit.utils", UTILS)])
def test_every_name_can_be_imported_or_says_what_to_use(package: str, names: list[str]) -> None:
    module = importlib.import_module(package)
    there: list[str] = []
    refused: list[tuple[str, str]] = []
    for name in names:
        try:
            found: Any = getattr(module, name)
        except AttributeError as error:
            refused.append((name, str(error)))
        else:
            assert name in module.__all__
            assert found.__doc__
            there.append(name)
    assert {"DistributedType", "find_executable_batch_size", "load_checkpoint_in_model"} <= {*there}
    assert there
    assert refused
    assert all(text.startswith(f"{package} has no {name}. Use: ") for name, text in refused)
