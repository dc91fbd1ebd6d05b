"""The code of Accelerate's quick tour and guides, with only the import changed, on one and on two processes."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator
from trainkit.utils import DistributedType, GradScalerKwargs, ProjectConfiguration, load_checkpoint_in_model, set_seed

SIZES = (1, 2)


def classification(samples: int = 66) -> TensorDataset:
    """Random points, and whether the sum of their coordinates is positive."""
    points = torch.randn(samples, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(points, (points.sum(1) > 0).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def weights(model: nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------- training and evaluating


def trained_and_evaluated() -> dict[str, Any]:
    set_seed(42)
    accelerator = Accelerator()
    train_dataloader = DataLoader(classification(), shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(classification(21), batch_size=4)
    model = network()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for _ in range(6):
        model.train()
        for inputs, targets in train_dataloader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()

    model.eval()
    for_metrics, truncated = [], []
    for inputs, targets in eval_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        for_metrics.append(torch.stack([all_predictions, all_targets]))
        truncated.append(torch.stack(accelerator.gather((predictions, targets))))
    found = torch.cat(for_metrics, dim=1)
    by_hand = torch.cat(truncated, dim=1)[:, : len(eval_dataloader.dataset)]
    accelerator.print("accuracy:", float((found[0] == found[1]).float().mean()))
    return {"found": found.tolist(), "by_hand": by_hand.tolist(), "weights": weights(accelerator.unwrap_model(model))}


@pytest.mark.parametrize("size", SIZES)
def test_a_training_and_an_evaluation(size: int) -> None:
    ranks = run_world(size, trained_and_evaluated)
    assert all(rank == ranks[0] for rank in ranks)
    predictions, targets = ranks[0]["found"]
    assert targets == classification(21).tensors[1].tolist()  # each of the 21 samples once, in order
    assert ranks[0]["by_hand"] == ranks[0]["found"]
    assert sum(p == t for p, t in zip(predictions, targets, strict=True)) >= 19


def ragged() -> list[list[int]]:
    """Gathered sequences of different lengths; each batch is padded to its longest sequence, then across processes."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(1, 11), batch_size=2))
    said = []
    for lengths in loader:
        sequence = torch.full((len(lengths), int(lengths.max())), 9)
        sequence[torch.arange(sequence.shape[1])[None] >= lengths[:, None]] = -100
        sequence = accelerator.pad_across_processes(sequence, dim=1, pad_index=-100)
        said += [[token for token in row if token != -100] for row in accelerator.gather_for_metrics(sequence).tolist()]
    return said


@pytest.mark.parametrize("size", (1, 2, 3))
def test_ragged_outputs(size: int) -> None:
    for said in run_world(size, ragged):
        assert [len(row) for row in said] == list(range(1, 11))


# --------------------------------------------------------------------------------------------------- blocks for one process


def blocks(folder: str) -> list[str]:
    accelerator = Accelerator()
    seen = []
    path = Path(folder, "downloaded.txt")
    with accelerator.main_process_first():
        if not path.exists():
            seen.append("downloads")
            path.write_text("data")
        assert path.read_text() == "data"
    if accelerator.is_main_process:
        seen.append("main")
    if accelerator.is_local_main_process:
        seen.append("local main")
    if accelerator.is_last_process:
        seen.append("last")

    @accelerator.on_main_process
    def on_main() -> str:
        return "decorated"

    @accelerator.on_process(process_index=1)
    def on_second() -> str:
        return "second"

    seen += [text for text in (on_main(), on_second()) if text]
    accelerator.wait_for_everyone()
    with accelerator.split_between_processes(["a", "b", "c"]) as mine:
        seen += mine
    if accelerator.process_index == accelerator.num_processes - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    return seen


def test_blocks_for_one_process(tmp_path: Path) -> None:
    first, second = run_world(2, blocks, str(tmp_path))
    assert first == ["downloads", "main", "local main", "decorated", "a", "b"]
    assert second == ["last", "second", "c"]
    (alone,) = run_world(1, blocks, str(tmp_path))
    assert alone == ["main", "local main", "last", "decorated", "second", "a", "b", "c"]


def bars() -> str:
    from tqdm.auto import tqdm

    accelerator, text = Accelerator(), io.StringIO()
    loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    bar = tqdm(range(len(loader)), disable=not accelerator.is_local_main_process, file=text)
    for _ in loader:
        bar.update(1)
    bar.close()
    return text.getvalue()


def test_a_progress_bar_on_the_main_process_only() -> None:
    first, second = run_world(2, bars)
    assert "2/2" in first
    assert second == ""


# ----------------------------------------------------------------------------------------------------------------- saving


def saved_in_shards(folder: str) -> dict[str, Any]:
    accelerator = Accelerator()
    model = accelerator.prepare(network())
    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder, max_shard_size="300B")
    accelerator.wait_for_everyone()  # the main process writes
    fresh = network()
    load_checkpoint_in_model(fresh, folder, device_map={"": "cpu"})
    assert weights(fresh) == weights(accelerator.unwrap_model(model))
    return weights(fresh)


@pytest.mark.parametrize("size", SIZES)
def test_a_model_in_shards(size: int, tmp_path: Path) -> None:
    ranks = run_world(size, saved_in_shards, str(tmp_path))
    assert all(rank == ranks[0] for rank in ranks)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        *(f"model-0000{place}-of-00004.safetensors" for place in range(1, 5)),
        "model.safetensors.index.json",
    ]


def a_transformers_model(folder: str) -> list[float]:
    from transformers import AutoModelForSequenceClassification, BertConfig

    set_seed(3)
    accelerator = Accelerator()
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    model = AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 32, (8, 6))
    loader = DataLoader([{"input_ids": row, "labels": row[0] % 2} for row in tokens], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    opened = AutoModelForSequenceClassification.from_pretrained(folder)
    for name, value in opened.state_dict().items():
        assert torch.equal(value, unwrapped_model.state_dict()[name]), name
    return [float(value) for value in opened.classifier.bias]


@pytest.mark.parametrize("size", SIZES)
def test_save_pretrained_and_from_pretrained(size: int, tmp_path: Path) -> None:
    ranks = run_world(size, a_transformers_model, str(tmp_path))
    assert all(rank == ranks[0] for rank in ranks)
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "model.safetensors").exists()


class Counted:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """The losses of a whole training, and those after resuming in the middle of it."""

    def parts() -> tuple[Any, ...]:
        set_seed(1)
        accelerator, counted = Accelerator(), Counted()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(classification(40), batch_size=4, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        accelerator.register_for_checkpointing(counted)
        return accelerator, counted, *accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch(
        accelerator: Any, counted: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, save: int
    ) -> list[float]:
        losses = []
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counted.count += 1
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if counted.count == save:
                accelerator.save_state(folder)
        return losses

    whole = epoch(*parts(), save=2)
    accelerator, counted, *others = parts()
    accelerator.load_state(folder, resume_loaders=True)
    assert counted.count == 2
    return whole, epoch(accelerator, counted, *others, save=-1)


@pytest.mark.parametrize("size", SIZES)
def test_save_state_and_load_state(size: int, tmp_path: Path) -> None:
    for whole, rest in run_world(size, resumed, str(tmp_path / "state")):
        assert len(rest) == len(whole) - 2 > 0
        assert rest == whole[2:]


def automatically_named(folder: str) -> list[str]:
    accelerator = Accelerator(
        project_dir=folder, project_config=ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    )
    model = accelerator.prepare(network())
    for value in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(value))
        accelerator.save_state()
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state()
    assert {float(p.mean()) for p in model.parameters()} == {3.0}
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("size", SIZES)
def test_automatic_names_and_a_limit(size: int, tmp_path: Path) -> None:
    for names in run_world(size, automatically_named, str(tmp_path)):
        assert names == ["checkpoint_2", "checkpoint_3"]


# --------------------------------------------------------------------------------------- precision, accumulation, clipping


def skipping() -> tuple[list[bool], int, bool]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**8)])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(classification(32), batch_size=4), scheduler
    )
    skipped, moved = [], False
    for place, (inputs, targets) in enumerate(loader):
        before = weights(accelerator.unwrap_model(model))
        with accelerator.autocast():
            loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss * (math.inf if place == 1 and accelerator.is_main_process else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        moved = moved or (skipped[-1] and weights(accelerator.unwrap_model(model)) != before)
    return skipped, scheduler.last_epoch, moved


@pytest.mark.parametrize("size", SIZES)
def test_mixed_precision_with_a_skipped_update(size: int) -> None:
    for skipped, steps, moved in run_world(size, skipping):
        assert skipped == [place == 1 for place in range(8 // size)]
        assert steps == size * (len(skipped) - 1)
        assert not moved


def accumulated() -> tuple[list[bool], list[float]]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(classification(40), batch_size=4))
    synced, norms = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
        synced.append(accelerator.sync_gradients)
    return synced, norms


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_and_clipping(size: int) -> None:
    ranks = run_world(size, accumulated)
    for synced, norms in ranks:
        assert synced == [place % 2 == 1 or place == 10 // size - 1 for place in range(10 // size)]
        assert all(norm <= 0.1 + 1e-6 for norm in norms)
        assert norms == ranks[0][1]


# ------------------------------------------------------------------------------------------ two trainings in one process


def twice() -> list[dict[str, Any]]:
    found, accelerator = [], Accelerator()
    for _ in range(2):
        set_seed(5)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(classification(24), batch_size=4, shuffle=True)
        )
        for inputs, targets in loader:
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(accelerator.unwrap_model(model)))
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        assert model is optimizer is loader is None
    return found


@pytest.mark.parametrize("size", SIZES)
def test_two_trainings_in_one_process(size: int) -> None:
    for first, second in run_world(size, twice):
        assert first == second


# ------------------------------------------------------------------------------------------------- the notebook's example


class Images(nn.Module):
    """A small convolutional network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(8, 3)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures))


def pictures(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    labels = torch.arange(samples) % 3
    noise = torch.randn(samples, 3, 8, 8, generator=generator) * 0.3
    return TensorDataset(noise + F.one_hot(labels, 3)[:, :, None, None] * 1.0, labels)


def training_loop(mixed_precision: str = "no", seed: int = 42, batch_size: int = 8) -> dict[str, Any]:
    set_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    train_dataloader = DataLoader(pictures(48), shuffle=True, batch_size=batch_size, drop_last=True)
    eval_dataloader = DataLoader(pictures(21), batch_size=2 * batch_size)
    model = Images()
    mean, std = torch.tensor([0.4, 0.4, 0.4])[None, :, None, None], torch.tensor([0.5, 0.5, 0.5])[None, :, None, None]
    mean, std = mean.to(accelerator.device), std.to(accelerator.device)
    for parameter in model.features.parameters():
        parameter.requires_grad = True
    optimizer = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=3e-2, epochs=5, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    rates, accuracies = [], []
    for epoch in range(5):
        model.train()
        for inputs, targets in train_dataloader:
            outputs = model((inputs - mean) / std)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                outputs = model((inputs - mean) / std)
            accurate_preds = accelerator.gather_for_metrics(outputs.argmax(dim=-1) == targets)
            num_elems += accurate_preds.shape[0]
            accurate += int(accurate_preds.long().sum())
        assert num_elems == 21
        accuracies.append(accurate / num_elems)
        accelerator.print(f"epoch {epoch}: {100 * accuracies[-1]:.2f}")
    kind = DistributedType.MULTI_CPU if accelerator.num_processes > 1 else DistributedType.NO
    assert accelerator.distributed_type == kind
    return {"rates": rates, "accuracy": accuracies[-1]}


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_the_example_of_the_notebook(mixed_precision: str) -> None:
    """On two processes each optimizer step moves the schedule by two steps, so it ends with the training, as on one process."""
    (alone,) = run_world(1, training_loop, mixed_precision)
    ranks = run_world(2, training_loop, mixed_precision)
    assert [len(alone["rates"]), len(ranks[0]["rates"])] == [30, 15]
    for rank in ranks:
        assert rank["rates"] == alone["rates"][::2]
        assert rank["accuracy"] == ranks[0]["accuracy"] > 0.9
    assert alone["accuracy"] > 0.9
