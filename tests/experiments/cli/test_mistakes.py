"""Common mistakes on the command line: one line with place, value and a remedy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.hardware.documents.document import MAX_NODES
from tests.experiments.cli.samples import JOB, ROOT, unprivileged

LONG = """\
model: llama3-8b
cluster: dgx-h100:2
batch: {global: 16}
plan:
  mesh: {pp: 2, dp: 2, tp: 4}
  schemes:
    - {use: pipeline/1f1b, over: pp}
    - {use: data/zero-1, over: dp}
    - {use: tensor/megatron-sp, over: tp}
"""

CONFIG = (ROOT / "examples" / "llama3-70b" / "config.json").read_text("utf-8")

MODEL, CLUSTER, PLAN, BATCH = "llama3-8b", "dgx-h100:2", "{tp: 4, pp: 2}", "{global: 16, micro: 1, sequence: 4096}"
MIXTRAL = "preset: mixtral-8x7b, moe"
HOP = "{node: dgx-h100, nodes: 2, fabric: {hop_latency: {value: 1 us, kind: assumed, source: a}}}"

SHORT: list[tuple[str, str, str]] = [
    # (text of the short job, its replacement, words of the message)
    ("tp: 4", "tp: four", ":4 plan.tp is 'four': must be a whole number"),
    ("tp: 4", "tp: 2.5", ":4 plan.tp is 2.5: must be a whole number"),
    ("tp: 4", "tp: {a: 4}", ":4 plan.tp is {'a': 4}: must be a whole number"),
    ("tp: 4", "tp: [4, x]", ":4 plan.tp is 'x': its values are whole numbers. Correct them, or write auto"),
    ("tp: 4", "tp: []", ":4 plan.tp is []: there are no values. Give one at least, or write auto"),
    ("tp: 4", "tp: auto, dp: 2", ":4 plan.dp is 2: a search takes a plan in short form, without dp"),
    ("tp: 4", "tp: 3", ":4 plan.tp is 3: tp x pp = 3 x 2 = 6 must divide the 16 GPUs. With pp = 2, tp = 2 would"),
    ("pp: 2", "pp: 2, dp: 3", "must be the 16 GPUs of the cluster. dp = 2 would work"),
    ("pp: 2", "pp: 2, pp: 4", ":4: the key 'pp' is given twice. Keep one"),
    ("pp: 2", "p: 2", ":4 plan.p: no such key. Did you mean 'tp'? Valid: chunks, cp, cp_scheme, dp,"),
    ("pp: 2", "1: 2", ":4 plan[1] is 1: keys must be text. Put the key in quotes"),
    ("pp: 2", "schedule: 1f2b", "plan.schedule is '1f2b': no such schedule. Did you mean '1f1b'? Valid: 1f1b, bpipe"),
    ("pp: 2", "pp: 2, schedule: 1f1", "Did you mean '1f1b'?"),
    ("pp: 2", "recompute: selectiv", ":4 plan.recompute is 'selectiv': not one of the valid words, or a list. Did you"),
    ("pp: 2", "zero: 4", ":4 plan.zero is 4: not one of the valid words. Valid: 0, 1, 2, 3"),
    ("pp: 2", "fsdp: maybe", ":4 plan.fsdp is 'maybe': must be true or false"),
    ("pp: 2", "partition: evn", "is 'evn': no such partition. Valid: even, ends-as-layers, by-cost, by-memory"),
    ("pp: 2", "partition: 3", ":4 plan.partition is 3: must be text, or a list. Write one word,"),
    ("pp: 2", "partition: [16, x]", ":4 plan.partition[1] is 'x': must be a whole number"),
    ("pp: 2", "pp: 2, partition: [16, 17]", "2 entries with the sum 33"),
    ("pp: 2", "pp: 2, chunks: 3", "32 layers must divide evenly over pp x chunks = 6 stages. 4 stages would work"),
    ("pp: 2", "ep: 2", "llama3-8b has no experts"),
    ("global: 16", "global: 17", ":3 batch.global is 17: it must be a multiple of"),
    ("global: 16", "global: 160000000", ":3 batch.global is 160000000: 80,000,000 micro-batches through 2 stages"),
    ("batch:", "framework: {release: newest}\nbatch:", "framework.release is 'newest': a release is a month"),
    ("batch:", "framework: {release: 24.10}\nbatch:", "framework.release is 24.1: must be text"),
    ("batch:", "framework: {set: {sigmas: {disks: .nan}}}\nbatch:", "sigmas.disks is nan: must be"),
    ("batch:", "framework: {set: {sigmas: {disks: -0.1}}}\nbatch:", "sigmas.disks is -0.1: must be at least 0"),
    ("batch:", "noise: {jitter: .inf}\nbatch:", "noise.jitter is inf: must be"),
    ("batch: {global: 16", "noise: {}\nbatch: {global: 40000", "noise: a step with noise has at most 333,333 passes"),
    ("batch:", "noise: {steps: 9999}\nbatch:", "noise.steps is 9999: a step has 512 passes of micro-batches through"),
    ("micro: 1", "'micro ': 1", ":3 batch.'micro ': no such key. Did you mean 'micro'? Valid: documents"),
    ("micro: 1", "mirco: 1", ":3 batch.mirco: no such key. Did you mean 'micro'? Valid: documents, global, lengths"),
    ("micro: 1", "micro: -1", ":3 batch.micro is -1: must be above 0"),
    ("micro: 1", "micro: .nan", ":3 batch.micro is nan: must be a whole number"),
    ("micro: 1", "micro: 1" + 12 * "0", ":3 batch.micro is 1000000000000: must be at most 1000000000"),
    ("micro: 1", "micro: 1" + 5000 * "0", ":3: not valid YAML 1.2 (Exceeds the limit (4300 digits))"),
    ("sequence: 4096", "sequence: 4 kilo", ":3 batch.sequence is '4 kilo': must be a whole number"),
    ("sequence: 4096", "sequence: 4095", "batch.sequence = 4095 must divide by tp. tp = 3 or 5 would work"),
    (BATCH, "16", ":3 batch is 16: must be a mapping of keys to values. Keys: global, micro, microbatches, sequence"),
    (BATCH, "[16, 1]", ":3 batch is [16, 1]: must be a mapping"),
    (PLAN, "tp4", ":4 plan is 'tp4': must be a mapping of keys to values. Keys: tp, dp, cp,"),
    ("plan:", "plans:", ":4 plans: no such key. Did you mean 'plan'? Valid: batch, cluster,"),
    ("model: llama3-8b\n", "", ":1 model: needed and missing. Add `model: ...`"),
    (MODEL, "lama3-8b", ":1 model is 'lama3-8b': no preset or file has this name. Did you mean 'llama3-8b'?"),
    (MODEL, "8", ":1 model is 8: this does not describe a model"),
    (MODEL, "models/mine.yaml", ":1 model is 'models/mine.yaml': no such file, looked for from"),
    (MODEL, "{layers: 4}", "Add all that are missing: hidden, heads, vocab"),
    (MODEL, "{preset: llama3-8b, layer: 4}", ":1 model.layer: no such key. Did you mean 'layers'?"),
    (MODEL, "{preset: llama3-8b, layers: 2.5}", ":1 model.layers is 2.5: must be a whole number"),
    (MODEL, "{preset: llama3-8b, kv_heads: 5}", "must divide heads (32)"),
    (MODEL, "{preset: llama3-8b, hidden: 1000000000}", "at most 100000000"),
    (MODEL, "{preset: llama3-8b, norm: rms}", "Did you mean 'rmsnorm'? Valid: layernorm, layernorm1p, rmsnorm"),
    (MODEL, "{preset: llama3-8b, dropout: 1}", ":1 model.dropout is 1: must be below 1"),
    (MODEL, "{preset: llama3-8b, tied: 'yes'}", "must be true or false"),
    (MODEL, f"{{{MIXTRAL}: {{topk: 2}}}}", ":1 model.moe.topk: no such key. Did you mean 'top_k'?"),
    (MODEL, f"{{{MIXTRAL}: {{top_k: 20}}}}", "and there are 8. Give at most 8"),
    (MODEL, f"{{{MIXTRAL}: 8}}", "must be a mapping of keys to values. Keys: experts, top_k,"),
    (CLUSTER, "dgx-h1000:2", ":2 cluster is 'dgx-h1000:2': no node 'dgx-h1000' in the catalog. Did you mean 'dgx-h100"),
    (CLUSTER, "dgx-h100:2.5", ":2 cluster is 'dgx-h100:2.5': the number of nodes is a whole number above 0"),
    (CLUSTER, "mine.yaml", ":2 cluster is 'mine.yaml': no such file, looked for from"),
    (CLUSTER, "{gpu: h100, gpus: 8}", ":2 cluster.gpu is 'h100': not in the catalog of gpus. Did you mean 'h100-sxm'?"),
    (CLUSTER, "{gpu: h100-sxm, gpus: 8 GPUs}", ":2 cluster.gpus is '8 GPUs': must be a whole number"),
    (CLUSTER, "{gpu: h100-sxm, gpus: 16, inter: {gbps_per_gpu: 400 Gb/s}}", "must be a number. Write a plain number"),
    (CLUSTER, "{groups: [{node: dgx-h100, nods: 1}]}", ":2 cluster.groups[0].nods: no such key. Did you mean 'nodes'?"),
    (CLUSTER, "{groups: [{node: dgx-h100, nodes: 1, of: 2}]}", ":2 cluster.groups[0].of: no such key. Valid: node, no"),
    (CLUSTER, "{node: dgx-h100, nodes: 2, fabric: {levels: [{node: 2}]}}", "Did you mean 'nodes'? Valid: blocks, link"),
    (CLUSTER, HOP.replace("1 us", "1 GB"), "'GB' is not a unit of time. Units: s, ms, us"),
    (CLUSTER, HOP.replace("1 us", "[1]"), "hop_latency.value is [1]: must be text, or a number. Write one word"),
    (CLUSTER, HOP.replace("value", "valu"), "Did you mean 'value'? Valid: checked, direction, kind,"),
    (CLUSTER, HOP.replace("assumed", "guess"), "kind is 'guess': not one of the valid words. Valid: assumed, fitted,"),
    ("plan:", "framework: megatron\nplan:", ":4 framework.name is 'megatron': no such framework. Did you mean 'megatr"),
    ("plan:", "framework: 3\nplan:", ":4 framework is 3: must be a mapping of keys to values. Keys: name, release, ru"),
    ("plan:", "framework:\n  set:\n    overlap: {pd: 1}\nplan:", ":6 framework.set.overlap.pd: no such key. Did you m"),
    ("plan:", "framework:\n  set:\n    rates: {kernal: 1}\nplan:", ":6 framework.set.rates.kernal is 1.0: no such rat"),
    ("plan:", "precision: bf61\nplan:", ":4 precision.compute is 'bf61': not one of the valid words. Did you mean 'bf"),
    ("plan:", "precision: fp8-rowwize\nplan:", "Did you mean 'fp8-rowwise'? Valid: bf16, fp16, fp32, fp8, fp8-blockwi"),
    ("plan:", "precision: {gradients: fp8}\nplan:", "precision.gradients is 'fp8': not one of the valid words"),
    ("plan:", "id: [1]\nplan:", ":4 id is [1]: must be text, or a whole number"),
    ("plan:", "run: {tokens: 15 trillion}\nplan:", ":4 run.tokens is '15 trillion': must be a number"),
    ("plan:", "id: true\nplan:", ":4 id is True: must be text, or a whole number"),
    ("plan:", "run: {tokens: true}\nplan:", ":4 run.tokens is True: must be a number"),
    ("plan:", "run: {tokens: .inf}\nplan:", ":4 run.tokens is inf: must be finite"),
    ("plan:", "optimizer: lamb\nplan:", ":4 optimizer is 'lamb': not one of the valid words. Did you mean 'adam'?"),
]  # fmt: skip

LONGER: list[tuple[str, str, str]] = [
    ("data/zero-1", "data/zero1", ":8 plan.schemes[1].use is 'data/zero1': no such scheme. Did you mean 'data/zero-1'"),
    ("use: data/zero-1, ", "", ":8 plan.schemes[1].use: needed and missing"),
    ("over: dp", "over: ddp", ":8 plan.schemes[1].over is 'ddp': no such axis in plan.mesh. Did you mean 'dp'?"),
    ("over: dp", "ovr: dp", ":8 plan.schemes[1].ovr: no such key of data/zero-1. Did you mean 'over'?"),
    ("over: dp", "over: 3", ":8 plan.schemes[1].over is 3: must be a list"),
    ("over: pp", "over: pp, chunks: two", ":7 plan.schemes[0].chunks is 'two': must be a whole number"),
    ("dp: 2", "dp: 3", "(pp 2 x dp 3 x tp 4 = 24) must be the 16 GPUs of the cluster. dp = 2 would work"),
    ("dp: 2", "dp: 0", ":5 plan.mesh.dp is 0: must be above 0"),
    ("{use: data/zero-1, over: dp}", "data/zero-1", "must be a mapping of keys to values. Keys: use, over"),
    ("mesh:", "tp: 4\n  mesh:", ":5 plan.tp: no such key. Valid: mesh, pad_heads, partition, replicas, "),
    ("mesh:", "views: {expert: {ep: 2}}\n  mesh:", "Did you mean 'experts'?"),
    ("  mesh: {pp: 2, dp: 2, tp: 4}\n", "", "plan.mesh: needed and missing. Add `mesh: ...`"),
]  # fmt: skip


def refusal(*words: object) -> str:
    """The one line of a refusal."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr and "validation error" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("meshcast: ") and line.count(". ") >= 1, "a rule and a remedy"
    return line


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


@pytest.mark.parametrize(("old", "new", "words"), SHORT, ids=[f"{i}-{new[:40]}" for i, (_, new, _) in enumerate(SHORT)])
def test_a_mistake_in_a_short_job(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed(JOB, old, new), "utf-8")
    line = refusal("predict", path)
    assert words in line and re.match(rf"meshcast: {re.escape(str(path))}:[1-7]\b", line), line


@pytest.mark.parametrize(("old", "new", "words"), LONGER, ids=[new[:40] or old for old, new, _ in LONGER])
def test_a_mistake_in_a_long_job(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed(LONG, old, new), "utf-8")
    line = refusal("predict", path)
    assert words in line and re.match(rf"meshcast: {re.escape(str(path))}:[4-9]\b", line), line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("plan.tp=x", "plan.tp is 'x': must be a whole number"),
        ("nosuch.key=1", "job.yaml nosuch: no such key. Did you mean 'noise'? Valid: batch,"),
        ("plan.tp.x=3", "plan.tp holds no fields"),
        (
            "cluster.gpus=3",
            "cluster holds no fields: it is 'dgx-h100:2'. Set cluster as a whole, to a mapping",
        ),
        ("=3", "a change is written field=value"),
        ("batch.micro=[", "--set batch.micro:"),
    ],
)
def test_a_mistake_in_a_change(tmp_path: Path, change: str, words: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    assert words in refusal("predict", tmp_path / "job.yaml", "--set", change)


# --------------------------------------------------------------------------------------- whole files

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(9 * [f'*{old}'])}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)

FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ": a job is a mapping of keys to values. Start with `model:` and `cluster:`"),
    "binary": (bytes(range(256)), ":3: not UTF-8 text"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), ":1: not UTF-8 text"),
    "zeros": (bytes(100), ":1: a NUL character"),
    "utf-16": (JOB.encode("utf-16"), ":1: it is UTF-16 text, not UTF-8. Save it as UTF-8 text"),
    "utf-32": (JOB.encode("utf-32"), ":1: it is UTF-16 text"),
    "latin-1": ((JOB + "# é\n").encode("latin-1"), ":5: not UTF-8 text"),
    "words": (b"llama3-8b on dgx-h100\n", "is 'llama3-8b on dgx-h100': a job is a mapping"),
    "two documents": ((JOB + "---\n" + JOB).encode(), ":5: not valid YAML 1.2 (but found another document)"),
    "aliases": ((JOB + BOMB).encode(), f"aliases write out to more than {MAX_NODES:,} items"),
    "an object": ((JOB + "id: !!python/object/apply:os.system [ls]\n").encode(), ":5: not valid YAML 1.2"),
    "depth": (b"[" * 5000, "nested too deeply"),
    "a tab": (JOB.replace("batch: {", "batch:\n\tglobal: {").encode(), ":4: not valid YAML 1.2"),
    "a cut": (JOB[:-8].encode(), "not valid YAML 1.2"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES.keys())
def test_a_file_that_is_no_job(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    line = refusal("predict", path)
    assert words in line and str(path) in line


def test_files_that_are_not_there_or_too_long(tmp_path: Path) -> None:
    assert "no such file" in refusal("predict", tmp_path / "absent.yaml")
    assert "not a regular file" in refusal("predict", tmp_path)
    sparse = tmp_path / "large.yaml"
    with sparse.open("wb") as file:
        file.truncate(100 * 2**20)
    assert "104,857,600 bytes, at most 10,000,000 are read" in refusal("predict", sparse)
    for key, name in (("cluster", CLUSTER), ("model", MODEL)):
        (tmp_path / "job.yaml").write_text(changed(JOB, name, "large.yaml"), "utf-8")
        assert "large.yaml: 104,857,600 bytes" in refusal("predict", tmp_path / "job.yaml"), key


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("tp: 4", "tp: 3"), "utf-8")
    assert "plan.tp is 3" in refusal("predict", path), "as long as it may, and by then all that it takes is imported"
    path.chmod(0)
    with unprivileged():
        assert "cannot be read (Permission denied)" in refusal("predict", path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONFIG.replace('"llama"', '"mamba"'), "model_type is 'mamba': meshcast does not support this architecture"),
        (re.sub(r'"hidden_size": \d+', '"hidden_size": "8192"', CONFIG), "hidden_size is '8192': must be a whole"),
        (re.sub(r'"num_hidden_layers": \d+', '"num_hidden_layers": -1', CONFIG), "num_hidden_layers is -1"),
        (re.sub(r'"num_key_value_heads": \d+', '"num_key_value_heads": 7', CONFIG), "it must divide heads (64)"),
        (re.sub(r'"hidden_size": \d+', '"hidden_size": NaN', CONFIG), "hidden_size is nan: must be a whole number"),
        (re.sub(r'"hidden_size": \d+,', "", CONFIG), "hidden_size: needed and missing"),
        ('{"model_type": "llama",\n "model_type": "llama"}', "the key 'model_type' is given twice"),
        (CONFIG[:60], ":4: not valid JSON (" if CONFIG[:60].count("\n") == 3 else "not valid JSON ("),
        ("[1]", "is [1]: a Hugging Face config is a mapping"),
        ("", ":1: not valid JSON (a value is missing, or a word is not in double quotes, column 1)"),
        (bytes(range(256)), "not UTF-8 text"),
    ],
)
def test_a_mistake_in_a_config(tmp_path: Path, content: str | bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "job.yaml").write_text(changed(JOB, MODEL, "config.json"), "utf-8")
    line = refusal("predict", tmp_path / "job.yaml")
    assert words in line and str(tmp_path / "config.json") in line


# -------------------------------------------------------------------------------------------- lines

GOOD = '{"id": 1, "model": "gpt2", "cluster": "dgx-h100:1", "plan": {"tp": 2}}'

LINES: list[tuple[str, str]] = [
    ("not json", "not a job: not valid JSON (a value is missing"),
    ("[]", "a job is a mapping"),
    ("null", "a job is a mapping"),
    (GOOD[:-1], "not a job: not valid JSON"),
    (GOOD + GOOD, "not a job: not valid JSON (more follows"),
    (GOOD.replace('"tp": 2', '"tp": 2, "tp": 4'), "the key 'tp' is given twice"),
    (GOOD.replace('"tp": 2', '"tp": NaN'), "NaN is not a number in JSON"),
    (GOOD.replace('"tp": 2', '"tp": 1e999'), "not a job: 1e999 is too large for a number"),
    (GOOD.replace('"tp": 2', '"tp": -2'), "plan.tp is -2: must be above 0"),
    (GOOD.replace('"tp": 2', '"tp": 1' + "0" * 5000), "not a job: not valid JSON"),
    (GOOD.replace('"tp"', '"pt"'), "Did you mean 'tp'"),
    (GOOD.replace("gpt2", "gtp2"), "Did you mean 'gpt2'"),
    (GOOD.replace("dgx-h100:1", "\\ud800"), "half a character"),
    ("[" * 100_000, "nested too deeply"),
    (bytes(8).decode() + "\ufffd", "not a job: not valid JSON"),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_answers_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"model": "llama3-8b"}\n', "utf-8")
    result = CliRunner().invoke(app, ["predict", "--jobs", str(path), "--out", "/dev/full"])
    assert result.exit_code == 2 and result.stdout == ""
    assert "--out is '/dev/full': the file cannot be written (No space left on device)" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["--version"], ["list", "schedule", "1f1b", "--p", "2", "--m", "2"]])
def test_what_cannot_be_printed_is_told(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshcast", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "standard output: it cannot be written (No space left" in done.stderr


def test_every_line_is_answered(tmp_path: Path) -> None:
    path, out = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(f"{line}\n{GOOD}\n" for line, _ in LINES), "utf-8")
    result = CliRunner().invoke(app, ["predict", "--jobs", str(path), "--out", str(out)])
    told = f"meshcast: {path}: {2 * len(LINES)} lines, {len(LINES)} answered\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", told)
    answers = [json.loads(line, parse_constant=pytest.fail) for line in out.read_text("utf-8").splitlines()]
    assert len(answers) == 2 * len(LINES)
    for i, (line, words) in enumerate(LINES):
        found: dict[str, Any] = answers[2 * i]
        error = found["error"]
        assert found["line"] == 2 * i + 1 and error["where"].startswith(f"{path}:{2 * i + 1}")
        assert words in f"{error['where']} is {error['value']}: {error['rule']}. {error['remedy']}", line[:80]
        assert error["remedy"] and answers[2 * i + 1]["step_time_s"] == answers[1]["step_time_s"]


ROW: dict[str, Any] = {"id": "a-1", "spec": {"class": "dense", "stack": "megatron-lm"}, "measured": {}}

ROWS: list[tuple[Any, str]] = [
    ("nothing", "not valid JSON"),
    ("[1]", "not an object"),
    ({**ROW, "id": 3}, "id is 3: must be text"),
    ({"id": "a"}, "spec: needed and missing"),
    ({**ROW, "spec": {**ROW["spec"], "class": "dens"}}, "spec.class is 'dens': not one of the valid words. Did you"),
    ({**ROW, "spec": {**ROW["spec"], "gpuss": 3}}, "spec.gpuss: no such key. Did you mean 'gpus'?"),
    ({**ROW, "spec": {**ROW["spec"], "gpus": "8"}}, "spec.gpus is '8': must be a whole number"),
    ({**ROW, "spec": {**ROW["spec"], "mesh": {"tpp": 2}}}, "spec.mesh.tpp: no such key. Did you mean 'tp'?"),
    ({**ROW, "spec": {**ROW["spec"], "mesh": {"tp": -2}}}, "spec.mesh.tp is -2: must be at least 1"),
    ({**ROW, "spec": {**ROW["spec"], "precision": "bf61"}}, "Did you mean 'bf16'?"),
    ({**ROW, "spec": {**ROW["spec"], "filled": "gpus"}}, "spec.filled is 'gpus': must be a list"),
    ({**ROW, "measured": {"step_time_s": 0}}, "measured.step_time_s is 0: must be at least 1e-06"),
]


def test_every_published_row_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row, _ in ROWS), "utf-8")
    result = CliRunner().invoke(app, ["validate", "published", "--data", str(path), "--json", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(ROWS)
    for i, (row, (told_, words)) in enumerate(zip(rows, ROWS, strict=True), 1):
        assert row["status"] == "refused" and f"{path}:{i}" in row["reason"], told_
        assert words in row["reason"] and f"{i} ." not in row["reason"], row["reason"]
