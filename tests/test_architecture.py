"""The rooms of the project and the doors between them: imports run downwards only, files stay small."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hardware", "simulator", "validation", "experiments")

MODULE_LINES = 500
SCHEME_LINES = 120


@dataclass(frozen=True)
class Room:
    """What the modules of one room may import of ours, by dotted prefix, and why it is so."""

    allowed: tuple[str, ...]
    why: str
    denied: tuple[str, ...] = ()

    def admits(self, target: str) -> bool:
        return within(target, self.allowed) and not within(target, self.denied)


SECONDS = ("simulator.costs", "simulator.engine", "simulator.report", "simulator.bridges")
BENEATH = (
    "sites",
    "leaves",
    "scores",
    "rings",
    "ops",
    "layout",
    "mesh",
    "scheme",
    "schedule",
    "paired",
    "slots",
    "moves",
    "policy",
    "slicing",
    "lowering",
    "join",
    "rewrite",
    "decompose",
    "expert_leaves",
    "gathered",
    "grids",
    "summa",
    "exchange",
    "expert_scheme",
    "routing",
)
UNDER_SCHEMES = tuple("simulator." + name for name in (*BENEATH, "recompute", "offload", "sharding", "units"))
MACHINERY = Room(
    allowed=("hardware", "simulator"),
    denied=SECONDS,
    why="what schemes are built on says what runs; only simulator.costs knows seconds, only the engine adds them up",
)

# The longest prefix of a module's name decides which room it stands in.
ROOMS = {
    "hardware": Room(("hardware",), "hardware describes devices and imports nothing else of ours"),
    "simulator": Room(("hardware", "simulator"), "the simulator stands on hardware alone"),
    "validation": Room(("hardware", "simulator", "validation"), "nothing imports experiments"),
    "experiments": Room(PACKAGES, "experiments stands on top"),
    "simulator.schemes": Room(
        (*UNDER_SCHEMES, "simulator.bridges.torch_schedule", "hardware.units", "hardware.errors"),
        "a scheme speaks in shapes, bytes, groups and order; it knows neither seconds nor devices nor other schemes",
    ),
    "simulator.costs": Room(
        ("hardware", "simulator.ir.ops", "simulator.ir.mesh", "simulator.costs"),
        "costs turn one op on one device into seconds and know nothing of plans",
    ),
    **dict.fromkeys(UNDER_SCHEMES, MACHINERY),
}


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: str) -> str:
    """`simulator/costs/__init__.py` -> `simulator.costs`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(path: str) -> Room:
    name = dotted(path)
    return ROOMS[max((key for key in ROOMS if within(name, (key,))), key=len)]


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, anywhere in it, relative imports resolved.

    `from simulator import ops` counts as `simulator.ir.ops`.
    """
    package = dotted(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def breaches(path: str, source: str) -> Iterator[str]:
    """The imports of one module that its room does not admit, each as one line of text."""
    here = room(path)
    for line, target in imports(path, source):
        top = target.split(".")[0]
        if top in PACKAGES and not here.admits(target):
            yield f"{path}:{line} imports {target}: {here.why}"
        if top in ("tests", "benchmarks"):
            yield f"{path}:{line} imports {target}: shipped code must not need what is not shipped"
        if top == "torch" and not path.startswith("validation/"):
            yield f"{path}:{line} imports {target}: torch is used under validation/ only"


def test_imports_run_downwards() -> None:
    found = [text for path in modules() for text in breaches(relative(path), path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hardware/gpu.py", "import simulator"),
        ("hardware/gpu.py", "def f():\n    from simulator.ir.ops import Op"),
        ("simulator/job/job.py", "from validation import compare"),
        ("simulator/engine/__init__.py", "from experiments.cli import main"),
        ("validation/measurements/compare.py", "import experiments.sweeps.run"),
        ("experiments/sweeps/run.py", "from tests import strategies"),
        ("simulator/schemes/pipeline/1f1b.py", "from simulator.costs import price"),
        ("simulator/schemes/pipeline/1f1b.py", "from simulator import engine"),
        ("simulator/schemes/pipeline/1f1b.py", "from ...report import result"),
        ("simulator/schemes/pipeline/1f1b.py", "from simulator.schemes.pipeline import gpipe"),
        ("simulator/schemes/data/ddp.py", "from hardware.gpu import GPU"),
        ("simulator/schemes/data/ddp.py", "import hardware"),
        ("simulator/costs/__init__.py", "from simulator.plan.plan import Plan"),
        ("simulator/costs/__init__.py", "from ..lowering import lower"),
        ("simulator/lowering/lower.py", "from simulator.costs import price"),
        ("simulator/report/trace.py", "import torch.profiler"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(list(breaches(path, source))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hardware/gpu.py", "from .units import parse\nimport numpy"),
        ("simulator/engine/play.py", "from simulator.costs import price\nfrom hardware import cluster"),
        (
            "simulator/schemes/pipeline/1f1b.py",
            "from simulator.scheduling.schedule import Schedule\nfrom simulator import ops",
        ),
        ("simulator/schemes/tensor/megatron.py", "from hardware.units import GiB\nimport math\nimport pydantic"),
        ("simulator/costs/kernels/gemm.py", "from .. import calibration\nfrom ...ops import Gemm\nimport hardware.gpu"),
        ("simulator/ir/mesh.py", "from hardware.cluster import Cluster"),
        ("validation/calibration/kernels/gemm.py", "import torch\nfrom simulator import simulate"),
        ("experiments/cli.py", "from validation import compare\nfrom simulator import simulate\nimport hardware"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert list(breaches(path, source)) == []


def test_importing_the_simulator_is_light() -> None:
    if not (ROOT / "simulator" / "__init__.py").exists():
        pytest.skip("simulator/__init__.py does not exist yet")
    heavy = ("torch", "pandas", "matplotlib", "scipy", "pyarrow")
    code = f"import sys, simulator; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "import simulator brings in " + done.stdout


def test_files_stay_small() -> None:
    found = []
    for path in modules():
        name = relative(path)
        limit = SCHEME_LINES if name.startswith("simulator/schemes/") else MODULE_LINES
        lines = len(path.read_text("utf-8").splitlines())
        if lines > limit:
            found.append(f"{name} has {lines} lines, of at most {limit}")
    assert not found, "\n".join(found)


def project_files() -> Iterator[Path]:
    """Every file of the project, without what git ignores: environments, caches, build outputs."""
    ignored = {"__pycache__", "build", "dist", "out"}
    for folder, below, names in os.walk(ROOT):
        below[:] = [
            name
            for name in below
            if name not in ignored
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(folder) / name for name in names if name != ".git")


def test_no_file_names_a_path_of_one_machine() -> None:
    # A web address may well hold such a segment, so a word, a dot or a dash in front of it clears it.
    local = re.compile(rb"(?<![\w.-])/(?:%s)/" % b"|".join([b"work", b"root"]))
    found = []
    for path in sorted(project_files()):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if local.search(line):
                found.append(f"{relative(path)}:{number}: {line[:120].decode(errors='replace')}")
    assert not found, "\n".join(found)


def compared(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every text that a module compares something with, or looks something up by."""
    for node in ast.walk(ast.parse(source)):
        places: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            places = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            places = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            places = [node.value]
        for place in places:
            for inner in ast.walk(place) if place is not None else ():
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


def test_nothing_outside_its_file_asks_for_the_name_of_a_schedule() -> None:
    """What a schedule needs it states; the short form of a plan and what speaks others' words alone know its name."""
    names = {path.stem.replace("_", "-") for path in (ROOT / "simulator/schemes/pipeline").glob("*.py")}
    names |= {f"pipeline/{name}" for name in names}
    free = ("simulator/schemes/", "simulator/bridges/", "simulator/job/job.py", "validation/published/")
    found = [
        f"{relative(path)}:{line} asks for {text!r}"
        for path in modules()
        if not relative(path).startswith(free)
        for line, text in compared(path.read_text("utf-8"))
        if text in names
    ]
    assert not found, "\n".join(found)
