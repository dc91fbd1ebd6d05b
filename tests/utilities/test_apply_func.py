"""`move_data_to_device`."""

from __future__ import annotations

import torch

from trainkit.utilities import move_data_to_device


def test_tensors_in_containers() -> None:
    batch = {"x": torch.zeros(2), "rest": [(torch.ones(1), "name"), 3]}
    moved = move_data_to_device(batch, "meta")
    assert moved["x"].device.type == moved["rest"][0][0].device.type == "meta"
    assert moved["rest"][0][1:] == ("name",)
    assert moved["rest"][1] == 3
    assert move_data_to_device(batch, torch.device("cpu"))["x"] is batch["x"]
