"""The options of ZeRO by name and type."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["ZeROOptions"]


class ZeROOptions(TypedDict, total=False):
    """What :class:`~trainkit.strategies.ZeROStrategy` can be told; all of it may be left out.

    Attributes:
        offload_optimizer: keep optimizer state and masters, and update, on the ``"cpu"`` or ``"nvme"`` (stage 3).
        offload_params: keep parameters there between uses (stage 3).
        nvme_path: folder on a fast local disk for ``"nvme"``. Each process writes into one of its own in there, which it
            removes at the end; what killed processes have left is removed by the next run. Tensors below 1 MiB stay in memory.
        pin_memory: page-locked host memory for what is offloaded: faster to and from a GPU.
        reduce_bucket_size: elements that are reduced at a time; default: 5e8, or those of the model.
        allgather_bucket_size: elements that are gathered at a time (stages 1 and 2); default: likewise.
        overlap_comm: reduce while the backward pass goes on, on a GPU; default: in stage 3.
        contiguous_gradients: copy gradients into one buffer as they come.
        round_robin_gradients: deal parameters out to the processes in turn (stages 1 and 2).
        sub_group_size: elements that are updated at a time (stage 3); with the optimizer on NVMe those are in memory, once for
            each buffer. Default: 1e9; with the optimizer on NVMe 1e8.
        prefetch_bucket_size: elements that are gathered ahead (stage 3).
        param_persistence_threshold: parameters of fewer elements are not divided (stage 3).
        max_live_parameters: elements that a process holds whole at a time (stage 3).
        max_reuse_distance: a parameter that is needed again within so many elements is kept (stage 3); default: 1e9, and 0 for
            parameters on NVMe.
        max_params_in_cpu: elements of parameters that stay in host memory, though the others are on NVMe.
        param_buffer_count: parameters that are read from NVMe ahead.
        optimizer_buffer_count: page-locked buffers of ``sub_group_size`` elements; default, and the least: one for the masters,
            one for the gradients and one for each tensor that the optimizer has for each parameter (AdamW: 4 in all).
        aio_block_size: bytes of a request to the disk.
        aio_queue_depth: requests under way.
        aio_threads: that share a read or write.
        aio_single_submit: submit requests one by one.
        aio_overlap_events: submit requests while others are under way.
        hpz_partition_size: processes, those of a machine say, of which each group keeps all parameters once more, so that they
            are gathered from near (stage 3; ZeRO++, Wang et al., ICLR 2024).
        quantized_weights: gather parameters in 8 bits (stage 3 on GPUs; ZeRO++).
        quantized_nontrainable_weights: the same for frozen ones, which are also kept in 8 bits.
        quantized_gradients: reduce gradients in 8 and 4 bits (stage 3 on GPUs; ZeRO++).
        communication_dtype: ``"bf16"``, ``"fp16"``: what gradients travel in; default: the parameters' dtype, float32 under
            ``*-mixed``.
        activation_checkpointing: for a model that calls ``deepspeed.checkpointing.checkpoint``: the keys
            ``partition_activations``, ``cpu_checkpointing``, ``contiguous_memory_optimization``, ``number_checkpoints``,
            ``synchronize_checkpoint_boundary`` and ``profile``, as in a DeepSpeed configuration.
        zero3_save_16bit_model: ``save_model`` writes the parameters in 16 bits, as they are used, and not the float32 masters
            (stage 3).
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
