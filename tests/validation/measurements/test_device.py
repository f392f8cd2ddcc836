"""The device under measurement: what it does with CUDA, seen through a fake that counts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshcast.validation.measurements import gpu_state  # noqa: E402
from meshcast.validation.measurements.cuda import Cuda  # noqa: E402
from meshcast.validation.measurements.device import MAX_SPIN, MIN_SPIN, Device, _highest_level  # noqa: E402
from meshcast.validation.measurements.gpu_state import read_state  # noqa: E402
from meshcast.validation.measurements.measurement import GPUState, Machine  # noqa: E402
from meshcast.validation.measurements.recording import versions  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def gpu(fake_cuda: Any) -> Device:
    return Device.of("cuda")


# ------------------------------------------------------------------------------------------------ time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test sets it."""
    found = [0.0]
    monkeypatch.setattr("meshcast.validation.measurements.device.time.perf_counter", lambda: found[0])
    return found


def test_the_stream_is_held_back_until_all_work_is_issued(gpu: Device, fake_cuda: Any, clock: list[float]) -> None:
    """Launch latency would be part of a sample whose work takes the host longer to issue."""

    def work() -> None:
        clock[0] += 2e-3

    gpu.seconds(work, warmup=1, repeat=3)
    assert fake_cuda.spins == [pytest.approx(3e-3)] * 3 and MIN_SPIN < 2e-3


def test_a_sample_is_taken_again_if_the_host_was_too_slow(gpu: Device, fake_cuda: Any, clock: list[float]) -> None:
    durations = iter([0.0, 4e-3, 4e-3, 0.0])

    def work() -> None:
        clock[0] += next(durations)

    samples = gpu.seconds(work, warmup=0, repeat=3)
    assert samples == pytest.approx([0.0, 4e-3, 0.0])
    assert fake_cuda.spins == pytest.approx([MIN_SPIN, MIN_SPIN, 6e-3, 6e-3])


def test_eager_steps_are_held_back_for_half_a_second_at_most(gpu: Device, fake_cuda: Any, clock: list[float]) -> None:
    def work() -> None:
        clock[0] += 4.0

    gpu.seconds(work, warmup=1, repeat=1)
    assert fake_cuda.spins == [MAX_SPIN]


def test_work_that_runs_once_is_prepared_for_each_sample(gpu: Device) -> None:
    prepared: list[list[int]] = []

    def prepare() -> Any:
        uses = list[int]()
        prepared.append(uses)
        return lambda: uses.append(1)

    gpu.seconds_after(prepare, warmup=2, repeat=3)
    assert all(uses == [1] for uses in prepared) and len(prepared) >= 5


# ---------------------------------------------------------------------------------------------- memory


def test_the_driver_reports_the_memory_of_a_plan(gpu: Device, fake_cuda: Any) -> None:
    with gpu.peak() as before:
        pass
    gpu.release_cache()
    with gpu.peak() as after:
        pass
    assert (before.reserved, after.reserved) == (9000, 2000)  # what was cached is no part of a measurement
    assert (after.allocated, after.device) == (1000, 3000)
    assert all(name in after.instrument for name in ("max_memory_allocated", "max_memory_reserved", "mem_get_info"))
    assert fake_cuda.calls["reset_peaks"] == 2 and fake_cuda.calls["empty_cache"] == 1
    assert (gpu.memory_counters, Device("cpu").memory_counters) == (("allocated", "reserved", "device"), ("allocated",))


# -------------------------------------------------------------------------------------------- warm-up


def test_warming_up_ends_when_the_clock_is_steady(gpu: Device, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "INTERVAL", 1e-3)
    fake_cuda.clocks = [345.0, 345.0, 1200.0, *[1980.0 - 0.5 * i for i in range(30)]]
    with gpu.monitor() as add_states:
        for _ in gpu.warm_up(3):
            time.sleep(1e-3)
        readings = gpu._monitors[-1].readings
        assert [one.sm_clock for one in readings[:3]] == [345.0, 1200.0, 1980.0]
        latest = [one.sm_clock or 0.0 for one in readings[-gpu_state.WINDOW :]]
        assert max(latest) <= 1.01 * min(latest)
        machine = add_states(Machine(device="cuda", name="a GPU"))
    assert set(machine.states) == {"before", "during", "after"}
    assert machine.states["during"].power == 650.1 and machine.states["during"].throttled == ("power cap",)


def test_a_gpu_that_is_never_steady_is_warm_at_last(
    gpu: Device, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_state, "INTERVAL", 1e-3)
    monkeypatch.setattr(gpu_state, "WARM_UP_LIMIT", 0.05)
    fake_cuda.clocks = [1000.0, 2000.0] * 10_000
    with gpu.monitor():
        runs = sum(1 for _ in gpu.warm_up(2) if time.sleep(1e-3) is None)
    assert runs >= 2


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_clocks_the_number_of_runs_counts(kind: str, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "query", lambda self, fields: None)
    device = Device.of(kind)
    with device.monitor() as add_states:
        time.sleep(5e-3)
        assert [*device.warm_up(3)] == [0, 1, 2]
        assert add_states(Machine(device=device.kind, name="any")).states == {}


def test_one_process_decides_for_all(gpu: Device, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "INTERVAL", 1e-3)
    fake_cuda.clocks = [1000.0, 2000.0] * 10_000
    with gpu.monitor():
        assert [*gpu.warm_up(2, lambda go_on: False)] == [0, 1]


# ----------------------------------------------------------------------------------------- nvidia-smi


def test_a_gpu_is_asked_for_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA_VISIBLE_DEVICES torch's GPU 0 may be any of nvidia-smi's."""
    from types import SimpleNamespace

    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="1980, 2619, 650.12, 55, 0x0000000000000004\n")

    monkeypatch.setattr("meshcast.validation.measurements.cuda.subprocess.run", run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34"))
    state = read_state(Cuda(0))
    assert "--id=GPU-12-34" in asked[0] and any("clocks_event_reasons.active" in word for word in asked[0])
    expected = {"sm_clock": 1980, "memory_clock": 2619, "power": 650.12, "temperature": 55, "throttled": ["power cap"]}
    assert state == GPUState.model_validate(expected)
    # A build of torch whose properties have no UUID.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-77")
    assert [Cuda(0).uuid, Cuda(1).uuid, Cuda(2).uuid] == ["5", "GPU-77", "2"]


def test_a_process_that_starts_others_takes_no_memory_of_the_gpu(fake_cuda: Any) -> None:
    """Its context would be missing for them, and count as theirs: neither torch nor the driver makes one."""
    machine = Device.of("cuda", select=False).machine()
    assert not fake_cuda.calls["select"] and (machine.name, machine.memory) == ("NVIDIA H200", 143771 * 2**20)
    Device.of("cuda")
    assert fake_cuda.calls["select"] == 1


def test_old_drivers_name_the_reasons_otherwise(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def query(fields: Any) -> Any:
        old = "clocks_throttle_reasons.active" in fields
        return ["1410", "[N/A]", "300.5", "60", "0x28"] if old else None

    monkeypatch.setattr(gpu.cuda, "query", query)
    assert gpu.cuda is not None
    state = read_state(gpu.cuda)
    assert state is not None and state.memory_clock is None
    assert state.throttled == ("hardware slowdown", "temperature, by software")


# ------------------------------------------------------------------------------------------- versions


def test_a_measurement_names_its_commit() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert len(found.get("commit", "0" * 40).removesuffix("-dirty")) == 40


def test_a_processor_has_the_memory_of_its_machine() -> None:
    (line,) = (line for line in Path("/proc/meminfo").read_text("utf-8").splitlines() if line.startswith("MemTotal"))
    assert Device.of("cpu").machine().memory == 1024 * int(line.split()[1])


def test_the_peak_of_a_profile_is_above_its_begin_in_order_of_time() -> None:
    changes = [(3, -4), (1, 4), (2, 3), (4, 2)]
    events = [
        SimpleNamespace(start_ns=lambda at=at: at, nbytes=lambda n=n: n, name=lambda: "[memory]") for at, n in changes
    ]
    results = SimpleNamespace(events=lambda: events)
    assert _highest_level(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))) == 7
