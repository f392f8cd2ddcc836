"""The work on an input grows with its bytes: not with a number that it states, and not with the square of a length.

Each row would take minutes or more otherwise; here it has ten seconds of the processor, of which it needs a small part.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import simulate
from meshcast.simulator.formats import nccl_tests, torch_schedule
from meshcast.simulator.formats.kineto import read as read_trace
from meshcast.simulator.formats.logs.read import read_log
from meshcast.simulator.loading.load import load_job
from meshcast.validation.traces.host_timeline import _subtract, host_timeline
from meshcast.validation.traces.kernel_classes import classify
from tests.fuzz.seeds import SMALL
from tests.simulator.formats.samples import event

SECONDS = 10.0
PRIME = 999_999_937
MANY = 100_000
LAW = {"kind": "lognormal", "mean": 9, "sigma": 1}


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"more than {SECONDS:g} s of the processor")


@contextmanager
def soon() -> Iterator[None]:
    """Ends the block by an error after `SECONDS` of the processor, however busy the machine is."""
    before = signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


NUMBERS: dict[str, dict[str, Any]] = {
    "tp": {"plan": {"tp": PRIME}},
    "pp": {"plan": {"pp": PRIME}},
    "cp": {"plan": {"cp": PRIME, "cp_scheme": "wallfacer"}},
    "ep": {"plan": {"ep": PRIME}},
    "shard": {"plan": {"shard": PRIME}},
    "chunks": {"plan": {"pp": 2, "chunks": PRIME}},
    "sequence": {"batch": {"global": 16, "sequence": PRIME}},
    "slices": {"batch": {"global": 16, "sequence": PRIME}, "plan": {"pp": 2, "schedule": "seq1f1b"}},
    "samples": {"batch": {"sequence": PRIME, "samples": {"distribution": LAW, "count": 16, "join": "padding"}}},
    "micro": {"batch": {"global": 16, "micro": PRIME}},
    "global": {"batch": {"global": PRIME}},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_fits_nothing_is_refused_soon(name: str) -> None:
    with soon(), pytest.raises(MeshcastError):
        simulate({**SMALL, **NUMBERS[name]})


PART = {"per": "gpu", "mtbf_hours": 1e6}
SLOW = {"per": "gpu", "every_hours": 1e6, "minutes": 1.0, "slowdown": 1.1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "components": ({"run": {"failures": {"components": {f"c{i}": PART for i in range(1_001)}}}}, "at most 1000 items"),
    "episodes": ({"run": {"stragglers": {"episodes": {f"c{i}": SLOW for i in range(1_001)}}}}, "at most 1000 items"),
    "kind": ({"batch": {"samples": {"distribution": {"mean": 9}}}}, "the key 'kind' is missing"),
    "law": ({"batch": {"samples": {"distribution": {"kind": "x"}}}}, "'kind' must be one of 'lognormal', 'uniform'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_or_of_no_kind_is_told_in_plain_words(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(MeshcastError, match=words):
        load_job({**SMALL, **change})


def read_megatron(text: str) -> Callable[[Path], object]:
    return lambda folder: read_log(_write(folder, text), "megatron")


def read_titan(text: str) -> Callable[[Path], object]:
    return lambda folder: read_log(_write(folder, text), "torchtitan")


def read_table(head: str) -> Callable[[Path], object]:
    row = "1048576 262144 float sum -1 45.0 23.3 40.8 0 45.0 23.3 40.8 0"
    text = f"# Collective test starting: all_reduce_perf\n{head}\n{row}\n"
    return lambda folder: nccl_tests.read(_write(folder, text))


def read_schedule(cells: list[str]) -> Callable[[Path], object]:
    return lambda folder: torch_schedule.read_csv(_write(folder, "\n".join(cells))).devices


def read_host(events: list[dict[str, Any]]) -> Callable[[Path], object]:
    return lambda folder: host_timeline(read_trace(_write(folder, json.dumps({"traceEvents": events}))), None)


def read_launch(text: str, name: str = "launch.py") -> Callable[[Path], object]:
    return lambda folder: load_job(_write(folder, text, name))


def _write(folder: Path, text: str, name: str = "input.txt") -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


DIGITS = "1" * MANY
NESTED = [event(f"aten::op{i}", "cpu_op", i, 2 * (MANY - i)) for i in range(10_000)]
NEMO = {
    "model": {
        "tensor_model_parallel_size": 2,
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "seq_length": 128,
    },
    "train": {"global_batch_size": 32, "micro_batch_size": 1},
    f"b{DIGITS * 9}": {f"parallel_{i}": i for i in range(1, 99)},
}
FILES: dict[str, Callable[[Path], object]] = {
    "time of Megatron-LM": read_megatron(f"iteration 1/ 9 | elapsed time per iteration (ms): {DIGITS}x |"),
    "loss of Megatron-LM": read_megatron(f"iteration 1/ 9 | elapsed time per iteration (ms): 9 | lm loss: {DIGITS}x |"),
    "loss of torchtitan": read_titan(f"step: 1  loss: {DIGITS}x  tps: 7  tflops: 1"),
    "rate of torchtitan": read_titan(f"step: 1  loss: 4  tps: {DIGITS}x  tflops: 1"),
    "ranks of nccl-tests": read_table("# Ranks 0 to 9 Group 0 on 1 hosts a" + " devices [x" * 10_000),
    "hosts of nccl-tests": read_table(f"# Ranks 0 to {MANY - 1} Group 0 on {MANY} hosts a devices 0 [0x00] H100"),
    "rows of a schedule": read_schedule([f"{i}F0,{i}B0" for i in range(30_000)]),
    "nested operators": read_host(NESTED),
    "kernels of Mamba": lambda folder: classify("mamba" * (MANY // 2)),
    "kernels of Triton": lambda folder: classify("triton_tem" * (MANY // 4)),
    "empty lines of Python": read_launch("\n" * MANY + "x = 1\n"),
    "name of a section": read_launch(json.dumps(NEMO), "launch.json"),
    "empty lines in quotes": read_launch(f"python train.py --a '{chr(10) * MANY}x'\n", "launch.sh"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_long_file_is_read_soon(name: str, tmp_path: Path) -> None:
    with soon():
        try:
            FILES[name](tmp_path)
        except MeshcastError as error:
            assert len(str(error)) < 3_000


def test_waits_before_an_operator_are_not_looked_at() -> None:
    class Indexed(list[tuple[float, float]]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("all of them are looked at")

    assert _subtract(3.2, 6.0, Indexed((float(i), i + 0.5) for i in range(9))) == [(3.5, 4.0), (4.5, 5.0), (5.5, 6.0)]
