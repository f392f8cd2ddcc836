"""Reads YAML 1.2 and JSON files as plain data; every fault of a file is a single error with its line. Writes data as
YAML.

JSON text is read as JSON: libyaml refuses pairs of surrogates, tabs between values and keys of more than 1,024 letters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from meshcast.hardware.errors import CatalogError, MeshcastError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

try:
    from yaml import CSafeLoader as SafeLoader  # libyaml, many times faster
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

MAX_NODES = 600_000
"""Most keys and values of a document, as written and with its aliases expanded (``*a`` of ``*b`` of ``*c`` grows
without bound). Each takes 20 us with the search for a line."""

MAX_DEPTH = 100
"""Deepest nesting that is read: libyaml ends the process when its stack overflows."""

MAX_WORDS, LONGEST_WORD = 4096, 30
"""Number of words whose tags are kept, and letters of the longest."""

SURROGATES = re.compile(r"(?i)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
"""A character of JSON beyond U+FFFF."""

Place = tuple[int | str, ...]
"""Keys and indices from the root of a document to a field."""


class Document(NamedTuple):
    """A YAML document.

    Attributes:
        data: plain data.
        text: of the file, to find lines in.
        where: its name in errors.
    """

    data: Any
    text: str
    where: str


class GivenTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice."""


class TooManyNodes(yaml.YAMLError):
    """A document has more than `MAX_NODES` keys and values."""


class Loader(SafeLoader):
    """PyYAML's safe loader, for YAML 1.2.

    Words without quotes are what the core schema of YAML 1.2 says: ``yes``, ``off`` and ``1:30`` are text, ``1e3`` is a
    number, ``2026-11-21`` is text. Beyond it ``1_000``, ``0b11`` and the merging of ``<<`` are understood.
    """

    yaml_implicit_resolvers = {  # without numbers, truth and dates as YAML 1.1 had them
        first: [resolver for resolver in resolvers if resolver[0].endswith((":null", ":merge"))]
        for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # what JSON has, too: no days, bytes, sets or lists of pairs
        tag: construct
        for tag, construct in SafeLoader.yaml_constructors.items()
        if not (tag or "").endswith((":timestamp", ":binary", ":set", ":omap", ":pairs"))
    }
    depth = 0
    node_count = 0
    known_tags: dict[str, str] = {}
    """Tags of words without quotes, most of which occur again and again; of no more than `MAX_WORDS`."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        """Returns the tag of a node that states none."""
        if kind is not yaml.ScalarNode or not implicit[0]:
            return super().resolve(kind, value, implicit)
        tag = self.known_tags.get(value)
        if tag is None:
            tag = super().resolve(kind, value, implicit)
            if len(self.known_tags) < MAX_WORDS and len(value) <= LONGEST_WORD:
                self.known_tags[value] = tag
        return tag

    def descend_resolver(self, *_: Any) -> None:
        """Called before each node that is composed."""
        self.depth += 1
        self.node_count += 1
        if self.node_count > MAX_NODES:
            raise TooManyNodes
        if self.depth > MAX_DEPTH:
            raise RecursionError

    def ascend_resolver(self) -> None:
        """Called after each node that was composed."""
        self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Adds the place to errors of values (an invalid number, !!int before a word)."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as e:
            problem = str(e).partition(" for ")[0]  # Python's advice on long numbers follows
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 0 if text.lstrip("+-")[1:2] in ("b", "o", "x") else 10)  # 012 is twelve

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called before each mapping that is constructed: refuses a repeated key and merges ``<<``."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self._key(key_node)
            if key in seen:
                raise GivenTwice(problem=f"the key {str(key)!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        if "<<" in seen:
            super().flatten_mapping(node)
            # Each key once, or mappings merged into each other would grow without bound.
            node.value = list({self._key(pair[0]): pair for pair in node.value}.values())

    def _key(self, node: yaml.Node) -> Any:
        if node.tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge") and isinstance(node.value, str):
            return node.value
        key = self.construct_object(node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.MarkedYAMLError(problem="found unhashable key", problem_mark=node.start_mark)
        if isinstance(key, float) and not math.isfinite(key):
            raise yaml.MarkedYAMLError(problem="a key that is no finite number", problem_mark=node.start_mark)
        return key


CORE = (
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?(?:[0-9][0-9_]*|0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+)"),
    ("float", r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, with quotes around texts that are no text without them in YAML 1.1 or 1.2, such as ``1e3``
    or ``yes``: whoever reads the file."""


for _tag, _form in CORE:
    for _class in (Loader, Dumper):
        _pattern = re.compile(rf"(?:{_form})\Z")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list("tTfF-+.0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def to_yaml(data: object, width: int = 80, default_flow_style: bool | None = False, allow_unicode: bool = False) -> str:
    """Returns data as YAML, its keys in their order, which `read_yaml` and readers of YAML 1.1 read as the same data.

    width, default_flow_style, allow_unicode: as of ``yaml.dump``.
    """
    text: str = yaml.dump(
        data,
        Dumper=Dumper,
        sort_keys=False,
        width=width,
        default_flow_style=default_flow_style,
        allow_unicode=allow_unicode,
    )
    return text


TOO_DEEP = (f"nested too deeply, by more than {MAX_DEPTH} levels", "Simplify the file")
"""Rule and remedy."""

PROBLEMS = {
    "mapping values are not allowed": "a second `: ` in one line, or a line indented deeper than its key allows",
    "did not find expected key": "a line that is indented unlike its neighbours, or no key where one belongs",
    "could not find expected ':'": "a key without its `:`, or a quote that is not closed",
    "did not find expected ',' or '}'": "a `,` or the closing `}` is missing",
    "did not find expected ',' or ']'": "a `,` or the closing `]` is missing",
    "did not find expected '-' indicator": "an item of a list without its `- `, or indented unlike the others",
    "did not find expected node content": "a value is missing",
    "did not find expected alphabetic": "a word that begins with & or * stands for another: put it in quotes",
    "did not find expected <document start>": "more follows after the end of the document",
    "did not find expected whitespace": "a blank is missing",
    "block sequence entries are not allowed": "a list cannot begin here",
    "block mapping entries are not allowed": "a key cannot begin here",
    "cannot start any token": "a character that begins no value, such as a tab, %, @ or `: put the word in quotes",
    "unexpected end of stream": "a quote is not closed",
    "non-alphabetical character": "a line that begins with %: put the word in quotes",
    "directive": "a line that begins with %: put the word in quotes",
    "undefined alias": "a word that begins with * stands for one marked with &, which is missing: put it in quotes",
    "second occurrence": "the anchor is given twice",
    "unhashable key": "a key is a list or a mapping",
    "control characters are not allowed": "a control character, which no text file has",
    "could not determine a constructor": "a word that begins with !: put it in quotes",
}
"""Plain words for problems, by a part of the parser's."""


def _explain_problem(text: str, e: yaml.YAMLError) -> tuple[str, int]:
    """Returns the rule that a file breaks, and the line (from 1); 0 where the parser names none."""
    problem = str(getattr(e, "problem", None) or e).splitlines()[0]
    plain = next((words for part, words in PROBLEMS.items() if part in problem), problem)
    if isinstance(e, yaml.reader.ReaderError):
        at = next((i for i, letter in enumerate(text) if yaml.reader.Reader.NON_PRINTABLE.match(letter)), -1)
        return f"not valid YAML 1.2 ({plain})", text.count("\n", 0, at) + 1 if at >= 0 else 0
    mark = getattr(e, "problem_mark", None)
    return f"not valid YAML 1.2 ({plain})", mark.line + 1 if mark else 0


def read_yaml(source: str | Path | Traversable, where: str = "", error: type[MeshcastError] = CatalogError) -> Document:
    """Returns the YAML 1.2 document in a file (`source` is a path) or in text (`source` is a str).

    Duplicate keys, tags that would build objects, several documents, binary files, and whatever else stops
    reading raise an `error` naming `where` (by default the path) and the line.
    """
    where = where or ("text" if isinstance(source, str) else str(source))
    text = source if isinstance(source, str) else _read_text(source, where, error)
    with _explain_errors(text, where, error):
        data = _load(text)
    _refuse_expansion(data, text, where, error)
    return Document(data, text, where)


def _load(text: str) -> object:
    """Returns the data of JSON text, or else of YAML text, whose reader finds the line of what is wrong in either."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = parse_json(text, most=MAX_NODES)
            if not _too_large(data):
                return data
        except Unreadable:
            pass
    return yaml.load(text, Loader)


def read_yaml_documents(text: str, where: str, error: type[MeshcastError] = CatalogError) -> list[object]:
    """Returns the data of all YAML 1.2 documents in a text. Raises an error as `read_yaml`."""
    with _explain_errors(text, where, error):
        documents = list(yaml.load_all(text, Loader))
    _refuse_expansion(documents, text, where, error)
    return documents


@contextmanager
def _explain_errors(text: str, where: str, error: type[MeshcastError]) -> Iterator[None]:
    """Raises an error with the line for whatever the parser raises."""
    try:
        yield
    except TooManyNodes:
        rule = f"more than {MAX_NODES:,} keys and values, which is the most that is read"
        raise error(where, rule, DESCRIPTION.remedy) from None
    except yaml.YAMLError as e:
        if "maximum nesting depth" in str(e):  # of libyaml
            raise error(where, *TOO_DEEP) from None
        rule, line = _explain_problem(text, e)
        where += f":{line}" if line else ""
        if isinstance(e, GivenTwice):
            raise error(where, str(e.problem), "Keep one of the two") from None
        remedy = "Correct this line or the one above it; `key: value`, spaces for indentation"
        raise error(where, rule, remedy) from None
    except RecursionError:
        raise error(where, *TOO_DEEP) from None
    except ValueError as e:  # half a character
        raise error(where, f"not valid YAML 1.2 ({e})", "Save the file as UTF-8") from None


def _refuse_expansion(data: object, text: str, where: str, error: type[MeshcastError]) -> None:
    """Raises an error for aliases that would be copied without bound."""
    if "&" in text and "*" in text and _too_large(data):
        rule = f"its aliases write out to more than {MAX_NODES:,} items"
        raise error(where, rule, "Write the values out instead of using & and *")


def _name_neighbours(path: Path) -> str:
    """Returns what to write for a file that is not there: what its folder holds."""
    names = sorted(neighbour.name for neighbour in path.parent.glob("*.y*ml"))[:4] if path.parent.is_dir() else []
    if not names:
        return "Name a YAML file that exists"
    more = ", ..." if len(names) > 3 else ""
    folder = "this folder" if path.parent == Path() else str(path.parent)
    return f"Name a YAML file that exists; {folder} has {', '.join(names[:3])}{more}"


def _read_text(path: Path | Traversable, where: str, error: type[MeshcastError]) -> str:
    try:
        if not isinstance(path, Path):  # of an installed package, perhaps in a zip file
            return path.read_text("utf-8")
        if not path.exists():
            raise Unreadable("no such file", _name_neighbours(path))
        return read_text(path, DESCRIPTION)
    except Unreadable as e:
        raise e.error(error, where, "Name a YAML file, saved as UTF-8") from None
    except (OSError, ValueError) as e:  # exists() of an overlong name, or of a name with a null byte
        reason = getattr(e, "strerror", None) or str(e)
        raise error(where, f"cannot be read ({reason})", "Name a readable YAML file") from None


def _too_large(data: Any) -> bool:
    """Returns whether data has more than `MAX_NODES` values, or more than `MAX_DEPTH` levels."""
    stack, seen = [(data, 1)], 0
    while stack:
        item, depth = stack.pop()
        seen += 1
        if seen > MAX_NODES or depth > MAX_DEPTH:
            return True
        if isinstance(item, dict | list):
            stack.extend((inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item))
    return False


@lru_cache(maxsize=4)
def _compose(text: str) -> yaml.Node | None:
    """Returns the nodes of a text: the lines of many fields are asked for in turn."""
    if text.lstrip()[:1] in ("{", "["):  # what libyaml refuses in JSON
        text = SURROGATES.sub("?", text.replace("\t", " "))
    node: yaml.Node | None = yaml.compose(text, Loader)
    return node


@lru_cache(maxsize=1024)
def _items_by_key(node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Returns key and value nodes of a mapping, by the text of the key; the first of equal keys counts."""
    return {str(key.value): (key, value) for key, value in reversed(node.value)}


def line_of(text: str, place: Place) -> int:
    """Returns the line (from 1) of the field at `place` in YAML `text`, or of its innermost parent that exists."""
    try:
        node = _compose(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return 1
    line = 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            item = _items_by_key(node).get(str(part))
            if item is None:
                break
            key, node = item
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
