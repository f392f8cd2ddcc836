"""Names of a user in files that are written for other programs: they stay data, whatever they hold."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.simulator.formats.launch.programs.registry import EXPORTS
from meshcast.simulator.formats.launch.quoting import quote_python, quote_shell, quote_toml, quote_yaml
from meshcast.simulator.formats.launch.render import render_job
from meshcast.simulator.loading.load import load_job, read_launch_job
from tests.launch_files import RUNS, export
from tests.payloads import PAYLOADS
from tests.simulator.formats.launch.test_shell import arguments

WORDS = [*(text.replace("\0", "") for text in PAYLOADS.values()), "", "~", "*", "{a,b}", "a=b", "on", "é 中 🙂\x1b"]
EVIL = "c\ntouch PWNED\n#'\"$(touch PWNED)`touch PWNED`\u2028PWNED: 1\u0085PWNED: 1\r\tEND\x1b\u202e"
"""A name that has something for every language."""

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="this machine has no bash")


def is_one_line(text: str) -> bool:
    return len(text.splitlines()) <= 1 and "\x1b" not in text and "\u202e" not in text


def test_every_language_reads_the_quoted_words_back() -> None:
    by_word = {word: word for word in WORDS}
    assert yaml.safe_load(quote_yaml(by_word)) == by_word and yaml.safe_load(quote_yaml(WORDS)) == WORDS
    assert tomllib.loads(f"words = {quote_toml(WORDS)}") == {"words": WORDS}
    assert ast.literal_eval(quote_python(WORDS)) == WORDS
    shell = " ".join(f"--{number} {quote_shell(word)}" for number, word in enumerate(WORDS) if word)
    read = {str(number): word for number, word in enumerate(WORDS) if word}
    assert {name: value for name, value in arguments(f"python a.py {shell}").items() if value != read[name]} == {}
    for quoted in (quote_yaml(by_word), quote_toml(WORDS), quote_python(WORDS), shell):
        assert is_one_line(quoted)


@needs_bash
def test_bash_reads_the_quoted_words_back() -> None:
    found = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(map(quote_shell, WORDS))}"], capture_output=True, check=True
    )
    assert found.stdout.decode().split("\0")[:-1] == WORDS


# ------------------------------------------------------------------------------------------- exports


def export_cluster(folder: Path, name: str, form: str, framework: str | dict[str, str]) -> str:
    """Returns the text of a job on a cluster in a file of this name."""
    (folder / f"{name}.yaml").write_text("{gpu: h100-sxm, gpus: 8}", "utf-8")
    plan = {"dp": 8, "zero": 1}
    job = load_job({"model": "llama3-8b", "cluster": f"{name}.yaml", "framework": framework, "plan": plan}, base=folder)
    return export(job, form, RUNS).text


def parse(text: str, form: str) -> Any:
    """What a file means to the program that reads it."""
    if form == "deepspeed":
        return {name: value for name, value in json.loads(text).items() if name != "_meshcast"}
    if text.startswith("#!/bin/bash"):
        return [line for line in text.split("\n") if not line.startswith("#")]
    if form == "torchtitan":
        return ast.dump(ast.parse(text)) if "def meshcast_job" in text else tomllib.loads(text)
    return yaml.safe_load(text)


CASES: list[tuple[str, Any]] = [(form, "megatron-core") for form in EXPORTS]
CASES += [("torchtitan", {"name": "torchtitan", "release": "2025-12"}), ("accelerate", "deepspeed")]


@pytest.mark.parametrize(("form", "framework"), CASES)
def test_the_name_of_a_cluster_changes_nothing_of_an_export(tmp_path: Path, form: str, framework: Any) -> None:
    evil, plain = (export_cluster(tmp_path, name, form, framework) for name in (EVIL, "plain"))
    assert parse(evil, form) == parse(plain, form)
    assert "touch PWNED" in evil and "\x1b" not in evil and "\u2028" not in evil


@needs_bash
@pytest.mark.parametrize("form", ["megatron", "accelerate"])
def test_an_exported_script_starts_its_program_alone(tmp_path: Path, form: str) -> None:
    """In a folder of its own, where every command is a stub that records its words."""
    for folder in ("job", "bin", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "job.sh").write_text(export_cluster(tmp_path / "job", EVIL, form, "deepspeed"), "utf-8")
    for name in ("torchrun", "accelerate", "touch"):
        stub = tmp_path / "bin" / name
        stub.write_text(f'#!/bin/sh\necho "{name} $#" >> "{tmp_path}/started"\n', "utf-8")
        stub.chmod(0o755)
    (tmp_path / "bin" / "cat").symlink_to(shutil.which("cat") or "cat")
    bash, path = shutil.which("bash") or "bash", {**os.environ, "PATH": str(tmp_path / "bin")}
    found = subprocess.run([bash, tmp_path / "job.sh"], cwd=tmp_path / "run", env=path, capture_output=True, text=True)
    assert found.returncode == 0 and found.stderr == "" == found.stdout
    (started,) = (tmp_path / "started").read_text("utf-8").splitlines()
    assert started.startswith(("torchrun ", "accelerate "))
    files = {"megatron": [], "accelerate": ["accelerate.yaml", "deepspeed.json"]}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files[form]


@pytest.mark.parametrize("release", [{}, {"release": "2025-12"}])
def test_the_path_of_a_schedule_is_one_string_of_torchtitan(tmp_path: Path, release: dict[str, str]) -> None:
    (tmp_path / f"{EVIL}.csv").write_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n", "utf-8")
    plan = {"pp": 2, "dp": 4, "schedule": f"{EVIL}.csv"}
    described = {"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 8}, "plan": plan}
    described |= {"framework": {"name": "torchtitan", **release}, "batch": {"global": 8, "micro": 1}}
    text = export(load_job(described, base=tmp_path), "torchtitan", RUNS).text
    if release:
        assert tomllib.loads(text)["parallelism"]["pipeline_parallel_schedule_csv"] == str(tmp_path / f"{EVIL}.csv")
    else:
        constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        assert str(tmp_path / f"{EVIL}.csv") in constants


# ------------------------------------------------------------------------------------------- imports


def test_an_imported_job_is_the_job_that_its_text_says(tmp_path: Path) -> None:
    """Every payload is the name and the value of a setting that nothing knows."""
    unknown = {f"{number} {text}": text for number, text in enumerate(WORDS)}
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "encoder_seq_length": 128, **unknown}
    model |= {"vocab_size": 1024, "micro_batch_size": 1, "global_batch_size": 8, "tokenizer": {"type": EVIL}}
    path = tmp_path / f"{EVIL}.yaml"
    path.write_text(yaml.safe_dump({"name": EVIL, "trainer": {"num_nodes": 1, "devices": 8}, "model": model}), "utf-8")
    cluster = [f"cluster={json.dumps({'gpu': 'h100-sxm', 'gpus': 8})}"]
    imported = read_launch_job(path, cluster, "nemo").launch
    assert imported is not None
    text = render_job(imported)
    assert yaml.safe_load(text) == imported.job and "PWNED" in text
    assert "\x1b" not in text and "\u2028" not in text
