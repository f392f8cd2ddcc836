"""Lists the systems that can be forecast, each with its file, its idea, its tests, and how its claims are judged.

A system is a scheme, a planner, an optimizer, a way to assign samples, a policy of runs that lose nodes, or a field of
a job. Its claims are those of the files in `validation/claims/` of its paper; of systems that share a paper those whose
jobs use it; where its paper has no claims, those of other papers whose jobs use it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.experiments.planning.planner import find_planner, planner_names
from meshcast.experiments.views.table import Table
from meshcast.simulator.ir.registry import describe_scheme, find_scheme, scheme_names
from meshcast.simulator.ir.scheme import Paper
from meshcast.validation.claims.claim_file import Claim, ClaimFile, read_claims
from tools.pages.schemes import CARDS, ELSEWHERE, describe_file, paper_url

ROOT = Path(__file__).resolve().parents[2]

KEYS = {
    **{"use": "", "schedule": "", "planner": "planner ", "elastic": "elastic ", "kind": "kind ", "join": "join "},
    **{"optimizer": "optimizer ", "name": "optimizer "},
}
"""Keys of a job or plan that name a system, and what stands before the name in `System.words`."""

RUNS = {
    "Varuna, morphing of jobs": ("arXiv:2111.04007", "elastic fewer-replicas"),
    "Oobleck": ("arXiv:2309.08125", "elastic templates"),
    "ReCycle": ("arXiv:2405.14009", "elastic reroute"),
    "Bamboo": ("arXiv:2204.12013", "elastic redundant"),
    "torchft": ("https://github.com/meta-pytorch/torchft", "elastic quorum"),
    "Gemini, checkpoints": ("doi:10.1145/3600006.3613145", "kind in-memory"),
    "Just-in-time checkpoints": ("EuroSys 2024", "kind just-in-time"),
}
"""Systems for runs that lose nodes: publication, and the word of the job."""


class System(NamedTuple):
    """A system of the list.

    name: as a job or a command names it, where that does.
    file: its code.
    idea: a sentence.
    urls: of its publications.
    words: that a job has which uses it.
    """

    name: str
    file: str
    idea: str
    urls: tuple[str, ...]
    words: tuple[str, ...]


def systems() -> Iterator[System]:
    """Yields all systems."""
    for use in scheme_names():
        family, name = use.split("/")
        file = f"simulator/schemes/{family}/{name.replace('-', '_')}.py"
        yield System(use, file, describe_scheme(use), (paper_url(find_scheme(use).paper),), (use,))
    for name in planner_names():
        file = f"experiments/planning/planners/{name.replace('-', '_')}.py"
        url = paper_url(find_planner(name).paper)
        yield System(f"planner {name}", file, describe_file(file), (url,), (f"planner {name}",))
    for card in CARDS:
        if card.word:
            yield System(card.title, card.files[0], describe_file(card.files[0]), card.urls, (card.word,))
    for name, (ref, word) in RUNS.items():
        file = f"simulator/runs/{'checkpoints' if 'checkpoints' in name else 'elastic'}.py"
        idea = _sentence_of(file, word.partition(" ")[2])
        yield System(name, file, idea, (paper_url(Paper(ref, name, 0)),), (word,))
    for name, ref, where in ELSEWHERE:
        yield System(name, "", where, (paper_url(Paper(ref, name, 0)),), ())


def _sentence_of(file: str, word: str) -> str:
    """Returns what the docstring of a file says behind ``word:``, to the end of the sentence."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8"))) or ""
    return " ".join(text.partition(f"\n{word}: ")[2].split()).partition(". ")[0].partition(" (")[0]


# ------------------------------------------------------------------------------------------ claims


@cache
def _used_words() -> Mapping[str, frozenset[str]]:
    """Returns the words of the jobs, plans and cases of every claim, by its id."""
    used = {}
    for file in read_claims():
        for claim in file.entries:
            used[claim.id] = frozenset() if claim.cannot_judge else frozenset(_words_of(file, claim))
    return used


def _words_of(file: ClaimFile, claim: Claim) -> Iterator[str]:
    for jobs in file.expand(claim, next(file.alternatives(claim))).values():
        for job in jobs:
            yield from _strings(job)


def _strings(value: Any) -> Iterator[str]:
    """Yields what a job names: ``planner alpa``, ``elastic redundant``, and names of schemes."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(each, str):
                yield from _strings(each)
            elif key in KEYS:
                yield f"pipeline/{each}" if key == "schedule" else f"{KEYS[key]}{each}"


def claims_of(system: System, rows: Sequence[dict[str, Any]], sharing: int) -> list[dict[str, Any]]:
    """Returns the judgements of a system's claims. sharing: number of systems with its paper."""
    used = _used_words()
    using = [row for row in rows if used[row["id"]] & {*system.words}]
    own = [row for row in rows if row["reference"] in system.urls]
    shared = [row for row in own if row in using]
    return (shared if sharing > 1 and shared else own) or using


def word_verdicts(rows: Sequence[dict[str, Any]]) -> str:
    """Returns how many claims hold, and the ids of those that do not."""
    if not rows:
        return "no claim"
    holding = sum(row["status"] == "holds" for row in rows)
    others = Counter[str]()
    ids: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "holds":
            others[row["status"]] += 1
            ids.setdefault(row["status"], []).append(f"`{row['id']}`")
    listed = "; ".join(
        f"{status.replace('-', ' ')}: {', '.join(names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for status, names in ids.items()
    )
    return f"{holding} of {len(rows)} hold" + (f"; {listed}" if listed else "")


# ------------------------------------------------------------------------------------------ tests


@cache
def _test_texts() -> Mapping[str, str]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def tests_of(system: System) -> str:
    """Returns the golden job of a system, and the file of tests that names it most often."""
    golden = f"tests/golden/{system.name.replace('/', '-')}.yaml"
    found = [golden] if (ROOT / golden).exists() else []
    words = [word.rpartition(" ")[2] for word in system.words]
    named = Counter({path: sum(text.count(f'"{word}"') for word in words) for path, text in _test_texts().items()})
    found += [path for path, count in named.most_common(1) if count]
    return ", ".join(f"`{path}`" for path in found)


def tabulate_systems(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the list. rows: of ``validate claims``."""
    every = list(systems())
    sharing = Counter(url for system in every for url in system.urls)
    table = Table("system", "file", "idea", "tests", "claims")
    for system in every:
        most = max((sharing[url] for url in system.urls), default=1)
        file = f"`{system.file}`" if system.file else ""
        verdicts = word_verdicts(claims_of(system, rows, most))
        table.add(system.name, file, system.idea, tests_of(system), verdicts)
    return table
