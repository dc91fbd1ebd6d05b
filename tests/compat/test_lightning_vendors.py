"""Names that other packages import from private modules of Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.compat.lightning_vendors import _AcceleratorConnector
from trainkit.errors import ConfigurationError


@pytest.mark.parametrize(
    "arguments, accelerator, devices, distributed",
    [
        ({}, "cpu", 1, False),
        ({"accelerator": "cpu", "devices": 2}, "cpu", 2, True),
        ({"accelerator": "cpu", "devices": -1}, "cpu", 1, False),
        ({"accelerator": "gpu", "devices": [1]}, "cuda", [1], False),
        ({"accelerator": "cuda", "devices": 2}, "cuda", [0, 1], True),
        ({"accelerator": "mps"}, "mps", [0], False),
        ({"accelerator": "tpu"}, "tpu", 1, False),
    ],
)
def test_which_devices_the_arguments_of_a_trainer_mean(
    arguments: dict[str, Any], accelerator: str, devices: Any, distributed: bool
) -> None:
    if not arguments and torch.cuda.is_available():
        pytest.skip("on a CPU")
    connector = _AcceleratorConnector(**arguments, strategy="auto")
    assert (connector._accelerator_flag, connector._devices_flag) == (accelerator, devices)
    assert connector.is_distributed == distributed
    with pytest.raises(ConfigurationError, match="devices must be"):
        _AcceleratorConnector(devices="many")
