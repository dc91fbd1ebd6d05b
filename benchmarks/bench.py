"""Run the benchmarks one after the other, and write one document with their tables, the machine, versions and date.

    python benchmarks/bench.py [--only overhead input] [--skip faults] [--python PEERS/bin/python] [--out bench.md] [--quick]

Each program runs in a process of its own. One that fails, exceeds its time or misses a limit does not stop the others. What the
machine lacks is skipped and named: a CUDA device, DeepSpeed, torch_xla. The document is written after each program, and next to
it a JSON file with all figures. `--quick` only tries the programs, with as little work as possible.

Returns 1 if a program failed or missed a limit, and names them; limits do not count with `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = ("lightning", "accelerate", "pytorch-ignite", "transformers")


@dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        name: for `--only` and the document.
        title: the heading in the document.
        script: file in this folder.
        arguments: of a full run.
        quick: arguments of a run that only tries it.
        needs: what it is skipped without: "cuda" or a package.
        peers: it measures other frameworks and has `--python`.
        folder: it has `--folder`, for files on the disk that is measured.
    """

    name: str
    title: str
    script: str
    arguments: str = ""
    quick: str = ""
    needs: str | None = None
    peers: bool = False
    folder: bool = False


PAIRS = "--repeats 1 --chunks 2"
SAVES = "--only stall --device cuda"
PROGRAMS = [
    Program("overhead", "A step", "overhead.py", quick=f"--only trainer predict ignite lightning {PAIRS}", peers=True),
    Program("input", "Reading batches", "input.py", quick=f"--only custom trainer_0 {PAIRS}"),
    Program("ddp", "A step on two processes (DDP)", "ddp.py", quick=f"--only mlp trainer {PAIRS}"),
    Program("fsdp", "A step under FSDP, and memory", "fsdp.py", quick=f"--only gpt5 trainer {PAIRS}"),
    Program("zero", "A step under ZeRO, and memory", "zero.py", quick=f"--only mlp zero2 {PAIRS}", needs="deepspeed"),
    Program("xla", "A step on XLA devices", "xla.py", quick=f"--only gpt trainer_one {PAIRS}", needs="torch_xla"),
    Program("compile", "A compiled step", "compile.py", "--repeats 3", quick="--depth 1 --steps 8 --repeats 1"),
    Program("device", "A step on a CUDA device", "device.py", quick=f"--only wide trainer {PAIRS}", needs="cuda"),
    Program("checkpoint", "A checkpoint", "checkpoint.py", quick="--only save stall --layers 1 --repeats 2", folder=True),
    Program("saves", "Saves from CUDA", "checkpoint.py", SAVES, f"{SAVES} --layers 1 --repeats 2", needs="cuda", folder=True),
    Program("scale", "Many ranks", "scale.py", quick="--ranks 2"),
    Program("soak", "What a long run keeps", "soak.py", quick="--only trainer --steps 100"),
    Program("order", "The first index of an epoch", "order.py", quick="--lengths 1000 --baseline 1000"),
    Program("import_time", "Import", "import_time.py", quick="--repeats 1"),
    Program("plan", "What a run holds", "plan.py", quick="--only single --precisions 32-true"),
    Program("transformers", "The Trainer's job", "transformers_jobs.py", quick="--only gpt2", needs="transformers"),
    Program("metrics", "The memory of compute_metrics", "metrics_memory.py", quick="--rows 40 80", needs="transformers"),
    Program("faults", "After a fault", "faults.py", quick="--contender trainkit --part flip --kills 1", peers=True),
]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [program.name for program in PROGRAMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="NAME", help="skip some of them")
    parser.add_argument("--quick", action="store_true", help="only try the programs: the figures mean nothing")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the other frameworks (default: this one)")
    parser.add_argument("--xla-python", default=sys.executable, help="interpreter with torch_xla (default: this one)")
    parser.add_argument(
        "--folder", default=".", help="a folder on the disk that checkpoints are written to (default: this one)"
    )
    parser.add_argument("--minutes", type=float, default=180.0, help="limit for each program (default: 180)")
    parser.add_argument("--out", type=Path, default=Path("bench.md"), help="the document (default: bench.md); JSON next to it")
    parsed = parser.parse_args(arguments)
    for name in ("python", "xla_python"):  # programs start it in folders of their own
        given = getattr(parsed, name)
        found = shutil.which(given)
        if found is None:
            parser.error(f"--{name.replace('_', '-')}: {given} is not a program. Name a Python interpreter: PEERS/bin/python")
        setattr(parsed, name, os.path.abspath(found))
    return parsed


# ------------------------------------------------------------------------------------------------ the machine


def output(*command: str) -> str:
    """What a command prints; empty if it fails or does not exist."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def of_file(path: str, key: str) -> str:
    """The first value of `key` in a file of /proc; empty without one."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = of_file("/proc/meminfo", "MemTotal").removesuffix(" kB")
    gpus = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    return {
        "processor": of_file("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": str(cores),
        "memory": f"{int(memory) / 1e6:.1f} GB" if memory else "unknown",
        "GPU": "; ".join(gpus) or "none",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }


def versions(python: str) -> dict[str, str]:
    """Versions here, and those of the other frameworks in the environment of `python`."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print(json.dumps({name: have.get(name, 'not installed') for name in sys.argv[1:]}))"
    )
    found = {"python": platform.python_version()}
    found |= {name: report.version(name) or "not installed" for name in ("torch", "trainkit-torch", "deepspeed", "torchao")}
    peers = json.loads(output(python, "-c", program, "torch", *PEERS) or "{}")
    return found | {(f"{name} of the other frameworks" if name == "torch" else name): one for name, one in peers.items()}


def commit() -> str:
    known = output("git", "rev-parse", "HEAD")
    return known + (" with changes" if known and output("git", "status", "--porcelain", "--untracked-files=no") else "")


def lacking(program: Program, arguments: argparse.Namespace) -> str | None:
    """What the machine lacks for a program."""
    if program.needs == "cuda":
        found = output(sys.executable, "-c", "import torch; print(torch.cuda.is_available())")
        return None if found == "True" else "a CUDA device"
    if program.needs == "torch_xla":
        program_text = "import importlib.util as u; print(u.find_spec('torch_xla') is not None)"
        return None if output(arguments.xla_python, "-c", program_text) == "True" else "torch_xla (make test-xla installs it)"
    if program.needs is not None and importlib.util.find_spec(program.needs) is None:
        return program.needs
    return None


# ------------------------------------------------------------------------------------------------ the programs


def command_of(program: Program, arguments: argparse.Namespace) -> list[str]:
    python = arguments.xla_python if program.needs == "torch_xla" else sys.executable
    command = [python, str(HERE / program.script), *shlex.split(program.quick if arguments.quick else program.arguments)]
    command += ["--python", arguments.python] if program.peers else []
    return command + (["--folder", arguments.folder] if program.folder else [])


def shown(program: Program, arguments: argparse.Namespace) -> str:
    """The command of a program as it is written in the document, without the paths of this machine."""
    words = ["python", f"benchmarks/{program.script}", program.quick if arguments.quick else program.arguments]
    words += ["--python PEERS/bin/python"] * program.peers + ["--folder DISK"] * program.folder
    return " ".join(word for word in words if word)


def run(program: Program, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a program; returns its figures and how it ended."""
    missing = lacking(program, arguments)
    if missing is not None:
        return {"name": program.name, "title": program.title, "result": "skipped", "reason": f"needs {missing}"}
    command, began = command_of(program, arguments), time.monotonic()
    result: dict[str, Any] = {"name": program.name, "title": program.title, "command": shown(program, arguments)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if program.needs != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # these are measurements of the CPU, on every machine
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        code = wait([*command, "--json", str(figures)], environment, arguments.minutes * 60)
        document = json.loads(figures.read_text("utf-8")) if figures.exists() else None
    result["seconds"] = time.monotonic() - began
    if code is None:
        result |= {"result": "out of time", "reason": f"took more than {arguments.minutes:g} minutes"}
    elif document is None:
        result |= {"result": "failed", "reason": f"ended with code {code}, without figures"}
    else:
        missed = list(report.missed(document))
        result |= {"result": "missed" if missed else "held", "missed": missed, **document}
    return result


def wait(command: list[str], environment: dict[str, str], seconds: float) -> int | None:
    """Run a command with all its processes in a group; returns its code, None if it was ended after `seconds`."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also after Ctrl-C, which does not reach another session
        if process.returncode is None:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: first with SIGTERM, upon which faults.py ends what it has started."""
    for number, grace in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            return


# ------------------------------------------------------------------------------------------------ the document


def markdown(document: dict[str, Any]) -> str:
    facts = {"date": document["date"], "commit": document["commit"], **document["machine"], **document["versions"]}
    lines = ["# Benchmarks of trainkit", "", f"`{document['command']}`", ""]
    if document["quick"]:
        lines += ["A quick run, which only tries the programs: **these figures mean nothing**.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    lines += ["A ratio is the median of the pairs, with the range in parentheses.", ""]
    lines += ["| program | result | minutes |", "|---|---|---|"]
    for each in document["programs"]:
        result = described(each).replace("|", "\\|")
        lines.append(f"| {each['title']} | {result} | {each.get('seconds', 0.0) / 60:.1f} |")
    for each in document["programs"]:
        if "tables" in each:
            load = "" if each["facts"]["load"] is None else f" Load at the start: {each['facts']['load']:.1f}."
            lines += ["", f"## {each['title']}", "", f"`{each['command']}`.{load}", "", report.markdown(each)]
    return "\n".join(lines) + "\n"


def described(result: dict[str, Any]) -> str:
    """How a program ended, in a few words."""
    if result["result"] == "missed":
        return f"missed: {'; '.join(result['missed'])}"
    if result["result"] == "held":
        limited = any(row["held"] for table in result["tables"] for row in table["rows"])
        return "all limits held" if limited else "measured, no limits"
    return f"{result['result']}: {result['reason']}"


def main() -> int:
    """Run, write, and return 1 if something failed or missed a limit."""
    arguments = parse_arguments()
    chosen = [program for program in PROGRAMS if program.name in arguments.only and program.name not in arguments.skip]
    few = f"--only {' '.join(program.name for program in chosen)}" if len(chosen) < len(PROGRAMS) else ""
    document: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "command": " ".join(filter(None, ["python benchmarks/bench.py", few, "--quick" if arguments.quick else ""])),
        "quick": arguments.quick,
        "machine": machine(),
        "versions": versions(arguments.python),
        "programs": [],
    }
    for program in chosen:
        print(f"\n=== {program.name}", flush=True)
        document["programs"].append(run(program, arguments))
        print(f"=== {program.name}: {described(document['programs'][-1])}", flush=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        arguments.out.write_text(markdown(document), "utf-8")
    counted = ("failed", "out of time", *([] if arguments.quick else ["missed"]))
    bad = [each for each in document["programs"] if each["result"] in counted]
    for each in bad:
        print(f"{each['name']}: {described(each)}", file=sys.stderr)
    print(f"written to {arguments.out} and {arguments.out.with_suffix('.json')}")
    return int(bool(bad))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no process behind
    sys.exit(main())
