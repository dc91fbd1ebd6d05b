"""Accelerate's examples of single features, typed again with a tiny model and made-up data. Prints what each has computed.

Change it only as a user of Accelerate would: the tests run it under Accelerate, and behind the door under trainkit.
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import tempfile

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType, ProfileKwargs
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

CONFIG = {"lr": 0.1, "num_epochs": 2, "seed": 42, "batch_size": 4}


def make_dataset(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long())


def get_dataloaders(accelerator, batch_size):
    with accelerator.main_process_first():
        train_dataset, eval_dataset = make_dataset(64, 0), make_dataset(27, 1)
    train_dataloader = DataLoader(train_dataset, shuffle=False, batch_size=batch_size, drop_last=True)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=4)
    return train_dataloader, eval_dataloader


def get_objects(accelerator, batch_size):
    """The model, its optimizer, the loaders and the schedule of an example, before `prepare`."""
    set_seed(CONFIG["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=CONFIG["lr"])
    steps = len(train_dataloader) * CONFIG["num_epochs"]
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    return model, optimizer, train_dataloader, eval_dataloader, lr_scheduler


def evaluate(accelerator, model, eval_dataloader):
    model.eval()
    found, expected = [], []
    for inputs, labels in eval_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, labels))
        found.append(predictions)
        expected.append(references)
    found, expected = torch.cat(found), torch.cat(expected)
    return [len(found), (found == expected).sum().item()]


def mean_of(accelerator, loss):
    return accelerator.gather(loss.detach()).mean().item()


def gradient_accumulation(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if accelerator.distributed_type == DistributedType.XLA:
        raise NotImplementedError
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(*get_objects(accelerator, 4))
    losses, metrics = [], []
    for _epoch in range(CONFIG["num_epochs"]):
        model.train()
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
        metrics.append(evaluate(accelerator, model, eval_dataloader))
    accelerator.end_training()
    return {"losses": losses, "metrics": metrics}


def automatic_gradient_accumulation(folder):
    accelerator = Accelerator(cpu=True)
    observed_batch_size, sizes, losses = 16, [], []

    @find_executable_batch_size(starting_batch_size=observed_batch_size)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        sizes.append(batch_size)
        accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
        accelerator.free_memory()
        objects = get_objects(accelerator, batch_size)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(*objects)
        if batch_size > 4 and accelerator.num_processes == 1:
            raise RuntimeError("CUDA out of memory.")
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
        losses.append(evaluate(accelerator, model, eval_dataloader)[1])

    inner_training_loop()
    accelerator.end_training()
    # the rule for the next smaller size is the library's
    return {"losses": losses, "fits": sizes[-1] <= 4, "first": sizes[0]}


def checkpointing(folder):
    """Train, save after each five steps and each epoch, and train again from one of the checkpoints."""

    def training_function(resume_from_checkpoint=None):
        accelerator = Accelerator(cpu=True, project_dir=folder)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(*get_objects(accelerator, 4))
        overall_step = starting_epoch = 0
        resume_step = None
        if resume_from_checkpoint is not None:
            accelerator.load_state(resume_from_checkpoint)
            training_difference = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
            if "epoch" in training_difference:
                starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            else:
                resume_step = int(training_difference.replace("step_", ""))
                starting_epoch = resume_step // len(train_dataloader)
                resume_step -= starting_epoch * len(train_dataloader)
        losses = []
        for epoch in range(starting_epoch, CONFIG["num_epochs"]):
            model.train()
            if resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
                active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
                overall_step += resume_step
            else:
                active_dataloader = train_dataloader
            for inputs, labels in active_dataloader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                overall_step += 1
                losses.append(mean_of(accelerator, loss))
                if overall_step % 5 == 0 and resume_from_checkpoint is None:
                    accelerator.save_state(os.path.join(folder, f"step_{overall_step}"))
            if resume_from_checkpoint is None:
                accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
            losses.append(evaluate(accelerator, model, eval_dataloader)[1])
        accelerator.end_training()
        return losses

    whole = training_function()
    resumed = [training_function(os.path.join(folder, name)) for name in ("step_5", "epoch_0")]
    return {"losses": whole, "resumed": [[len(one), one == whole[-len(one) :]] for one in resumed]}


def early_stopping(folder):
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(*get_objects(accelerator, 4))
    losses, metrics, best, count = [], [], math.inf, 0
    for _epoch in range(CONFIG["num_epochs"]):
        model.train()
        for step, (inputs, labels) in enumerate(train_dataloader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if step % 1 == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
            best, count = (loss.item(), 0) if loss.item() < best else (best, count + 1)
            if count >= 2:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        metrics.append(evaluate(accelerator, model, eval_dataloader))
    accelerator.end_training()
    return {"losses": losses, "metrics": metrics}


def multi_process_metrics(folder):
    accelerator = Accelerator(cpu=True)
    model, _, _, eval_dataloader, _ = accelerator.prepare(*get_objects(accelerator, 4))
    model.eval()
    samples_seen, found = 0, []
    for step, (inputs, labels) in enumerate(eval_dataloader):
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, labels))
        if accelerator.use_distributed:
            if step == len(eval_dataloader) - 1:
                predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                references = references[: len(eval_dataloader.dataset) - samples_seen]
            else:
                samples_seen += references.shape[0]
        found += list(zip(predictions.tolist(), references.tolist(), strict=True))
    return {"metrics": found}


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.kept = []

    @property
    def tracker(self):
        return self.kept

    @on_main_process
    def store_init_configuration(self, values):
        self.kept.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.kept.append([step, values])


def tracking(folder):
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    accelerator.init_trackers("tracking", CONFIG)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(*get_objects(accelerator, 4))
    for epoch in range(CONFIG["num_epochs"]):
        model.train()
        total_loss = 0
        for inputs, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        right = evaluate(accelerator, model, eval_dataloader)[1]
        accelerator.log({"right": right, "train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch}, step=epoch)
    accelerator.end_training()
    return {"logged": tracker.kept if accelerator.is_main_process else None}


def profiler(folder):
    profile_kwargs = ProfileKwargs(record_shapes=True, output_trace_dir=folder)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[profile_kwargs])
    model, optimizer, train_dataloader, _, lr_scheduler = accelerator.prepare(*get_objects(accelerator, 4))
    with accelerator.profile() as prof:
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
    table = prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=-1)
    return {"traces": sorted(os.listdir(folder))[:1], "profiled": "aten::addmm" in table}


def cross_validation(folder):
    accelerator = Accelerator(cpu=True)
    dataset, test_predictions, losses = make_dataset(48, 2), [], []
    test_dataloader = DataLoader(make_dataset(12, 3), batch_size=4)
    for fold in range(3):
        model, optimizer, _, _, lr_scheduler = get_objects(accelerator, 4)
        train = [index for index in range(48) if index % 3 != fold]
        valid = [index for index in range(48) if index % 3 == fold]
        train_dataloader = DataLoader(Subset(dataset, train), batch_size=4)
        eval_dataloader = DataLoader(Subset(dataset, valid), batch_size=4)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
        model.train()
        for step, (inputs, labels) in enumerate(train_dataloader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if step % 1 == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
        losses.append(evaluate(accelerator, model, eval_dataloader)[1])
        fold_predictions = []
        for inputs, _labels in test_dataloader:
            with torch.no_grad():
                outputs = model(inputs)
            fold_predictions.append(accelerator.gather_for_metrics(outputs).cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        model, optimizer = accelerator.free_memory(model, optimizer)
    predicted = torch.stack(test_predictions, dim=0).sum(dim=0).argmax(dim=-1)
    accelerator.end_training()
    return {"losses": losses, "predicted": predicted.tolist()}


def ddp_comm_hook(folder):
    ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType("bf16"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp_kwargs])
    model, optimizer, train_dataloader, eval_dataloader, _ = accelerator.prepare(*get_objects(accelerator, 4))
    losses = []
    for inputs, labels in train_dataloader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean_of(accelerator, loss))
    return {"losses": losses, "metrics": evaluate(accelerator, model, eval_dataloader)}


def schedule_free(folder):
    if importlib.util.find_spec("schedulefree") is None:
        return None
    import schedulefree

    accelerator = Accelerator(cpu=True)
    model, _, train_dataloader, eval_dataloader, _ = get_objects(accelerator, 4)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=CONFIG["lr"], warmup_steps=5)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    losses = []
    for _epoch in range(CONFIG["num_epochs"]):
        model.train()
        optimizer.train()
        for inputs, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_of(accelerator, loss))
        model.eval()
        optimizer.eval()
        losses.append(evaluate(accelerator, model, eval_dataloader)[1])
    return {"losses": losses}


def autoregressive(folder, samples=54, inside=False):
    """Batches are read ahead to count their tokens, and trained on outside of `accumulate` or `inside`."""
    steps = 2
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    set_seed(CONFIG["seed"])
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (samples, 5), generator=generator)
    labels[torch.rand(samples, 5, generator=generator) < 0.4] = -100
    model = nn.Linear(6, 15).double()
    train_dataloader = DataLoader(TensorDataset(torch.randn(samples, 6, generator=generator).double(), labels), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    remainder = len(train_dataloader) % steps or steps
    total_gradient_updates = math.ceil(len(train_dataloader) / steps)
    norms = []
    for _epoch in range(2):
        model.train()
        training_iterator = iter(train_dataloader)
        for update_step in range(total_gradient_updates):
            batch_samples = []
            num_batches_in_step = steps if update_step != total_gradient_updates - 1 else remainder
            for _ in range(num_batches_in_step):
                batch_samples += [next(training_iterator)]
            local_num_items_in_batch = sum(labels.ne(-100).sum() for _, labels in batch_samples)
            num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()
            for i, (inputs, targets) in enumerate(batch_samples):
                more = i < len(batch_samples) - 1
                whole_step = model.no_sync() if more and accelerator.num_processes > 1 else contextlib.nullcontext()
                with accelerator.accumulate(model) if inside else whole_step:
                    if inside:
                        accelerator.gradient_state._set_sync_gradients(not more)
                    logits = model(inputs).view(-1, 3)
                    loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / num_items_in_batch
                    accelerator.backward(loss * steps * accelerator.num_processes)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": norms}


def autoregressive_accumulate(folder):
    return autoregressive(folder, inside=True)


EXAMPLES = [
    gradient_accumulation,
    automatic_gradient_accumulation,
    checkpointing,
    early_stopping,
    multi_process_metrics,
    tracking,
    profiler,
    cross_validation,
    ddp_comm_hook,
    schedule_free,
    autoregressive,
    autoregressive_accumulate,
]

if __name__ == "__main__":
    results = {}
    for example in EXAMPLES:
        accelerator = Accelerator(cpu=True)
        with tempfile.TemporaryDirectory() as folder:
            shared = [os.path.join(os.environ.get("EXAMPLES_FOLDER", folder), example.__name__)]
            os.makedirs(shared[0], exist_ok=True)
            results[example.__name__] = example(shared[0])
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps(results))
    sys.stdout.flush()
