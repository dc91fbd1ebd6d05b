"""`Trust`: which names of a checkpoint are followed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.module.trusted import Trust

FILES = {
    "mypackage/__init__.py": "import os\nfrom json import loads\nfrom .layers import Layer\nclass layers2: pass",
    "mypackage/layers.py": """
import functools, os, torch
class Layer(torch.nn.Module):
    class Inner: pass
    other = os
    def forward(self): pass
def make(): pass
system = os.system
partial = functools.partial(os.system, "true")
instance = Layer()
class Borrowed(Layer): pass
Borrowed.__module__ = "os"
faked = type("system", (), {"__module__": "mypackage.layers"})
""",
    "mypackage/broken.py": "import a_package_that_is_missing",
    "mypackage_evil.py": "open('ran', 'w')\ndef run(): pass",
}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in the directory of the test."""
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(".")
    yield
    for name in [name for name in sys.modules if name.startswith("mypackage")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["layers.Layer", "Layer", "layers.Layer.Inner", "layers.make", "layers2"])
def test_classes_and_functions_of_the_package(name: str) -> None:
    path = f"mypackage.{name}"
    found = Trust(["mypackage."]).find(path)
    assert found.__qualname__.rpartition(".")[2] == path.rpartition(".")[2]
    assert Trust().find(path) is None
    assert Trust(["mypackage.other.", "torch."]).find(path) is None


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "path",
    [
        *("mypackage.os.system", "mypackage.layers.os.system", "mypackage.layers.torch.load", "mypackage.layers.os"),
        *("mypackage.layers", "mypackage", "mypackage.layers.Layer.other.system", "mypackage.layers.Layer.Inner.missing"),
        *("mypackage.loads", "mypackage.layers.system", "mypackage.layers.partial", "mypackage.layers.instance"),
        *("mypackage.layers.Borrowed", "mypackage.layers.faked", "mypackage.layers.instance.forward"),
        *(
            "mypackage.layers.Layer.load_state_dict",
            "mypackage.layers.Layer.__init__.__globals__",
            "mypackage.layers.Layer.__class__",
        ),
        *(
            "mypackage_evil.run",
            "os.system",
            "mypackage.",
            "mypackage..layers",
            "",
            ".",
            "mypackage.layers.Layer()",
            "mypackage.a b",
        ),
        *("mypackage.missing.Layer", "mypackage.layers.Layer.__subclasses__", 5, None, ["mypackage.layers.Layer"]),
    ],
)
def test_what_is_not_found(path: Any) -> None:
    """Another package, what a package has imported, objects, and what is defined elsewhere."""
    assert Trust(["mypackage."]).find(path) is None
    assert "mypackage_evil" not in sys.modules
    assert not Path("ran").exists()


@pytest.mark.usefixtures("package")
def test_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(CheckpointError, match=r"names mypackage.broken.Net, which trust= covers.*a_package_that_is_missing"):
        Trust(["mypackage."]).find("mypackage.broken.Net")


@pytest.mark.parametrize("prefixes", ["mypackage.", ["mypackage"], [""], ["."], ["..."], ["my-package."], [5], [None]])
def test_what_is_no_package(prefixes: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected prefixes of import paths, each with a dot.*trust=\['mypackage.'\]"):
        Trust(prefixes)
