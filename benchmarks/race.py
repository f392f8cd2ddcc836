"""What meshcast costs, in CPU seconds, and beside Calculon and SimuMax on equal jobs.

``python -m benchmarks.race`` (``make bench``) prints a table; with ``docs/performance.md`` behind it
(``make docs-performance``) it also writes that of the page.

Neither peer is in the package index: its `calculon` is another program, and ``pip download --no-deps simumax`` finds no
version (2026-11-26). So both run from checkouts, with a Python that has their packages, and are left out where there is
none::

    git clone https://github.com/calculon-ai/calculon
    git clone https://github.com/MooreThreads/SimuMax
    python -m venv peer && peer/bin/pip install numpy pandas psutil matplotlib sympy tabulate tqdm
    CALCULON=$PWD/calculon SIMUMAX=$PWD/SimuMax PEER_PYTHON=$PWD/peer/bin/python make bench

Processes run one at a time, those that are compared in turn. A loaded machine lengthens CPU seconds, too: a row has the
least of its rounds, and a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.jobs import GRID, every_plan, execution, job, plans_without_chunks, strategy
from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Column, Table
from meshcast.hardware.documents.output_file import write_file

ROUNDS = 3
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]
EXAMPLE = "examples/gpt3-175b-dgx-a100.yaml"
LARGE = "examples/llama3-405b-dgx-h100.yaml"
PEERS = {"Calculon": os.environ.get("CALCULON", ""), "SimuMax": os.environ.get("SIMUMAX", "")}
"""Checkouts; empty: there is none."""
PYTHON = os.environ.get("PEER_PYTHON", sys.executable)
MEBI = 2**20
TABLE = re.compile(r"(?<=<!-- race -->\n\n).*?(?=\n\n<!-- end of race -->)", re.DOTALL)

COMMANDS = {
    "predict": ("predict", EXAMPLE),
    "predict --json": ("predict", EXAMPLE, "--json"),
    "predict --plot FOLDER": ("predict", EXAMPLE, "--plot", "{out}/figures/"),
    "why": ("why", EXAMPLE),
    "plot tornado": ("plot", "tornado", EXAMPLE, "--out", "{out}/tornado.png"),
    "plot memory": ("plot", "memory", EXAMPLE, "--out", "{out}/memory.png"),
    "plot timeline": ("plot", "timeline", EXAMPLE, "--out", "{out}/timeline.png"),
    "report": ("report", EXAMPLE, "--out", "{out}/report.html"),
    "scale 8..4096": ("scale", "examples/llama3-8b-dgx-h100.yaml", "--gpus", "8..4096"),
    "search, 1,347 plans": ("search", "examples/search-llama3-70b.yaml", "--top", "1"),
    "sweep, 432 plans": ("sweep", "examples/sweep-llama3-70b.yaml", "--out", "{out}/sweep.parquet", "--workers", "1"),
}

FORECASTS = {
    "16,384 GPUs, equal ranks folded": (LARGE,),
    "16,384 GPUs, every rank with jitter": (LARGE, "noise.jitter=0.05"),
    "131,072 GPUs, equal ranks folded": (LARGE, "cluster.gpus=131072", "plan.mesh.dp=1024", "batch.global=16384"),
}


class Spent(NamedTuple):
    """What a process took. seconds: CPU time of what is compared; mebibytes: most memory of the process."""

    seconds: float
    mebibytes: float
    answered: int = 0


class Row(NamedTuple):
    """A row of the table. rates: jobs a second in place of seconds."""

    name: str
    ours: str
    mebibytes: str
    calculon: str = ""
    simumax: str = ""


def run(command: Sequence[str], inside: bool = False, path: str = str(ROOT), cache: str = "") -> Spent:
    """Runs a process. inside: it prints the CPU time of its work as JSON; otherwise that of the whole process counts.

    path: where it finds its modules. cache: folder of bytecode.
    """
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if inside:
        answer = json.loads(output)
        answered = sum(answer["valid"]) if "valid" in answer else int(answer["answered"])
        return Spent(answer["cpu_s"], usage.ru_maxrss / 1024, answered)
    return Spent(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


Runner = Callable[[], Spent]


def compare(name: str, ours: Runner, peers: dict[str, Runner], rounds: int = ROUNDS) -> Row:
    """Runs meshcast and its peers in turn, and returns their row: seconds, or jobs a second where these are counted.

    A single round is for what takes long, of modules that were compiled before.
    """
    if rounds > 1:
        ours()  # compiles modules
    pairs = [(ours(), {peer: theirs() for peer, theirs in peers.items()}) for _ in range(rounds)]
    mine = [spent for spent, _ in pairs]

    def describe(peer: str) -> str:
        if peer not in peers:
            return ""
        theirs = [others[peer] for _, others in pairs]
        ratio = median(_cost(spent) / _cost(other) for spent, other in zip(mine, theirs, strict=True))
        return f"{_least(theirs)}, ratio {ratio:.2f}"

    return Row(name, _least(mine), f"{max(spent.mebibytes for spent in mine):.0f}", *map(describe, PEERS))


def _cost(spent: Spent) -> float:
    return spent.seconds / max(1, spent.answered)


def _least(rounds: Sequence[Spent]) -> str:
    best = min(rounds, key=lambda spent: spent.seconds)
    return f"{best.answered / best.seconds:,.0f} a second" if best.answered > 1 else f"{best.seconds:.2f} s"


def races(folder: Path) -> Iterator[Row]:
    """Yields the rows. folder: for files of the races."""
    cache = str(folder / "bytecode")
    meshcast = sys.executable, "-m", "meshcast"

    def write(name: str, content: Any) -> str:
        (folder / name).write_text(json.dumps(content))
        return str(folder / name)

    def peers(executions: Sequence[Any], strategies: Sequence[Any], name: str) -> dict[str, Runner]:
        """Returns what runs each peer that is there on a grid that it has."""
        grids = {"Calculon": ("calculon_grid.py", executions), "SimuMax": ("simumax_grid.py", strategies)}
        runners = dict[str, Runner]()
        for peer, (script, grid) in grids.items():
            if PEERS[peer] and grid:
                command = PYTHON, str(HERE / script), PEERS[peer], write(f"{name} {peer}.json", grid)
                runners[peer] = lambda command=command: run(command, inside=True, path=PEERS["Calculon"], cache=cache)  # type: ignore[misc]
        return runners

    plan, theirs = job(8, 8, 1, 3, zero=1, recompute="selective"), execution(8, 8, 1, 3, 1, "selective")
    file, alone = write("job.json", plan), dict[str, Runner]()
    if PEERS["Calculon"]:
        checkout = Path(PEERS["Calculon"])
        inputs = checkout / "models" / "gpt3-175B.json", write("plan.json", theirs), checkout / "systems/a100_80g.json"
        command = PYTHON, str(checkout / "bin" / "calculon"), "llm", *map(str, inputs), "-"
        alone["Calculon"] = lambda: run(command, path=PEERS["Calculon"], cache=cache)
    if PEERS["SimuMax"]:
        single = PYTHON, str(HERE / "simumax_grid.py"), PEERS["SimuMax"], write("strategy.json", [strategy(8, 8, 1)])
        alone["SimuMax"] = lambda: run(single, path="", cache=cache)
    yield compare("one forecast, a process", lambda: run((*meshcast, "predict", file), cache=cache), alone)

    inside = sys.executable, "-m", "benchmarks.inside"
    small = plans_without_chunks()
    grids: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
        "grid of 240 plans": ([job(*each) for each in GRID], [execution(*each) for each in GRID], []),
        "grid of 2,880 plans": (
            [job(*degrees, **more) for degrees, more in every_plan()],
            [execution(*degrees, **more) for degrees, more in every_plan()],
            [],
        ),
        "60 plans without chunks": ([job(*each) for each in small], [], [strategy(*each[:3]) for each in small]),
    }
    for name, (jobs, executions, strategies) in grids.items():
        grid = *inside, "grid", write(f"{name}.json", jobs)
        rounds = 1 if len(jobs) > 1000 else ROUNDS
        yield compare(name, lambda grid=grid: run(grid, True, cache=cache), peers(executions, strategies, name), rounds)  # type: ignore[misc]
    for name, words in FORECASTS.items():
        forecast = *inside, "forecast", *words
        yield compare(name, lambda forecast=forecast: run(forecast, True, cache=cache), {})  # type: ignore[misc]
    for name, words in COMMANDS.items():
        line = *meshcast, *(word.format(out=folder) for word in words)
        yield compare(f"`{name}`", lambda line=line: run(line, cache=cache), {}, 1)  # type: ignore[misc]


def describe_machine() -> str:
    """Describes the machine, and the versions of what runs on it."""
    cpu = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else None
    )
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    commits = [f"{peer} {_find_commit(folder)}" for peer, folder in PEERS.items() if folder]
    packages = [f"{name} {version(name)}" for name in ("numpy", "pydantic", "matplotlib", "bokeh")]
    shared = f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} cores, load {load} at the begin"
    return f"{shared}; Python {platform.python_version()}, {', '.join([*packages, *commits])}."


def _find_commit(checkout: str) -> str:
    words = "git", "-C", checkout, "rev-parse", "--short", "HEAD"
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main(page: str | None) -> None:
    """Prints the table, and writes it into a page."""
    machine = describe_machine()
    table = Table(*(Column(name, align="left" if name == "" else "right") for name in ("", "meshcast", "MiB", *PEERS)))
    with tempfile.TemporaryDirectory() as folder:
        for row in races(Path(folder)):
            print(" | ".join(row), flush=True)
            table.add(*row)
    text = f"{machine}\n\n{render_table(table).rstrip()}"
    print(f"\n{text}")
    if page:
        write_file(page, TABLE.sub(lambda _: text, Path(page).read_text("utf-8")))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
