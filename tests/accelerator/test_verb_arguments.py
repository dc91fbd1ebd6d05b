"""Optional arguments of the methods of `Accelerator`: a value other than the default has an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Accelerator, AutocastKwargs, ProfileKwargs, Strategy
from trainkit.errors import ConfigurationError, StateMismatchError


def own_loop(**arguments: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(**{"strategy": Strategy("cpu"), **arguments})
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_what_backward_passes_on_to_torch() -> None:
    accelerator, model, _ = own_loop()
    loss = (model(torch.ones(1, 2)) ** 2).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        accelerator.backward(loss)


@pytest.mark.parametrize("options, norm", [({}, 5.0), ({"norm_type": 1.0}, 7.0), ({"norm_type": float("inf")}, 4.0)])
def test_the_norm_that_is_clipped(options: dict[str, float], norm: float) -> None:
    """`clip_grad_norm_(norm_type=...)` for the gradient (3, 4)."""
    accelerator, model, _ = own_loop()
    accelerator.backward((model.weight**2).sum() / 2)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0, **options).item() == pytest.approx(norm)
    assert model.weight.grad.abs().sum().item() == pytest.approx(7.0 / norm)


def test_where_the_batches_of_one_loader_are_put() -> None:
    """Batches are moved to the device, which fails for meta tensors; `device_placement=False` does not move them."""
    accelerator, _, _ = own_loop()
    (batch,) = accelerator.prepare_data_loader([torch.ones(2, device="meta")], device_placement=False)
    assert batch.device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta tensor"):
        list(accelerator.prepare_data_loader([torch.ones(2, device="meta")]))


def test_where_one_model_is_put() -> None:
    accelerator = Accelerator(strategy=Strategy("cpu"))
    with pytest.raises(ConfigurationError, match=r"device_placement=False, but the model has parameters on meta"):
        accelerator.prepare_model(nn.Linear(2, 1, device="meta"), device_placement=False)


def test_an_autocast_of_its_own() -> None:
    """`autocast(autocast_handler=...)` overrides the precision of the accelerator."""
    accelerator, model, _ = own_loop(mixed_precision="bf16")
    weight = accelerator.unwrap_model(model).weight
    with accelerator.autocast():
        assert nn.functional.linear(torch.ones(1, 2), weight).dtype == torch.bfloat16
    with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
        assert nn.functional.linear(torch.ones(1, 2), weight).dtype == torch.float32


def test_a_profile_of_its_own(run_dir: Path) -> None:
    """`profile(profile_handler=...)` uses these settings."""
    accelerator, _, _ = own_loop()
    with accelerator.profile(profile_handler=ProfileKwargs(record_shapes=True, output_trace_dir="traces")) as profile:
        torch.ones(3).sum()
    assert profile.record_shapes
    assert [path.name for path in (run_dir / "traces").iterdir()] == ["profile_0.json"]
    first = (run_dir / "traces" / "profile_0.json").read_text("utf-8")
    for folder in ("traces", "traces", "others"):
        with accelerator.profile(ProfileKwargs(output_trace_dir=folder)):
            torch.ones(3).prod()
    names = ["profile_0-v1.json", "profile_0-v2.json", "profile_0.json"]
    assert sorted(path.name for path in (run_dir / "traces").iterdir()) == names
    assert [path.name for path in (run_dir / "others").iterdir()] == ["profile_0.json"]
    assert (run_dir / "traces" / "profile_0.json").read_text("utf-8") == first


def test_a_state_that_does_not_fit() -> None:
    """`load_state(strict=False)` loads the parameters that match; by default it raises and loads nothing."""
    accelerator, _, _ = own_loop()
    accelerator.save_state("there")
    accelerator.free_memory()
    wider = nn.ModuleDict({"more": nn.Linear(1, 1)})
    wider.register_parameter("weight", nn.Parameter(torch.zeros(1, 2)))
    accelerator = Accelerator(strategy=Strategy("cpu"))
    prepared = accelerator.prepare(wider)
    with pytest.raises(StateMismatchError, match="more"):
        accelerator.load_state("there", restore={"model"})
    assert prepared.weight.tolist() == [[0.0, 0.0]]
    accelerator.load_state(input_dir="there", restore={"model"}, strict=False)
    assert prepared.weight.tolist() == [[3.0, 4.0]]


def test_objects_that_are_freed_are_returned_as_none() -> None:
    accelerator, model, optimizer = own_loop()
    assert accelerator.clear(model, optimizer) == (None, None)
    assert accelerator.free_memory(model) is None
    assert accelerator.free_memory() == ()


def test_models_that_were_not_prepared_are_named() -> None:
    accelerator, model, _ = own_loop()
    accelerator.accumulate(model)
    with pytest.raises(ConfigurationError, match="accumulate"):
        accelerator.accumulate(nn.Linear(1, 1))


def test_batches_that_are_skipped() -> None:
    accelerator, _, _ = own_loop()
    loader = accelerator.prepare(DataLoader(torch.arange(6), batch_size=2))
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, num_batches=2)] == [[4, 5]]
    assert len(list(accelerator.skip_first_batches(loader))) == 3
