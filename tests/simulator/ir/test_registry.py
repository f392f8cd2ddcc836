"""Schemes are found by name: one class each wherever a job names it, and a file with a mistake is one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir import registry
from meshcast.simulator.ir.registry import describe_scheme, find_scheme, scheme_names


def test_a_scheme_is_one_class_wherever_it_is_named() -> None:
    assert find_scheme("pipeline/gpipe", "plan.schedule") is find_scheme("pipeline/gpipe", "plan.schemes[0]")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\nclass Eager(Schedule):\n    pass\n", r"broken\.py:2: .* NameError: name 'Schedule' is not defined"),
        ("def order(:\n    pass\n", r"broken\.py:1: .* SyntaxError"),
        ("x = 1\n", "must define exactly one scheme, it defines 0"),
    ],
    ids=["a name", "syntax", "no scheme"],
)
def test_a_file_with_a_mistake_is_named(code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "broken.py").write_text(code, "utf-8")
    monkeypatch.setattr(registry, "SCHEMES", tmp_path)
    registry._has_file.cache_clear()
    with pytest.raises(PlanError, match=words):
        find_scheme("pipeline/broken")
    registry._has_file.cache_clear()


def test_every_scheme_says_its_idea_in_a_sentence() -> None:
    assert all(len(describe_scheme(name).split()) > 3 for name in scheme_names())
