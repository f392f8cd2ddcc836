"""Real stages: the schedule's order and its micro-batches in flight, memory as forecast, and a file written blind."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.planning import resolve_plan

torch = pytest.importorskip("torch")

from meshcast.simulator.loading.load import load_job  # noqa: E402
from meshcast.validation.measurements.device import Device  # noqa: E402
from meshcast.validation.measurements.measurement import read  # noqa: E402
from meshcast.validation.pipelines.cases import ScheduleCase, replay  # noqa: E402
from meshcast.validation.reference.model import build_stage  # noqa: E402
from meshcast.validation.reference.optimizer import gradient  # noqa: E402
from meshcast.validation.reference.orders import action_orders  # noqa: E402
from meshcast.validation.reference.tensor_parallel import TensorGroup  # noqa: E402
from meshcast.validation.reference.tokens import make_tokens  # noqa: E402
from meshcast.validation.stages import measure as stages  # noqa: E402
from meshcast.validation.stages.replay import DeviceReplay  # noqa: E402
from tests.draws import drawn, drawn_grid  # noqa: E402
from tests.validation.distributed import jobs as distributed  # noqa: E402

pytestmark = pytest.mark.torch

GPT = {**distributed.GPT, "dropout": 0}
LLAMA = {**distributed.LLAMA, "ffn": 64}


def job(m: int = 4, model: dict[str, Any] = LLAMA, **plan: Any) -> dict[str, Any]:
    degrees = math.prod(plan.get(axis, 1) for axis in ("pp", "tp", "dp"))
    return {
        **distributed.job(degrees, model, **plan),
        "precision": {"compute": "fp32", "gradients": "fp32"},
        "batch": {"micro": 1, "global": m * plan.get("dp", 1)},
    }


@pytest.fixture
def cpu() -> Device:
    return Device.of("cpu")


def in_flight(schedule: str, p: int, v: int = 1) -> list[int]:
    """Of four micro-batches on each device, until the gradients of their weights are made."""
    return replay(ScheduleCase(schedule=schedule, p=p, m=4, v=v, t_f=1, t_b=1, t_w=1)).in_flight("W")


@pytest.mark.parametrize(
    ("plan", "held"),
    [
        ({"pp": 2}, [2, 1]),
        ({"pp": 4}, [4, 3, 2, 1]),
        ({"pp": 2, "schedule": "gpipe"}, [4, 4]),
        ({"pp": 2, "chunks": 2}, in_flight("interleaved-1f1b", p=2, v=2)),
        ({"pp": 2, "chunks": 2, "schedule": "breadth-first"}, in_flight("breadth-first", p=2, v=2)),
        ({"pp": 4, "schedule": "zb-h1"}, in_flight("zb-h1", p=4)),
        ({"pp": 2, "schedule": "zb-v"}, in_flight("zb-v", p=2, v=2)),
        ({"pp": 2, "schedule": "v-half"}, in_flight("v-half", p=2, v=2)),
        ({"pp": 2, "tp": 2}, [2, 1]),
        ({"pp": 2, "tp": 2, "sequence_parallel": False}, [2, 1]),
    ],
)
def test_order_and_micro_batches_in_flight(plan: dict[str, Any], held: list[int], cpu: Device) -> None:
    of = resolve_plan(load_job(job(4, **plan)))
    for number, wanted in enumerate(held):
        device = DeviceReplay(of, number, cpu)
        played = device.play()
        assert played.order == action_orders(of)[number]
        assert played.held == wanted
        assert not device.in_flight and not device.passed_on
        turns = Counter((action.stage, action.kind) for action in played.order)
        assert {turn: len(passes) for turn, passes in played.seconds.items()} == turns
        assert min(map(min, played.seconds.values())) > 0 and played.optimizer > 0


def test_gradients_are_those_of_the_mean_over_micro_batches(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the results of the passes were dropped in between."""
    plan = resolve_plan(load_job(job(2)))
    device, plain = DeviceReplay(plan, 0, cpu), build_stage(plan, 0, TensorGroup(), cpu.torch)
    sum(plain(*make_tokens(plan, 0, k, 0)) / 2 for k in range(2)).backward()
    monkeypatch.setattr(device.optimizer, "step", lambda: None)
    monkeypatch.setattr(device.optimizer, "zero_grad", lambda: None)
    device.play()
    for name, param in device.stages[0].named_parameters():
        assert torch.allclose(gradient(param), plain.get_parameter(name).grad, atol=1e-6), name


@pytest.mark.parametrize(
    ("model", "recompute", "schedule"),
    drawn_grid(["llama", "gpt"], ["none", "full"], ["1f1b", "zb-h1", "zb-v", "v-half", "breadth-first"]),
)
def test_gradients_of_weights_made_later_are_the_same(
    schedule: str, model: str, recompute: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every device, from the same results and gradients of other devices."""
    plan = resolve_plan(
        load_job(job(4, {"llama": LLAMA, "gpt": GPT}[model], pp=2, schedule=schedule, recompute=recompute))
    )
    made = torch.Generator().manual_seed(0)
    shape = 4, plan.shape.stages, 2, 1, 16, 32
    results, gradients = torch.randn(shape, generator=made).transpose(0, 2)

    def incoming(stage: int, forward: bool, k: int) -> Any:
        if forward:
            return results[stage, k].clone() if stage else make_tokens(plan, 0, k, 0)[0]
        return gradients[stage, k].clone() if stage < plan.shape.stages - 1 else torch.tensor(0.25)

    for number in (0, 1):
        device, again = DeviceReplay(plan, number, cpu), DeviceReplay(plan, number, cpu)
        plain = again.stages
        for k in range(4):
            left: Any = None
            for stage in plain:
                entered = left if stage - 1 in plain else incoming(stage, True, k)
                targets = (make_tokens(plan, 0, k, 0)[1],) if stage == plan.shape.stages - 1 else ()
                left = plain[stage](entered, *targets)
                if stage + 1 not in plain:
                    left.backward(incoming(stage, False, k))
        real = device._receive

        def instead(action: Any, real: Any = real) -> Any:
            if real(action) is None:
                return None
            return incoming(action.stage, action.kind == "F", action.microbatch)

        monkeypatch.setattr(device, "_receive", instead)
        monkeypatch.setattr(device.optimizer, "step", lambda: None)
        monkeypatch.setattr(device.optimizer, "zero_grad", lambda: None)
        device.play()
        for late, at_once in zip(device.optimizer.params, again.optimizer.params, strict=True):
            assert gradient(at_once).abs().max() > 0
            assert torch.allclose(gradient(late), gradient(at_once), rtol=1e-6, atol=1e-6)


def test_stages_on_one_device_share_a_tied_table(cpu: Device) -> None:
    device = DeviceReplay(resolve_plan(load_job(job(4, GPT, pp=2, schedule="zb-v"))), 0, cpu)
    assert device.stages[0].embedding.weight is device.stages[3].embedding.weight


MODEL = {**LLAMA, "hidden": 128, "ffn": 256, "vocab": 512, "seq": 256}
PEAKS = [(*case, 0.02) for case in product(["1f1b"], ["none", "full"])]
PEAKS += [(*case, 0.05) for case in product(["zb-h1", "zb-v"], ["none", "full"])]


@pytest.mark.parametrize(("schedule", "recompute", "off"), drawn(PEAKS, keep=len(PEAKS)))
def test_memory_is_as_forecast(schedule: str, recompute: str, off: float, tmp_path: Path) -> None:
    of = job(4, MODEL, pp=2, schedule=schedule)
    file = stages.measure(of, "cpu", tmp_path / "stages.json", recompute=[recompute], repeat=1, warmup=0)
    rows = [row for row in file.rows if row.quantity == "bytes"]
    assert [row.name for row in rows] == ["device 0 peak allocated", "device 1 peak allocated"]
    for row in rows:
        assert row.forecasts["catalog"].value == pytest.approx(row.samples[0], rel=off), row


def test_the_file_holds_forecasts_before_anything_is_measured(tmp_path: Path) -> None:
    out, seen = tmp_path / "stages.json", []

    def progress(text: str) -> None:
        if not seen:
            before = read(out)
            assert before.measured is None and not any(row.samples for row in before.rows)
            seen.append([(row.name, row.group, row.forecasts) for row in before.rows])

    file = stages.measure(job(pp=2), "cpu", out, recompute=["none", "selective"], repeat=2, progress=progress)
    assert [(row.name, row.group, row.forecasts) for row in read(out).rows] == seen[0]
    names = [f"device {device} {what}" for device in (0, 1) for what in ("F", "BW")]
    more = [f"device {device} {what}" for device in (0, 1) for what in ("optimizer", "peak allocated")]
    assert [row.name for row in file.rows] == 2 * [*names, *more, "step (put together)"]
    assert {row.group for row in file.rows} == {"recompute none", "recompute selective"}
    for row in file.rows:
        many = 8 if row.name in names else 1 if row.quantity == "bytes" else 2
        assert len(row.samples) == many and min(row.samples) > 0 and row.forecasts["catalog"].value > 0
    values = {row.name: min(row.samples) for row in file.rows[:9]}
    busiest = max(4 * (values[f"device {device} F"] + values[f"device {device} BW"]) for device in (0, 1))
    assert values["step (put together)"] > busiest


def test_gradients_of_inputs_and_of_weights_have_rows_of_their_own(tmp_path: Path) -> None:
    file = stages.measure(job(pp=2, schedule="zb-h1"), "cpu", tmp_path / "stages.json", repeat=1, warmup=0)
    rows = {row.name: row for row in file.rows}
    assert [name for name in rows if name.startswith("device 0")][:3] == [f"device 0 {kind}" for kind in "FBW"]
    for kind in "FBW":
        assert len(rows[f"device 1 {kind}"].samples) == 4 and rows[f"device 1 {kind}"].forecasts["catalog"].value > 0
    busiest = max(4 * sum(rows[f"device {device} {kind}"].median or 0.0 for kind in "FBW") for device in (0, 1))
    assert (rows["step (put together)"].median or 0.0) > busiest


def test_weights_have_no_gradient_before_their_own_action(cpu: Device) -> None:
    """The order of a split backward pass: B leaves the gradients of matrices as they are, W adds them."""
    device = DeviceReplay(resolve_plan(load_job(job(1, pp=2, schedule="zb-h1"))), 0, cpu)
    matrix = device.stages[0].layers["0"].mlp.up.weight
    changed: dict[str, bool] = {}
    run = device._run_action

    def watch(action: Any, received: Any) -> Any:
        before = gradient(matrix).clone()
        message = run(action, received)
        changed[action.kind] = not torch.equal(gradient(matrix), before)
        return message

    device._run_action = watch  # type: ignore[method-assign]
    device.play()
    assert changed == {"F": False, "B": False, "W": True}


def test_memory_counters_and_states_of_a_gpu(tmp_path: Path, fake_cuda: Any) -> None:
    """Each action stands between two synchronisations, and each device of the pipeline begins with an empty cache."""
    file = stages.measure(job(pp=2), "cuda", tmp_path / "stages.json", repeat=1, warmup=0)
    values = {row.name: row.median for row in file.rows}
    assert [values[f"device 1 peak {what}"] for what in ("allocated", "reserved", "device")] == [1000, 2000, 3000]
    assert set(file.machine.states) == {"before", "during", "after"}
    during = file.machine.states["during"]
    assert (during.sm_clock, during.power, during.throttled) == (1980.0, 650.1, ("power cap",))
    # Two devices, two passes each: eight actions, and the update behind them.
    assert fake_cuda.calls["synchronize"] >= 2 * 2 * (2 * 8 + 1)
    assert fake_cuda.calls["empty_cache"] >= 2 and fake_cuda.calls["reset_peaks"] == 2


def test_a_stage_that_runs_out_of_memory_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceReplay, "play", full)
    file = stages.measure(job(pp=2), "cpu", tmp_path / "stages.json")
    assert file.notes == ("recompute none: device 0 does not fit, so no step is assembled",)
    assert not any(row.samples for row in file.rows)


def test_an_interrupt_keeps_finished_measurements(tmp_path: Path) -> None:
    out = tmp_path / "stages.json"

    def stop(text: str) -> None:
        if text.endswith("device 1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.measure(job(pp=2), "cpu", out, repeat=1, progress=stop)
    file = read(out)
    measured = {row.name for row in file.rows if row.samples}
    assert measured == {"device 0 F", "device 0 BW", "device 0 optimizer", "device 0 peak allocated"}
    assert "interrupted" in file.notes[0]


def test_replicas_with_whole_states_are_measured(tmp_path: Path) -> None:
    file = stages.measure(job(pp=2, dp=2, zero=0), "cpu", tmp_path / "stages.json", repeat=1, warmup=0)
    assert len(file.rows) == 9
