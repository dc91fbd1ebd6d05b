"""One contender of faults.py: the same small training and evaluation in each framework, resumed as its documentation says.

By hand, in an empty folder; start it again to resume:

    python benchmarks/faults_contenders.py trainkit train --epochs 2

It appends what it does to `events.jsonl` in the working directory, one line of JSON for each event. Only what a contender
needs is imported: the other frameworks may live in an environment without trainkit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

FEATURES, CLASSES = 32, 10
SAMPLES, BATCH = 640, 32  # 20 steps in an epoch of one process
EVALUATED, EVALUATED_BATCH = 101, 8  # samples to evaluate: sample i has the value i²
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Recorder:
    """Writes what a process does to `events.jsonl`, and fails at a step if asked to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, False

    def tell(self, **event: Any) -> None:
        line = json.dumps({**event, "rank": RANK, "pid": os.getpid(), "time": time.time()}) + "\n"
        file = os.open("events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

    def before(self, step: int, optimizer: Any) -> None:
        """At the beginning of a training step: `step` optimizer steps have been taken."""
        if not self.started:
            self.started = True
            known = {int(state["step"]) for state in optimizer.state.values()}
            self.tell(start=step, optimizer=max(known, default=0))
        if self.options.fail_at == step and RANK == 1:
            raise RuntimeError("boom")
        time.sleep(0.01)  # stands for a larger model

    def after(self, step: int, loss: Tensor) -> None:
        self.tell(step=step, loss=float(loss.detach()).hex())

    def saving(self, step: int) -> None:
        if self.started:
            self.tell(saving=step)

    def end(self, model: nn.Module) -> None:
        numbers = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        self.tell(end=hashlib.sha256(numbers).hexdigest())


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


class Samples(Dataset[Any]):
    """Samples with labels; with noise that is drawn when a sample is fetched, if `augment`."""

    def __init__(self, options: argparse.Namespace) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, FEATURES, generator=draw)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
        self.augment = options.augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + 0.1 * torch.randn(FEATURES) if self.augment else x, self.y[index]


def collate(samples: list[Any]) -> dict[str, Tensor]:
    """A batch in the form of the Hugging Face Trainer."""
    x, labels = default_collate(samples)
    return {"x": x, "labels": labels}


def training_loader(options: argparse.Namespace) -> DataLoader[Any]:
    return DataLoader(Samples(options), BATCH, shuffle=True, num_workers=2)


def values() -> Tensor:
    return torch.arange(EVALUATED, dtype=torch.float32) ** 2


def values_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(values()), EVALUATED_BATCH)


def module_of(base: Any, recorder: Recorder) -> Any:
    """The module of trainkit and of Lightning: the same but for its base class."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(recorder.options.width)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            step = self.trainer.global_step
            recorder.before(step, self.trainer.optimizers[0])
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            recorder.after(step, loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", batch[0].mean(), on_epoch=True, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            recorder.saving(self.trainer.global_step)

    return Module()


# --------------------------------------------------------------------------------- a run of trainkit, and one of Lightning


def trainkit(options: argparse.Namespace, recorder: Recorder) -> None:
    from trainkit import Trainer, TrainModule, seed_everything
    from trainkit.callbacks import ModelCheckpoint

    seed_everything(1)
    module = module_of(TrainModule, recorder)
    save = ModelCheckpoint(every_n_train_steps=options.save_every)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_epochs=options.epochs, callbacks=[save], **quiet)
    if options.task == "evaluate":
        trainer.validate(module, values_loader(), verbose=False)
        recorder.tell(mean=float(trainer.callback_metrics["mean"]), way="self.log")
    else:
        trainer.fit(module, training_loader(options), ckpt_path="auto")
        recorder.end(module)


def lightning(options: argparse.Namespace, recorder: Recorder) -> None:
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    seed_everything(1, workers=True)
    module = module_of(LightningModule, recorder)
    save = ModelCheckpoint(
        "checkpoints", every_n_train_steps=options.save_every, save_last=True, save_on_exception=options.with_option
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    alone = options.processes == 1 or (options.task == "evaluate" and options.with_option)
    run: dict[str, Any] = {"devices": 1} if alone else {"devices": options.processes, "strategy": "ddp"}
    trainer = Trainer(accelerator="cpu", max_epochs=options.epochs, callbacks=[save], **run, **quiet)
    if options.task == "evaluate":
        trainer.validate(module, values_loader(), verbose=False)
        recorder.tell(mean=float(trainer.callback_metrics["mean"]), way="self.log")
    else:
        trainer.fit(module, training_loader(options), ckpt_path="last")
        recorder.end(module)


# ------------------------------------------------------------------------------------------------ the others


class Progress:
    """The number of optimizer steps, which Accelerate saves as a custom object."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerate(options: argparse.Namespace, recorder: Recorder) -> None:
    """The loop of its guide to checkpointing, with the sampler that its guide to reproducibility recommends."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    if options.task == "evaluate":
        loader = accelerator.prepare(values_loader())
        gather = accelerator.gather_for_metrics if options.with_option else accelerator.gather
        mean = float(torch.cat([gather(x) for (x,) in loader]).mean())
        recorder.tell(mean=mean, way="gather_for_metrics" if options.with_option else "gather")
        return
    model = network(options.width)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), training_loader(options)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = [int(re.sub(r"\D", "", folder.name)) for folder in Path("checkpoints").glob("checkpoint_*")]
    if saved:
        accelerator.load_state()
        accelerator.project_configuration.iteration = max(saved) + 1
    done = divmod(progress.step, len(loader))
    for epoch in range(done[0], options.epochs):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, done[1]) if (epoch, 0) < done else loader:
            recorder.before(progress.step, optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            recorder.after(progress.step, loss)
            progress.step += 1
            if progress.step % options.save_every == 0:
                recorder.saving(progress.step)
                accelerator.save_state()
    recorder.end(model)


def transformers(options: argparse.Namespace, recorder: Recorder) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(options.width)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if options.task == "evaluate":
                return {"loss": labels.mean() + 0 * self.net(x).sum(), "values": labels}
            return {"loss": F.cross_entropy(self.net(x), labels)}

    class Recorded(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            step = self.state.global_step
            recorder.before(step, self.optimizer)
            loss: Tensor = super().training_step(*args, **kwargs)
            recorder.after(step, loss)
            return loss

    class Saving(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                recorder.saving(state.global_step)

    set_seed(1)
    arguments = TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=EVALUATED_BATCH,
        dataloader_num_workers=2,
        save_strategy="steps",
        save_steps=options.save_every,
        seed=1,
        use_cpu=True,
        learning_rate=1e-3,
        enable_jit_checkpoint=options.with_option,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    if options.task == "evaluate":
        data = [{"x": torch.zeros(FEATURES), "labels": value} for value in values()]
        measure = {"compute_metrics": lambda seen: {"mean": float(seen.label_ids.mean())}} if options.with_option else {}
        found = Recorded(model=Model(), args=arguments, eval_dataset=data, **measure).evaluate()
        way = "mean" if options.with_option else "loss"
        recorder.tell(mean=found[f"eval_{way}"], way="compute_metrics" if options.with_option else "eval_loss")
        return
    model = Model()
    trainer = Recorded(model, arguments, collate, train_dataset=Samples(options), callbacks=[Saving()])
    saved = get_last_checkpoint("checkpoints") if Path("checkpoints").is_dir() else None
    trainer.train(resume_from_checkpoint=True if saved else None)
    recorder.end(model)


CONTENDERS = {"trainkit": trainkit, "lightning": lightning, "accelerate": accelerate, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("task", choices=("train", "evaluate"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer; 100000: 50 MB of parameters and state")
    parser.add_argument("--save-every", type=int, default=5, help="steps between two saves")
    parser.add_argument("--augment", action="store_true", help="add noise to the samples, drawn in the workers")
    parser.add_argument("--processes", type=int, default=1, help="number of processes; needs the framework's launcher")
    parser.add_argument("--fail-at", type=int, default=-1, help="raise an exception in rank 1 at this step")
    parser.add_argument("--with-option", action="store_true", help="use what the documentation offers beyond the default")
    options = parser.parse_args()

    torch.set_num_threads(1)
    CONTENDERS[options.contender](options, Recorder(options))


if __name__ == "__main__":
    main()
