"""A program with objects of the installed Lightning in both its Trainer and trainkit's; it prints what happened as JSON."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.errors import TrainkitError
from trainkit.fabric import Fabric
from trainkit.registry import adapt

HOOKS = [name for name, member in vars(theirs.Callback).items() if name[0] != "_" and callable(member)]
STATE = ("state_dict", "load_state_dict")
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 1,
    "max_epochs": 2,
    "num_sanity_val_steps": 1,
}


def recording(calls: list[Any]) -> Any:
    """A callback that defines all hooks of Lightning."""

    def record(name: str) -> Any:
        base = getattr(theirs.Callback, name)

        def hook(self: Any, *arguments: Any, **named: Any) -> Any:
            if name not in STATE:
                calls.append([name, {key: str(getattr(value, "value", value)) for key, value in named.items()}])
            return base(self, *arguments, **named)

        return hook

    return type("Recording", (theirs.Callback,), {name: record(name) for name in HOOKS})()


class Tracker(Logger):
    """A logger of another vendor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "experiments"

    @property
    def version(self) -> int:
        return 3

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        return self.calls

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.append(sorted(metrics))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.append(dict(params))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.experiment.append(status)


def module_of(base: Any) -> Any:
    """A module for one of the two Trainers."""

    class Regression(base):  # type: ignore[misc]
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)
            torch.nn.init.constant_(self.layer.weight, 0.5)
            torch.nn.init.constant_(self.layer.bias, 0.25)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch[0]).pow(2).mean())

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Regression()


def losses_of(folder: Path) -> dict[str, list[str]]:
    """The columns with losses of the only metrics.csv in a folder."""
    (path,) = folder.rglob("metrics.csv")
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    return {name: [row[name] for row in rows if row.get(name)] for name in ("loss", "val_loss", "test_loss") if name in rows[0]}


def run(trainer: Any, module: Any) -> None:
    """Every verb once."""
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4)), batch_size=4)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader)
    trainer.predict(module, loader)


def message(make: Any) -> str:
    """The error of a call."""
    try:
        make()
    except TrainkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rows_of(folder: str) -> list[dict[str, str]]:
    """The rows of the only metrics.csv in a folder."""
    (path,) = Path(folder).rglob("metrics.csv")
    return list(csv.DictReader(path.open(encoding="utf-8")))


def in_an_own_loop(tracker: Any) -> Any:
    """What loggers of Lightning's Trainer and of its Fabric get from an Accelerator."""
    accelerator = trainkit.Accelerator(cpu=True, log_with=[tracker, CSVLogger("loop"), FabricCSVLogger("loop_fabric")])
    accelerator.init_trackers("mine", {"lr": 0.1})
    for step in range(2):
        accelerator.log({"loss": torch.tensor(0.5), "text": "a"}, step=step)
    shown = type(accelerator.get_tracker("CSVLogger", unwrap=True)).__name__
    accelerator.end_training()
    return tracker.calls, shown, rows_of("loop"), rows_of("loop_fabric")


def in_fabric(tracker: Any) -> Any:
    """The same from a Fabric."""
    fabric = Fabric(accelerator="cpu", loggers=[tracker, FabricCSVLogger("fabric")])
    fabric.launch()
    for step in range(2):
        fabric.log_dict({"loss": torch.tensor(0.5)}, step)
    fabric.loggers[1].finalize("success")
    return tracker.calls, isinstance(fabric.loggers[1], FabricCSVLogger), rows_of("fabric")


def main() -> None:
    """Print the findings."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, (package, base) in {
        "theirs": (pl.Trainer, pl.LightningModule),
        "ours": (trainkit.Trainer, trainkit.LightningModule),
    }.items():
        calls: list[Any] = []
        tracker = Tracker()
        loggers = [CSVLogger(name), tracker, TensorBoardLogger(name, name="board")]
        run(package(callbacks=[recording(calls)], logger=loggers, **OPTIONS), module_of(base))
        found[name] = {
            "calls": calls,
            "losses": losses_of(Path(name)),
            "tracked": tracker.calls,
            "events": len(list(Path(name).rglob("events.out.tfevents.*"))),
        }
    kinds = [getattr(theirs, name) for name in theirs.__all__ if name not in ("Callback", "Checkpoint")]
    found["refused"] = {kind.__name__: message(lambda kind=kind: adapt(kind.__new__(kind))) for kind in kinds}
    trainer = trainkit.Trainer(logger=False, **OPTIONS)
    found["module"] = message(lambda: trainer.fit(module_of(pl.LightningModule)))
    found["data"] = message(lambda: trainer.fit(module_of(trainkit.LightningModule), datamodule=pl.LightningDataModule()))
    found["own loop"] = [in_an_own_loop(Tracker()), in_fabric(Tracker())]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
