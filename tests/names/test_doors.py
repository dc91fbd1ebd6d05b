"""The doors: `lightning` and `accelerate` are trainkit's names after one import, or one flag, here and in child processes.

Each test starts a fresh Python: a door stays open until its process ends.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.support import run_python

import trainkit

HERE = """
import trainkit.compat.lightning, trainkit.compat.accelerate
import importlib, importlib.metadata as metadata, importlib.util, sys
import trainkit, trainkit.callbacks
before = list(sys.meta_path)
importlib.reload(trainkit.compat.lightning)
assert sys.meta_path == before

import lightning as L
import lightning_utilities.core.rank_zero
assert lightning_utilities.core.rank_zero.rank_zero_only.rank == 0
import lightning.pytorch as pl, pytorch_lightning, accelerate
from lightning.pytorch.callbacks import Callback
from lightning.fabric.utilities.rank_zero import rank_zero_only
from pytorch_lightning.utilities import rank_zero_only as same
assert L.LightningModule is pl.LightningModule is pytorch_lightning.LightningModule is trainkit.LightningModule
assert pl.callbacks is trainkit.callbacks is importlib.import_module("pytorch_lightning.callbacks")
assert Callback is trainkit.Callback and rank_zero_only is same
for name in ("lightning", "pytorch-lightning", "pytorch_lightning"):
    assert metadata.version(name) == L.__version__ == pl.__version__ == pytorch_lightning.__version__ == "2.6.6"
assert metadata.version("accelerate") == accelerate.__version__ == "1.15.0"
assert "accelerate" in metadata.packages_distributions()["accelerate"]
assert importlib.util.find_spec("lightning.pytorch.callbacks") and importlib.util.find_spec("accelerate.hooks")
assert importlib.util.find_spec("lightning.app") is None and importlib.util.find_spec("accelerate.nothing") is None

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import operations, set_seed
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import get_balanced_memory
assert Accelerator is trainkit.Accelerator and set_seed is trainkit.set_seed and operations.gather is trainkit.utils.gather
assert accelerate.utils is importlib.import_module("accelerate.utils")
assert AlignDevicesHook is accelerate.AlignDevicesHook and not isinstance(1, AlignDevicesHook)

from argparse import Namespace
from lightning.fabric.loggers.logger import Logger as FabricLogger, rank_zero_experiment
from lightning.fabric.utilities.logger import _add_prefix, _convert_params, _sanitize_callable_params
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
assert issubclass(Logger, FabricLogger) and FabricLogger is trainkit.loggers.Logger and Logger is not FabricLogger
assert isinstance(pl.loggers.CSVLogger("logs"), Logger) and issubclass(pl.loggers.CSVLogger, Logger)

def star(module):
    names = {}
    exec(f"from {module} import *", names)
    return {*names} - {"__builtins__"}

exported = {"Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"}
assert star("lightning.pytorch") == star("pytorch_lightning") == exported
assert star("lightning") == exported | {"Fabric", "__version__"}
assert star("lightning.fabric") == {"Fabric", "seed_everything"}

class VendorsForFabric(FabricLogger):
    def log_metrics(self, metrics, step=None):
        return "fabric"

class Vendors(Logger, VendorsForFabric):
    _log_model = True
    experiment = property(rank_zero_experiment(lambda self: "experiment"))

assert Vendors().log_metrics({}) == "fabric" and Vendors().experiment == "experiment"
assert not isinstance(pl.loggers.CSVLogger("logs"), Vendors)
assert _add_prefix({"a": 1}, "p", "/") == {"p/a": 1} and _add_prefix({"a": 1}, "", "/") == {"a": 1}
assert _convert_params(Namespace(a=1)) == {"a": 1} and _convert_params(None) == {}
params = {"a": 1, "class": Vendors, "two": lambda: 2, "needs": lambda x: x, "makes": lambda: print}
assert _sanitize_callable_params(params) == {"a": 1, "class": "Vendors", "two": 2, "needs": "<lambda>", "makes": "<lambda>"}

import pathlib, tempfile, types
with tempfile.TemporaryDirectory() as folder:
    file = str(pathlib.Path(folder, "a.ckpt"))
    pathlib.Path(file).touch()
    saved = types.SimpleNamespace(last_model_path=file, current_score=2, best_model_path="", best_model_score=None)
    saved.best_k_models = {file: 1}
    assert [found[1:] for found in _scan_checkpoints(saved, {})] == [(file, 1, "best_k")]
    assert _scan_checkpoints(saved, {file: 1e12}) == []

class Ours(LightningEnvironment):
    world_size = global_rank = local_rank = node_rank = lambda self: 0

Ours()

from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.accelerators.cuda import num_cuda_devices
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.plugins import BitsandbytesPrecision
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.fabric.utilities import ThroughputMonitor
from lightning.fabric.utilities.init import _materialize_meta_tensors
from lightning.fabric.utilities.load import _NotYetLoadedTensor, _lazy_load
from lightning.fabric.utilities.throughput import ThroughputMonitor as SameMonitor, measure_flops
from lightning.pytorch.core.saving import _load_from_checkpoint
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
assert FSDPStrategy is trainkit.strategies.FSDPStrategy and not isinstance(1, ModelParallelStrategy | _NotYetLoadedTensor)
assert num_cuda_devices() == CUDAAccelerator.auto_device_count() and _lazy_load is trainkit.utils.load
assert _AcceleratorConnector._choose_auto_accelerator() in ("cpu", "cuda", "mps", "tpu")
assert SameMonitor is ThroughputMonitor and ThroughputMonitor is not trainkit.callbacks.ThroughputMonitor
assert FabricCSVLogger(root_dir="logs").name == "lightning_logs"

class Loads(pl.LightningModule):
    @classmethod
    def load_from_checkpoint(cls, checkpoint_path, map_location=None, hparams_file=None, strict=False, **kwargs):
        return _load_from_checkpoint(cls, checkpoint_path, map_location, hparams_file, strict, **kwargs)

try:
    Loads.load_from_checkpoint("nothing.ckpt", weights_only=False)
except trainkit.errors.CheckpointNotFoundError:
    loads = True
assert loads

names = {"L": L, "accelerate": accelerate, "hook": AlignDevicesHook, "balance": get_balanced_memory}
names |= {"Bits": BitsandbytesPrecision, "GPUs": CUDAAccelerator}

def message(text):
    try:
        exec(text, {"vendors": Vendors, "Environment": LightningEnvironment, "DeepSpeed": DeepSpeedStrategy, **names})
    except Exception as error:
        return f"{type(error).__name__}: {error}"

texts = sys.stdin.read().splitlines()
import json
print(json.dumps([message(text) for text in texts]))
"""

NOT_FOUND = (
    "ModuleNotFoundError: No module named {0!r}: trainkit takes the place of {1} in this process and has no such module."
)
INSTEAD = " (trainkit takes the place of lightning in this process: see docs/moving-over/lightning.md)"

WRONG = {
    "import lightning.app": "ModuleNotFoundError: No module named 'lightning.app': trainkit takes the place of lightning",
    "import accelerate.nothing": "ModuleNotFoundError: No module named 'accelerate.nothing': trainkit takes the place of",
    "import lightning.pytorch.calbacks": (
        f"{NOT_FOUND.format('lightning.pytorch.calbacks', 'lightning')} Did you mean 'callbacks'?"
    ),
    "import lightning.pytroch": f"{NOT_FOUND.format('lightning.pytroch', 'lightning')} Did you mean 'pytorch'?",
    "import pytorch_lightning.callbacks.early_stoping": (
        f"{NOT_FOUND.format('pytorch_lightning.callbacks.early_stoping', 'lightning')} Did you mean 'early_stopping'?"
    ),
    "import lightning.fabric.utilities.sed": (
        f"{NOT_FOUND.format('lightning.fabric.utilities.sed', 'lightning')} Did you mean 'seed'?"
    ),
    "import accelerate.utils.deepsped": (
        f"{NOT_FOUND.format('accelerate.utils.deepsped', 'accelerate')} Did you mean 'deepspeed'?"
    ),
    "from pytorch_lightning.metrics import Accuracy": (
        f"ImportError: pytorch_lightning.metrics has no Accuracy. Use: from torchmetrics import Accuracy{INSTEAD}"
    ),
    "L.Trainer(logger=False).fit(1)": "ModuleError: expected a TrainModule (LightningModule), received int.",
    "from lightning import LightningModul": "ImportError: cannot import name 'LightningModul' from 'lightning'. Did you mean",
    "L.LightningModul": "AttributeError: module 'lightning' has no attribute 'LightningModul'. Did you mean",
    "from lightning import nothing": f"ImportError: cannot import name 'nothing' from 'lightning'.{INSTEAD}",
    "from lightning import GradClipAlgorithmType": "ImportError: lightning has no GradClipAlgorithmType. Use: ",
    "from pytorch_lightning import Trainr": "ImportError: cannot import name 'Trainr' from 'pytorch_lightning'. Did you mean",
    "L.pytorch.nothing": f"AttributeError: module 'lightning.pytorch' has no attribute 'nothing'.{INSTEAD}",
    "from lightning.pytorch.loggers import CSVLoggr": "ImportError: cannot import name 'CSVLoggr' from",
    "L.pytorch.loggers.nothing": f"AttributeError: module 'lightning.pytorch.loggers' has no attribute 'nothing'.{INSTEAD}",
    "from lightning.pytorch.utilities.types import nothing": (
        f"ImportError: cannot import name 'nothing' from 'lightning.pytorch.utilities.types'.{INSTEAD}"
    ),
    "from lightning.fabric.utilities import nothing": (
        f"ImportError: cannot import name 'nothing' from 'lightning.fabric.utilities'.{INSTEAD}"
    ),
    "from lightning.pytorch.plugins import DoublePrecision": (
        "ImportError: lightning.pytorch.plugins has no DoublePrecision. Use: "
    ),
    "from accelerate.utils import RNGType": "ImportError: accelerate.utils has no RNGType. Use: ",
    "from accelerate.utils import nothing": "ImportError: cannot import name 'nothing' from 'accelerate.utils'. (trainkit ",
    "from accelerate import _nothing": "ImportError: cannot import name '_nothing' from 'accelerate'. (trainkit ",
    "accelerate.Acelerator": "AttributeError: module 'accelerate' has no attribute 'Acelerator'. Did you mean 'Accelerator'?",
    "import trainkit; trainkit.nothing": "AttributeError: module 'trainkit' has no attribute 'nothing'.",
    "hook()": "ConfigurationError: accelerate.hooks.AlignDevicesHook cannot be called: ",
    "DeepSpeed(stage=2)": "ConfigurationError: lightning.pytorch.strategies.DeepSpeedStrategy cannot be called: trainkit ",
    "Bits()": "ConfigurationError: lightning.fabric.plugins.BitsandbytesPrecision cannot be called: trainkit ",
    "GPUs()": "ConfigurationError: CUDAAccelerator cannot be created. Use: the argument: Trainer(accelerator='cpu'), ",
    "Environment()": "ConfigurationError: LightningEnvironment defines no world_size() and global_rank(), so it decides ",
    "vendors().set_rank(0)": "ConfigurationError: Vendors(log_model=...) is not supported: this logger stores files, and a ",
    "balance({})": "ConfigurationError: accelerate.utils.get_balanced_memory cannot be called: ",
}

CHILD = """
import multiprocessing
import lightning
from lightning.pytorch.callbacks import Callback

class Mine(Callback):
    pass

def work(queue, mine):
    queue.put((type(mine).__mro__[1].__module__, lightning.__version__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue, Mine()))
    process.start()
    print(*queue.get(timeout=120), flush=True)
    process.join()
"""


def test_behind_both_doors() -> None:
    done = subprocess.run([sys.executable, "-c", HERE], input="\n".join(WRONG), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text, found, expected in zip(WRONG, json.loads(done.stdout), WRONG.values(), strict=True):
        assert str(found).startswith(expected), text


LORA = """
import trainkit.compat.accelerate
import torch, peft, transformers
import transformers.modeling_utils
from accelerate import Accelerator
from accelerate.utils.versions import is_torch_version

assert is_torch_version(">=", "2.9") and not is_torch_version("<", "2.9.0") and is_torch_version("<", "99")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
loader = torch.utils.data.DataLoader([torch.arange(16) % 7 for _ in range(64)], batch_size=8)
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(losses[0], losses[-1])
"""


def test_a_lora_model_trains_with_libraries_that_import_accelerate() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    done = run_python(LORA)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.splitlines()[-1].split())
    assert last < first - 0.1


def test_the_real_package_is_imported_already(tmp_path: Path) -> None:
    (tmp_path / "lightning.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lightning, trainkit.compat.lightning"
    done = run_python(program, bare=True)
    assert done.returncode == 1
    assert "ConfigurationError: the real lightning is imported already" in done.stderr
    assert "trainkit launch --as lightning script.py" in done.stderr


def test_the_flag_and_spawned_processes(tmp_path: Path) -> None:
    """Two ranks, whose script does not name trainkit; each spawns a process, which unpickles a class of the script."""
    (tmp_path / "script.py").write_text(CHILD)
    (tmp_path / "sitecustomize.py").write_text("print('hidden', flush=True)")
    command = [sys.executable, "-m", "trainkit", "launch", "--as", "lightning", "--cpu", "--nproc-per-node", "2"]
    folders = [str(Path(__file__).parents[2]), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([*command, str(tmp_path / "script.py")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trainkit.callback 2.6.6") == 2
    assert done.stdout.count("hidden") >= 4  # the sitecustomize of the user still runs, in ranks and in their children


def test_several_doors_with_spaces() -> None:
    program = "import trainkit, lightning, accelerate; print(lightning.Trainer is trainkit.Trainer, accelerate.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRAINKIT_AS": " lightning, accelerate,"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True 1.15.0\n", done.stderr


def test_no_other_module_opens_a_door() -> None:
    """Each module is imported in a process of its own, forked from one that has imported torch and nothing of trainkit."""
    program = """
import os, sys, traceback
import torch, torch.distributed, torch.utils.data

def check(module):
    try:
        __import__(module)
    except ImportError:  # an optional package
        pass
    names = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    if module.startswith("trainkit.integrations.transformers"):  # transformers imports accelerate itself
        names = [name for name in names if name.partition(".")[0] != "accelerate"]
    doors = [finder for finder in sys.meta_path if type(finder).__name__ == "Door"]
    missing = [finder for finder in finders if finder not in sys.meta_path]
    assert not (names or doors or missing), (module, names, doors, missing)

PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
finders = list(sys.meta_path)
assert not any(name.partition(".")[0] in PACKAGES | {"trainkit"} for name in sys.modules)
for module in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            check(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, module
"""
    doors = ("trainkit.compat.lightning", "trainkit.compat.accelerate")
    modules = [found.name for found in pkgutil.walk_packages(trainkit.__path__, "trainkit.")]
    modules = [name for name in modules if name not in doors and not name.endswith(("__main__", "sitecustomize"))]
    assert len(modules) > 200
    done = run_python("-c", program, "trainkit", *modules, bare=True, timeout=400)
    assert done.returncode == 0, done.stderr
