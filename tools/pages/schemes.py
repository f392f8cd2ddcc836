"""Writes docs/schemes.md, the page of all schemes: idea, paper, options, what is modelled, and the closed forms.

It is made from the files of the schemes alone: their docstrings, options with the sentences below them, and
`ClosedForm` calls. Cards of optimizers, of the assignment of samples and of runs that lose nodes are docstrings, too.
``make docs-schemes`` runs ``python -m tools.pages.schemes docs/schemes.md``.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.schemas import ModelField
from meshcast.simulator.ir.registry import describe_scheme, find_scheme, scheme_docstring, scheme_names
from meshcast.simulator.ir.scheme import FAMILIES, Paper, Scheme
from meshcast.simulator.job.optimizers import OPTIMIZER_STATES, MatrixOptions

ROOT = Path(__file__).resolve().parents[2]

HEAD = """# Schemes

Made by `make docs-schemes` from the files in `simulator/schemes/`; do not edit it. A plan names a scheme as
`family/name`, says which axes of the mesh it is `over`, and gives its options as further keys of the same entry
([the job file](job.md)). The *closed forms* of a scheme are formulas of its paper that its lowered program must
reproduce exactly under ideal costs; `tests/contract` checks them in many settings. Symbols, where the text of a scheme
defines no others:

| symbol | meaning |
| --- | --- |
| b | sequences of a micro-batch, per replica |
| s | tokens of a sequence |
| h | hidden size |
| f | width of the MLP |
| a | attention heads |
| m | micro-batches of a step, per replica |
| p | pipeline devices; in the other families the ranks over which a scheme shards (t: of a tensor scheme) |
| n, N | ranks of a data scheme |
| v | chunks (virtual stages) of a pipeline device |
| i | number of a pipeline device, from 0 |
| t_f | forward pass of a micro-batch through all layers of a device [s] |
| t_b, t_w | its gradients of inputs, its gradients of weights [s] |
| t_B | its whole backward pass [s]: t_b + t_w; `t_total` is t_f + t_B |
| F, B, W | in drawings of orders: forward pass, backward pass (split: gradients of inputs), gradients of weights |

In formulas `setting` and `shape` are the sizes and times at which a form is evaluated.

Some systems are no scheme of their own, but fields of a job or several schemes together:

"""

ELSEWHERE = (
    ("Stream-K", "arXiv:2301.03598", "`framework.set.gemm_decomposition` ([framework](framework.md))"),
    ("mCAP", "doi:10.1007/978-3-031-12597-3_10", "`plan.partition: by-memory` ([job](job.md))"),
    ("DynaPipe, its micro-batches", "arXiv:2311.10418", "`batch.samples.join: shortest-step` ([job](job.md))"),
    ("USP", "arXiv:2405.07719", "`sequence/ulysses` over one axis, `sequence/ring` over another"),
    ("LoongTrain", "arXiv:2406.18485", "the same, with `sequence/ring` in two levels"),
    ("Llama 3, 4-D", "arXiv:2407.21783", "`examples/llama3-405b-128k-dgx-h100.yaml`"),
    ("Muon", "https://kellerjordan.github.io/posts/muon/", "`optimizer: muon` ([job](job.md#optimizer))"),
    ("Moonlight, distributed Muon", "arXiv:2502.16982", "`optimizer: {name: muon, replicas: gather}`"),
    ("SOAP", "arXiv:2409.11321", "`optimizer: soap`"),
    ("Distributed Shampoo", "arXiv:2309.06497", "`optimizer: shampoo`"),
    ("Dion", "arXiv:2504.05295", "`optimizer: dion`"),
    ("DeepSpeed, partitioned activations", "arXiv:1910.02054", "`partition` of `memory/recompute-full`"),
)
"""Systems that are no scheme of their own: name, publication, and where they are."""


class Card(NamedTuple):
    """A card of what is no scheme: a file whose docstring is its text.

    title: as a job names it, or what the file is about.
    files: whose docstrings follow each other.
    section: under which it stands.
    urls: of the publications.
    word: key and value of the jobs that use it; empty: it is no single system.
    """

    title: str
    files: tuple[str, ...]
    section: str
    urls: tuple[str, ...] = ()
    word: str = ""


CARDS = (
    Card("States of optimizers", ("simulator/job/optimizers.py",), "Optimizers"),
    Card("optimizer: muon", ("simulator/lowering/matrices.py",), "Optimizers",
         ("https://kellerjordan.github.io/posts/muon/", "https://arxiv.org/abs/2502.16982"), "optimizer muon"),
    Card("optimizer: soap, shampoo, dion", ("simulator/lowering/preconditioners.py",), "Optimizers",
         ("https://arxiv.org/abs/2409.11321", "https://arxiv.org/abs/2309.06497", "https://arxiv.org/abs/2504.05295"),
         "optimizer soap"),
    Card("samples.join: dp-balanced", ("simulator/job/assigners/dp_balanced.py",), "Assignment of samples", (),
         "join dp-balanced"),
    Card("samples.join: wlb", ("simulator/job/assigners/wlb.py",), "Assignment of samples",
         ("https://arxiv.org/abs/2503.17924",), "join wlb"),
    Card("samples.join: hybrid-cp", ("simulator/job/assigners/hybrid_cp.py",), "Assignment of samples", (),
         "join hybrid-cp"),
    Card("samples.join: flexsp", ("simulator/job/assigners/flexsp.py",), "Assignment of samples",
         ("https://arxiv.org/abs/2412.01523",), "join flexsp"),
    Card("What a run does while nodes are missing", ("simulator/runs/elastic.py",), "Runs that lose nodes"),
    Card("Checkpoints", ("simulator/runs/checkpoints.py",), "Runs that lose nodes"),
)  # fmt: skip
"""Cards of optimizers, of ways to assign samples, and of runs that lose nodes."""

TITLES = {
    "pipeline": "Pipeline schedules",
    "tensor": "Tensor parallelism",
    "sequence": "Sequence and context parallelism",
    "expert": "Expert parallelism",
    "data": "Data parallelism and sharded states",
    "memory": "Memory: recomputation and offloading",
}


def page() -> str:
    """Returns the whole page."""
    names = scheme_names()
    elsewhere = ((name, _link(Paper(ref, name, 0)), where) for name, ref, where in ELSEWHERE)
    schemes = ((f"[{use}](#{anchor(use)})", _link(find_scheme(use).paper), describe_scheme(use)) for use in names)
    parts = [HEAD + render_table(Table("system", "paper", "in a job", rows=elsewhere))]
    parts.append(render_table(Table("scheme", "paper", "idea", rows=schemes)).rstrip())
    for family in FAMILIES:
        parts.append(f"\n## {TITLES[family]}\n")
        parts += [_scheme(use) for use in names if use.startswith(f"{family}/")]
    for section in dict.fromkeys(card.section for card in CARDS):
        parts.append(f"\n## {section}\n")
        parts += [_card(card) for card in CARDS if card.section == section]
    return "\n".join(parts).rstrip() + "\n"


def anchor(use: str) -> str:
    """Returns the anchor of a scheme's heading, as GitHub makes it."""
    return use.replace("/", "")


def _parse(kind: type[Scheme]) -> ast.Module:
    return ast.parse(Path(inspect.getfile(kind)).read_text("utf-8"))


def closed_forms(use: str) -> Iterator[tuple[str, str, str]]:
    """Yields quantity, reference and formula of every `ClosedForm` in the file of the class that states them."""
    stated = next(kind for kind in find_scheme(use).__mro__ if "closed_forms" in vars(kind))
    inline = _InlineNames(_parse(stated))
    for node in ast.walk(inline.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ClosedForm":
            quantity, formula, where = (*node.args, *(k.value for k in node.keywords))
            yield *(ast.literal_eval(part) for part in (quantity, where)), ast.unparse(inline.visit(formula))


class _InlineNames(ast.NodeTransformer):
    """Replaces a local name by the expression assigned to it; symbols of the setting stay."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
        self._values = {
            target.id: node.value
            for node in assigned
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.BinOp)
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._values.get(node.id)
        return self.visit(value) if value is not None else node


def _scheme(use: str) -> str:
    kind = find_scheme(use)
    idea_first, _, rest = scheme_docstring(use).partition("\n\n")
    modelled, _, _ = rest.partition("References:")
    parts = [f"### {use}\n", " ".join(idea_first.split()), "", _paper(kind.paper), "", _body(modelled)]
    if options := list(_options(kind)):
        parts.append(render_table(Table("option", "default", "what it says", rows=options)))
    if forms := dict.fromkeys(closed_forms(use)):
        cells = [(quantity, f"`{formula}`", where) for quantity, where, formula in forms]
        parts.append(render_table(Table("closed form", "formula", "where", rows=cells)).rstrip())
    return "\n".join([*parts, ""])


def _card(card: Card) -> str:
    """Writes a card of docstrings: the idea, the text, where it is from; of optimizers their states and options."""
    parts = [f"### {card.title}\n"]
    for file in card.files:
        text, _, sources = _docstring(file).partition("\n\nReferences:")
        first, _, rest = text.partition("\n\n")
        parts += [" ".join(first.split()), "", _body(_word_terms(rest))]
        parts += [f"Sources: {' '.join(sources.split())}\n"] if sources else []
        parts.append(f"In `{file}`.\n")
    if card.title == CARDS[0].title:
        parts.append(_states_of_optimizers())
        options = [(f"`{name}`", _default(field), text) for (name, text), field in _matrix_options()]
        parts.append(render_table(Table("option of matrices", "default", "what it says", rows=options)))
    return "\n".join(parts)


def _word_terms(text: str) -> str:
    """Makes a list of lines ``word: what it is``, which go on indented."""
    return re.sub(r"^([a-z][a-z-]*): ", r"- *\1*: ", text, flags=re.MULTILINE)


def _states_of_optimizers() -> str:
    """Writes a table of the states of every optimizer."""
    table = Table("optimizer", "states as large as a tensor", "of a matrix", "bytes of an element of a state")
    for name, states in OPTIMIZER_STATES.items():
        matrix = "" if states.of_matrix is None else str(states.of_matrix)
        matrix += ", squares of both sides" if states.squares else ", a basis" if states.basis else ""
        factored = "sums over rows and columns" if states.factored else str(states.tensors)
        table.add(f"`{name}`", factored, matrix, f"{states.nbytes:.4g}" if states.nbytes else "as the moments")
    return render_table(table)


def _matrix_options() -> Iterator[tuple[tuple[str, str], ModelField]]:
    sentences = dict(_sentences(MatrixOptions))
    for name, field in MatrixOptions.model_fields.items():
        yield (name, sentences.get(name, "")), field


def _docstring(file: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8"))) or ""


def describe_file(file: str) -> str:
    """Returns the first sentence of a file."""
    return " ".join(_docstring(file).partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _body(text: str) -> str:
    """Writes the paragraphs of a docstring in Markdown; indented paragraphs are drawings and become blocks of text."""
    written = []
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.strip():
            drawing = all(line.startswith("  ") for line in paragraph.splitlines() if line.strip())
            written.append(f"```text\n{paragraph}\n```\n" if drawing else f"{paragraph.strip()}\n")
    return "\n".join(written)


def _options(kind: type[Scheme]) -> Iterator[tuple[str, str, str]]:
    """Yields the name, default and sentence of every option of a scheme."""
    sentences = {name: text for base in reversed(kind.Options.__mro__) for name, text in _sentences(base)}
    for name, field in kind.Options.model_fields.items():
        yield f"`{name}`", _default(field), sentences.get(name, "")


def _sentences(base: type) -> Iterator[tuple[str, str]]:
    """Yields the fields of a class, each with the docstring below it."""
    if not base.__module__.startswith("meshcast."):
        return
    file = ast.parse(Path(inspect.getfile(base)).read_text("utf-8"))
    body = next(node.body for node in ast.walk(file) if isinstance(node, ast.ClassDef) and node.name == base.__name__)
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            yield node.target.id, " ".join(str(below.value.value).split())


def _default(field: ModelField) -> str:
    return "needed" if field.is_required() else f"`{field.default}`"


def _paper(paper: Paper) -> str:
    return f"{paper.title}, {paper.year}, {_link(paper)}."


PLACES = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}


def paper_url(paper: Paper) -> str:
    """Returns the address of a publication, or what stands in its place."""
    kind, _, number = paper.ref.partition(":")
    return PLACES[kind] + number if kind in PLACES else paper.ref


def _link(paper: Paper) -> str:
    kind, _, number = paper.ref.partition(":")
    return f"[{kind} {number}]({paper_url(paper)})" if kind in PLACES else f"<{paper.ref}>"


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), page())
