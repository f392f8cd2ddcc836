"""Mutants of the product, by room: ``make mutants``, or ``python -m tools.mutants --room simulator/costs -n 30``.

A mutant is one file with one change: another operator or sign, a number that is one off, a branch that is turned
round, a loop that is skipped, a statement that is dropped. The changes are cosmic-ray's; a seed draws them. A mutant is
caught if a test of its room fails (or does not end), first those whose file imports the module. Each that survives is
read by a person: a law is missing, the code is dead, or the mutant is equal to the code.

``--out`` keeps one line a mutant. The same command goes on where it was stopped, and tries again only what survived; so
new laws are seen to catch what they were written for.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import ExprStmt, Keyword, PythonNode

from tools.forked_tests import Change, ForkedTests, Outcome

ROOT = Path(__file__).resolve().parents[1]

PRODUCT = ("hardware", "simulator", "validation", "experiments")

SECONDS = 600
"""Seconds of a processor after which the tests of a mutant are stopped, or ten times as many of the clock, since other
work may hold them up: it is caught, for its room needs less."""

REFUSALS = "tests/test_refusals.py"
"""What messages of errors say; it belongs to every room."""

TESTS = {
    "simulator/schemes": (
        *("tests/contract", "tests/simulator/plan/test_by_memory.py"),
        "tests/simulator/scheduling/test_weight_copies.py",
    ),
    "simulator/scheduling": ("tests/contract/test_every_scheme.py",),
    "simulator/lowering": (
        "tests/contract/test_conservation.py",
        "tests/contract/test_dataflow.py",
        "tests/contract/test_step_dataflow.py",
        "tests/simulator/engine/test_engines.py",
        "tests/simulator/schemes/test_annotated.py",
        "tests/simulator/schemes/test_fully_sharded.py",
        "tests/simulator/schemes/test_zero_offload.py",
    ),
    "simulator/formats": ("tests/simulator/lowering/test_uneven_experts.py",),
    "simulator/ir": (
        "tests/simulator/costs/test_eager.py",
        "tests/simulator/engine/test_peak_memory.py",
        "tests/simulator/lowering/test_host_launches.py",
        "tests/simulator/lowering/test_uneven_experts.py",
        "tests/simulator/models/test_linear_attention.py",
    ),
    "simulator/loading": ("tests/simulator/job", "tests/simulator/plan"),
    "simulator/bounds": ("tests/experiments/search/test_bounds.py", "tests/simulator/costs/test_power.py"),
    "simulator/program": (
        "tests/contract/test_step_dataflow.py",
        "tests/simulator/engine/test_engines.py",
        "tests/simulator/engine/test_peak_memory.py",
    ),
    "simulator/engine": (
        "tests/simulator/forecast/test_update_memory.py",
        "tests/simulator/scheduling/test_activation_transfer.py",
    ),
    "simulator/report": ("tests/simulator/engine/test_per_rank.py",),
    "simulator/forecast": (
        "tests/simulator/engine/test_reserved_memory.py",
        "tests/simulator/job/test_samples.py",
        "tests/simulator/lowering/test_host_launches.py",
        "tests/simulator/lowering/test_scatter_gather.py",
        "tests/simulator/models/test_branches.py",
        "tests/simulator/plan/test_by_tensor.py",
        "tests/simulator/plan/test_mixed_clusters.py",
        "tests/simulator/report/test_phases.py",
        "tests/simulator/scheduling/test_heterogeneous_branches.py",
        "tests/simulator/scheduling/test_weight_copies.py",
        "tests/simulator/schemes/test_gemini.py",
    ),
    "experiments/sweeps": ("tests/experiments/cli/test_input_files.py",),
    "experiments/search": ("tests/validation/published/test_choice.py",),
    "experiments/explain": ("tests/experiments/views", "tests/experiments/cli/test_collectives.py"),
    "experiments/views": ("tests/experiments/render",),
    "experiments/render": (
        "tests/experiments/cli/test_schedule.py",
        "tests/experiments/cli/test_snapshots.py",
        "tests/experiments/cli/test_validate_published.py",
    ),
    "validation/calibration": ("tests/simulator/costs",),
    "validation/pipelines": (
        "tests/simulator/scheduling/test_bidirectional.py",
        "tests/simulator/scheduling/test_list_scheduler.py",
        "tests/simulator/scheduling/test_no_flush.py",
        "tests/simulator/scheduling/test_weight_copies.py",
    ),
}
"""Folders and files with tests of a room beside the folder of its name."""

PAIRS = {
    "BinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div Mod_FloorDiv Pow_Mul",
    "ComparisonOperator": "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt Gt_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is",
    "UnaryOperator": "USub_UAdd Delete_Not",
}
"""Operators that replace others; cosmic-ray has all pairs, of which most are caught by any test."""

NAMES = (
    *(f"Replace{kind}_{pair}" for kind, pairs in PAIRS.items() for pair in pairs.split()),
    *("AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceFalseWithTrue", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
)


class DropStatement(Operator):
    """Drops a call whose value is not used, an assignment to a part of an object, and ``raise``."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the place of a statement that can be dropped."""
        if node.parent is not None and node.parent.type == "simple_stmt" and _is_droppable(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Returns ``pass`` in its place."""
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Sequence[Any]:
        """Returns none: cosmic-ray's own tests ask for them."""
        return ()


def _is_droppable(node: Any) -> bool:
    if node.type in ("raise_stmt", "del_stmt"):
        return True
    if isinstance(node, ExprStmt):
        target = node.children[0]
        return isinstance(target, PythonNode) and target.type in ("atom_expr", "power")
    return bool(node.type in ("atom_expr", "power") and node.children[-1].get_code().startswith("("))


OPERATORS: dict[str, type[Operator]] = {name: OperatorProvider()[name] for name in NAMES} | {
    "DropStatement": DropStatement
}


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        room: the folder of the product.
        path: the file, from the root.
        operator: what changes it, by its name in `OPERATORS`.
        occurrence: which of the operator's places in the file, from 0.
        line: line of the place, from 1.
    """

    room: str
    path: str
    operator: str
    occurrence: int
    line: int

    @property
    def key(self) -> str:
        """The mutant in a line of ``--out``."""
        return f"{self.path}:{self.line} {self.operator} {self.occurrence}"

    def code(self, source: str) -> str:
        """Returns the file with the change."""
        mutated: str = mutate_code(source, OPERATORS[self.operator](), self.occurrence)
        return mutated


class Verdict(NamedTuple):
    """What the tests said of a mutant.

    Attributes:
        key: the mutant.
        room: its room.
        caught: by ``"room"``, ``"all"`` tests, or ``""``.
        test: the first test that failed.
        tests: how many run the changed statement, or stand in a file with such a test.
        seconds: of the clock.
        change: the changed lines, as a diff has them.
    """

    key: str
    room: str
    caught: str
    test: str
    tests: int
    seconds: float
    change: str


def list_rooms() -> list[str]:
    """Returns the folders of the product that hold a room's files: all but ``hardware`` are one level down."""
    inner = [path for name in PRODUCT[1:] for path in (ROOT / name).iterdir()]
    return ["hardware", *sorted(str(path.relative_to(ROOT)) for path in inner if any(path.rglob("*.py")))]


def draw_mutants(room: str, number: int, seed: int) -> list[Mutant]:
    """Draws different mutants of a room: files by their lengths, then one of the file's places, then a change."""
    rng = random.Random(f"{seed} {room}")
    files = sorted(path for path in (ROOT / room).rglob("*.py") if path.stat().st_size)
    ends = list(accumulate(len(path.read_text("utf-8").splitlines()) for path in files))
    drawn: dict[str, Mutant] = {}
    for _ in range(100 * number):
        if len(drawn) == number:
            break
        places = _list_places(room, files[bisect(ends, rng.randrange(ends[-1]))])
        if places:
            mutant = rng.choice(places[rng.choice(sorted(places))])
            if _is_python(mutant):
                drawn.setdefault(f"{mutant.path}:{mutant.line}", mutant)
    return list(drawn.values())


def _is_python(mutant: Mutant) -> bool:
    """Returns whether a mutant can be compiled: ``**`` of a call has no other operator."""
    try:
        compile(mutant.code((ROOT / mutant.path).read_text("utf-8")), mutant.path, "exec")
    except SyntaxError:
        return False
    return True


@cache
def _list_places(room: str, path: Path) -> dict[Any, list[Mutant]]:
    """Returns the mutants of a file by the place that they change."""
    places, counts = defaultdict(list), Counter[str]()
    for node in ast_nodes(get_ast(path.read_text("utf-8"))):
        for name, operator in OPERATORS.items():
            for begin, _ in operator().mutation_positions(node):
                mutant = Mutant(room, str(path.relative_to(ROOT)), name, counts[name], begin[0])
                counts[name] += 1
                if _is_run(node):
                    places[begin].append(mutant)
    return dict(places)


def _is_run(node: Any) -> bool:
    """Returns whether a node is in the body of a function, and no annotation: what a law can guard. The rest, tables
    of figures and fields of classes, is data."""
    inside = False
    while node is not None and not inside:
        if node.parent is not None and node.parent.type == "annassign" and node is node.parent.children[1]:
            return False
        inside = node.type == "suite" and node.parent.type == "funcdef"
        inside |= node.parent is not None and node.parent.type == "lambdef"
        node = node.parent
    return inside


def list_room_tests(room: str) -> list[str]:
    """Returns the test files of a room, from the root."""
    named = [ROOT / name for name in (f"tests/{room}", *TESTS.get(room, ()), REFUSALS)]
    places = [place for place in named if place.exists()]  # not every room has a folder of tests
    files = [path for place in places for path in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])]
    return [str(path.relative_to(ROOT)) for path in files]


def try_mutants(mutants: Sequence[Mutant], tests: Sequence[str], caught: str, out: Path) -> None:
    """Tries mutants on test files or folders, from the root, in this process and its forks; adds each verdict to `out`.

    caught: of verdicts where a test fails.
    """
    sources = {mutant.path: (ROOT / mutant.path).read_text("utf-8") for mutant in mutants}
    codes = {mutant.key: mutant.code(sources[mutant.path]) for mutant in mutants}
    again: list[tuple[Mutant, int]] = []

    def keep(mutant: Mutant, test: str, tests: int, seconds: float) -> None:
        before, after = sources[mutant.path].splitlines(), codes[mutant.key].splitlines()
        change = "\n".join([*difflib.unified_diff(before, after, n=0, lineterm="")][3:])
        _keep(Verdict(mutant.key, mutant.room, caught if test else "", test, tests, seconds, change), out)

    def tell(outcome: Outcome) -> None:
        mutant = by_key[outcome.key]
        if not outcome.test and (outcome.imported or not outcome.tests):  # or run by processes of their own
            again.append((mutant, outcome.tests))
        else:
            keep(mutant, outcome.test, outcome.tests, outcome.seconds)

    by_key = {mutant.key: mutant for mutant in mutants}
    changes = [Change(mutant.key, mutant.path, mutant.line, codes[mutant.key]) for mutant in mutants]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests], [ForkedTests(ROOT, changes, tell, SECONDS)])
    if again:
        with tempfile.TemporaryDirectory() as folder:
            copy = make_copy(Path(folder))
            for mutant, number in again:
                begin = time.monotonic()
                (copy / mutant.path).write_text(codes[mutant.key], "utf-8")
                test = _find_failure(copy, tests)
                (copy / mutant.path).write_text(sources[mutant.path], "utf-8")
                keep(mutant, test, number, time.monotonic() - begin)


def _keep(verdict: Verdict, out: Path) -> None:
    """Adds a verdict to a file, and prints it where nothing was caught."""
    with out.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(verdict._asdict()) + "\n")
    if not verdict.caught:
        print(f"{verdict.key}: {verdict.tests} tests\n{verdict.change}\n", flush=True, file=sys.__stdout__)


def make_copy(folder: Path) -> Path:
    """Copies the files that git knows, with its links, so that mutants never touch the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def _find_failure(copy: Path, tests: Sequence[str]) -> str:
    """Returns the first test that fails, or an empty text."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS)),
    ) as process:
        try:
            output, _ = process.communicate(timeout=10 * SECONDS)
        except subprocess.TimeoutExpired:
            return "no end"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGKILL:
        return "no end"
    if process.returncode in (0, 5):  # 5: there are no tests
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[1] if failed else "no start"


def print_table(verdicts: Iterable[Verdict]) -> None:
    """Prints mutants and caught ones by room, as Markdown."""
    by_room: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_room[verdict.room].append(verdict)
    total = [verdict for room in by_room.values() for verdict in room]
    print("| room | mutants | caught by its tests | by any test |\n|---|---|---|---|")
    for name, rows in [*sorted(by_room.items()), ("all", total)]:
        caught = Counter(verdict.caught for verdict in rows)
        print(f"| {name} | {len(rows)} | {caught['room']} | {caught['room'] + caught['all']} |")


def main(words: Sequence[str] | None = None) -> int:
    """Tries mutants, prints those that survive, and the table by room."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=30, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", action="append", choices=list_rooms(), help="one room; may be repeated")
    parser.add_argument("--whole", action="store_true", help="all tests for those that survive their room's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/mutants.jsonl"), help="what is known of each mutant")
    options = parser.parse_args(words)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = {room: draw_mutants(room, options.n, options.seed) for room in options.room or list_rooms()}
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rooms = [
            pool.submit(try_mutants, left, list_room_tests(room), "room", options.out)
            for room, mutants in drawn.items()
            if (left := _list_survivors(mutants, options.out))
        ]
        for number, room in enumerate(as_completed(rooms), 1):
            room.result()
            print(f"{number} of {len(rooms)} rooms tried", file=sys.stderr)
        left = _list_survivors([mutant for mutants in drawn.values() for mutant in mutants], options.out)
        if options.whole and left:
            pool.submit(try_mutants, left, ["tests"], "all", options.out).result()
    known = _read_verdicts(options.out)
    print_table(known[mutant.key] for mutants in drawn.values() for mutant in mutants)
    return 0


def _list_survivors(mutants: Iterable[Mutant], out: Path) -> list[Mutant]:
    """Returns the mutants that nothing has caught so far, the last word on each."""
    known = _read_verdicts(out)
    return [mutant for mutant in mutants if mutant.key not in known or not known[mutant.key].caught]


def _read_verdicts(path: Path) -> dict[str, Verdict]:
    """Returns what an earlier run has found, the last word on each mutant."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {verdict.key: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}


if __name__ == "__main__":
    sys.exit(main())
