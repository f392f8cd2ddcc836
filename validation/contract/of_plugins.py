"""What holds for the files of a plug-in, by their kind: ``meshcast check --plugins FOLDER``.

Tests of meshcast ask the same of its own files.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType

from meshcast import hardware
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import MeshcastError, nearest
from meshcast.hardware.gpu import GPU
from meshcast.hardware.load import load
from meshcast.hardware.node import Node
from meshcast.hardware.plugins import FOLDERS, add_plugin
from meshcast.simulator.formats.launch.keys import flatten_for_export
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.formats.launch.program import Evidence
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, find_format, list_formats
from meshcast.simulator.formats.launch.table import SettingRow
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.checked import layer_problems
from meshcast.validation.contract.composed import chunks_for, complete, job_with
from meshcast.validation.contract.laws import STEP_LAWS, closed_form_problems, find_measures, identity_problems
from meshcast.validation.contract.measure import make
from meshcast.validation.contract.played import play_job
from meshcast.validation.selfcheck.completeness import price_node
from meshcast.validation.selfcheck.replay import Track, track_silently

MAX_SETTINGS = 40
"""Settings at which the closed forms of a scheme are measured."""

WIDE_TO_NARROW = ("fp32", "tf32", "fp16", "fp8", "fp4")
"""Formats of numbers."""


def gpu_problems(name: str) -> Iterator[str]:
    """Yields what is inconsistent about a GPU. Peaks are dense: a narrower format is never slower, bf16 never faster
    than fp16, which TPUs lack. In a cycle a multiprocessor makes a power of two FLOPs; a clock as devices report it may
    be above the one that peaks follow from."""
    gpu: GPU = load("gpus", name)
    peaks = [gpu.peak[kind] for kind in WIDE_TO_NARROW if kind in gpu.peak]
    if peaks != sorted(peaks):
        yield f"a narrower format is slower: {', '.join(f'{kind} {gpu.peak[kind]:.4g}' for kind in gpu.peak)} FLOP/s"
    if gpu.peak.get("bf16", 0) > gpu.peak.get("fp16", math.inf):
        yield "bf16 is faster than fp16"
    if gpu.clock and gpu.clock.kind != "measured" and "fp16" in gpu.peak:
        each = gpu.peak["fp16"] / (gpu.multiprocessors * gpu.clock)
        if abs(math.log2(each) - round(math.log2(each))) >= math.log2(1.015):
            yield (
                f"peak.fp16 is {each:,.0f} FLOPs a multiprocessor and cycle, which is no power of two: are the peaks "
                "dense, and of this clock?"
            )
    if gpu.scale_up is not None and gpu.scale_up not in hardware.links():
        yield f"its link {gpu.scale_up} is not in the catalog"
    if gpu.usual_node is not None:
        if gpu.usual_node not in hardware.nodes():
            yield f"its usual node {gpu.usual_node} is not in the catalog"
            return
        node: Node = load("nodes", gpu.usual_node)
        if node.gpu.architecture != gpu.architecture:
            yield f"its usual node {node.name} has GPUs of another architecture, {node.gpu.architecture}"
        if node.scale_up is not None and node.scale_up.link.name != gpu.scale_up:
            yield f"its usual node {node.name} is joined by {node.scale_up.link.name}, not by {gpu.scale_up}"


def node_problems(name: str) -> Iterator[str]:
    """Yields what is inconsistent about a node."""
    node: Node = load("nodes", name)
    if node.gpus % node.domain and node.domain % node.gpus:
        yield f"domains of {node.domain} GPUs do not fill nodes of {node.gpus}, nor nodes domains"
    price_node(name)


def sizes_in(name: str) -> list[tuple[float, float]]:
    """Returns the parameters that a name states, each with the value of its last digit: 6.9b is 6.9e9 and 1e8."""
    plain = re.sub(r"(?<=\d)_(?=\d)", ".", name.rpartition("/")[2])
    stated = re.findall(
        r"(?<![A-Za-z0-9.])[aA]?(\d+(?:\.(\d+))?)([bB])(?![A-Za-z0-9])|(?<![A-Za-z0-9.])(\d{2,})()([mM])\b", plain
    )
    return [
        (float(billions or millions) * (1e9 if billions else 1e6), (1e9 if billions else 1e6) * 10 ** -len(decimals))
        for billions, decimals, _, millions, *_ in stated
    ]


def parameter_counts(model: Model) -> list[int]:
    """Returns parameters and active ones without layers of multi-token prediction, each with all tables of words, with
    one and with none."""
    trunk = model.model_copy(update={"mtp": 0})
    table = model.vocab * model.hidden
    tables = (0, table) if model.tied else (0, table, 2 * table)
    return [count - words for count in (trunk.parameters, trunk.active_parameters) for words in tables]


def model_problems(name: str) -> Iterator[str]:
    """Yields the sizes in the name of a model that it does not have, to its last digit or an eighth."""
    model = load_model(name)
    for size, digit in sizes_in(name):
        if not any(abs(count - size) <= max(digit / 2, size / 8) for count in parameter_counts(model)):
            yield f"its name says {size / 1e9:g} B parameters, and it has {model.parameters / 1e9:.4g} B"


def framework_problems(name: str) -> Iterator[str]:
    """Yields what a profile of a framework lacks."""
    load_framework(name, release="2000-01")
    if len(load_framework(name).source) < 10:
        yield "it names no source"


def scheme_problems(use: str) -> Iterator[str]:
    """Yields the laws of schemes that one breaks."""
    kind = find_scheme(use)
    if not complete(use):
        yield "it has options without a default, so that no plan is made of it here"
        return
    for attention in ("flash", "unfused"):
        yield from identity_problems(use, attention)
    measured = Counter[str]()
    for setting in islice(find_measures(kind).settings(kind), MAX_SETTINGS):
        if problems := closed_form_problems(use, setting, measured):
            yield from problems
            break
    if kind.family in ("tensor", "sequence") and kind.most_axes != 0:
        mesh = Mesh({f"x{number}": 2 for number in range(max(1, kind.least_axes))})
        yield from layer_problems(mesh, lambda: [make(use, mesh, tuple(mesh.axes))])
    played = play_job(job_with(use))
    for problems_of in STEP_LAWS.values():
        yield from problems_of(played, chunks_for(use))


def list_rows(module: ModuleType) -> Iterator[SettingRow]:
    """Yields the rows of the tables of a program."""
    for table in vars(module).values():
        yield from (row for row in table if isinstance(row, SettingRow)) if isinstance(table, tuple) else ()


def program_problems(name: str) -> Iterator[str]:
    """Yields keys that no job has, and the launch files of other programs that a reader takes for files of its own."""
    program, batch = find_format(name), {"global": 64, "micro": 1}
    rooms = {form.interpret.__module__: form for form in list_formats().values()}
    ours = {row.key for room in rooms if rooms[room] is not program for row in list_rows(sys.modules[room])}
    for row in list_rows(sys.modules[program.interpret.__module__]):
        if row.key not in ours and row.key.split(".")[:2] not in (["model", field] for field in Model.model_fields):
            yield f"its setting {row.name} fills {row.key}. {nearest(row.key, ours)}"
    job = load_job({"model": "llama3-8b", "cluster": "dgx-h100:2", "batch": batch, "plan": {"tp": 2}})
    keys = flatten_for_export(job)
    with tempfile.TemporaryDirectory() as folder:
        for other in map(find_format, EXPORTS):
            assert other.write is not None
            file = Path(folder) / f"launch{other.suffix}"
            write_file(file, other.write(keys, []))
            if program.recognise(read_launch_file(file)) is Evidence.CERTAIN:
                yield f"it is certain that a launch file of {other.program} is one of {program.program}"


LAWS: dict[str, Callable[[str], Iterator[str]]] = {
    "gpus": gpu_problems,
    "nodes": node_problems,
    "models": model_problems,
    "frameworks": framework_problems,
    "schemes": scheme_problems,
    "programs": program_problems,
}
"""By the folders of a plug-in; of files of other folders it is checked that they can be read."""


def list_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the folders of the files of a plug-in with the names of what they describe."""
    for kind in FOLDERS:
        for path in sorted((folder / kind).rglob("*.*")):
            is_code = kind in ("schemes", "planners", "programs")
            if path.suffix == (".py" if is_code else ".yaml") and path.stem != "__init__":
                name = path.stem.replace("_", "-") if is_code else path.stem
                yield kind, f"{path.parent.name}/{name}" if kind == "schemes" else name


Readers = dict[str, Callable[[str], object]]
"""Functions that read a file of a plug-in, by its folder."""

READERS: Readers = {
    "models": load_model,
    "frameworks": load_framework,
    "schemes": find_scheme,
    "programs": find_format,
}


def check_plugin(folder: Path, more_readers: Readers, track: Track = track_silently) -> list[Fields]:
    """Adds a plug-in, and returns a row for each of its files as `run_checks` does for each check.

    more_readers: of folders whose files rooms above read. track: shows the progress.
    Raises PlanError for a folder that is no plug-in.
    """
    add_plugin(folder, "--plugins")
    readers, rows = READERS | more_readers, list[Fields]()
    for kind, name in track([*list_files(folder)], "checking files"):
        begin = time.perf_counter()
        violations = [{"what": text, "job": None} for text in check_file(kind, name, readers)]
        seconds = time.perf_counter() - begin
        rows.append({"check": f"{kind}/{name}", "jobs": None, "violations": violations, "seconds": seconds})
    return rows


def check_file(kind: str, name: str, readers: Readers = READERS) -> list[str]:
    """Returns what is wrong about a file of a plug-in. kind: its folder."""
    try:
        readers.get(kind, partial(load, kind))(name)
        return [*LAWS[kind](name)] if kind in LAWS else []
    except MeshcastError as error:
        return [str(error)]
    except Exception as error:  # whatever the code of a plug-in raises
        return [f"{type(error).__name__}: {error}"]
