"""Nothing writes a file but `hardware.documents.output_file`, which writes it whole or not at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_architecture import modules, relative

ROOM = "hardware/documents/output_file.py"

OPENERS = {"open", "fdopen", "TextIOWrapper"}
"""Functions whose mode or flags say whether they write."""

WRITERS = {
    *("write_text", "write_bytes", "touch", "mknod", "symlink_to", "hardlink_to", "truncate", "renames"),
    *("copy2", "copyfile", "copyfileobj", "copytree", "make_archive"),
    *("NamedTemporaryFile", "mkstemp", "ZipFile", "TarFile", "FileHandler", "memmap"),
    *("savefig", "save", "savez", "savez_compressed", "savetxt", "tofile", "imsave", "export_chrome_trace"),
    *("to_csv", "to_parquet", "to_excel", "to_feather", "to_hdf", "to_pickle", "write_html"),
    *("write_table", "ParquetWriter", "PdfFile"),
}
"""Functions that make or change a file whose name they get."""

OF_MODULE = {("os", name) for name in ("replace", "rename", "link", "symlink")} | {
    ("shutil", "copy"),
    ("shutil", "move"),
}
"""Functions of names that others have, too, with what stands before them."""

OF_OURS = {"save", "write_table"}
"""Functions that are ours where nothing stands before them."""

CALLS = re.compile(rf"\b(({'|'.join(OPENERS | WRITERS)})\(|(os|shutil)\.\w|(replace|rename)\([^,()]*\))")
"""What a file that writes holds."""

HANDLES = {"replacing", "BytesIO", "StringIO", "ParquetWriter"}
"""Functions whose result is written into instead of a file."""

ALLOWED = {
    ("experiments/sweeps/output.py", "open"): "the lock of a sweep, which holds no rows",
    ("experiments/sweeps/output.py", "truncate"): "the same",
    ("experiments/cli/start.py", "open"): "the null device, where the caller has closed a standard stream",
    ("experiments/render/notebook/report.py", "savefig"): "a file object of the caller",
    ("tools/mutants.py", "copy2"): "into a temporary copy of the repository",
    ("tools/mutants.py", "write_text"): "in that copy",
    ("tools/mutants.py", "open"): "verdicts, appended to as they come",
    ("validation/distributed/launch.py", "open"): "the output of processes, in a temporary folder",
    ("validation/distributed/launch.py", "touch"): "messages of a process, in a temporary folder",
    ("validation/distributed/worker.py", "open"): "the same, appended to as they come",
    ("validation/distributed/worker.py", "export_chrome_trace"): "in a temporary folder, since torch writes by name",
}
"""Files with the functions that write in them, each with the reason; short, and without entries that nothing needs."""


def find_bare_writes(source: str) -> Iterator[tuple[int, str]]:
    """(line, function) of every call that writes a file, unless its target is what `HANDLES` return."""
    if not CALLS.search(source):  # most files: their trees need not be made
        return
    scopes: list[ast.AST] = [ast.parse(source)]
    for scope in scopes:
        nodes: list[ast.AST] = [scope]
        for node in nodes:
            for inner in ast.iter_child_nodes(node):  # functions within functions share their names
                outer = isinstance(inner, ast.FunctionDef) and not isinstance(scope, ast.FunctionDef)
                (scopes if outer else nodes).append(inner)
        handles = {name for node in nodes for name in bind_handles(node)}
        for node in nodes:
            if isinstance(node, ast.Call) and writes(node):
                around = [node.func.value] if isinstance(node.func, ast.Attribute) else []
                words = [*around, *node.args, *(word.value for word in node.keywords)]
                if not any(isinstance(word, ast.Name) and word.id in handles for word in words):
                    yield node.lineno, name_call(node)


def bind_handles(node: ast.AST) -> Iterator[str]:
    """The names to which a statement, or the parameter that a node is, binds what `HANDLES` return."""
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.With):
        pairs = [(item.optional_vars, item.context_expr) for item in node.items]
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        else:
            pairs = [(target, value)]
    elif isinstance(node, ast.AnnAssign):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.arg) and node.annotation is not None and "BytesIO" in ast.unparse(node.annotation):
        yield node.arg
    for bound, content in pairs:
        if isinstance(bound, ast.Name) and content is not None:
            if {name_call(inner) for inner in ast.walk(content) if isinstance(inner, ast.Call)} & HANDLES:
                yield bound.id


def name_call(call: ast.Call) -> str:
    """The name of the function that is called, without what stands before it."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def writes(call: ast.Call) -> bool:
    """Whether a call may write a file."""
    name = name_call(call)
    before = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in OPENERS:
        words = [*call.args, *(word.value for word in call.keywords if word.arg in ("mode", "flags"))]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        flags = " ".join(map(ast.unparse, words)) if before == "os" else ""
        return any(len(mode) <= 3 and set(mode) & set("wax+") for mode in modes) or "O_WR" in flags or "O_RDWR" in flags
    if name in ("replace", "rename") and len(call.args) == 1 and not call.keywords:  # of a path; texts take two words
        return bool(before)
    return (name in WRITERS and bool(before or name not in OF_OURS)) or (before, name) in OF_MODULE


def test_files_are_written_whole_or_not_at_all() -> None:
    found = {
        (relative(path), function, line)
        for path in modules()
        if relative(path) != ROOM
        for line, function in find_bare_writes(path.read_text("utf-8"))
    }
    bare = [f"{path}:{line} {function}" for path, function, line in sorted(found) if (path, function) not in ALLOWED]
    assert not bare, "written in place; use hardware/documents/output_file.py:\n" + "\n".join(bare)
    assert ALLOWED.keys() <= {(path, function) for path, function, _ in found}, "an exception that nothing needs"


@pytest.mark.parametrize(
    "source",
    [
        'open(path, "w")',
        'open(path, mode="ab")',
        'path.open("x")',
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        'gzip.open(path, "wb")',
        "path.write_text(text)",
        "path.write_bytes(data)",
        "figure.savefig(path)",
        "pq.write_table(table, path)",
        "table.to_parquet(path)",
        "json.dump(data, open(path, 'w'))",
        "shutil.copy(left, right)",
        "os.replace(left, right)",
        "left.replace(right)",
        "with zipfile.ZipFile(path, 'w') as file: pass",
        "with replacing(path) as file: pq.write_table(table, other)",
        "def f():\n  def g(): path.write_text(text)",
        "def f():\n  with replacing(path) as file: pass\ndef g(file): file.write_text(text)",
    ],
)
def test_a_bare_write_is_seen(source: str) -> None:
    assert [*find_bare_writes(source)]


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        'path.open("rb")',
        'text.replace("a", "b")',
        "with replacing(path) as file: pq.write_table(table, file)",
        "image = io.BytesIO(); figure.savefig(image)",
        "write_file(path, text)",
    ],
)
def test_what_writes_no_file_passes(source: str) -> None:
    assert not [*find_bare_writes(source)]
