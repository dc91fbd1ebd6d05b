"""`Accelerator.save_state`, `load_state`, `save_model` and `register_for_checkpointing`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from safetensors.torch import load_file
from torch import nn

from trainkit import Accelerator, DataLoaderConfiguration, Strategy, set_seed
from trainkit.accelerator.checkpointing import Checkpointing, NumberedCheckpoints
from trainkit.accelerator.gradients import AccumulationState
from trainkit.accelerator.prepared_models import PreparedObjects
from trainkit.checkpoint import open_checkpoint
from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    StateMismatchError,
    UnknownNameError,
    UnsupportedArgumentError,
)


class Loop:
    """Your own training loop with dropout, accumulation and a schedule; it can save after a micro-batch and resume."""

    def __init__(self, accumulation: int = 1, precision: str = "32-true", seed: int = 3, configuration: Any = None) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulation, precision=precision, dataloader_config=configuration
        )
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self.plain = model
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, tiny_loader(22, shuffle=True), scheduler
        )
        self.losses: list[str] = []

    def run(self, epochs: int = 2, save_after: tuple[int, int] | None = None) -> Loop:
        for epoch in range(self.loader.epoch, epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(loss.detach()).hex())
                if (epoch, len(self.losses) - 6 * epoch) == save_after:
                    self.accelerator.save_state("there")
        return self


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulation, batch", [(1, 2), (1, 6), (2, 4), (2, 3), (4, 6)])
def test_a_loop_resumes_exactly(accumulation: int, batch: int, precision: str) -> None:
    """A resumed loop has the same losses and parameters as an uninterrupted one.

    The checkpoint is saved after any micro-batch. If that is in the middle of an accumulation window, the loop resumes at the
    start of the window.
    """
    whole = Loop(accumulation, precision).run(2)
    Loop(accumulation, precision).run(1, save_after=(0, batch))
    resumed = Loop(accumulation, precision)
    resumed.accelerator.load_state("there", resume_loaders=True)
    resumed.run(2)
    start = batch if batch == 6 else batch // accumulation * accumulation
    assert resumed.losses == whole.losses[start:]
    assert same(parameters_of(resumed.plain), parameters_of(whole.plain))
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The notices about the position at which loaders start."""
    return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "resume_loaders" in text]


def test_without_resume_loaders_the_epoch_begins_at_its_beginning_and_a_notice_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Loop().run(1, save_after=(0, 4))
    resumed = Loop()
    caplog.clear()
    resumed.accelerator.load_state("there")
    (text,) = told(caplog)
    assert "saved at batch 4 of epoch 0, and the prepared loader starts epoch 0 at its first batch, as in Accelerate" in text
    assert "accelerator.load_state(folder, resume_loaders=True), or accelerator.resume_loaders()" in text
    assert "accelerator.skip_first_batches(loader, 4)" in text
    assert resumed.loader.epoch == 0
    orders = [[[targets.tolist() for _, targets in loop.loader] for _ in range(2)] for loop in (resumed, Loop())]
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert len(told(caplog)) == 1


def test_gradients_of_a_window_that_was_left_are_those_of_other_parameters() -> None:
    """`load_state` drops the gradients of an incomplete accumulation window."""
    Loop(2).accelerator.save_state("there")
    whole = Loop(2).run(1)
    loop = Loop(2)
    for inputs, _ in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(inputs).sum())
        break
    loop.accelerator.load_state("there")
    assert loop.run(1).losses == whole.losses


def test_resume_loaders_after_load_state_acts_once(caplog: pytest.LogCaptureFixture) -> None:
    whole = Loop().run(3)
    Loop().run(1, save_after=(0, 4))
    resumed = Loop()
    with pytest.raises(ConfigurationError, match=r"after load_state and before the loop.*resume_loaders=True"):
        resumed.accelerator.resume_loaders()
    resumed.accelerator.load_state("there")
    resumed.accelerator.resume_loaders()
    assert resumed.run(3).losses == whole.losses[4:]
    with pytest.raises(ConfigurationError, match="no prepared loader has a position to resume from.*have been read since"):
        resumed.accelerator.resume_loaders()
    late = Loop()
    late.accelerator.load_state("there")
    next(iter(late.loader))
    with pytest.raises(ConfigurationError, match="no prepared loader has a position to resume from.*have been read since"):
        late.accelerator.resume_loaders()
    caplog.clear()
    stateful = Loop(configuration=DataLoaderConfiguration(use_stateful_dataloader=True))
    stateful.accelerator.load_state("there")
    assert stateful.run(3).losses == whole.losses[4:], "as with Accelerate's stateful loaders"
    Loop().accelerator.load_state("there", resume_loaders=True)
    assert not told(caplog), "who has asked for it need not be told"


def test_a_position_that_was_loaded_and_not_used_is_saved_again() -> None:
    Loop().run(1, save_after=(0, 4))
    between = Loop()
    between.accelerator.load_state("there")
    between.accelerator.save_state("again")
    resumed = Loop()
    resumed.accelerator.load_state("again", resume_loaders=True)
    assert resumed.run(1).losses == Loop().run(1).losses[4:]


def test_a_position_inside_a_micro_batch_is_an_error_only_for_who_continues_there(caplog: pytest.LogCaptureFixture) -> None:
    """With another batch size, `load_state` works; `resume_loaders` raises if the position is inside a micro-batch."""

    def loop(batch_size: int) -> tuple[Accelerator, Any]:
        set_seed(3)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(nn.Linear(4, 1), tiny_loader(24, batch_size=batch_size))[1]

    accelerator, loader = loop(4)
    next(iter(loader))
    accelerator.save_state("there")
    accelerator, loader = loop(3)
    accelerator.load_state("there")
    assert "skip_first_batches(loader, n)" in told(caplog)[0]
    with pytest.raises(StateMismatchError, match="is inside a micro-batch"):
        accelerator.resume_loaders()
    assert len(list(loader)) == 8


class Stream(torch.utils.data.IterableDataset[int]):
    """An iterable dataset, whose length is unknown until it ends."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_the_end_of_an_epoch_of_unknown_length_is_the_beginning_of_the_next(caplog: pytest.LogCaptureFixture) -> None:
    def loop() -> tuple[Accelerator, Any]:
        set_seed(3)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(nn.Linear(4, 1), torch.utils.data.DataLoader(Stream(), batch_size=2))[1]

    accelerator, loader = loop()
    assert len(list(loader)) == 3
    accelerator.save_state("there")
    accelerator, loader = loop()
    accelerator.load_state("there")
    assert not told(caplog)
    assert loader.epoch == 1
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_loop_that_saves_after_each_epoch() -> None:
    whole = Loop().run(3)
    first = Loop().run(2)
    assert first.accelerator.save_state("there") == Path("there")
    resumed = Loop()
    resumed.accelerator.load_state("there")
    assert resumed.loader.epoch == 2
    assert resumed.run(3).losses == whole.losses[12:]


def test_another_seed_is_said() -> None:
    """A warning says that the checkpoint was saved with another seed."""
    Loop().run(1).accelerator.save_state("there")
    with pytest.warns(UserWarning, match=r"the seed is 4, but the checkpoint was saved with seed 3.*set_seed\(3\)"):
        Loop(seed=4).accelerator.load_state("there")


def test_registered_objects() -> None:
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "when": (1, "a")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value, self.when = state["value"], state["when"]

    def loop() -> tuple[Accelerator, Counter]:
        accelerator, counter = Accelerator(), Counter()
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.register_for_checkpointing(counter)
        return accelerator, counter

    accelerator, counter = loop()
    counter.value = 9
    accelerator.save_state("there")
    accelerator, counter = loop()
    accelerator.load_state("there")
    assert (counter.value, counter.when) == (9, (1, "a"))
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(StateMismatchError, match="contains 1 registered, but there are 2"):
        accelerator.load_state("there")
    with pytest.raises(ConfigurationError, match="needs objects with state_dict"):
        accelerator.register_for_checkpointing(Counter)


def test_two_models_and_two_optimizers() -> None:
    def loop() -> tuple[Accelerator, list[Any]]:
        torch.manual_seed(2)
        accelerator = Accelerator()
        models = [nn.Linear(3, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.1 * n) for n, model in enumerate(models, 1)]
        return accelerator, list(accelerator.prepare(*models, *optimizers))

    accelerator, (first, second, *optimizers) = loop()
    for _ in range(3):
        accelerator.backward(second(first(torch.ones(2, 3))).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("there")
    names = {path.name for path in Path("there").iterdir()}
    assert {"model.safetensors", "model_1.safetensors", "optimizer.safetensors"} <= names
    assert "1/model_1/weight/exp_avg" in load_file("there/optimizer.safetensors")
    accelerator, prepared = loop()
    accelerator.load_state("there")
    for before, after in zip([first, second], prepared[:2], strict=True):
        assert same(parameters_of(before), parameters_of(after))
    states = [prepared_optimizer.state_dict()["state"] for prepared_optimizer in prepared[2:]]
    for optimizer, state in zip(optimizers, states, strict=True):
        for number, slots in optimizer.state_dict()["state"].items():
            assert all(torch.equal(slots[slot], state[number][slot]) for slot in slots)


def test_parts() -> None:
    """`load_state(restore=...)` restores only the parts that are named; unsupported arguments are errors."""
    Loop().run(1).accelerator.save_state("there")
    loop = Loop()
    run_id = loop.accelerator.run_id
    loop.accelerator.load_state("there", restore={"model"})
    assert (loop.loader.epoch, loop.accelerator.updates, loop.accelerator.run_id) == (0, 0, run_id), "a loop of its own"
    other = Loop()
    other.accelerator.load_state("there", restore={"model", "optimizer"})
    assert (other.loader.epoch, other.accelerator.updates) == (0, 6), "updates are counted on with the optimizer's state"
    assert not loop.optimizer.state
    with pytest.raises(UnknownNameError, match="unknown part 'models'.*Did you mean 'model'"):
        loop.accelerator.load_state("there", restore={"models"})
    for refused, use in (("map_location", "remove it"), ("load_module_only", "restore={'model'}")):
        with pytest.raises(UnsupportedArgumentError, match=rf"load_state\({refused}=...\): .*{use}"):
            loop.accelerator.load_state("there", **{refused: True})
    with pytest.raises(UnsupportedArgumentError, match=r"load_state\(load_kwargs=...\): remove it"):
        loop.accelerator.load_state("there", {"weights_only": True})
    with pytest.raises(UnsupportedArgumentError, match=r"save_state\(exclude_frozen_parameters=...\): remove it"):
        loop.accelerator.save_state("there", exclude_frozen_parameters=True)


class Begun(TinyModule):
    """Records the parameters and the learning rate with which training begins. Its own learning rate is 7."""

    def on_train_start(self) -> None:
        self.found, self.rate = parameters_of(self), self.optimizers().param_groups[0]["lr"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=7.0)


def test_a_checkpoint_of_a_trainer() -> None:
    trainer = make_trainer()
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint("there")
    accelerator, module = Accelerator(), TinyModule()
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    accelerator.load_state("there", restore={"model", "optimizer"})
    assert same(parameters_of(model), parameters_of(trainer.model))
    assert accelerator.optimizers[0].param_groups[0]["lr"] == 0.1
    accelerator.save_state("mine")
    with pytest.raises(CheckpointError, match="your own training loop"):
        make_trainer().fit(TinyModule(), tiny_loader(), ckpt_path="mine")
    begun = Begun()
    make_trainer().fit(begun, tiny_loader(), ckpt_path="mine", restore={"model", "optimizer"})
    assert same(begun.found, parameters_of(model))
    assert begun.rate == 0.1
    with pytest.raises(CheckpointError, match="training loop of your own"):
        TinyModule.load_from_checkpoint("mine")


def test_nothing_prepared() -> None:
    """`save_state` before `prepare` is an error."""
    with pytest.raises(ConfigurationError, match="nothing was"):
        Accelerator().save_state("there")


def test_damage_is_found() -> None:
    Loop().accelerator.save_state("there")
    Path("there/optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.safetensors"):
        Loop().accelerator.load_state("there")


def test_save_model_writes_plain_safetensors() -> None:
    loop = Loop(precision="bf16-mixed")
    loop.accelerator.save_model(loop.model, "weights")
    assert same(load_file("weights/model.safetensors"), parameters_of(loop.plain))
    with pytest.raises(ConfigurationError, match="pickle"):
        loop.accelerator.save_model(loop.model, "weights", safe_serialization=False)


def test_checksums() -> None:
    loop = Loop()
    for checksum in ("sha256", "xxh3-128"):
        loop.accelerator.save_state("there", checksum=checksum, blocking=checksum == "sha256")
        loop.accelerator.free_memory()
        loop = Loop()
        assert open_checkpoint("there").manifest.checksum == checksum
        loop.accelerator.load_state("there")
    loop.accelerator.save_state("there")
    assert open_checkpoint("there").manifest.checksum == "xxh3-128"
    with pytest.raises(ConfigurationError, match=r"save_state\(checksum=\) must be one of 'xxh3-128', 'sha256', not 'md5'"):
        loop.accelerator.save_state("there", checksum="md5")


def test_the_memory_of_asynchronous_saves_can_be_freed() -> None:
    loop = Loop()
    for _ in range(2):
        loop.accelerator.save_state("there", blocking=False)
        assert loop.accelerator._checkpointing._saver._buffers.nbytes > 0
        loop.accelerator.release_save_buffers()
        assert loop.accelerator._checkpointing._saver._buffers.nbytes == 0
    loop.accelerator.load_state("there")


def test_save_model_writes_the_digests_if_asked_to() -> None:
    loop = Loop()
    for checksum, hash_of in {"sha256": hashlib.sha256, "xxh3-128": xxhash.xxh3_128}.items():
        loop.accelerator.save_model(loop.model, "weights", max_shard_size="60B", checksum=checksum)
        names = sorted(path.name for path in Path("weights").iterdir())
        assert [name for name in names if name.startswith("model.") and "safetensors" not in name] == [f"model.{checksum}"]
        lines = Path("weights", f"model.{checksum}").read_text().splitlines()
        files = {name: Path("weights", name).read_bytes() for name in names if name != f"model.{checksum}"}
        assert sorted(lines) == sorted(f"{hash_of(data).hexdigest()}  {name}" for name, data in files.items())
        assert len(lines) == 5
    loop.accelerator.save_model(loop.model, "weights")
    assert [path.name for path in Path("weights").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigurationError, match=r"save_model\(checksum=\) must be one of 'xxh3-128', 'sha256' or None"):
        loop.accelerator.save_model(loop.model, "weights", checksum="md5")


def test_save_model_divides_large_ones_and_removes_what_was() -> None:
    loop = Loop()
    loop.accelerator.save_model(loop.model, "weights", max_shard_size="60B")
    files = sorted(path.name for path in Path("weights").iterdir())
    assert len(files) == 5
    index = json.loads(Path("weights/model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: load_file(f"weights/{file}")[name] for name, file in index.items()}
    assert same(tensors, parameters_of(loop.plain))
    Path("weights/.model.safetensors.tmp-0123").write_text("left by a kill")
    os.utime("weights/.model.safetensors.tmp-0123", (1, 1))
    loop.accelerator.save_model(loop.model, "weights", max_shard_size=10_000)
    assert [path.name for path in Path("weights").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigurationError, match="max_shard_size must be a size such as '5GB'"):
        loop.accelerator.save_model(loop.model, "weights", max_shard_size="5 apples")


def test_a_transformers_model_opens_with_from_pretrained() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    accelerator = Accelerator()
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state("there")
    accelerator.save_model(prepared, "weights", max_shard_size="10KB")
    tokens = torch.arange(8).reshape(1, 8)
    for folder in ("there", "weights"):
        opened = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
    assert open_checkpoint("there").manifest.aliases["model"] == {"lm_head.weight": "transformer.wte.weight"}


def test_not_blocking() -> None:
    """`save_state(blocking=False)` writes the state at the time of the call; if it fails, the next `save_state` raises."""
    loop = Loop().run(1)
    expected = parameters_of(loop.plain)
    loop.accelerator.save_state("there", blocking=False)
    with torch.no_grad():
        for parameter in loop.plain.parameters():
            parameter.fill_(3.0)
    loop.accelerator.free_memory()
    assert same(open_checkpoint("there").read().tensors["model"], expected)
    loop = Loop()
    Path("other").mkdir()
    Path("other/notes.txt").write_text("no checkpoint")
    loop.accelerator.save_state("other", blocking=False)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        loop.accelerator.save_state("fine")
    loop.accelerator.save_state("fine")


def test_save_model_writes_adapters_as_peft_does() -> None:
    peft = pytest.importorskip("peft")

    def base() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["0"], modules_to_save=["2"], r=2))
    model.add_adapter("other", peft.LoraConfig(target_modules=["0"], r=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    accelerator = Accelerator()
    accelerator.save_model(accelerator.prepare(model), "ours", max_shard_size="60B")  # PEFT reads a single file
    model.save_pretrained("theirs")
    for adapter in ("", "other"):
        ours, theirs = (load_file(Path(folder, adapter, "adapter_model.safetensors")) for folder in ("ours", "theirs"))
        assert same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
    files = {str(path.relative_to("ours")) for path in Path("ours").rglob("*") if path.is_file()}
    assert files == {f"{where}adapter_{kind}" for where in ("", "other/") for kind in ("config.json", "model.safetensors")}
    loaded = peft.PeftModel.from_pretrained(base(), "theirs").eval()
    assert torch.equal(peft.PeftModel.from_pretrained(base(), "ours").eval()(torch.ones(3, 4)), loaded(torch.ones(3, 4)))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # a warning of transformers, caused by PEFT
def test_save_model_refuses_adapters_that_only_peft_can_tell() -> None:
    """For prompt tuning, the error says to call PEFT's `save_pretrained`."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), prompts)
    with pytest.raises(ConfigurationError, match=r"PROMPT_TUNING.*save_pretrained\(folder\)"):
        Accelerator().save_model(model, "weights")
    assert not Path("weights").exists()


def test_adapters_alone_are_saved() -> None:
    peft = pytest.importorskip("peft")

    def loop(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2))
        accelerator = Accelerator()
        prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(prepared(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator, model

    accelerator, model = loop(1)
    accelerator.save_state("there")
    checkpoint = open_checkpoint("there")
    assert checkpoint.manifest.contents["model"] == "trainable"
    assert all("lora" in name for name in checkpoint.read().tensors["model"])
    again, other = loop(1)
    again.load_state("there")
    assert same(parameters_of(other), parameters_of(model))
    with pytest.raises(StateMismatchError, match="base"):
        loop(2)[0].load_state("there")


def test_state_that_was_read_is_not_copied_again() -> None:
    """After `load_state`, large tensors of the optimizer state stay where the file was read to; two loads share no memory."""

    def loop() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
        accelerator = Accelerator()
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return accelerator, prepared, optimizer

    def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        accelerator.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    whole = loop()
    step(*whole)
    whole[0].save_state("there")
    first, second = loop(), loop()
    for accelerator, _, optimizer in (first, second):
        accelerator.load_state("there")
        slots = [slot for slots in optimizer.state.values() for slot in (slots["exp_avg"], slots["exp_avg_sq"])]
        assert all(slot.data_ptr() % 64 == 0 for slot in slots), "aligned as torch's own, so that kernels round alike"
        large = [slot for slot in slots if slot.numel() >= 64]
        ends = [slot.data_ptr() + slot.nbytes for slot in large]
        assert sum(slot.data_ptr() in ends for slot in large) > 3, "one after the other, as in the file"
    step(*first)
    assert same(parameters_of(second[1]), parameters_of(whole[1]))
    for loop_ in (whole, second):
        step(*loop_)
    assert same(parameters_of(first[1]), parameters_of(whole[1]))
    assert same(parameters_of(second[1]), parameters_of(whole[1]))


class Counter:
    """An object for `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_part_needs_no_accelerator() -> None:
    """`Checkpointing` can be used without an `Accelerator`."""

    def part(updates: int) -> tuple[Checkpointing, nn.Module, Counter, Any]:
        model, counter, strategy = nn.Linear(1, 1), Counter(), Strategy("cpu")
        torch.nn.init.constant_(model.weight, updates)
        counter.count = updates
        numbered = NumberedCheckpoints(ProjectConfiguration("project", automatic_checkpoint_naming=True), strategy.world)
        made = Checkpointing(strategy, numbered, PreparedObjects([model]))
        made.register(counter)
        accumulation = AccumulationState(1, lambda micro: None)
        accumulation.restore_counts([(0, updates)])
        loop = SimpleNamespace(
            updates=updates, seed=1, accumulation=accumulation, open_loaders=SimpleNamespace(note_load=lambda *_: None)
        )
        return made, model, counter, loop

    first, _, _, loop = part(5)
    path = first.save(loop)
    second, model, counter, loop = part(0)
    second.load(loop)
    assert path.name == "checkpoint_0"
    assert (model.weight.item(), counter.count, loop.updates, loop.accumulation.counts()) == (5.0, 5, 5, [(0, 5)])
    assert (second.run_id, second.save(loop).name) == (first.run_id, "checkpoint_1")
    third, model, counter, loop = part(7)
    third.load(loop, path, parts=["model"])
    assert (model.weight.item(), counter.count, loop.updates) == (5.0, 7, 7), "only what was asked for"
    assert third.run_id != first.run_id
    with pytest.raises(ConfigurationError, match="no prepared loader has a position"):
        third.resume_loaders()
    third.close()
