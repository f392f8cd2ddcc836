"""Lines of training logs as Megatron-LM, its forks and torchtitan print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.logs.read import read_log

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
TIMERS = """\
 [2026-04-06 02:59:36.123456] iteration       43/     100 | consumed samples:         5504 | elapsed time per \
iteration (ms): 5444.9 | global batch size:   128 | lm loss: 1.825991E+00 | number of skipped iterations:   1 | \
number of nan iterations:   0 |
(min, max) time across ranks (ms):
    forward-compute ................................: (2031.04, 2432.71)
times across ranks (ms):
  backward-compute:
     rank  0: 3100.00
     rank  1: 3300.50
  saving checkpoint at iteration      43 to /checkpoints in torch_dist format
    save-checkpoint ................................: (20000.10, 20001.20)
INFO:megatron.core.utils:[2024-03-14 23:07:56] | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | MnDRtt/Rnk: \
14.27ms/23 | MxDRtt/Rnk: 34.65ms/3 | MnEtpt/Rnk: 296.02TF/0 | MxEtpt/Rnk: 297.32TF/8
 [2026-04-06 03:00:02.123456] iteration       44/     100 | consumed samples:         5632 | elapsed time per \
iteration (ms): 5533.8 | global batch size:   128 | lm loss: 1.875063E+00 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
"""
NEMO = """\
Training epoch 0, iteration 0/249 | lr: 1.961e-06 | global_batch_size: 8 | global_step: 0 | reduced_train_loss: 1.315 \
| train_step_timing in s: 7.126
Training epoch 0, iteration 1/249 | lr: 3.922e-06 | global_batch_size: 8 | global_step: 1 | reduced_train_loss: 1.653 \
| train_step_timing in s: 2.505 | consumed_samples: 16
Epoch 0: :   3%|#| 3/100 [00:48<00:00, reduced_train_loss=1.0172, global_step=2.000, consumed_samples=24.0, \
train_step_timing in s=3.130]
"""
DEEPSPEED = """\
[2023-11-07 01:55:08,040] [INFO] [logging.py:96:log_dist] [Rank 0] Overflow detected. Skipping step. Attempted loss \
scale: 8192.0, reducing to 4096.0
[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec=25.704280480541442, MemAllocated=4.32GB, \
MaxMemAllocated=38.49GB
[2023-11-07 01:55:48,714] [WARNING] [stage3.py:1850:step] 3 pytorch allocator cache flushes since last step. this
[2023-11-07 01:55:48,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=80/global_step=20, \
RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.6, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
steps: 30 loss: 7.1234 iter time (s): 1.250 samples/sec: 25.600
"""
NANOTRON = """\
11/30/2024 09:54:02 [INFO|DP=0|PP=0|TP=0]: iteration: 9 / 100 | consumed_tokens: 18.9M | time_per_iteration_ms: 1.2K | \
tokens_per_sec: 1.75M | tokens_per_sec_per_gpu: 218K | global_batch_size: 2.1M | lm_loss: 7.2 | lr: 0.0003 | \
model_tflops_per_gpu: 310
12/10/2023 09:54:03 [INFO|DP=0]: iteration: 10 / 100 | consumed_tokens: 20.5K | elapsed_time_per_iteration_ms: 950 | \
tokens_per_sec: 2.2M | lm_loss: 7.1
"""
TRAINER = (
    "  1%|1         | 1/100 [00:04<06:36,  4.00s/it]\r  3%|3         | 3/100 [00:12<06:28,  4.00s/it]\n"
    "{'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    " 50%|#####     | 4/8 [00:01<00:01,  3.00it/s]\r100%|##########| 8/8 [00:02<00:00,  3.00it/s]\n"
    "{'eval_loss': 1.8, 'eval_runtime': 2.6012, 'eval_samples_per_second': 31.4, 'epoch': 0.1}\n"
    "  6%|6         | 6/100 [00:27<06:28,  4.00s/it]\r 10%|#         | 10/100 [1:00:43<06:28,  4.00s/it]\n"
)
OTHERS = (TIMERS, NEMO, DEEPSPEED, NANOTRON, TRAINER)


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.log"
        path.write_text(text, "utf-8")
        return path

    return write


def test_megatron(put: Any) -> None:
    first, second = read_log(put(MEGATRON), "megatron").iterations
    assert (first.number, first.seconds, first.samples, first.tflops) == (43, 5.4449, 128, 239.8)
    assert first.loss == pytest.approx(1.825991) and first.where.endswith("run.log:2")
    assert (second.number, second.seconds) == (44, 5.5338)


def test_forks_of_megatron(put: Any) -> None:
    (only,) = read_log(put(FORK), "megatron").iterations
    assert (only.seconds, only.tflops, only.loss, only.samples) == (3.21, 33.65, None, 256)


def test_torchtitan(put: Any) -> None:
    first, second = read_log(put(TITAN), "torchtitan").iterations
    # Of the ranks that log a step the slowest counts.
    assert (first.number, first.tokens_per_s, first.loss) == (1, 1850, 12.2513)
    assert first.mfu == pytest.approx(0.1104) and first.seconds is None
    assert (second.number, second.tokens_per_s, second.tflops, second.mfu) == (10, 5593, 1323.92, None)
    assert second.reserved == pytest.approx(49.70 * 2**30)
    # What follows from a number has to be finite, and memory is above 0.
    for word in ("1e300", "-1"):
        assert read_log(put(TITAN.replace("49.70", word)), "torchtitan").iterations[1].reserved is None


def test_timers_of_ranks_and_events(put: Any) -> None:
    log = read_log(put(TIMERS))
    assert [(times.name, times.line, times.least, times.most) for times in log.times] == [
        ("forward-compute", 0, pytest.approx(2.03104), pytest.approx(2.43271)),
        ("backward-compute", 0, pytest.approx(3.1), pytest.approx(3.3005)),
        ("save-checkpoint", 0, pytest.approx(20.0001), pytest.approx(20.0012)),
        ("Rtt", 0, pytest.approx(3.45308), pytest.approx(3.4682)),
        ("DRtt", 0, pytest.approx(0.01427), pytest.approx(0.03465)),
    ]
    assert log.times[1].ranks == {0: pytest.approx(3.1), 1: pytest.approx(3.3005)} and log.times[3].ranks.keys() == {
        0,
        8,
    }
    assert [(event.kind, event.before) for event in log.events] == [("save", 1)]
    first, second = log.iterations
    assert first.skipped == 1 and second.skipped == 0 and first.resolution == 1e-6
    assert second.moment is not None and first.moment is not None and second.moment - first.moment == pytest.approx(26)


def test_nemo(put: Any) -> None:
    log = read_log(put(NEMO))
    assert [(line.number, line.seconds, line.samples) for line in log.iterations] == [
        (1, 7.126, 8),
        (2, 2.505, 8),
        (3, 3.13, None),
    ]
    assert log.program == "NeMo" and log.iterations[1].loss == 1.653


def test_deepspeed(put: Any) -> None:
    log = read_log(put(DEEPSPEED))
    first, second, third = log.iterations
    assert (first.number, first.samples_per_s, first.seconds) == (10, 25.704280480541442, None)
    assert (second.number, third.number, third.seconds, third.samples) == (20, 30, 1.25, 32)
    assert [(event.kind, event.before, event.count) for event in log.events] == [
        ("skip", 0, 1),
        ("allocator retries", 1, 3),
    ]


def test_nanotron(put: Any) -> None:
    first, second = read_log(put(NANOTRON)).iterations
    assert (first.number, first.seconds, first.tokens) == (9, pytest.approx(1.2), pytest.approx(2.1e6))
    assert (second.number, second.seconds) == (10, pytest.approx(0.95))


def test_the_bar_of_a_trainer(put: Any) -> None:
    """Bars that are ten seconds apart count; that of an evaluation is another one."""
    log = read_log(put(TRAINER))
    assert [(line.number, line.seconds) for line in log.iterations] == [
        (1, None),
        (6, pytest.approx(23 / 5)),
        (10, pytest.approx((3643 - 27) / 4)),
    ]
    assert [(event.kind, event.before, event.seconds) for event in log.events] == [("evaluation", 1, 2.6012)]
    with pytest.raises(PlanError, match="less than ten seconds"):
        read_log(put(TRAINER.splitlines()[0]))


def test_totals_of_retries_count_once(put: Any) -> None:
    lines = TITAN.splitlines(keepends=True)
    warning = "[rank0]:[titan] 2025-06-16 22:30:49,322 - root - WARNING - {} CUDA memory allocation retries.\n"
    log = read_log(put(warning.format(2) + lines[1] + warning.format(2) + warning.format(5) + lines[3]))
    assert [(event.before, event.count) for event in log.events] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("megatron", "", "form"),
        ("megatron", TITAN, "form"),
        ("torchtitan", MEGATRON, "form"),
        ("megatron", MEGATRON[:170], "run.log:2.*cut off"),
        ("megatron", MEGATRON[: MEGATRON.index("5444.9") + 2], "run.log:2.*cut off"),
        ("megatron", MEGATRON.replace("5444.9", "0.0"), "run.log:2.*above 0"),
        ("megatron", MEGATRON.replace("5444.9", "nan"), "run.log:2.*above 0"),
        ("torchtitan", TITAN[: TITAN.index("5,593") + 2], "run.log:4.*cut off"),
        ("torchtitan", TITAN.replace("5,593", "0"), "run.log:4.*above 0"),
    ],
)
def test_mistakes_end_in_one_error(put: Any, form: str, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_log(put(text), form)


@given(st.data())
def test_broken_logs_end_in_one_error_or_are_read(tmp_path_factory: Any, data: Any) -> None:
    form, text = data.draw(st.sampled_from([("megatron", MEGATRON + FORK), ("torchtitan", TITAN)]))
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 60))
    put_in = data.draw(st.text(st.sampled_from(list("0189.,-|: \nenai%\x00\x1b\u00b2")), max_size=6))
    path = tmp_path_factory.mktemp("fuzz") / "run.log"
    path.write_text(text[:at] + put_in + text[at + length :], "utf-8")
    try:
        found = read_log(path, form).iterations
    except PlanError as error:
        assert str(path) in str(error)
    else:
        assert found and all((one.seconds or one.tokens_per_s) > 0 for one in found)
