"""Calibrating the machine at hand: measured, fitted, written, and used by name."""

import pytest

torch = pytest.importorskip("torch")

from meshcast.hardware import load  # noqa: E402
from meshcast.hardware.errors import PlanError  # noqa: E402
from meshcast.simulator.costs.calibration.calibration import Calibration  # noqa: E402
from meshcast.simulator.costs.calibration.check import check_folder  # noqa: E402
from meshcast.simulator.forecast.simulate import simulate  # noqa: E402
from meshcast.simulator.ir.ops import Attention, Gemm, Memory  # noqa: E402
from meshcast.validation.calibration.device import calibrate as calibrating  # noqa: E402
from meshcast.validation.calibration.device import describe  # noqa: E402
from meshcast.validation.calibration.device import kernels as works  # noqa: E402
from meshcast.validation.measurements.device import Device  # noqa: E402
from meshcast.validation.measurements.forecasts import use_calibrated_gpu  # noqa: E402
from meshcast.validation.measurements.measurement import Machine, MeasurementRow, read  # noqa: E402

pytestmark = pytest.mark.torch

FEW = works.Sizes(
    (32, 64), ((64, 64), (128, 64)), ((1, 64, 2, 2, 32), (1, 96, 2, 1, 32)) * 3, ((32, 64), (64, 128)), ((32, 128),)
)
SENT = [
    MeasurementRow(
        name=f"{operation} {size}",
        samples=(2e-4 + size / 1e9,),
        shape={"operation": operation, "bytes": size, "members": 2},
    )
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
    for size in (1000, 30_000, 1_000_000, 30_000_000)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(works.SIZES, "cpu", FEW)
        patch.setattr(calibrating, "ROUNDS", 1)
        patch.setattr(calibrating, "collectives_among", lambda kind, members: SENT)
        patch.setattr(
            calibrating, "measure_sustained_rate", lambda *_: {"sustained": {"value": 0.9, "sigma": 0.05, "rows": 1}}
        )
        neighbours, run_neighbours = [], calibrating.run_neighbours
        patch.setattr(calibrating, "run_neighbours", lambda count: neighbours.append(count) or run_neighbours(count))
        calibrated = calibrating.calibrate("cpu", out, 2, lambda steps, total, what: steps)
        assert set(neighbours) == {1}  # of two processes one is measured
    return out, calibrated


def test_it_writes_the_device_its_calibration_and_the_samples(folder) -> None:
    out, calibrated = folder
    names = {"device.yaml", "loopback.yaml", "measured.json", "steps.yaml", "this-core.yaml"}
    assert {file.name for file in out.iterdir()} == names
    assert all((out / name).is_file() for name in ("device.yaml", "loopback.yaml")) and calibrated["device"]
    check_folder(out)
    measured = read(out / "measured.json")
    assert measured.kind == "calibration" and all(row.samples for row in measured.rows)


def test_the_measured_device_is_used_by_name(folder) -> None:
    out, _ = folder
    gpu = load("gpus", str(out / "device.yaml"))
    assert gpu.architecture == "cpu" and gpu.peak["fp32"].kind == "measured"
    known = Calibration.from_folder(out)
    assert known.sustained_rate(gpu) == 0.9
    for section in ("cpu-gemm", "cpu-attention", "cpu-memory"):
        model, borrowed = known.kernel_model(gpu, section)
        assert not borrowed and model.sigma > 0
    cluster = {"gpu": "cpu-core", "gpus": 2}
    job = {"model": "gpt2-124m", "cluster": cluster, "framework": "reference", "precision": "fp32", "plan": {"tp": 2}}
    named = use_calibrated_gpu(job, out)
    assert named["cluster"]["gpu"] == str(out / "device.yaml")
    assert simulate(named, calibration=known).step_time != simulate(job, calibration=known).step_time


def test_the_cost_model_of_processes_follows_their_times(folder) -> None:
    out, _ = folder
    from meshcast.hardware.inline import ByGPU, Inter
    from meshcast.hardware.topology import reach
    from meshcast.simulator.costs.collectives import collective
    from meshcast.simulator.costs.collectives.links import Links, TierCostModels
    from meshcast.simulator.ir.ops import Collective

    cluster = ByGPU(
        gpu=load("gpus", "cpu-core"), gpus=2, gpus_per_node=2, scale_up_domain=1, inter=Inter(kind="none")
    ).cluster()
    model = Calibration.from_folder(out).link_models(cluster.host).model
    links = Links(cluster, TierCostModels(model, model, None))  # type: ignore[arg-type]
    for size in (30_000, 30_000_000):
        found = collective.price(Collective("all_gather", size, ("x",)), reach(cluster, [0, 1]), links)
        assert found.seconds == pytest.approx(2e-4 + size / 1e9, rel=0.3)


def test_the_set_has_every_kind_of_kernel_at_sizes_of_no_model() -> None:
    for kind, dtype in (("cpu", "fp32"), ("cuda", "bf16")):
        sizes = works.SIZES[kind]
        assert not {size for pair in sizes.weights for size in pair} & {512, 768, 1024, 2048, 4096, 8192}, dtype
    every = [case.work for case in works.make_cases(Device.of("cpu"), "fp32")]
    assert {type(work) for work in every} == {Gemm, Attention, Memory}
    kinds = {(work.what, work.backward) for work in every if isinstance(work, Memory)}
    assert {("norm", True), ("rms-norm", True), ("rope", True), ("adam", False), ("cross-entropy", False)} <= kinds
    # A backward pass reads what the forward pass read, and the gradient of what it wrote.
    passes = {(work.what, work.backward): work for work in every if isinstance(work, Memory)}
    for what in ("rms-norm", "norm", "activation", "gelu"):
        forward, backward = passes[what, False], passes[what, True]
        assert (backward.read, backward.write) == (forward.read + forward.write, forward.read), what
    assert {work.layout for work in every if isinstance(work, Gemm)} == {"tn", "nn", "nt"}


def test_gpus_are_known_by_the_name_of_their_driver() -> None:
    assert describe.catalog_name(Machine(device="cuda", name="NVIDIA H200")) == "h200-sxm"
    assert describe.catalog_name(Machine(device="cuda", name="NVIDIA Something")) == ""
    assert all(load("gpus", name) for name in describe.KNOWN.values())


def test_without_a_gpu_the_command_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(PlanError, match="no CUDA device"):
        Device.of("cuda")
    with pytest.raises(PlanError, match="cpu or cuda"):
        Device.of("tpu")


def test_a_core_counts_live_and_allocated_bytes() -> None:
    device = Device.of("cpu")
    kept = torch.ones(1000, 1000)
    with device.peak() as peak:
        more = torch.ones(500, 1000)
        del more
    assert peak.allocated >= kept.nbytes + 2_000_000 and "profiler" in peak.instrument
    assert peak.allocated < kept.nbytes + 2_000_000 + 50e6


def test_samples_are_taken_and_warmed_up_for() -> None:
    calls = []
    found = Device.of("cpu").seconds(lambda: calls.append(1), warmup=2, repeat=5, cold=True)
    assert len(found) == 5 and len(calls) == 7 and all(one >= 0 for one in found)


def test_naming_a_gpu_takes_no_memory_of_it(fake_cuda, tmp_path) -> None:
    assert calibrating.gpu_name("cuda", tmp_path) == "h200-sxm" and not fake_cuda.calls["select"]
