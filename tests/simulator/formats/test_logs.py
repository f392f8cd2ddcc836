"""Lines of training logs as Megatron-LM, its forks and torchtitan print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats import logs

MEGATRON = """\
using world size: 16, data-parallel size: 2
 [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 | elapsed time per iteration (ms): \
5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | learning rate: 8.600000E-06 | global batch size:   128 | lm loss: \
1.825991E+00 | loss scale: 1.0 | grad norm: 1.426 | number of skipped iterations:   0 | number of nan iterations:   0 |
saving checkpoint at iteration      43 to /checkpoints in torch format
 [2024-04-06 02:59:41] iteration       44/     100 | consumed samples:         5632 | elapsed time per iteration (ms): \
5533.8 | throughput per GPU (TFLOP/s/GPU): 236.0 | learning rate: 8.800000E-06 | global batch size:   128 | lm loss: \
1.875063E+00 | loss scale: 1.0 | grad norm: 1.426 | number of skipped iterations:   0 | number of nan iterations:   0 |
(min, max) time across ranks (ms):
"""
FORK = """\
 iteration        6/      10 | consumed samples:         1536 | consumed tokens:       185228 | elapsed time per \
iteration (s): 3.21 | learning rate: 0.000E+00 | global batch size:   256 | lm loss: nan | TFLOPs: 33.65 |
"""
TITAN = """\
[rank0]:[titan] 2025-06-16 22:30:48,735 - root - INFO - [GC] Peforming periodical GC collection. 0.06 seconds.
[rank0]:[titan] 2025-06-16 22:30:50,322 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2513  \x1b[38;2;180;60;0m\
grad_norm:  1.1230  \x1b[39mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 1,856  \x1b[36mtflops: 109.16  \x1b[35m\
mfu: 11.04%\x1b[39m
[rank1]:[titan] 2025-06-16 22:30:50,322 - root - INFO - step:  1  loss: 12.2513  memory: 49.66GiB(52.28%)  tps: 1,850  \
tflops: 109.16  mfu: 11.04%
[rank0]:[titan] 2025-06-16 22:31:04,970 - root - INFO - step: 10  loss:  6.0388  memory: 49.70GiB(52.28%)  tps: 5,593  \
tflops: 1,323.92  mfu: N/A
[rank0]:[titan] 2025-06-16 22:31:04,990 - root - INFO - validate step: 10  loss:  6.0388  memory: 49.66GiB(52.28%)  \
tps: 9,593
"""


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.log"
        path.write_text(text, "utf-8")
        return path

    return write


def test_megatron(put: Any) -> None:
    first, second = logs.megatron(put(MEGATRON))
    assert (first.number, first.seconds, first.samples, first.tflops) == (43, 5.4449, 128, 239.8)
    assert first.loss == pytest.approx(1.825991) and first.where.endswith("run.log:2")
    assert (second.number, second.seconds) == (44, 5.5338)


def test_forks_of_megatron(put: Any) -> None:
    (only,) = logs.megatron(put(FORK))
    assert (only.seconds, only.tflops, only.loss, only.samples) == (3.21, 33.65, None, 256)


def test_torchtitan(put: Any) -> None:
    first, second = logs.torchtitan(put(TITAN))
    # Of the ranks that log a step the slowest counts.
    assert (first.number, first.tokens_per_s, first.loss) == (1, 1850, 12.2513)
    assert first.mfu == pytest.approx(0.1104) and first.seconds is None
    assert (second.number, second.tokens_per_s, second.tflops, second.mfu) == (10, 5593, 1323.92, None)
    assert second.reserved == pytest.approx(49.70 * 2**30)
    # What follows from a number has to be finite, and memory is above 0.
    assert all(logs.torchtitan(put(TITAN.replace("49.70", word)))[1].reserved is None for word in ("1e300", "-1"))


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (logs.megatron, "", "form"),
        (logs.megatron, TITAN, "form"),
        (logs.torchtitan, MEGATRON, "form"),
        (logs.megatron, MEGATRON[:170], "run.log:2.*cut off"),
        (logs.megatron, MEGATRON[: MEGATRON.index("5444.9") + 2], "run.log:2.*cut off"),
        (logs.megatron, MEGATRON.replace("5444.9", "0.0"), "run.log:2.*above 0"),
        (logs.megatron, MEGATRON.replace("5444.9", "nan"), "run.log:2.*above 0"),
        (logs.torchtitan, TITAN[: TITAN.index("5,593") + 2], "run.log:4.*cut off"),
        (logs.torchtitan, TITAN.replace("5,593", "0"), "run.log:4.*above 0"),
    ],
)
def test_mistakes_end_in_one_error(put: Any, read: Any, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read(put(text))


@given(st.data())
def test_broken_logs_end_in_one_error_or_are_read(tmp_path_factory: Any, data: Any) -> None:
    read, text = data.draw(st.sampled_from([(logs.megatron, MEGATRON + FORK), (logs.torchtitan, TITAN)]))
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 60))
    put_in = data.draw(st.text(st.sampled_from(list("0189.,-|: \nenai%\x00\x1b\u00b2")), max_size=6))
    path = tmp_path_factory.mktemp("fuzz") / "run.log"
    path.write_text(text[:at] + put_in + text[at + length :], "utf-8")
    try:
        found = read(path)
    except PlanError as error:
        assert str(path) in str(error)
    else:
        assert found and all((one.seconds or one.tokens_per_s) > 0 for one in found)
