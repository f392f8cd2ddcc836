"""The structure of the project: rooms and the direction of imports, sizes of functions and classes, names that speak
the field's language.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.plan_keys import PLAN_KEYS

ROOT = Path(__file__).resolve().parents[1]
PLANNERS = "experiments/planning/planners/"
"""One planner a file, as one scheme is."""

LEARNED = "experiments/planning/cores/learned/"
"""Planners that train a policy: they import torch when they plan."""

TRACED = "simulator/models/trace/"
"""Models without a reader are traced: torch is imported when a job has such a model."""

PACKAGES = ("meshcast", "hardware", "simulator", "validation", "experiments", "tools")

FLOORS = [
    "meshcast.hardware",
    "meshcast.simulator.ir",
    "meshcast.simulator.models",
    "meshcast.simulator.scheduling",
    "meshcast.simulator.lowering",
    "meshcast.simulator.formats",
    "meshcast.simulator.schemes",
    "meshcast.simulator.costs",
    "meshcast.simulator.job",
    "meshcast.simulator.formats.launch",
    "meshcast.simulator.loading",
    "meshcast.simulator.plan",
    "meshcast.simulator.program",
    "meshcast.simulator.engine",
    "meshcast.simulator.report",
    "meshcast.simulator.forecast",
    "meshcast.simulator.batch",
    "meshcast.simulator.bounds",
    "meshcast.simulator.runs",
    "meshcast.simulator",
    "meshcast.validation.traces",
    "meshcast.validation.measurements",
    "meshcast.validation.reference",
    "meshcast.validation.kernels",
    "meshcast.validation.distributed",
    "meshcast.validation.stages",
    "meshcast.validation.calibration",
    "meshcast.validation.published",
    "meshcast.validation.learning",
    "meshcast.validation.pipelines",
    "meshcast.validation.claims",
    "meshcast.validation.selfcheck",
    "meshcast.validation.contract",
    "meshcast.experiments.options",
    "meshcast.experiments.sweeps",
    "meshcast.experiments.runs",
    "meshcast.experiments.explain",
    "meshcast.experiments.schema",
    "meshcast.experiments.views",
    "meshcast.experiments.render.matplotlib",
    "meshcast.experiments.render.markdown",
    "meshcast.experiments.render.terminal",
    "meshcast.experiments.render.notebook",
    "meshcast.experiments.search.space",
    "meshcast.experiments.search.frontier",
    "meshcast.experiments.search.certificate",
    "meshcast.experiments.search.heterogeneous",
    "meshcast.experiments.search.output",
    "meshcast.experiments.search",
    "meshcast.experiments.advice",
    "meshcast.experiments.diagnosis",
    "meshcast.experiments.render.bokeh",
    "meshcast.experiments.sizing",
    "meshcast.experiments.explorer",
    "meshcast.experiments.planning",
    "tools.data",
    "tools.inputs",
    "tools.papers",
    "tools.pages",
    "meshcast.experiments.cli",
    "meshcast",
    "tools.data",
    "tools.inputs",
    "tools.papers",
    "tools.pages",
    "tools",
]
"""Rooms from the lowest to the highest: a room imports itself and rooms below it."""

DENIED = {
    "meshcast.simulator.costs": tuple(
        f"meshcast.simulator.{room}" for room in ("models", "scheduling", "lowering", "formats", "schemes")
    ),
    "meshcast.experiments.render.bokeh": ("meshcast.experiments.render.matplotlib",),
    "meshcast.simulator.schemes": (
        "meshcast.simulator.models",
        "meshcast.hardware.cluster",
        "meshcast.hardware.gpu",
        "meshcast.hardware.node",
        "meshcast.hardware.topology",
    ),
}
"""Rooms below that a room must not import all the same: costs know no plans, schemes neither devices nor models, the
HTML page nothing that matplotlib draws."""


parse = cache(ast.parse)


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a syntax tree."""
    nodes = [tree]
    for node in nodes:
        nodes += children(node)
    return tuple(nodes)


@cache
def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below one, without those that are the same in all trees (`ast.Load`)."""
    below: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            below += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and value._fields:
            below.append(value)
    return below


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a module."""
    return walk(parse(source))


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Forgets the syntax trees of all modules, which several tests walk, behind the last of them."""
    yield
    parse.cache_clear()
    nodes_of.cache_clear()
    walk.cache_clear()
    children.cache_clear()


@cache
def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: str) -> str:
    """`simulator/costs/__init__.py` -> `meshcast.simulator.costs`."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.partition(".")[0] in ("meshcast", "tools") else f"meshcast.{name}"


@cache
def room(name: str) -> str:
    """The room of a module: the longest entry of `FLOORS` that it lies in."""
    inside = [floor for floor in FLOORS if name == floor or name.startswith(floor + ".")]
    return max(inside, key=len) if inside else name


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, anywhere in it, relative imports resolved.

    `from meshcast.simulator.ir import ops` counts as `meshcast.simulator.ir.ops`.
    """
    package = dotted(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in nodes_of(source):
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
    here = room(dotted(path))
    for line, target in imports(path, source):
        top = target.split(".")[0]
        there = room(target)
        if top in PACKAGES and top not in ("meshcast", "tools"):
            yield f"{path}:{line} imports {target}: a package of meshcast is imported as meshcast.{target}"
        if top in ("meshcast", "tools") and there != here:
            denied = any((target + ".").startswith(prefix + ".") for prefix in DENIED.get(here, ()))
            if here not in FLOORS or there not in FLOORS:
                yield f"{path}:{line} imports {target}: {here} or {there} is no room of FLOORS"
            elif denied or FLOORS.index(there) > FLOORS.index(here):
                yield f"{path}:{line} imports {target}: {here} must not import {there}"
        if path.startswith("simulator/schemes/") and re.match(
            r"meshcast\.simulator\.schemes\.\w+\.(?!shared\.)", target + "."
        ):
            yield f"{path}:{line} imports {target}: a scheme file imports no other scheme"
        if path.startswith("experiments/views/") and top in ("matplotlib", "bokeh", "rich"):
            yield f"{path}:{line} imports {target}: views are data, which any library may draw"
        if top in ("tests", "benchmarks"):
            yield f"{path}:{line} imports {target}: shipped code must not need what is not shipped"
        if top == "torch" and not path.startswith(("validation/", LEARNED, TRACED)):
            yield f"{path}:{line} imports {target}: torch is used under validation/, {LEARNED} and {TRACED} only"


@cache
def scheme_classes() -> dict[type[Scheme], str]:
    """The classes of all schemes and of their bases, each with its module."""
    for use in scheme_names():
        find_scheme(use)
    classes: dict[type[Scheme], str] = {}
    waiting: list[type[Scheme]] = [Scheme]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("meshcast."):
            classes[kind] = kind.__module__
            waiting += kind.__subclasses__()
    return classes


def hooks_with_files(base: type[Scheme]) -> dict[str, set[str]]:
    """The public members of a base class that scheme files override, each with these files; abstract ones left out."""
    hooks: dict[str, set[str]] = {}
    for name, member in vars(base).items():
        if not name.startswith("_") and not getattr(member, "__isabstractmethod__", False):
            hooks[name] = {
                module
                for kind, module in scheme_classes().items()
                if issubclass(kind, base) and name in vars(kind) and module.startswith("meshcast.simulator.schemes.")
            }
    return {name: files for name, files in hooks.items() if files}


@cache
def import_graph() -> dict[str, set[str]]:
    """Which modules of the project each module imports; a package counts where a name of its `__init__` is imported."""
    known = {dotted(relative(path)): path for path in modules()}
    graph = {}
    for name, path in known.items():
        found = set()
        for _, target in imports(relative(path), path.read_text("utf-8")):
            module = target if target in known else target.rpartition(".")[0]
            found |= {module} if module in known and module != name else set()
        graph[name] = found
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set[str](), [start]
        while stack:
            for other in graph[stack.pop()] - seen:
                seen.add(other)
                stack.append(other)
        reach[start] = seen
    groups = {frozenset({a} | {b for b in reach[a] if a in reach[b]}) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


# --------------------------------------------------------------------------------------------------------- imports


def test_imports_between_rooms_run_down() -> None:
    found = [text for path in modules() for text in breaches(relative(path), path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(import_graph()) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hardware/gpu.py", "import meshcast.simulator"),
        ("hardware/gpu.py", "def f():\n    from meshcast.simulator.ir.ops import Op"),
        ("simulator/job/job.py", "from meshcast.validation.published import rows"),
        ("simulator/engine/play.py", "from meshcast.experiments.cli.app import main"),
        ("simulator/plan/plan.py", "from meshcast.simulator.engine import play"),
        ("simulator/lowering/lower.py", "from meshcast.simulator.costs.costs import Costs"),
        ("validation/measurements/row_errors.py", "import meshcast.experiments.sweeps.run"),
        ("validation/measurements/row_errors.py", "from meshcast.validation.reference import model"),
        ("experiments/sweeps/run.py", "from tests import strategies"),
        ("experiments/render/matplotlib/memory.py", "from meshcast.experiments.render.terminal import forecast"),
        ("experiments/views/memory.py", "from meshcast.experiments.render.matplotlib import style"),
        ("experiments/views/memory.py", "import matplotlib"),
        ("simulator/schemes/pipeline/1f1b.py", "from meshcast.simulator.costs import costs"),
        ("simulator/schemes/pipeline/1f1b.py", "from meshcast.simulator.engine import play"),
        ("simulator/schemes/pipeline/1f1b.py", "from ...report import report"),
        ("simulator/schemes/pipeline/1f1b.py", "from meshcast.simulator.schemes.pipeline import gpipe"),
        ("simulator/schemes/data/ddp.py", "from meshcast.hardware.gpu import GPU"),
        ("simulator/costs/host.py", "from meshcast.simulator.plan.plan import Plan"),
        ("simulator/costs/host.py", "from ..lowering import lower"),
        ("simulator/report/trace.py", "import torch.profiler"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(list(breaches(path, source))) == 1


DDP = "from meshcast.simulator.schemes.data.shared.data_parallel import DataParallel"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("hardware/gpu.py", "from .units import parse\nimport numpy"),
        ("simulator/engine/play.py", "from meshcast.simulator.costs.estimate import Use"),
        ("simulator/engine/play.py", "from meshcast.hardware import cluster"),
        ("simulator/schemes/pipeline/1f1b.py", "from meshcast.simulator.scheduling.schedule import Schedule"),
        ("simulator/schemes/data/ddp.py", DDP),
        ("simulator/schemes/tensor/megatron.py", "from meshcast.hardware.units import GiB\nimport math"),
        ("simulator/costs/kernels/gemm.py", "from ..calibration import calibration\nimport meshcast.hardware.gpu"),
        ("validation/kernels/measure.py", "import torch\nfrom meshcast.simulator import simulate"),
        ("experiments/cli/app.py", "from meshcast.validation.published import rows"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert list(breaches(path, source)) == []


def test_importing_the_simulator_is_light() -> None:
    heavy = ("torch", "pandas", "matplotlib", "scipy", "pyarrow")
    code = f"import sys, simulator; simulator.simulate; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], "import simulator brings in " + done.stdout


def test_the_public_api_shows() -> None:
    from meshcast import simulator

    assert set(simulator.__all__) <= set(dir(simulator))
    assert all(getattr(simulator, name) is not None for name in simulator.__all__)


# ----------------------------------------------------------------------------------------------------------- sizes


def test_packages_hold_rooms_only() -> None:
    allowed = {
        "simulator": {"__init__.py"},
        "validation": {"__init__.py"},
        "experiments": {"__init__.py", "options.py", "schema.py"},
    }
    for package, names in allowed.items():
        assert {path.name for path in (ROOT / package).glob("*.py")} == names


def test_every_room_has_a_docstring() -> None:
    folders = {path.parent for path in modules()} - {ROOT / "simulator" / "schemes"}
    mute = []
    for folder in sorted(folders):
        if "schemes" not in folder.parts:
            file = folder / "__init__.py"
            if not file.is_file() or not ast.get_docstring(parse(file.read_text("utf-8"))):
                mute.append(relative(folder))
    assert not mute, f"without a docstring in __init__.py: {', '.join(mute)}"


# ----------------------------------------------------------------------------------------------------------- hooks


SERVES_ONE = {
    "meshcast.simulator.schemes.tensor.shared.operator_tables": "a small language of its own, with its checks",
}
"""Shared modules that one scheme uses all the same, each with its reason; this list only shrinks."""


def test_shared_code_of_schemes_serves_several_files() -> None:
    """What one scheme alone uses stands in its file."""
    graph = import_graph()
    shared = [name for name in graph if re.match(r"meshcast\.simulator\.schemes\.\w+\.shared\.", name)]
    users = {name: [user for user, used in graph.items() if name in used] for name in shared}
    lonely = {name: by[0] for name, by in users.items() if len(by) == 1 and ".shared." not in by[0]}
    assert lonely.keys() == SERVES_ONE.keys(), lonely


def test_a_hook_of_schemes_serves_at_least_three_files() -> None:
    """What fewer schemes can do is abstract, in a class of `simulator.ir.capabilities` that these derive from."""
    few = [
        f"{base.__name__}.{name}: {', '.join(sorted(files))}"
        for base, module in scheme_classes().items()
        if module.startswith("meshcast.simulator.ir.")
        for name, files in hooks_with_files(base).items()
        if len(files) < 3
    ]
    assert not few, "\n".join(few)


def test_the_base_class_of_schemes_knows_what_all_have() -> None:
    members = {name for name in {*vars(Scheme), *Scheme.__annotations__} if not name.startswith("_")}
    assert len(members) <= 20, sorted(members)


def test_every_capability_is_asked_for() -> None:
    """Rooms outside of the schemes ask for each, by its own name."""
    asking = [path for path in modules() if not relative(path).startswith(("simulator/schemes/", "simulator/ir/"))]
    names = {node.id for path in asking for node in nodes_of(path.read_text("utf-8")) if isinstance(node, ast.Name)}
    capabilities = {kind.__name__ for kind, module in scheme_classes().items() if module.endswith(".ir.capabilities")}
    assert len(capabilities) > 15
    assert capabilities <= names, sorted(capabilities - names)


# --------------------------------------------------------------------------------------------- small functions

LIMITS = {"lines": 60, "branch points": 15, "local names": 20, "public members": 25, "constructor arguments": 8}
"""What functions and classes of simulator/ may have at most."""

ABOVE: dict[str, dict[str, int]] = {
    "lines": {},
    "branch points": {
        "simulator/engine/task_player.py:_Player.advance": 18,
    },
    "local names": {
        "simulator/engine/task_player.py:_Player.advance": 33,
        "simulator/costs/collectives/algorithms.py:_exchange_messages": 21,
        "simulator/costs/kernels/attention.py:seconds": 24,
        "simulator/costs/kernels/gemm.py:_busy": 23,
    },
    "public members": {
        "simulator/ir/modules.py:Operator": 28,
        "simulator/job/framework.py:Framework": 46,
        "simulator/models/shape/fields.py:TransformerFields": 43,
        "simulator/models/shapes.py:Shapes": 28,
        "simulator/report/metrics.py:Metrics": 40,
        "simulator/scheduling/schedule.py:Schedule": 32,
    },
    "constructor arguments": {},
}
"""What is above a limit all the same, with its value. Lists only shrink: at most 10 entries each, none grows, and one
that is no longer needed leaves."""

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def branch_points(function: ast.AST) -> int:
    """Returns the number of places at which a function goes one way or another."""
    ways = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
    count = 0
    for node in walk(function):
        count += isinstance(node, ways)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def local_names(function: ast.AST) -> set[str]:
    """Returns the names that a function binds, with those of functions inside it; variables of comprehensions live in
    these alone."""
    comprehended = {
        name
        for node in walk(function)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    names = set()
    for node in walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in comprehended:
            names.add(node.id)
        elif isinstance(node, (*FUNCTION, ast.ExceptHandler)) and node is not function and node.name:
            names.add(node.name)
    return names


def public_members(owner: ast.ClassDef) -> set[str]:
    """Returns the public methods and fields that a class states itself."""
    members = {node.name for node in owner.body if isinstance(node, FUNCTION)}
    for node in owner.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        members |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in members if not name.startswith("_")}


def measure(path: str, source: str) -> Iterator[tuple[str, str, int]]:
    """Yields (limit, name, value) of every function and class of a module.

    A constructor is an `__init__` that is written out: the fields of a record have names wherever one is made.
    """

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str, int]]:
        for child in children(node):
            inside = f"{name}.{child.name}" if isinstance(child, (*FUNCTION, ast.ClassDef)) else name
            inside = inside.replace(":.", ":")
            if isinstance(child, FUNCTION):
                yield "lines", inside, (child.end_lineno or child.lineno) - child.lineno + 1
                yield "branch points", inside, branch_points(child)
                yield "local names", inside, len(local_names(child))
            if isinstance(child, FUNCTION) and child.name == "__init__":
                arguments = child.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                yield "constructor arguments", name, count - 1
            if isinstance(child, ast.ClassDef):
                yield "public members", inside, len(public_members(child))
            yield from visit(child, inside)

    yield from visit(parse(source), f"{path}:")


@cache
def above_limits() -> dict[str, dict[str, int]]:
    """Returns by limit what is above it in simulator/."""
    above: dict[str, dict[str, int]] = {limit: {} for limit in LIMITS}
    for path in sorted((ROOT / "simulator").rglob("*.py")):
        for limit, name, value in measure(relative(path), path.read_text("utf-8")):
            if value > LIMITS[limit]:
                above[limit][name] = max(value, above[limit].get(name, 0))
    return above


@pytest.mark.parametrize("limit", LIMITS)
def test_functions_and_classes_of_the_simulator_are_small(limit: str) -> None:
    excepted, found = ABOVE[limit], above_limits()[limit]
    assert len(excepted) <= 10
    grown = [f"{name}: {value} {limit}" for name, value in found.items() if value > excepted.get(name, LIMITS[limit])]
    assert not grown, f"at most {LIMITS[limit]}:\n" + "\n".join(grown)
    smaller = [f"{name}: {found.get(name, 'none')}" for name in excepted if found.get(name) != excepted[name]]
    assert not smaller, f"ABOVE[{limit!r}] shrinks:\n" + "\n".join(smaller)


def test_a_function_is_measured() -> None:
    source = """
class Shop:
    size: int
    _hidden = 1

    def __init__(self, size, *, open=True):
        self.size = size

    def sell(self, goods):
        if goods and self.size or not goods:
            prices = [price for price in goods if price]
        for good in goods:
            def pay(coin): return coin
        return 1 if prices else 2
"""
    measured = {(limit, name.removeprefix("shop.py:")): value for limit, name, value in measure("shop.py", source)}
    assert measured["lines", "Shop.sell"] == 6
    assert measured["branch points", "Shop.sell"] == 6  # if, and, or, if of the comprehension, for, the ternary
    assert measured["local names", "Shop.sell"] == 6  # self, goods, prices, good, pay, coin
    assert measured["public members", "Shop"] == 2
    assert measured["constructor arguments", "Shop"] == 2


# ----------------------------------------------------------------------------------------------------------- names


VAGUE = {"one": 29, "found": 11, "own": 16, "given": 7, "made": 19, "Any": 1959}
"""How often the product binds a local name or parameter that says nothing of what it holds, or says `Any`. The numbers
only shrink: whoever replaces some of them by nouns writes the new ones here."""


def count_vague_names(source: str) -> Counter[str]:
    """Returns how often a module binds each of the names of `VAGUE`, and how often it says `Any`."""
    names = Counter[str]()
    for node in nodes_of(source):
        if isinstance(node, ast.arg):
            names[node.arg] += 1
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id == "Any"):
            names[node.id] += 1
    return Counter({name: names[name] for name in VAGUE})


def test_commands_say_lines_and_print_documents() -> None:
    """A line goes through `say` or a page, which escape names in it; a document escapes them where it is written."""
    lines = {
        (relative(path), line.strip())
        for path in modules()
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"(?<!\.)\bprint\(", line) and 'end=""' not in line and relative(path).startswith("experiments/")
    }
    console, say = "experiments/cli/console.py", "experiments/render/terminal/say.py"
    assert lines == {
        (say, "print(to_line(line), file=sys.stderr if err else sys.stdout, flush=True)"),
        (console, 'print(f"meshcast: {error}", file=sys.stderr, flush=True)'),
        (console, "print(to_json(answer, indent=2), flush=True)"),
    }


def test_names_that_say_nothing_get_fewer() -> None:
    product = [path for path in modules() if not relative(path).startswith("tools/")]
    counted = sum((count_vague_names(path.read_text("utf-8")) for path in product), Counter[str]())
    more = {name: counted[name] for name, limit in VAGUE.items() if counted[name] > limit}
    assert not more, f"more than in VAGUE: {more}"


def test_vague_names_are_counted() -> None:
    assert count_vague_names("def f(one: Any, two): found = [own for own in one]") == {
        **dict.fromkeys(VAGUE, 0),
        **dict.fromkeys(("one", "found", "own", "Any"), 1),
    }


def project_files() -> Iterator[Path]:
    """Every file of the project except those that git ignores: environments, caches, build outputs."""
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
        content = path.read_bytes()
        for place in local.finditer(content):
            number = content.count(b"\n", 0, place.start()) + 1
            found.append(f"{relative(path)}:{number}: {content[place.start() :][:60].decode(errors='replace')}")
    assert not found, "\n".join(found)


def compared(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every text that a module compares something with, or looks something up by."""
    for node in nodes_of(source):
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


def test_shared_code_asks_for_the_name_of_no_scheme() -> None:
    """A scheme states its own needs; only the short form of a plan and readers of other formats know its name."""
    names = {
        f"{path.parent.name}/{path.stem.replace('_', '-')}" for path in (ROOT / "simulator/schemes").glob("*/*.py")
    }
    names |= {name.partition("/")[2] for name in names if name.startswith("pipeline/")}
    free = (
        "simulator/schemes/",
        "simulator/formats/",
        "simulator/job/",
        "validation/",
    )
    found = [
        f"{relative(path)}:{line} asks for {text!r}"
        for path in modules()
        if not relative(path).startswith(free)
        for line, text in compared(path.read_text("utf-8"))
        if text in names
    ]
    assert not found, "\n".join(found)


EVERYDAY_KEYS = {
    *("tp", "pp", "dp", "cp", "ep", "unit", "schedule", "partition", "order", "stages", "replicas", "share"),
}
"""Keys of a plan whose names are words of many other things, too."""

MOST_FILES_OF_A_KEY = 4
"""The table, its scheme, and two that ask for its value."""

LAUNCH = "simulator/formats/launch/"

KEYS_OF_MANY_FILES = {
    **{"recompute": 49, "chunks": 31, "shard": 23, "etp": 17, "zero": 17, "offload": 15, "fsdp": 13},
    **{"sequence_parallel": 9, "recompute_layers": 9, "pad_heads": 8},
}
"""Keys that more files name, and how many do: no key may come to it, and no number may grow."""


def plan_keys_in(source: str) -> set[str]:
    """The keys of a plan that a module names: as a text, also behind ``plan.``, an attribute, a keyword or a field."""
    names: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.removeprefix("plan."))
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword):
            names.add(node.arg or "")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names & PLAN_KEYS.keys() - EVERYDAY_KEYS


def test_a_key_of_a_plan_is_named_in_few_files() -> None:
    """The files of schemes, which have options of the same names, count as one, and so do the tables of programs, whose
    own settings have these names."""
    files: dict[str, set[str]] = {key: set() for key in PLAN_KEYS.keys() - EVERYDAY_KEYS}
    for path in modules():
        file = relative(path)
        file = file.replace("validation/contract/", "simulator/schemes/")  # the laws of their options
        room = next((room for room in ("simulator/schemes/", f"{LAUNCH}programs/") if file.startswith(room)), file)
        for key in plan_keys_in(path.read_text("utf-8")) if not file.startswith("tools/") else ():
            files[key].add(room)
    counts = {key: len(names) for key, names in files.items() if len(names) > MOST_FILES_OF_A_KEY}
    assert len(KEYS_OF_MANY_FILES) <= 10
    more = {key: sorted(files[key]) for key, count in counts.items() if count > KEYS_OF_MANY_FILES.get(key, 0)}
    assert not more, "\n".join(f"{key}: {', '.join(names)}" for key, names in more.items())
    assert counts.keys() == KEYS_OF_MANY_FILES.keys(), "a key that is named in few files leaves the list"


REPLACED = {
    "Leaf": "Operator",
    "Nest": "CompositeModule",
    "Site": "Module",
    "Touch": "TensorUse",
    "Chain": "StageOps",
    "Beside": "SideOps",
    "Join": "Resharding",
    "Law": "ClosedForm",
    "Workshop": "SharedWork",
    "leaf": "operator",
    "habits": "framework",
    "rests": "shards_at_rest",
    "claims": "axes",
    "alike": "lowering_key",
    "paced": "slowest_rank",
    "laden": "most_loaded",
    "told": "given or options",
    "workshop": "shared_work",
    "spread": "sigma",
    "unlike": "heterogeneous",
}
"""Names that were replaced by the field's terms, with the term."""


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every class, function, parameter, variable and attribute that a module defines or sets."""
    for node in nodes_of(source):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_replaced_names_do_not_come_back() -> None:
    found = [
        f"{relative(path)}:{line} {name}: say {REPLACED[name.lstrip('_')]}"
        for path in modules()
        for line, name in names_of(path.read_text("utf-8"))
        if name.lstrip("_") in REPLACED
    ]
    assert not found, "\n".join(found)


PARTICIPLES = {
    "shipped": "the calibration that ships with meshcast: a constructor, read as `Calibration.shipped()`",
    "remembered": "a decorator: the method below it is remembered",
}
"""Functions whose name is a bare participle all the same, each with its reason; at most 10."""

IRREGULAR = {
    "cut",
    "held",
    "kept",
    "known",
    "laid",
    "led",
    "left",
    "made",
    "met",
    "put",
    "sent",
    "shown",
    "told",
    "built",
}
VERBS = {"embed", "feed", "need", "proceed", "seed", "shed", "speed", "spread"}


def bare_participles() -> dict[str, list[str]]:
    """Functions whose name is one word, a participle (no property, which may well be one)."""
    found: dict[str, list[str]] = {}
    for path in modules():
        for node in nodes_of(path.read_text("utf-8")):
            if isinstance(node, ast.FunctionDef) and not any("property" in ast.dump(d) for d in node.decorator_list):
                word = node.name.strip("_")
                if word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in VERBS):
                    found.setdefault(node.name, []).append(relative(path))
    return found


def test_functions_are_verbs_with_their_object() -> None:
    assert len(PARTICIPLES) <= 10
    found = {name: paths for name, paths in bare_participles().items() if name not in PARTICIPLES}
    assert not found, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in sorted(found.items()))


def test_a_class_name_has_one_meaning() -> None:
    """Torch modules carry the names of torch's world; every scheme has its Options."""
    found: dict[str, list[str]] = {}
    for path in modules():
        if not relative(path).startswith("validation/reference/"):
            for node in nodes_of(path.read_text("utf-8")):
                if isinstance(node, ast.ClassDef) and node.name != "Options":
                    found.setdefault(node.name, []).append(relative(path))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in sorted(twice.items()))
