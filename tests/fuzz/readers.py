"""Every command and function that reads a file, with valid files for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner, Result

from experiments.cli.app import app
from experiments.sweeps.grid import load_sweep
from experiments.sweeps.run import run as run_sweep
from experiments.sweeps.store import parts_folder
from simulator.ir.routing import read_counts
from tests.experiments.cli.samples import JOB, ROOT
from tests.experiments.cli.test_fuzz import JOBS
from tests.simulator.bridges.samples import event, kernel, launch
from tests.simulator.bridges.test_logs import MEGATRON, TITAN
from tests.simulator.bridges.test_nccl_tests import OLD, TABLE, document
from validation.measurements import campaign
from validation.measurements.import_nccl_tests import import_nccl_tests
from validation.measurements.measurement import to_json
from validation.pipelines.cases import EXAMPLES

PART = "0000000.parquet"
DATA = "tests/data"
CATALOG = "hardware/catalog"
CALIBRATIONS = "simulator/costs/calibration"
MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 96, "seq": 32}
SMALL: dict[str, Any] = {"model": MODEL, "cluster": "dgx-h100:2", "batch": {"global": 16}, "plan": {"tp": 2, "pp": 2}}
SWEEP = {
    "job": SMALL,
    "vary": {"plan.tp": {"powers": [1, 4]}, "batch.micro": [1, 2]},
    "where": ["plan.tp * plan.pp <= 8"],
}
CAMPAIGN = {
    "title": "a test",
    "device": "cpu",
    "calibrate": {"processes": 2, "refresh": True},
    "jobs": {"a": {**SMALL, "cluster": {"gpu": "cpu-core", "gpus": 2}, "precision": "fp32", "plan": {"tp": 2}}},
    "runs": [
        {"name": "k", "measure": "kernels", "job": "a", "options": {"tps": [1, 2]}},
        {"name": "d", "measure": "distributed", "job": "a", "set": {"plan": {"tp": 1}}, "options": {"steps": 2}},
    ],
}
TRACE = {
    "traceEvents": [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("_RMSNorm", "cpu_op", 10, 20),
        launch(12, 1),
        launch(30, 2),
        kernel("void gemm", 20, 30, 1),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 10, 2, stream=20),
    ],
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
    "distributedInfo": {"rank": 0, "world_size": 16},
}
COMPUTE_ONLY = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


class Reader(NamedTuple):
    """One kind of input file.

    Attributes:
        form: format of the file, a key of `generate.LAYERS`.
        name: of the file in the working folder.
        read: arguments of meshcast, in which the working folder is `{}`; or a function of the file's path.
        make_seeds: makes the valid files; its argument is the working folder.
    """

    form: str
    name: str
    read: str | Callable[[Path], object]
    make_seeds: Callable[[Path], list[bytes]]


def as_json(*documents: Any) -> Callable[[Path], list[bytes]]:
    return lambda folder: [json.dumps(one, indent=1).encode() for one in documents]


def as_yaml(*documents: Any) -> Callable[[Path], list[bytes]]:
    return lambda folder: [yaml.safe_dump(one, sort_keys=False).encode() for one in documents]


def as_lines(*rows: Any) -> Callable[[Path], list[bytes]]:
    return lambda folder: ["".join(json.dumps(row) + "\n" for row in rows).encode()]


def as_text(*texts: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [text.encode() for text in texts]


def of_files(pattern: str, lines: int | None = None) -> Callable[[Path], list[bytes]]:
    """The first lines of files of the repository."""
    return lambda folder: [
        b"".join(path.read_bytes().splitlines(keepends=True)[:lines]) for path in sorted(ROOT.glob(pattern))
    ]


def make_measurement(folder: Path) -> list[bytes]:
    """A measurement file of collectives."""
    path = folder / "log.txt"
    path.write_text(TABLE, "utf-8")
    return [to_json(import_nccl_tests(path, SMALL)).encode()]


def stop_sweep(folder: Path) -> list[bytes]:
    """The part of a sweep that was stopped before its parts were joined."""

    def stop(done: int, points: int) -> None:
        if done == points:
            raise KeyboardInterrupt

    (folder / "parts.yaml").write_text(yaml.safe_dump(SWEEP), "utf-8")
    with suppress(KeyboardInterrupt):
        run_sweep(load_sweep(folder / "parts.yaml"), folder / "stopped.parquet", workers=1, watch=stop)
    return [path.read_bytes() for path in parts_folder(folder / "stopped.parquet").glob(PART)]


def resume_sweep(path: Path) -> Result:
    """Resumes a copy of the stopped sweep, whose part is `path`."""
    out = path.with_name("resumed.parquet")
    out.unlink(missing_ok=True)
    shutil.rmtree(parts_folder(out), ignore_errors=True)
    shutil.copytree(parts_folder(path.with_name("stopped.parquet")), parts_folder(out))
    shutil.copy(path, parts_folder(out) / PART)
    return invoke(f"sweep {path.parent}/parts.yaml --out {out} --workers 1 --json")


def finish_sweep(folder: Path) -> list[bytes]:
    """The joined rows of a finished sweep."""
    out = folder / "finished.parquet"
    run_sweep(load_sweep(SWEEP, folder), out, workers=1)
    return [out.read_bytes()]


def invoke(arguments: str) -> Result:
    """Runs meshcast in this process."""
    return CliRunner().invoke(app, arguments.split())


READERS: dict[str, Reader] = {
    "job": Reader("yaml", "given.yaml", "predict {}/given.yaml --json", as_yaml(*JOBS)),
    "job page": Reader("yaml", "given.yaml", "predict {}/given.yaml", as_yaml(*JOBS)),
    "jobs": Reader("jsonl", "given.jsonl", "predict --jobs {}/given.jsonl", as_lines(*JOBS)),
    "sweep": Reader(
        "yaml", "sweep.yaml", "sweep {}/sweep.yaml --out {}/out.parquet --workers 1 --restart --json", as_yaml(SWEEP)
    ),
    "sweep part": Reader("parquet", "given.parquet", resume_sweep, stop_sweep),
    "sweep rows": Reader("parquet", "given.parquet", "plot {}/given.parquet --why 1,1", finish_sweep),
    "cluster": Reader(
        "yaml",
        "given.yaml",
        "predict {}/plain.yaml --json --set cluster={}/given.yaml",
        of_files(f"{CATALOG}/clusters/*"),
    ),
    "model": Reader(
        "yaml",
        "given.yaml",
        "predict {}/plain.yaml --json --set model={}/given.yaml",
        of_files("simulator/models/presets/[dlm]*.yaml"),
    ),
    "config.json": Reader(
        "json",
        "config.json",
        "predict {}/job.yaml --json --set model={}/config.json",
        of_files("examples/*/config.json"),
    ),
    "routing": Reader("json", "counts.json", read_counts, as_json([1, 2, 3], [[1, 2.5], [3, 4]])),
    "routing table": Reader("csv", "counts.csv", read_counts, as_text("1,2,3\n4,5,6\n")),
    "calibration of a gpu": Reader(
        "yaml",
        "calibration/h100-sxm.yaml",
        "predict {}/job.yaml --json --calibration {}/calibration",
        of_files(f"{CALIBRATIONS}/v100-sxm2-32.yaml"),
    ),
    "calibration of links": Reader(
        "yaml",
        "calibration/infiniband.yaml",
        "predict {}/job.yaml --json --calibration {}/calibration",
        of_files(f"{CALIBRATIONS}/infiniband.yaml"),
    ),
    "published": Reader(
        "jsonl",
        "given.jsonl",
        "validate published --json --jobs 1 --data {}/given.jsonl",
        of_files(f"{DATA}/published_runs.jsonl", 6),
    ),
    "pipeline": Reader("jsonl", "given.jsonl", "validate pipeline --json {}/given.jsonl", as_lines(*EXAMPLES)),
    "kernels": Reader(
        "csv", "given.csv", "validate kernels --json --data {}/given.csv", of_files(f"{DATA}/[aegm]*.csv", 8)
    ),
    "collectives": Reader(
        "csv", "given.csv", "validate collectives --json --data {}/given.csv", of_files(f"{DATA}/co*.csv", 20)
    ),
    "measurement": Reader("json", "given.json", "validate collectives --json --data {}/given.json", make_measurement),
    "trace": Reader("json", "given.json", "validate trace {}/given.json --json --job {}/job.yaml", as_json(TRACE)),
    "kineto": Reader(
        "json", "given.json", "import kineto {}/given.json --json --job {}/job.yaml --out {}/out.json", as_json(TRACE)
    ),
    "nccl-tests": Reader(
        "text",
        "given.txt",
        "import nccl-tests {}/given.txt --json --job {}/job.yaml --out {}/out.json",
        as_text(TABLE, OLD),
    ),
    "nccl-tests json": Reader(
        "json", "given.json", "import nccl-tests {}/given.json --json --out {}/out.json", as_json(document())
    ),
    "megatron-log": Reader(
        "text", "given.log", "import megatron-log {}/given.log --json --skip 1 --out {}/out.json", as_text(MEGATRON)
    ),
    "torchtitan-log": Reader(
        "text",
        "given.log",
        "import torchtitan-log {}/given.log --json --skip 0 --tokens 65536 --gpus 8 --out {}/out.json",
        as_text(TITAN),
    ),
    "schedule": Reader("csv", "given.csv", "list schedule {}/given.csv --json", as_text(COMPUTE_ONLY)),
    "campaign": Reader("yaml", "given.yaml", campaign.load, as_yaml(CAMPAIGN)),
}


def prepare(folder: Path) -> None:
    """Writes the valid files that commands take besides the malformed one."""
    (folder / "job.yaml").write_text(JOB, "utf-8")
    (folder / "plain.yaml").write_text("model: llama3-8b\ncluster: dgx-h100:2\n", "utf-8")
    (folder / "calibration").mkdir()
