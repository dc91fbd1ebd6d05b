"""The names and types of the ZeRO options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["ZeROOptions"]


class ZeROOptions(TypedDict, total=False):
    """The keyword options of `ZeROStrategy`. All of them are optional.

    Attributes:
        offload_optimizer: Where to keep the optimizer state and the float32 master weights: `"cpu"`, where the optimizer
            step then also runs, or `"nvme"` (stage 3 only). Default: the device.
        offload_params: Where to keep parameters that are not in use: `"cpu"` or `"nvme"` (stage 3). Default: the device.
        nvme_path: Folder on a fast local disk for `"nvme"`. Each process writes to its own folder and removes it at
            the end. The next run removes the files of killed processes. Tensors smaller than 1 MiB stay in memory.
        pin_memory: Keep offloaded tensors in page-locked host memory, which makes copies to and from a GPU faster. Default:
            `True`.
        reduce_bucket_size: Number of elements to reduce at a time. Default: 5e8, or the size of the model if that is
            smaller.
        allgather_bucket_size: Number of elements to gather at a time (stages 1 and 2). Same default.
        overlap_comm: Reduce gradients during the backward pass, on a GPU. Default: `True` in stage 3 only.
        contiguous_gradients: Copy gradients into one buffer as they are computed. Default: `True`.
        round_robin_gradients: Assign parameters to the processes in round-robin order (stages 1 and 2). Default: `False`.
        sub_group_size: Number of elements to update at a time (stage 3). With the optimizer on NVMe, each buffer holds that
            number of elements in memory. Default: 1e9; with the optimizer on NVMe 1e8.
        prefetch_bucket_size: Number of elements to gather ahead of their use (stage 3). Default: 5e7.
        param_persistence_threshold: Parameters with at most this number of elements are not sharded (stage 3). Default:
            1e5.
        max_live_parameters: Maximum number of gathered elements on a process at a time (stage 3). Default: 1e9.
        max_reuse_distance: Keep a gathered parameter if it is used again within this number of elements (stage 3). Default:
            1e9; 0 for parameters on NVMe.
        max_params_in_cpu: Number of parameter elements to keep in host memory when parameters are on NVMe. Default: 0.
        param_buffer_count: Number of parameters to read ahead from NVMe. Default: 5.
        optimizer_buffer_count: Number of page-locked buffers of `sub_group_size` elements. Default, and minimum: one for
            the master weights, one for the gradients, and one for each tensor of optimizer state per parameter (AdamW: 4 in
            all).
        aio_block_size: Size of a disk request in bytes. Default: 1 MiB.
        aio_queue_depth: Maximum number of disk requests in flight. Default: 8.
        aio_threads: Number of threads for a read or write. Default: 1.
        aio_single_submit: Submit disk requests one by one. Default: `False`.
        aio_overlap_events: Submit disk requests while others are in flight. Default: `True`.
        hpz_partition_size: Size of a group of processes, for example those of one node, that keeps a secondary copy of all
            parameters, so that they are gathered within the group (stage 3; ZeRO++, Wang et al., ICLR 2024). Default: 1.
        quantized_weights: Gather parameters in 8 bits (stage 3 on GPUs; ZeRO++). Default: `False`.
        quantized_nontrainable_weights: The same for frozen parameters, which are also stored in 8 bits. Default: `False`.
        quantized_gradients: Reduce gradients in 8 and 4 bits (stage 3 on GPUs; ZeRO++). Default: `False`.
        communication_dtype: Dtype in which gradients are reduced: `"fp32"`, `"bf16"` or `"fp16"`. Default: the dtype of
            the parameters; float32 under `*-mixed`.
        activation_checkpointing: Options for a model that calls `deepspeed.checkpointing.checkpoint`, with the keys of a
            DeepSpeed configuration: `partition_activations`, `cpu_checkpointing`, `contiguous_memory_optimization`,
            `number_checkpoints`, `synchronize_checkpoint_boundary` and `profile`.
        zero3_save_16bit_model: Let `save_model` write the 16-bit parameters instead of the float32 master weights (stage
            3). Default: `False`.
    """

    offload_optimizer: str | None
    offload_params: str | None
    nvme_path: str | os.PathLike[str] | None
    pin_memory: bool
    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    overlap_comm: bool | None
    contiguous_gradients: bool
    round_robin_gradients: bool
    sub_group_size: int | None
    prefetch_bucket_size: int
    param_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int | None
    max_params_in_cpu: int
    param_buffer_count: int
    optimizer_buffer_count: int | None
    aio_block_size: int
    aio_queue_depth: int
    aio_threads: int
    aio_single_submit: bool
    aio_overlap_events: bool
    hpz_partition_size: int
    quantized_weights: bool
    quantized_nontrainable_weights: bool
    quantized_gradients: bool
    communication_dtype: str | None
    activation_checkpointing: Mapping[str, Any] | None
    zero3_save_16bit_model: bool
