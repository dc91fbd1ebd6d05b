"""The wheel and the source distribution are built, installed and imported outside of the checkout, with and without links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections import Counter
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from helpers import house
from helpers.support import run_python
from helpers.try_wheel import try_wheel

import trainkit

LINKS = {"trainkit/callbacks": "../callbacks", "trainkit/strategies": "../strategies"}
GITHUB = house.ROOT / ".github"
NAMES_THE_HOME = {  # file → how it names the project's home
    "mkdocs.yml": "repository: {home}\n",
    "CITATION.cff": "repository-code: {home}\n",
    "SECURITY.md": "<{home}/security/advisories/new>",
    ".github/ISSUE_TEMPLATE/config.yml": "url: {home}/security/advisories/new",
}
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "trainkit_runs", "wandb")
WHERE = """
import json, trainkit, trainkit.callbacks, trainkit.errors, trainkit.loggers, trainkit.strategies
names = [trainkit, trainkit.callbacks, trainkit.errors, trainkit.loggers, trainkit.strategies]
print(json.dumps({"files": [m.__file__ for m in names] + [trainkit.callbacks.Timer.__init__.__code__.co_filename],
                  "version": trainkit.__version__}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without files that builds and runs create."""
    return Path(shutil.copytree(house.ROOT, tmp_path_factory.mktemp("source") / "tree", symlinks=True, ignore=NOT_SOURCE))


def with_links(source: Path, to: Path, links: str) -> Path:
    """Copy the checkout. Its links are "kept", "missing", or text files ("text"), as git creates where there are no links."""
    shutil.copytree(source, to, symlinks=True)
    for link, target in LINKS.items():
        (to / link).unlink(missing_ok=True)
        if links == "kept":
            (to / link).symlink_to(target, target_is_directory=True)
        elif links == "text":
            (to / link).write_text(target)
    return to


def build(tree: Path, out: Path, *what: str) -> list[Path]:
    """Build with the installed packages. Without `what`, build a source distribution and a wheel from it."""
    done = run_python("-m", "build", "--no-isolation", "--outdir", str(out), *what, str(tree), cwd=out.parent, bare=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(out.iterdir())


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def metadata(wheel: Path) -> Message:
    name = next(name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(contents(wheel)[name].decode())


@pytest.fixture(scope="module")
def from_checkout(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built directly from a checkout with its links."""
    folder = tmp_path_factory.mktemp("checkout")
    (wheel,) = build(with_links(source, folder / "tree", "kept"), folder / "out", "--wheel")
    return wheel


@pytest.fixture(scope="module")
def distribution(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution of a checkout with its links, and a wheel that is built from it."""
    folder = tmp_path_factory.mktemp("distribution")
    wheel, archive = build(with_links(source, folder / "tree", "kept"), folder / "out")
    assert archive.name.endswith(".tar.gz")
    return archive, wheel


def test_the_wheel_holds_every_module_once(source: Path, from_checkout: Path) -> None:
    with zipfile.ZipFile(from_checkout) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert {name for name in names if name.endswith(".py")} == {
        f"{package.replace('.', '/')}/{file.relative_to(source / folder).as_posix()}"
        for folder, package in house.PACKAGES.items()
        for file in house.python_files(source / folder)
    }
    data = [
        "trainkit/names/accelerate.json",
        "trainkit/names/hugging_face.json",
        "trainkit/names/lightning.json",
        "trainkit/py.typed",
    ]
    assert sorted(name for name in names if not name.endswith(".py")) == data


@pytest.mark.parametrize("links", ["missing", "text"])
def test_the_links_change_nothing(links: str, source: Path, from_checkout: Path, tmp_path: Path) -> None:
    (wheel,) = build(with_links(source, tmp_path / "tree", links), tmp_path / "out", "--wheel")
    assert contents(wheel) == contents(from_checkout)


def test_the_source_distribution_builds_the_same_wheel(distribution: tuple[Path, Path], from_checkout: Path) -> None:
    assert contents(distribution[1]) == contents(from_checkout)


def test_the_source_distribution_holds_files_and_no_links(source: Path, distribution: tuple[Path, Path]) -> None:
    with tarfile.open(distribution[0]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert all(member.isfile() or member.isdir() for member in members.values())
    modules = [file for folder in house.PACKAGES for file in house.python_files(source / folder)]
    assert {file.relative_to(source).as_posix() for file in modules} <= set(members)
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"} <= set(members)
    assert {"constraints.txt", "constraints-vendors.txt", "constraints-xla.txt", "tests/conftest.py"} <= set(members)
    assert [name for name in members if name.startswith(tuple(LINKS))] == []


def test_it_imports_away_from_the_repository(from_checkout: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    done = run_python("-m", "pip", "install", *options, str(from_checkout), bare=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "trainkit" / "py.typed").exists()
    found = imported_from(run_python(WHERE, cwd=tmp_path, installed_in=target))
    assert all(Path(file).is_relative_to(target) for file in found), found


def test_an_editable_install_works_without_the_links(source: Path, tmp_path: Path) -> None:
    """As with `pip install -e .`: the editable wheel of the build backend, unpacked into a folder of packages."""
    tree, site = with_links(source, tmp_path / "tree", "missing"), tmp_path / "site"
    make = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    done = run_python("-c", make, str(tmp_path), cwd=tree, bare=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    found = imported_from(run_python(f"import site; site.addsitedir({str(site)!r})\n{WHERE}", installed_in=site))
    assert all(Path(file).is_relative_to(tree) for file in found), found
    assert str(tree / "callbacks" / "__init__.py") in found


def imported_from(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Files of the modules that the program WHERE has imported."""
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"] == trainkit.__version__
    return answer["files"]


def test_the_metadata_says_what_it_is(source: Path, from_checkout: Path) -> None:
    data = metadata(from_checkout)
    assert (data["Name"], data["Version"]) == ("trainkit-torch", trainkit.__version__)
    assert (data["Requires-Python"], data["License-Expression"]) == (">=3.10", "Apache-2.0")
    required = [line for line in data.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.9", "numpy", "tqdm", "safetensors", "PyYAML", "cloudpickle", "fsspec", "xxhash"]
    assert data.get_all("Provides-Extra") == [
        "tensorboard",
        "wandb",
        "mlflow",
        "comet",
        "deepspeed",
        "xla",
        "plot",
        "report",
        "cli",
        "fp8",
        "rich",
        "transformers",
        "all",
        "docs",
        "dev",
    ]
    assert data.get_payload().strip() == (source / "README.md").read_text("utf-8").strip()
    files = contents(from_checkout)
    (entry_points,) = [text.decode() for name, text in files.items() if name.endswith("/entry_points.txt")]
    assert "trainkit = trainkit.cli.main:main" in entry_points
    assert any(name.endswith("/licenses/LICENSE") for name in files)


def test_everything_names_the_same_home(source: Path, from_checkout: Path) -> None:
    """All files name the same repository address: that of `REPOSITORY` in setup.py, a placeholder for now."""
    home = re.findall(r'^REPOSITORY = "(https://.+)"$', (source / "setup.py").read_text("utf-8"), re.MULTILINE)[0]
    urls = dict(line.split(", ") for line in metadata(from_checkout).get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url == home or url.startswith(f"{home}/") for url in urls.values()), urls
    files = [path.removeprefix(f"{home}/blob/main/") for path in urls.values() if "/blob/main/" in path]
    assert [file for file in files if not (source / file).is_file()] == []
    for name, line in NAMES_THE_HOME.items():
        if (house.ROOT / name).exists():  # a source distribution has no .github
            assert line.format(home=home) in (house.ROOT / name).read_text("utf-8"), name


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((house.ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["license"]) == (trainkit.__version__, "Apache-2.0")


@pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution does not contain .github")
def test_github_runs_the_same_commands() -> None:
    """ci.yml runs all targets of .ci/run, and workflows use only existing targets of the Makefile."""
    (targets,) = re.findall(r"^.* \|\| set -- (.+)$", (house.ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    assert jobs["make"]["strategy"]["matrix"]["target"] == targets.split()
    assert jobs["make"]["steps"][-1]["run"] == ".ci/run ${{ matrix.target }}"
    known = set(re.findall(r"^([a-z-]+):", (house.ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    workflows = [path.read_text("utf-8") for path in (GITHUB / "workflows").glob("*.yml")]
    named = {name for text in workflows for name in re.findall(r"run: make ([a-z-]+)", text)}
    assert named == {"dist", "docs"}
    assert named | set(targets.split()) <= known


@pytest.mark.slow
def test_what_is_uploaded(distribution: tuple[Path, Path], tmp_path: Path) -> None:
    """As in `make dist`: the package index would accept both files, and the wheel works in a new environment."""
    archive, wheel = map(str, distribution)
    for command in (["twine", "check", "--strict", archive, wheel], ["check_wheel_contents", wheel]):
        done = run_python("-m", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    printed = try_wheel(Path(wheel), tmp_path)
    assert f"trainkit {trainkit.__version__}" in printed
    assert "fit ended at step 6" in printed


def test_the_command_of_the_entry_point_exists() -> None:
    from trainkit.cli.main import main

    assert callable(main)


def test_constraints_fix_versions_and_nothing_else() -> None:
    """constraints.txt has exact versions and no URLs, and all direct dependencies of `make test`."""
    text = (house.ROOT / "constraints.txt").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==[\w.]+(; python_version >= \"3\.\d+\")?", line)] == []
    fixed = {line.partition("==")[0].lower() for line in lines}
    setup = (house.ROOT / "setup.py").read_text("utf-8")
    direct = ["torch", "numpy", "tqdm", "safetensors", "PyYAML", "cloudpickle", "tensorboard", "wandb", "pillow", "matplotlib"]
    direct += ["bokeh", "mlflow-skinny", "sqlalchemy", "alembic", "comet_ml"]
    direct += re.findall(r'"([\w-]+)', setup.partition('"dev": [')[2].partition("]")[0])
    assert {name.lower() for name in direct} - fixed == set()


@pytest.mark.skipif(os.name == "nt", reason="git does not make links on Windows unless it is told to")
@pytest.mark.skipif((house.ROOT / "PKG-INFO").exists(), reason="a source distribution holds no links")
@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_a_checkout_has_the_links(link: str, target: str) -> None:
    assert os.readlink(house.ROOT / link) == target
