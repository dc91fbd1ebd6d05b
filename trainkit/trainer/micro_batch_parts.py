"""`MicroBatchParts`: runs a micro-batch in parts if memory runs out, for `Trainer(auto_micro_batch=True)`.

A micro-batch whose shape is larger than any before, in some dimension, is *tried*: its forward and backward run without
averaging gradients over the ranks. If they run out of memory, the try is discarded whole, and tried again in twice the number
of parts; parts are whole samples. So the parts of a micro-batch are a function of its batch and of one number,
`RunProgress.largest_part`, and the global batch and the order of samples do not change.

No rank needs to know in advance what another one tries, because a try moves no collective: ranks do not communicate in it, and
after it a rank takes part in the same all-reduces that the others make in their backward pass, with a backward pass of zeros,
which adds nothing to the gradients that it has accumulated. The others wait for it in their first all-reduce, as for any slow
rank, whether it has tried once or five times. A shape that has been tried costs nothing: the last of its parts averages the
gradients in its backward pass, as usual.

Ranks agree on the number by one reduction that is made anyway, the step flags (`SafePoints`): the rank that ran out of memory
uses it at once, the others two steps later, and all before a checkpoint is saved.

The gradients of parts add up to that of the micro-batch only if the loss is a mean. So before a micro-batch is split for the
first time, the loss of a few samples is compared with the mean of the losses of its halves.

What passes in the first optimizer step, or where no gradients are held yet, does not count for later: the optimizer's state
and gradients take memory too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.console import notice
from trainkit.data.batches import concatenate, split
from trainkit.data.micro_batches import MicroBatch
from trainkit.data.windows import check_weight
from trainkit.errors import ConfigurationError, DataError, LossError, OutOfMemoryError
from trainkit.metrics.part_values import PartValues
from trainkit.nested import batch_size, copy_containers, leaves, map_tensors
from trainkit.rng import part_key, seed_generators
from trainkit.trainer.module_steps import Effects, ModuleStep, detach_loss, loss_in, without_effects
from trainkit.tuner.executable_batch_size import is_out_of_memory, release_memory

if TYPE_CHECKING:
    from trainkit.trainer.run import Run
    from trainkit.trainer.setup import Training

__all__ = ["MicroBatchParts"]

Shape = tuple[tuple[int, ...], ...]  # of each tensor of a batch

_TOLERANCE = 0.02  # relative: above the rounding of bf16, and below what a sum or a contrastive loss differs by

_LESS = (
    "Trainer(activation_checkpointing=True) needs less memory for activations; strategy='zero2' or 'fsdp' shards the model and "
    "its optimizer over processes, strategy='zero3_offload' moves them to the host"
)


class MicroBatchParts:
    """Runs the micro-batches of a fit, in parts if they do not fit into memory.

    Args:
        run: The fit.

    Raises:
        ConfigurationError: The module cannot be run in parts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._norms = [(name, layer) for name, layer in run.module.named_modules() if isinstance(layer, _BatchNorm)]
        self._refuse_batch_norm()
        self._compared = False  # the loss has been found to be a mean, or this cannot be found out
        self._told = False  # that buffers change in each part
        # Without and with gradients held: the largest shapes that passed, none of which is within another.
        self._passed: tuple[list[Shape], list[Shape]] = ([], [])
        self._stepped = False  # an optimizer step was made in this fit

    @staticmethod
    def of_fit(run: Run, optimizer: Any, module_step: ModuleStep | None) -> MicroBatchParts | None:
        """For the loop; `None` without `auto_micro_batch`, or if nothing is trained.

        Raises:
            ConfigurationError: It does not work with the optimization of this module, or with one of its layers.
        """
        if not run.arguments.auto_micro_batch:
            return None
        if not run.module.automatic_optimization:
            raise ConfigurationError(
                "auto_micro_batch=True needs automatic optimization, since only the module knows how to repeat its steps under "
                "manual optimization. Remove auto_micro_batch, or automatic_optimization = False."
            )
        if module_step is not None:
            raise ConfigurationError(
                f"auto_micro_batch=True does not work with {type(run.module).__name__}.optimizer_step, or with an optimizer "
                f"that needs a closure; the optimizer is {type(optimizer).__name__}. Use an optimizer such as "
                "torch.optim.AdamW and on_before_optimizer_step, or remove auto_micro_batch."
            )
        return None if optimizer is None else MicroBatchParts(run)

    def _refuse_batch_norm(self) -> None:
        for name, layer in self._norms:
            if layer.training or layer.running_mean is None:
                raise ConfigurationError(
                    f"auto_micro_batch=True does not work with {name} ({type(layer).__name__}), whose statistics over a part "
                    "of a micro-batch differ from those over all of it. Use nn.GroupNorm(num_groups, num_channels), or freeze "
                    f"its statistics before fit: model.{name}.eval()"
                )

    def run(self, training: Training, micro: MicroBatch, compute: Callable[[MicroBatch], Any]) -> Any:
        """Run the forward and backward of a micro-batch.

        Args:
            training: What the loop calls.
            micro: The micro-batch, which is current.
            compute: Runs the forward and backward of the current micro-batch; returns the outputs of `training_step`.

        Returns:
            The outputs of the whole micro-batch.

        Raises:
            OutOfMemoryError: A single sample does not fit, or a shape that has passed before.
            DataError: Memory runs out, and the batch cannot be split.
            LossError: The batch is to be split, and the loss is not a mean over samples.
        """
        outputs = self._run_until_it_fits(training, micro, compute)
        if (outputs if isinstance(outputs, Tensor) else loss_in(outputs)) is not None:
            for hook in self._run.hooks.on_after_backward:
                hook()
        return outputs

    def _run_until_it_fits(self, training: Training, micro: MicroBatch, compute: Callable[[MicroBatch], Any]) -> Any:
        run = self._run
        if not self._stepped and run.progress.global_step > run.progress.first_step:
            self._stepped = True
            self._passed = [], []
        while True:
            parts = self._split(micro.batch)
            if len(parts) > 1:
                self._refuse_batch_norm()  # it may be trained by now
                if not self._compared:
                    self._compare(training, micro, parts[0])
            shape = tuple(tuple(leaf.shape) for leaf in leaves(parts[0]) if isinstance(leaf, Tensor))
            passed = self._passed[len(parts) > 1 or not micro.first]
            if any(_is_within(shape, other) for other in (*passed, *self._passed[1])):
                return self._run_known(micro, parts, compute)
            outputs, failure = self._try(training, micro, parts, compute)
            if not failure:
                passed[:] = [other for other in passed if not _is_within(other, shape)]
                passed.append(shape)
                return outputs
            del outputs
            self._halve(micro.batch, parts, failure)

    def _split(self, batch: Any) -> list[Any]:
        """The parts of a batch: the smallest number of which none is too large."""
        most = self._run.progress.largest_part
        if most is None:
            return [batch]
        samples, size = batch_size(batch), _elements(batch)
        in_part = max(1, most * samples // size) if size else samples  # samples of a part
        number = -(-samples // in_part)
        return split(batch, number) if number > 1 else [batch]

    def _halve(self, batch: Any, parts: list[Any], failure: str) -> None:
        """After a failed try: let parts have half the number of samples."""
        samples, in_part = batch_size(batch), batch_size(parts[0])
        rank = f" on rank {self._run.strategy.world.rank}" if self._run.distributed else ""
        try:
            split(batch, 1)  # whether it has samples at all
        except DataError as error:
            raise DataError(f"a micro-batch ran out of memory{rank}, and {error}") from None
        if in_part <= 1:
            raise OutOfMemoryError(
                f"a single sample, {_described(parts[0])}, ran out of memory{rank}, so auto_micro_batch cannot split it "
                f"further. {_LESS}. The error was: {failure}"
            )
        in_half = -(-samples // (2 * len(parts)))
        number = -(-samples // in_half)
        half = split(batch, number)
        self._run.progress.limit_parts(_elements(half[0]))
        notice(
            f"micro-batch of {samples} samples ran out of memory{rank}{f' in {len(parts)} parts' if len(parts) > 1 else ''}; "
            f"those of its size are split in {number} from now on.",
            everywhere=True,
        )

    def _run_known(self, micro: MicroBatch, parts: list[Any], compute: Callable[[MicroBatch], Any]) -> Any:
        """Run parts of a shape that has passed: the last one averages the gradients in its backward pass."""
        run = self._run
        try:
            if len(parts) > 1:
                return self._run_parts(micro, parts, compute, last=micro.last)
            if run.distributed:
                run.accelerator.accumulation.begin(micro._replace(alone=True))
            return compute(micro)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"{_described(parts[0])} ran out of memory, although one at least as large has passed before: something else "
                "has grown, or memory is fragmented. On CUDA set PYTORCH_ALLOC_CONF=expandable_segments:True, and resume with "
                f"ckpt_path='auto'; if it happens again, use a smaller batch_size. {_LESS}."
            ) from error

    def _try(
        self, training: Training, micro: MicroBatch, parts: list[Any], compute: Callable[[MicroBatch], Any]
    ) -> tuple[Any, str]:
        """Run parts without averaging gradients; returns the outputs, and why memory was exhausted, if it was."""
        run, progress, failure, outputs = self._run, self._run.progress, "", None
        loss, had_values = progress.loss, run.metrics.batch
        if len(parts) == 1:  # the step may remove items of it
            parts = [copy_containers(parts[0])]
        gradients = _Gradients(run.module.parameters())
        effects = Effects(run.module, copy=_to_host)
        try:
            outputs = self._run_parts(micro, parts, compute, last=False)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = " ".join(str(error).split())[:200] or type(error).__name__
        # Outside of `except`, no traceback keeps the frames that hold the tensors of the try.
        if failure:
            progress.loss, run.metrics.batch = loss, had_values
            run.accelerator.accumulation.begin(micro)
            release_memory()
            gradients.restore()
            effects.restore()
            return None, failure
        if len(parts) > 1 and not self._told and (changed := effects.changed_buffers()):
            self._told = True
            notice(
                f"training_step changes {', '.join(changed[:5])}: in a split micro-batch each part changes what the parts "
                "before it have left, as several micro-batches would."
            )
        if micro.last:
            training.backward(None)  # averages the gradients that the try has accumulated
        return outputs, ""

    def _compare(self, training: Training, micro: MicroBatch, part: Any) -> None:
        """Compare the loss of some samples with those of their halves, in eval mode and without gradients.

        Raises:
            LossError: It is not their mean.
        """
        run, self._compared = self._run, True
        samples = part if batch_size(part) > 1 else split(micro.batch, batch_size(micro.batch) // 2)[0]
        halves, modes = split(samples, 2), [(layer, layer.training) for layer in run.module.modules()]
        try:
            # Eager: a compilation for each size would take longer than the comparison.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), without_effects(run, micro.batch):
                run.module.eval()
                first, second = (self._loss_alone(training, micro, samples, place) for place in range(2))
                of_halves = [self._loss_alone(training, micro, half, 0) for half in halves]
        except Exception:
            # Not every step runs in eval mode or without gradients. What is wrong in training mode too is raised by the parts.
            self._compared = batch_size(part) <= 1  # fewer samples may fit
            return
        finally:
            for layer, mode in modes:
                layer.training = mode
            run.accelerator.accumulation.begin(micro)
        weights = self._weights(halves)
        if not sum(weights):
            return
        mean = sum(loss * weight for loss, weight in zip(of_halves, weights, strict=True)) / sum(weights)
        allowed = _TOLERANCE * max(map(abs, (first, *of_halves)))
        random = abs(first - second) > 0.1 * allowed
        if abs(first - mean) > allowed + 1e-6 and not random:  # never if one of them is NaN
            raise LossError(
                f"auto_micro_batch=True: the loss of {batch_size(samples)} samples is {first:.6g}, but the mean loss of their "
                f"two halves is {mean:.6g}, so a split micro-batch would have other gradients. The loss of training_step must "
                "be a mean over samples: .mean() instead of .sum(); or over what batch_weight counts: "
                "def batch_weight(self, batch): return float(batch['attention_mask'].sum()). A loss that compares the samples "
                "of a batch, such as a contrastive one, cannot be split: remove auto_micro_batch."
            )

    def _loss_alone(self, training: Training, micro: MicroBatch, batch: Any, place: int) -> float:
        """The loss of some samples of a micro-batch; NaN if there is none."""
        run = self._run
        assert run.train_loader is not None
        run.metrics.batch = batch
        run.accelerator.accumulation.begin(micro._replace(batch=batch, last=False, alone=run.distributed))
        seed_generators(part_key(run.train_loader.forward_key(micro.index), place), run.strategy.generators())
        outputs = training.training_step(copy_containers(batch), micro.index)
        loss = outputs if isinstance(outputs, Tensor) else loss_in(outputs)
        return math.nan if loss is None else float(loss)

    def _run_parts(self, micro: MicroBatch, parts: list[Any], compute: Callable[[MicroBatch], Any], *, last: bool) -> Any:
        """Run the parts one after the other; the micro-batch is current again afterwards.

        Args:
            micro: The micro-batch.
            parts: Its parts.
            compute: See `run`.
            last: The backward pass of the last part averages the gradients over the ranks.
        """
        run, state, metrics = self._run, self._run.accelerator.accumulation, self._run.metrics
        number, alone, values, outputs = len(parts), run.distributed, PartValues(), list[Any]()
        weights = [1.0] if number == 1 else self._weights(parts)
        total, end = sum(weights) or 1.0, number - 1
        key = 0
        if number > 1:
            assert run.train_loader is not None
            key = run.train_loader.forward_key(micro.index)
        with metrics.collecting(values):
            for place, (batch, weight) in enumerate(zip(parts, weights, strict=True)):
                part = micro._replace(
                    batch=batch,
                    first=micro.first and place == 0,
                    last=last and place == end,
                    share=micro.share if number == 1 else micro.share * weight / total,
                    weight=micro.weight if number == 1 else weight,
                    alone=alone,
                )
                metrics.batch = batch
                state.begin(part)
                values.begin(weight)
                if number > 1:
                    seed_generators(part_key(key, place), run.strategy.generators())
                returned = compute(part)
                outputs.append(returned if number == 1 else map_tensors(returned, torch.detach))
                del returned  # with the graph of the part
        metrics.batch = micro.batch
        state.begin(micro)
        values.record(metrics.log)
        return outputs[0] if number == 1 else _join(outputs, parts, weights)

    def _weights(self, parts: list[Any]) -> list[float]:
        """The weights of parts among each other."""
        loader = self._run.train_loader
        if loader is None or not loader.weighs:
            return [float(batch_size(part)) for part in parts]
        return [check_weight(self._run.module.batch_weight(part), "batch_weight must return", "return ") for part in parts]


class _Gradients:
    """The gradients before a try, in host memory: those of earlier micro-batches of the window."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        gradients = [parameter.grad for parameter in self._parameters]
        self._kept = [None if one is None else (one, _to_host(one)) for one in gradients]

    def restore(self) -> None:
        """Set the gradients to what they were, in the same memory."""
        with torch.no_grad():
            for parameter, kept in zip(self._parameters, self._kept, strict=True):
                if kept is None:
                    parameter.grad = None
                else:
                    parameter.grad = kept[0].copy_(kept[1])


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_within(shape: Shape, other: Shape) -> bool:
    """Whether a batch of this shape is in no dimension larger than one of the other shape."""
    return len(shape) == len(other) and all(
        len(one) == len(two) and all(n <= most for n, most in zip(one, two, strict=True))
        for one, two in zip(shape, other, strict=True)
    )


def _elements(batch: Any) -> int:
    """The number of elements of the tensors with a batch dimension."""
    return sum(leaf.numel() for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)


def _described(batch: Any) -> str:
    shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves(batch) if isinstance(leaf, Tensor))
    return f"a micro-batch with tensors of the shapes {shapes}"


def _join(outputs: list[Any], parts: list[Any], weights: list[float]) -> Any:
    """What `training_step` would have returned for the whole micro-batch, without graphs; see `_join_values`."""
    there = [place for place, one in enumerate(outputs) if one is not None]
    if not there:
        return None
    dicts, kept = [detach_loss(outputs[place]) for place in there], [weights[place] for place in there]
    sizes = [batch_size(parts[place]) for place in there]
    names = dict.fromkeys(name for one in dicts for name in one)
    joined = {name: _join_values(name, [one.get(name) for one in dicts], sizes, kept) for name in names}
    return joined["loss"] if isinstance(outputs[there[0]], Tensor) else joined


def _join_values(name: str, values: list[Any], sizes: list[int], weights: list[float]) -> Any:
    """The weighted mean of scalars, samples concatenated; a list of what cannot be joined, such as counts."""
    if name == "loss" or all(isinstance(one, float) or (_is_scalar(one) and one.is_floating_point()) for one in values):
        there = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
        total = sum(weight for _, weight in there)
        return sum(value * weight for value, weight in there) / total if total > 0.0 else values[0]
    if not any(isinstance(value, int | float) or _is_scalar(value) for value in values):
        try:
            return concatenate(values, sizes)
        except DataError:
            pass
    notice(
        f"training_step returned {name!r}, whose values of the parts of a split micro-batch cannot be joined: "
        "on_train_batch_end gets a list of them. Return means as floats, or tensors of shape [batch, …]."
    )
    return values


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0
