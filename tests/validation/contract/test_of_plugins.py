"""Plug-ins: files of a folder are read beside ours, code where the user names it alone; planted mistakes are seen."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshcast
from meshcast.experiments.cli.templates import find_template
from meshcast.experiments.planning.planner import find_planner, planner_names
from meshcast.experiments.sweeps.fingerprint import identify_job
from meshcast.hardware import plugins
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.ir import registry
from meshcast.simulator.scheduling.schedule import Action, PipelineShape, Schedule
from meshcast.validation.contract.of_plugins import check_file, check_plugin
from tests.excerpts import run_command

FILES = {
    name: find_template(Path("mine") / name) or ""
    for name in ("schemes/pipeline/forward_first.py", "gpus/x9.yaml", "models/mine-8b.yaml", "programs/mine.py")
}
JOB = {"model": "mine-8b", "cluster": {"gpu": "x9", "gpus": 8}, "plan": {"pp": 2}, "batch": {"global": 32}}


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leaves no plug-in behind, and has none of whoever runs the tests."""
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.setattr(plugins, "_plugins", None)
    monkeypatch.setattr(plugins, "_installed", False)
    monkeypatch.setattr(registry, "_classes", {})
    forget_all()
    yield
    forget_all()


def forget_all() -> None:
    """Forgets what was read of plug-ins."""
    registry._import_schemes.cache_clear()
    plugins._read_beside.cache_clear()
    for forget in plugins._look_ups:
        forget()


def write_plugin(folder: Path, **changed: tuple[str, str, str]) -> Path:
    """Writes the files. changed: the part of a file's name, a regular expression that matches in it, and its
    replacement."""
    for name, text in FILES.items():
        for part, pattern, replacement in changed.values():
            if part in name:
                text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
                assert count, pattern
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


def test_files_of_a_plugin_hold_and_are_read_beside_ours(tmp_path: Path) -> None:
    before = identify_job(JOB, tmp_path)
    rows = check_plugin(write_plugin(tmp_path / "mine"), {})
    assert {row["check"] for row in rows} == {
        *("gpus/x9", "models/mine-8b", "schemes/pipeline/forward-first", "programs/mine")
    }
    assert [row["violations"] for row in rows] == [[]] * 4
    mine = meshcast.simulate({**JOB, "plan": {"pp": 2, "schedule": "forward-first"}})
    ours = {
        **JOB,
        "model": "llama3-8b",
        "cluster": {"gpu": "h100-sxm", "gpus": 8},
        "plan": {"pp": 2, "schedule": "gpipe"},
    }
    assert mine.job.cluster.gpu.name == "x9" and mine.job.model.name == "mine-8b"
    assert mine.step_time == pytest.approx(meshcast.simulate(ours).step_time, rel=0.2)  # its kernels are borrowed
    launch = tmp_path / "launch.yaml"
    sizes = "tensor_parallel_size: 2, micro_batch_size: 1, global_batch_size: 8, sequence_length: 8192"
    launch.write_text(f"mine: {{{sizes}, model: mine-8b}}", "utf-8")
    assert meshcast.load_job(launch, "cluster=dgx-h100:1").plan.mesh["tp"] == 2
    after = identify_job(JOB, tmp_path)
    assert after != before, "what is remembered of a job is of its plug-ins"


MISTAKES = {
    "backward before forward": ("forward_first", r"return forward \+ (\[.*\])", r"return \1 + forward", "wait"),
    "a pass twice": ("forward_first", r"return forward \+", "return forward[:1] + forward +", "twice|once|2 times"),
    "a bubble that is not so": ("forward_first", r"\(shape\.p - 1\) \* setting", "shape.p * setting", "bubble is"),
    "sparse peaks": ("gpus/", r"bf16: \{value: [\d.]+ ", "bf16: {value: 1979 ", "bf16 is faster"),
    "no source": ("gpus/", r"(memory: \{value: .*), source: \"[^\"]*\"", r"\1", "source"),
    "a clock of another board": ("gpus/", r"^(clock: \{value:) \d+", r"\1 1200", "power of two"),
    "another size": ("models/", r"^layers: 32", "layers: 20", "its name says 8 B"),
    "heads that do not divide": ("models/", r"^heads: 32", "heads: 28", "heads"),
    "an unknown key": ("models/", r"^kv_heads:", "kv_head:", "kv_head"),
    "files of others": ("programs/", r"if isinstance.* else Evidence.NONE", "", "it is certain that a launch file of"),
    "another name": ("programs/", r'LaunchFormat\("mine"', 'LaunchFormat("theirs"', "exactly one LaunchFormat"),
    "a key that there is not": ("programs/", r'"plan\.tp"', '"plan.tensor_ranks"', "tensor_ranks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake: str, tmp_path: Path) -> None:
    part, pattern, replacement, seen = MISTAKES[mistake]
    plugins.add_plugin(write_plugin(tmp_path, changed=(part, pattern, replacement)))
    kinds = {"forward_first": "schemes", "gpus/": "gpus", "models/": "models", "programs/": "programs"}
    names = {"schemes": "pipeline/forward-first", "gpus": "x9", "models": "mine-8b", "programs": "mine"}
    problems = check_file(kinds[part], names[kinds[part]])
    assert any(re.search(seen, problem) for problem in problems), problems


def test_code_beside_a_job_is_run_only_for_whoever_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "run"
    write_plugin(tmp_path / "mine", run=(".py", r"\A", f"open({str(trace)!r}, 'w').close()\n"))
    (tmp_path / plugins.FILE).write_text('plugins = ["mine"]', "utf-8")
    assert meshcast.load_job(JOB, base=tmp_path).cluster.gpu.name == "x9"
    with pytest.raises(PlanError, match=r"is code, and only .* names it"):
        meshcast.load_job({**JOB, "plan": {"pp": 2, "schedule": "forward-first"}}, base=tmp_path)
    assert not trace.exists()
    monkeypatch.setattr(plugins, "_plugins", None)
    plugins._read_beside.cache_clear()
    monkeypatch.setenv(plugins.VARIABLE, str(tmp_path / "mine"))
    meshcast.load_job({**JOB, "plan": {"pp": 2, "schedule": "forward-first"}}, base=tmp_path)
    assert trace.exists()


def test_an_installed_package_is_a_plugin_for_names_that_nobody_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_plugin(tmp_path / "their_schemes")
    (package / "__init__.py").touch()
    facts = tmp_path / "their_schemes-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Name: their_schemes\nVersion: 1.0\n", "utf-8")
    (facts / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nany = their_schemes\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    meshcast.load_job({**JOB, "model": "llama3-8b", "cluster": "dgx-h100:1"})
    assert not plugins.list_plugins(), "they are not looked for"
    assert meshcast.load_job(JOB).model.name == "mine-8b"
    sys.modules.pop("their_schemes", None)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    plugins.add_plugin(write_plugin(tmp_path / "one"))
    with pytest.raises(MeshcastError, match=r"one.\w+.[\w-]+.yaml has this name"):
        plugins.add_plugin(write_plugin(tmp_path / "two"))
        meshcast.load_job(JOB)


def test_classes_of_python_code_are_schemes(tmp_path: Path) -> None:
    class AllThenAll(Schedule):
        def order(self, shape: PipelineShape, device: int) -> list[Action]:
            return [Action(device, kind, k) for kind in ("F", "BW") for k in shape.microbatches]

    job = {**JOB, "model": "llama3-8b", "cluster": "dgx-h100:1"}
    mine = meshcast.simulate({**job, "plan": {"pp": 2, "schedule": "all-then-all"}}, schemes=[AllThenAll])
    assert mine.step_time == meshcast.simulate({**job, "plan": {"pp": 2, "schedule": "gpipe"}}).step_time
    with pytest.raises(PlanError, match="another scheme has this name"):
        meshcast.simulate(job, schemes=[type("GPipe", (AllThenAll,), {"name": "gpipe"})])


def test_a_planner_of_a_plugin(tmp_path: Path) -> None:
    text = (Path(sys.modules[find_planner("galvatron").__module__].__file__ or "")).read_text("utf-8")
    (tmp_path / "planners").mkdir()
    (tmp_path / "planners" / "my_planner.py").write_text(text, "utf-8")
    plugins.add_plugin(tmp_path)
    assert "my-planner" in planner_names() and find_planner("my-planner").name == "my-planner"


def test_the_first_commands_of_the_page_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "check --plugins mine" in run_command("meshcast init mine/schemes/pipeline/my_schedule.py")
    assert "schemes/pipeline/my-schedule" in run_command("meshcast check --plugins mine")
