"""Corner cases: models moved back from XLA, steps without a loss, Adam's later steps, unusual ways to start."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import WorldError
from helpers.xla.xla_runs import run_xla
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Callback, Trainer, TrainModule
from trainkit.errors import OptimizerError

pytestmark = pytest.mark.xla


class Tied(TrainModule):
    def __init__(self, rates: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.rates, self.silent = rates, False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.silent else self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, betas=self.rates)


class Compilations(Callback):
    def __init__(self) -> None:
        self.counts: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts.append(trainer.strategy.compilations)


def data(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))), batch_size=2)


def quiet(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(strategy=strategy, callbacks=[*callbacks], **{"max_epochs": 1, **silent, **options})


# ------------------------------------------------------------------------------------------------------ to XLA and back


def fit_on_xla_cpu_xla() -> list[Any]:
    module, optimizers = Tied(), []
    for strategy in ("xla", "single", "xla"):
        trainer = quiet(strategy, accelerator="cpu" if strategy == "single" else "auto", devices=1)
        trainer.fit(module, data())
        optimizers.append(trainer.optimizers[0].param_groups[0]["params"][0] is module.first.weight)
    same = module.second.weight is module.first.weight
    return [same, len(list(module.parameters())), optimizers, str(module.first.weight.device.type)]


def test_tied_parameters_stay_tied_after_the_run() -> None:
    assert run_xla(fit_on_xla_cpu_xla) == [True, 1, [True, True, True], "xla"]


# --------------------------------------------------------------------------------------------------------- what compiles


def compiled(rates: tuple[float, float]) -> list[int]:
    counted = Compilations()
    quiet("xla", counted, max_epochs=16).fit(Tied(rates), data())
    return counted.counts


def test_the_corrections_of_adams_first_steps_may_become_1() -> None:
    """With these betas they reach 1 early, with others after thousands of steps. As numbers they would become constants."""
    counts = run_xla(compiled, (0.4, 0.5))
    assert len(counts) == 64
    assert 1 - 0.5**60 == 1.0
    assert counts[-1] == counts[1], counts


# -------------------------------------------------------------------------------------------------------- padded batches


def steps_without_a_loss() -> int:
    from trainkit.strategies import XLAStrategy

    module = Tied()
    module.silent = True
    trainer = quiet(XLAStrategy(pad_last_batch=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no optimizer step was made")
        trainer.fit(module, data(7))
    return trainer.global_step


def an_evaluation() -> list[int]:
    from trainkit.strategies import XLAStrategy

    accelerator = Accelerator(strategy=XLAStrategy(pad_last_batch=True))
    module = nn.Linear(4, 4)
    model, optimizer, loader, held = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), data(7), data(7))
    sizes = []
    for (x,) in loader:
        losses = model(x).square().mean(1)
        accelerator.backward((losses * loader.sample_mask).sum() / loader.sample_mask.sum())
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
    with torch.no_grad():
        for (x,) in held:
            sizes.append(len(model(x)))
    return sizes


def test_the_sample_mask_in_training_only() -> None:
    assert run_xla(steps_without_a_loss) == 0
    assert run_xla(an_evaluation) == [2, 2, 2, 2, 2, 2, 2, 1], "only what is trained on is filled up"


# ------------------------------------------------------------------------------------------------------------ odd starts


def _own_loop(index: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    Accelerator(strategy=XLAStrategy(mode="replicas"))
    Path(folder, f"{index}").touch()


def plainly_launched(folder: str) -> None:
    import torch_xla

    torch_xla.launch(_own_loop, args=(folder,), start_method="fork")


def launched_for(devices: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    XLAStrategy.launch(_own_loop, (folder,), devices=devices, start_method="fork")


@pytest.mark.skipif("__import__('os').environ.get('PJRT_DEVICE', 'CPU') != 'CPU'", reason="threads are the CPU's")
def test_replicas_that_could_hang_or_differ_from_the_request(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"your own training loop ends\. Start it with XLAStrategy\.launch\(main\)"):
        run_xla(plainly_launched, str(tmp_path), devices=2, env={"PJRT_CPU_ASYNC_CLIENT": "0"})
    with pytest.raises(WorldError, match=r"launch\(devices=3\): XLA's runtime has 2 devices on this host"):
        run_xla(launched_for, 3, str(tmp_path), devices=2)
    assert not list(tmp_path.iterdir())
    run_xla(launched_for, 2, str(tmp_path), devices=2)
    assert len(list(tmp_path.iterdir())) == 2


def several_fits(index: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    for _ in range(3):
        module = Tied()
        quiet(XLAStrategy(mode="replicas")).fit(module, data())
    Path(folder, f"{index}").write_text(str(float(module.first.weight.sum())))


def launched_several(folder: str) -> list[str]:
    import torch_xla

    torch_xla.launch(several_fits, args=(folder,), start_method="fork")
    return [path.read_text() for path in sorted(Path(folder).iterdir())]


@pytest.mark.skipif("__import__('os').environ.get('PJRT_DEVICE', 'CPU') != 'CPU'", reason="threads are the CPU's")
def test_replicas_fit_several_times(tmp_path: Path) -> None:
    first, second = run_xla(launched_several, str(tmp_path), devices=2, env={"PJRT_CPU_ASYNC_CLIENT": "0"})
    assert first == second


def one_of_several(options: dict[str, Any]) -> str:
    from trainkit.errors import ConfigurationError
    from trainkit.strategies import XLAStrategy

    with pytest.raises(ConfigurationError) as caught:
        quiet(XLAStrategy(**options), devices=1)
    quiet("xla", devices=1).fit(Tied(), data())  # the error did not enable SPMD
    return str(caught.value)


@pytest.mark.parametrize("options", [{"fsdp": True}, {"mesh": {"data": 1}}])
def test_one_device_of_several_is_not_sharded(options: dict[str, Any]) -> None:
    said = run_xla(one_of_several, options, devices=2)
    assert said.startswith("devices=1 does not work with mesh or fsdp, which use all devices of the runtime. Use devices=2.")


def synced() -> float:
    from trainkit.strategies import XLAStrategy

    module = Tied()
    module.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    quiet(XLAStrategy(), sync_batchnorm=True, devices=2).fit(module, data())
    return float(F.l1_loss(module.first[1].running_mean, torch.zeros(4, device=module.device)))


def test_batch_norm_uses_all_devices() -> None:
    assert run_xla(synced, devices=2) > 0.0


# ------------------------------------------------------------------------------- optimizer_step and backward of the module


class Stepping(Tied):
    backwards = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        super().backward(loss, *args, **kwargs)


class SteppingTwice(Tied):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer_closure()


def fit_with_its_own_step() -> Any:
    found = []
    for kind in (Tied, Stepping):
        torch.manual_seed(0)
        module = kind()
        quiet("xla", accumulate_grad_batches=2).fit(module, data())
        found.append(module.first.weight.tolist())
    assert isinstance(module, Stepping)
    try:
        quiet("xla").fit(SteppingTwice(), data())
    except OptimizerError as error:
        return found[0] == found[1], module.backwards, str(error)


def test_overrides_that_call_super_change_nothing() -> None:
    equal, backwards, message = run_xla(fit_with_its_own_step)
    assert (equal, backwards) == (True, 4)
    assert "called optimizer_closure twice, which does not work with XLAStrategy" in message
