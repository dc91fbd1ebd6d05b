"""Lightning's plugin for the file of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Precision
from trainkit.errors import NotAvailableError, UnsupportedArgumentError
from trainkit.fabric.plugins.io.torch_io import TorchCheckpointIO


class Restricted(TorchCheckpointIO):
    """Reads in another way, as the plugin of darts does."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return super().load_checkpoint(path, map_location, True)


def test_it_is_accepted_where_it_changes_no_file(caplog: pytest.LogCaptureFixture) -> None:
    from trainkit.plugins import TorchCheckpointIO as Same

    assert Same is TorchCheckpointIO
    for plugins in (TorchCheckpointIO(), [TorchCheckpointIO()]):
        make_trainer(plugins=plugins).fit(TinyModule(), tiny_loader(4))
    assert "load_checkpoint" not in caplog.text
    with caplog.at_level("INFO", "trainkit"):
        make_trainer(plugins=[Restricted()])
    assert caplog.text.count("Restricted.load_checkpoint is not called: trainkit reads checkpoints itself") == 1


@pytest.mark.parametrize("name", ["save_checkpoint", "remove_checkpoint"])
def test_one_that_writes_is_refused(name: str) -> None:
    writes = type("Writes", (Restricted,), {name: lambda *_: None})
    with pytest.raises(UnsupportedArgumentError, match=rf"Writes\.{name} would never be called.*on_save_checkpoint"):
        make_trainer(plugins=[writes()])


@pytest.mark.parametrize(
    "plugins", [Precision("bf16-mixed"), [TorchCheckpointIO(), Precision("bf16-mixed")], TorchCheckpointIO]
)
def test_other_plugins_are_refused_as_before(plugins: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=r"Trainer\(plugins=...\): pass precision="):
        make_trainer(plugins=plugins)


def test_its_methods_say_what_to_use() -> None:
    plugin = Restricted()
    plugin.teardown()
    with pytest.raises(NotAvailableError, match=r"Use trainer\.save_checkpoint\(path\)"):
        plugin.save_checkpoint({}, "there")
    with pytest.raises(NotAvailableError, match=r"open_checkpoint\(path\).*torch\.load\(path, weights_only=True\)"):
        plugin.load_checkpoint("there")
    with pytest.raises(NotAvailableError, match="ModelCheckpoint"):
        plugin.remove_checkpoint("there")
