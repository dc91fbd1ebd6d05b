"""`XLAStrategy(mode="replicas")`: one process per chip on a TPU, one thread per device on the CPU."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds.worlds import WorldError
from helpers.xla.xla_runs import run_xla
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainkit import Accelerator, Callback, Trainer, TrainModule, set_seed
from trainkit.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.xla


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn when they are fetched. Each contains its index."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 8, generator=generator)
        self.y = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.rand(8), self.y[index], index


class Classifier(TrainModule):
    def __init__(self, norm: bool = False, weigh: bool = False, silent: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        between = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8, 16), between, nn.Tanh(), nn.Linear(16, 3))
        self.silent = silent
        self.told: list[Any] = []
        if weigh:
            self.batch_weight = lambda batch: float(batch[2].float().mean())  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.told.append((ids.detach(), loss.detach()))
        return None if self.silent and self.global_rank == 1 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 9))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def found(self) -> dict[str, Any]:
        """The results, on the CPU."""
        return {
            "ids": [ids.tolist() for ids, _ in self.told],
            "losses": [float(loss) for _, loss in self.told],
            "state": {name: value.cpu().double().tolist() for name, value in self.state_dict().items()},
        }


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            raise ValueError("the second replica has had enough")


def fit(strategy: Any, module: Classifier, *, samples: int = 44, root: str | None = None, **options: Any) -> dict[str, Any]:
    path = options.pop("ckpt_path", None)
    trainer = Trainer(
        strategy=strategy,
        seed=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=root,
        enable_checkpointing=root is not None,
        **{"max_epochs": 2, "devices": 2, **options},
    )
    loader, held = DataLoader(Noisy(samples), batch_size=4, shuffle=True), DataLoader(Noisy(20), batch_size=4)
    trainer.fit(module, loader, held, ckpt_path=path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**module.found(), "metrics": metrics, "step": trainer.global_step, "world": trainer.world_size}


def _in_replica(index: int, folder: str, module: dict[str, Any], options: dict[str, Any]) -> None:
    from trainkit.strategies import XLAStrategy

    if options.pop("fail", False):
        options["callbacks"] = [Fails()]
    found = fit(XLAStrategy(mode="replicas"), Classifier(**module), **options)
    Path(folder, f"{index}.json").write_text(json.dumps(found))


def in_replicas(folder: str, module: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a fit in two replicas; returns the results of each."""
    from trainkit.strategies import XLAStrategy

    XLAStrategy.launch(_in_replica, (folder, module, options), devices=2, start_method="fork")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def replicas(tmp_path: Path) -> Any:
    """A function that runs a fit in two replicas."""
    return lambda module=None, **options: run_xla(in_replicas, str(tmp_path), module or {}, options, devices=2)


def alone(module: Classifier, **options: Any) -> dict[str, Any]:
    """The same training on one CPU, which accumulates the micro-batches that the replicas process in parallel."""
    options["accumulate_grad_batches"] = 2 * options.pop("accumulate_grad_batches", 1)
    return fit("single", module, accelerator="cpu", devices=1, **options)


def merge_replicas(found: list[dict[str, Any]], name: str) -> list[Any]:
    """The records of both replicas, merged in the order of the epoch's micro-batches."""
    parts = [list(one[name]) for one in found]
    rows = max(map(len, parts))
    per_epoch = rows // 2
    order = [part[epoch * len(part) // 2 :][:per_epoch] for epoch in range(2) for part in parts]
    merged: list[Any] = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        for row in range(per_epoch):
            merged.append(first[row])
            if row < len(parts[1]) // 2:
                merged.append(second[row])
    return merged


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"samples": 46}, {"samples": 42, "gradient_clip_val": 0.05}],
    ids=["a rank without its last", "accumulated, clipped", "a short last", "both short"],
)
@pytest.mark.parametrize("weigh", [False, True], ids=["by samples", "by weight"])
def test_two_replicas_equal_one_process(replicas: Any, options: dict[str, Any], weigh: bool) -> None:
    found, expected = replicas({"weigh": weigh}, **options), alone(Classifier(weigh=weigh), **options)
    assert [one["world"] for one in found] == [2, 2]
    assert merge_replicas(found, "ids") == expected["ids"]
    assert merge_replicas(found, "losses") == pytest.approx(expected["losses"], rel=2e-6)
    assert found[0]["state"] == found[1]["state"], "bit for bit"
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(found[0]["state"][name]), torch.tensor(value), rtol=5e-6, atol=1e-6)
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["step"] == expected["step"]
    assert found[0]["metrics"]["loss_epoch"] == pytest.approx(expected["metrics"]["loss_epoch"], rel=2e-6)
    assert found[0]["metrics"]["val_loss"] == pytest.approx(expected["metrics"]["val_loss"], rel=2e-6)


def test_buffers_come_from_the_main_replica(replicas: Any) -> None:
    first, second = replicas({"norm": True})
    assert first["state"] == second["state"]
    assert first["state"]["net.1.num_batches_tracked"] == 12  # two epochs of six micro-batches on this replica


def test_resumes_from_a_checkpoint_bit_for_bit(replicas: Any, tmp_path: Path) -> None:
    whole = replicas(root=str(tmp_path / "whole"))
    part = replicas(root=str(tmp_path / "part"), max_epochs=1)
    [saved] = (tmp_path / "part").rglob("step-*")
    assert open_checkpoint(saved).manifest.world_size == 2
    rest = replicas(root=str(tmp_path / "part"), ckpt_path="last")
    for one, before, after in zip(whole, part, rest, strict=True):
        assert before["losses"] + after["losses"] == one["losses"]
        assert before["ids"] + after["ids"] == one["ids"]
        assert after["state"] == one["state"]
    other = alone(Classifier(), ckpt_path=str(saved))
    assert other["losses"] == pytest.approx(merge_replicas(whole, "losses")[len(other["losses"]) :], rel=2e-6)


def test_no_loss_on_one_of_them_is_refused(replicas: Any) -> None:
    with pytest.raises(WorldError, match="with mode='replicas' all replicas must run the same graph"):
        replicas({"silent": True})


def test_one_failure_ends_all_replicas(replicas: Any) -> None:
    with pytest.raises(WorldError, match="the second replica has had enough"):
        replicas(fail=True)


# ----------------------------------------------------------------------------------------------- your own training loop


def _own_loop(index: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    set_seed(3)
    module = Classifier()
    accelerator = Accelerator(
        strategy=XLAStrategy(mode="replicas"),
        gradient_accumulation_steps=2,
        even_batches=False,
        step_scheduler_with_optimizer=False,
    )
    made = module.configure_optimizers()
    loader = DataLoader(Noisy(44), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(
        module.net, made["optimizer"], loader, made["lr_scheduler"]["scheduler"]
    )
    losses = []
    for _ in range(2):
        for x, y, _ids in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    gathered = accelerator.strategy.all_gather({"rank": torch.full((2,), float(index), device=accelerator.device)})
    found = {
        "losses": [float(loss) for loss in losses],
        "state": {f"net.{name}": value.cpu().double().tolist() for name, value in module.net.state_dict().items()},
        "gathered": gathered["rank"].cpu().tolist(),
        "main": accelerator.is_main_process,
    }
    Path(folder, f"own-{index}.json").write_text(json.dumps(found))


def own_loops(folder: str) -> list[dict[str, Any]]:
    from trainkit.strategies import XLAStrategy

    XLAStrategy.launch(_own_loop, (folder,), devices=2, start_method="fork")
    return [json.loads(Path(folder, f"own-{rank}.json").read_text()) for rank in range(2)]


def test_a_training_loop_equals_the_trainer_bit_for_bit(replicas: Any, tmp_path: Path) -> None:
    ours = replicas(accumulate_grad_batches=2, gradient_clip_val=0.1)
    own = run_xla(own_loops, str(tmp_path), devices=2)
    assert [one["main"] for one in own] == [True, False]
    for mine, theirs in zip(own, ours, strict=True):
        assert mine["state"] == theirs["state"]
        assert mine["gathered"] == [[0.0, 0.0], [1.0, 1.0]]
        assert set(theirs["losses"]) <= set(mine["losses"])  # plus those of padding micro-batches


# ------------------------------------------------------------------------------------------------------ how they start


def _plain(index: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    # Created once: without a Trainer, the threads would draw random numbers at the same time.
    found = fit(XLAStrategy(mode="replicas"), copy.deepcopy(_made[0]))
    Path(folder, f"{index}.json").write_text(json.dumps(found))


_made: list[Classifier] = []


def plainly_launched(folder: str) -> list[dict[str, Any]]:
    import torch_xla

    _made.append(Classifier())
    torch_xla.launch(_plain, args=(folder,), start_method="fork")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.skipif("__import__('os').environ.get('PJRT_DEVICE', 'CPU') != 'CPU'", reason="threads are the CPU's")
def test_torch_xla_launch_with_the_environment_variable(replicas: Any, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"export PJRT_CPU_ASYNC_CLIENT=0\. XLAStrategy\.launch\(main\) sets it"):
        run_xla(plainly_launched, str(tmp_path), devices=2)
    found = run_xla(plainly_launched, str(tmp_path), devices=2, env={"PJRT_CPU_ASYNC_CLIENT": "0"})
    assert found == replicas()


def of_another_number(devices: int) -> str:
    from trainkit.errors import ConfigurationError
    from trainkit.strategies import XLAStrategy

    with pytest.raises(ConfigurationError) as caught:
        fit(XLAStrategy(mode="replicas"), Classifier(), devices=devices)
    return str(caught.value)


def test_replicas_that_were_not_started() -> None:
    said = run_xla(of_another_number, 2, devices=1, env={"CPU_NUM_DEVICES": "1"})
    assert said.startswith("devices=2 and mode='replicas', but XLA's runtime has one replica. Start the replicas: ")


# ----------------------------------------------------------------------------------------------- verbs for users' values


class Verbs(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        value = torch.tensor([1.0, float(rank)], device=strategy.device)
        reduced = [strategy.reduce(value, reduce_op=name).cpu().tolist() for name in ("mean", "max")]
        sent = strategy.broadcast({"from": rank, "value": value} if rank == 1 else None, src=1)
        strategy.barrier("told")
        self.found = [reduced, sent["from"], sent["value"].tolist()]


def _use_verbs(index: int, folder: str) -> None:
    from trainkit.strategies import XLAStrategy

    told = Verbs()
    fit(XLAStrategy(mode="replicas"), Classifier(), samples=8, max_epochs=1, callbacks=[told])
    Path(folder, f"{index}.json").write_text(json.dumps(told.found))


def use_verbs(folder: str) -> list[Any]:
    from trainkit.strategies import XLAStrategy

    XLAStrategy.launch(_use_verbs, (folder,), devices=2, start_method="fork")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def test_broadcast_reduce_and_barrier(tmp_path: Path) -> None:
    assert run_xla(use_verbs, str(tmp_path), devices=2) == [[[[1.0, 0.5], [1.0, 1.0]], 1, [1.0, 1.0]]] * 2
