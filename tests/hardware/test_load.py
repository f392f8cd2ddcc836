"""Reading YAML: values of words, and one clear error for every kind of invalid YAML."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.documents import document
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.errors import CatalogError
from meshcast.hardware.load import MAX_DEPTH, line_of, load, read_yaml
from tests.draws import drawn
from tests.payloads import PAYLOADS

ROOT = Path(__file__).resolve().parents[2]

TEXT = (
    *("yes", "no", "on", "off", "y", "n", "Yes", "NO", "nULL", "tRUE", "inf", "nan", ".INf", "1f1b", "80GiB", "80 GiB"),
    *("1:30", "190:20:30", "1:30.5", "12:00:00", "1.2.3", "2026-1-2", "2026-11", "0X1F", "_1", "._1", "+", "e3", "1e"),
    *("1e3.5", ".", "=", "dgx-h100:64", "https://x.org/a,b", "a#b", "1,000", "words, and words"),
)

WORDS = [
    *((word, word) for word in TEXT),
    *((word, None) for word in ("null", "Null", "NULL", "~", "")),
    *((word, True) for word in ("true", "True", "TRUE")),
    *((word, False) for word in ("false", "False", "FALSE")),
    *(("1", 1), ("-1", -1), ("+1", 1), ("0", 0), ("012", 12), ("08", 8), ("0o17", 15), ("0x1F", 31), ("-0x1f", -31)),
    *(("0b11", 3), ("1_000", 1000), ("99999999999999999999", 99999999999999999999)),
    *(("1e3", 1000.0), ("1E+3", 1000.0), ("1.", 1.0), (".5", 0.5), ("-.5", -0.5), (".5e3", 500.0), ("1.5", 1.5)),
    *(("40.0e6", 4e7), ("-2.5e-3", -0.0025), ("1e12", 1e12), ("1_0.5", 10.5), ("0.0", 0.0)),
    *((".inf", float("inf")), ("-.Inf", float("-inf"))),
    ("2026-11-21", "2026-11-21"),
    ("2026-13-45 10:00:00", "2026-13-45 10:00:00"),
    *(("'1'", "1"), ('"true"', "true"), ("!!str 1", "1")),
]  # fmt: skip


@pytest.mark.parametrize(("word", "value"), WORDS)
def test_values_of_yaml_words(word: str, value: object) -> None:
    assert repr(read_yaml(word).data) == repr(value)
    assert repr(read_yaml(f"a: {word} # why").data) == repr({"a": value})


@pytest.mark.parametrize("text", [*(word for word, _ in WORDS), *PAYLOADS.values()])
def test_a_text_that_is_written_is_read_as_that_text(text: str) -> None:
    written = to_yaml({text: [text]})
    assert read_yaml(written).data == yaml.safe_load(written) == {text: [text]}


@pytest.mark.parametrize(("text", "data"), [
    ("a: 1\nb:\nc:\n  d: [two, 3.0, []]\n  e: {}\n", {"a": 1, "b": None, "c": {"d": ["two", 3.0, []], "e": {}}}),
    ('a: {b: 80 GiB, e: "x # y: {z}"} # why\n# and\n', {"a": {"b": "80 GiB", "e": "x # y: {z}"}}),
    ("a: >-\n  x\n  y\nb: |\n  x\n", {"a": "x y", "b": "x\n"}),
    ('{\n\t"a": 1,\n\t"b": [true, null, 1.5], "c": "\\u00e9\\/"}\n', {"a": 1, "b": [True, None, 1.5], "c": "é/"}),
    ("- &x {b: 1, c: 2}\n- *x\n- {<<: *x, b: 3}\n", [{"b": 1, "c": 2}, {"b": 1, "c": 2}, {"b": 3, "c": 2}]),
    ("a: {b: &x {<<: {c: 1}, c: 2}}\nd: {<<: [*x, {e: 3}], c: 4}\n", {"a": {"b": {"c": 2}}, "d": {"e": 3, "c": 4}}),
    *(("", None), ("- 1\n- é\n", [1, "é"]), ("\ufeffa: 1\r\nb: 2\r\n", {"a": 1, "b": 2}), ("1: a\n", {1: "a"})),
])  # fmt: skip
def test_contents_of_documents(text: str, data: object) -> None:
    assert read_yaml(text).data == data


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", '{"a":', "[{? "])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000, 1_000_000])
def test_deep_nesting_is_one_clear_error(opening: str, depth: int) -> None:
    with pytest.raises(CatalogError, match=r"^text: nested too deeply, by more than \d+ levels\. Simplify the file$"):
        read_yaml(opening * depth)
    assert line_of(opening * depth, ("a",)) == 1


def test_values_are_counted_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_NODES", 4)
    assert read_yaml("{a: [1]}").data == {"a": [1]}  # two mappings or lists, a key and a value
    with pytest.raises(CatalogError, match=r"^text: more than 4 keys and values, which is the most that is read"):
        read_yaml("{a: [1, 2]}")


def test_a_name_that_no_file_can_have_is_told() -> None:
    with pytest.raises(CatalogError, match=r"cannot be read \(File name too long\)"):
        read_yaml(Path("x" * 5000 + ".yaml"))


def test_nesting_below_the_limit_is_read() -> None:
    data = read_yaml("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1)).data
    for _ in range(MAX_DEPTH - 1):
        (data,) = data
    assert data == 1


def test_mappings_merged_into_each_other_do_not_grow() -> None:
    lines = ["a0: &a0 {x0: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}], x{i}: 1}}" for i in range(1, 60)]
    begin = time.process_time()
    assert len(read_yaml("\n".join(lines)).data["a59"]) == 60
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("every", drawn([4, 1], keep=2))
@pytest.mark.slow
def test_without_libyaml_the_same_is_read(every: int) -> None:
    """PyYAML may have been built without libyaml; its own parser is slower and reads all shipped files the same."""
    code = (
        "import sys; from pathlib import Path\n"
        "if 'slow' in sys.argv: sys.modules['yaml._yaml'] = None\n"
        "from meshcast.hardware.load import Loader, read_yaml\n"
        f"for path in sorted(Path().rglob('*/*.yaml'))[::{every}]:\n"
        "    if path.parts[0] in ('hardware', 'simulator', 'examples'): print(path, read_yaml(path).data)\n"
        "for text in ('['*10**5, 'a: 1\\na: 2', 'a: !t x', 'a: 1\\n---\\nb: 2'):\n"
        "    try: print(read_yaml(text))\n"
        "    except Exception as refused: print(refused)\n"
        "print(hasattr(Loader, 'scan_to_next_token'), file=sys.stderr)\n"
    )
    quick, slow = (
        subprocess.run([sys.executable, "-c", code, kind], capture_output=True, text=True, cwd=ROOT, check=True)
        for kind in ("quick", "slow")
    )
    assert slow.stderr.strip() == "True"
    assert quick.stdout == slow.stdout and quick.stdout.count("\n") > 40


def test_a_day_is_text() -> None:
    """A job is what JSON can hold, too: answers repeat it. Fields that take a day read it."""
    assert read_yaml("checked: 2026-11-21\n").data == {"checked": "2026-11-21"}
    assert load("gpus", "h100-sxm").memory.checked == "2026-11-21"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
"""Of JSON."""


@given(st.lists(VALUES) | st.dictionaries(st.text(), VALUES), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_json_is_read_as_json(data: object, indent: int | str | None, escapes: bool) -> None:
    text = json.dumps(data, ensure_ascii=escapes, indent=indent)
    assert read_yaml(text).data == json.loads(text) == data


def test_json_that_yaml_does_not_have() -> None:
    """Pairs of surrogates, a long key, a colon on a line of its own; the lines of fields are right all the same."""
    text = json.dumps({"a": "\U0001f469", "b": {"c": 1}}, indent="\t")
    assert "\\ud83d" in text and read_yaml(text).data["a"] == "\U0001f469"
    assert line_of(text, ("b", "c")) == 4
    long = "k" * 2_000
    assert read_yaml(f'{{"{long}"\n:\n1}}').data == {long: 1}
    with pytest.raises(CatalogError, match=r"^text: not valid YAML 1\.2 \("):
        read_yaml("a: \ud800\n")
