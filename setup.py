"""What the package is: name, dependencies, and where its folders lie."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# The folders at the top that import as part of trainkit. trainkit/callbacks and trainkit/strategies are links to them
# for an uninstalled checkout; nothing here depends on the links, which a zip file or Windows may not keep.
MAPPED = {"trainkit.callbacks": "callbacks", "trainkit.strategies": "strategies"}

TENSORBOARD = ["tensorboard"]
WANDB = ["wandb", "pillow"]  # wandb.Image needs pillow and wandb does not bring it
DEEPSPEED = ["deepspeed>=0.19; platform_system == 'Linux'"]
PLOT = ["matplotlib"]
REPORT = ["bokeh>=3.8"]  # charts that read the variables of a style sheet, for dark mode
MLFLOW = ["mlflow-skinny", "sqlalchemy", "alembic", "pillow"]  # what a run in a database needs; `mlflow ui` needs all of mlflow
COMET = ["comet_ml", "pillow"]
CLI = ["jsonargparse[signatures]>=4.53"]  # TrainkitCLI
FP8 = ["torchao>=0.18"]  # precision="fp8-mixed"
TRANSFORMERS = ["accelerate>=1.1", "transformers>=5.2"]
RICH = ["rich>=13"]  # RichProgressBar, RichModelSummary

# A placeholder until the project has a public home. To change it, search the tree for OWNER: a test holds that mkdocs.yml,
# CITATION.cff, SECURITY.md and the issue forms name the same one.
REPOSITORY = "https://github.com/OWNER/trainkit"


def version() -> str:
    """The version, read and not imported: building must not need torch."""
    match = re.search(r'^__version__ = "(.+)"$', (HERE / "trainkit" / "_version.py").read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise RuntimeError('expected a line `__version__ = "x.y.z"` in trainkit/_version.py, found none')
    return match[1]


def long_description() -> str:
    """The README, where there is one."""
    readme = HERE / "README.md"
    return readme.read_text("utf-8") if readme.exists() else ""


def packages() -> list[str]:
    """Every package under the name it imports as, each once whether or not the links are there."""
    names = set(find_packages(str(HERE), include=["trainkit", "trainkit.*"]))
    for package, folder in MAPPED.items():
        names.add(package)
        names.update(f"{package}.{name}" for name in find_packages(str(HERE / folder)))
    return sorted(names)


setup(
    name="trainkit-torch",
    version=version(),
    description="Trains PyTorch models: subclass TrainModule and call Trainer.fit(), or keep your own loop",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    project_urls={
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    },
    keywords=[
        *("pytorch", "training", "trainer", "training loop", "deep learning", "machine learning"),
        *("checkpoint", "resume", "reproducibility", "distributed training", "ddp", "fsdp", "deepspeed", "zero"),
        *("tensor parallelism", "activation checkpointing", "tpu", "xla"),
        *("mixed precision", "gradient accumulation", "fault tolerance", "safetensors", "callbacks"),
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",  # macOS and Windows are untested
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=packages(),
    package_dir=MAPPED,
    package_data={"trainkit": ["py.typed"], "trainkit.names": ["*.json"]},
    include_package_data=False,
    zip_safe=False,
    install_requires=["torch>=2.9", "numpy", "tqdm", "safetensors", "PyYAML", "cloudpickle", "fsspec", "xxhash"],
    extras_require={
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "comet": COMET,
        "deepspeed": DEEPSPEED,
        # torch_xla loads with the torch of its own version only, so this one is not part of `all`.
        "xla": ["torch==2.9.*", "torch_xla==2.9.*"],
        "plot": PLOT,
        "report": REPORT,
        "cli": CLI,
        "fp8": FP8,
        "rich": RICH,
        "transformers": TRANSFORMERS,
        "all": [*TENSORBOARD, *WANDB, *MLFLOW, *COMET, *DEEPSPEED, *PLOT, *REPORT, *CLI, *FP8, *RICH, *TRANSFORMERS],
        "docs": ["mkdocs-htmlproofer-plugin", "mkdocs-material", "mkdocstrings[python]"],
        "dev": [
            "build",
            "check-wheel-contents",
            "datasets",
            "hypothesis",
            "ipykernel",
            "import-linter",
            "ipywidgets",
            "moto[server]",
            "mypy",
            "nbclient",
            "omegaconf",
            "optuna",
            "optuna-integration",
            "peft",
            "pytest>=9",
            "pytest-xdist",
            "ruff",
            "s3fs",
            "scikit-learn",
            "scipy",
            "setuptools>=77",
            "torch_geometric",
            "torchdata",
            "torchmetrics",
            "transformers",
            "twine",
            "types-PyYAML",
            "types-tqdm",
            "webdataset",
        ],
    },
    entry_points={"console_scripts": ["trainkit = trainkit.cli.main:main"]},
)
