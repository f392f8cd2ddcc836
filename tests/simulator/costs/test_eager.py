"""Operations of eager PyTorch: several kernels, whose bytes a framework counts and whose rates are calibrated."""

from dataclasses import replace

import pytest

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.costs.kernels import eager
from meshcast.simulator.costs.kernels.eager import RATE_OF, EagerKernels, make_eager_kernels
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.graph_parts import CudaGraphs
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.loading.load import load_job

H200, H100 = load("gpus", "h200-sxm"), load("gpus", "h100-sxm")
REFERENCE = load_framework("reference")
MODEL = Calibration.shipped().kernel_model(H200, "eager").model
MB = 10**6


def costs_on(gpu: str, framework: str) -> Costs:
    cluster = load_job({"model": "llama3-8b", "cluster": {"gpu": gpu, "gpus": 1}}).cluster
    return Costs(cluster, Mesh({"tp": 1}), replace(load_framework(framework).kernel_traits, alone=True))


def test_an_operation_has_the_kernels_and_the_bytes_of_its_pass() -> None:
    forward = make_eager_kernels(Memory("activation", 200 * MB, 100 * MB), REFERENCE.eager)
    backward = make_eager_kernels(Memory("activation", 300 * MB, 200 * MB, backward=True), REFERENCE.eager)
    assert forward == EagerKernels("activation", pytest.approx(300 * MB * 10 / 6, rel=2e-3), 2)
    assert backward == EagerKernels("activation", pytest.approx(500 * MB * 22 / 10, rel=2e-3), 4, backward=True)


def test_sums_over_copies_of_tokens_differ_from_the_copies() -> None:
    copies, sums = Memory("permute", MB, 2 * MB), Memory("permute", 2 * MB, MB)
    kinds = [made.what for one in (copies, sums) if (made := make_eager_kernels(one, REFERENCE.eager))]
    assert kinds == ["permute", "unpermute"]
    assert make_eager_kernels(Memory("residual", MB, MB), REFERENCE.eager) is None


@pytest.mark.parametrize("what", RATE_OF)
def test_every_operation_takes_a_latency_for_each_kernel_and_longer_with_more_bytes(what: str) -> None:
    none, launch = eager.seconds(EagerKernels(what, 0.0, 3), H200, MODEL)
    assert none == launch == pytest.approx(3 * MODEL.launch)
    small, large = (eager.seconds(EagerKernels(what, n * MB, 3), H200, MODEL)[0] for n in (1, 1000))
    assert large - none == pytest.approx(1000 * (small - none))
    assert large >= 1e9 / H200.memory_bandwidth


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("what", RATE_OF)
def test_an_operation_runs_at_its_own_rate(what: str, backward: bool) -> None:
    work = EagerKernels(what, 1e9, 1, backward)
    own = "loss_backward_rate" if what == "cross-entropy" and backward else RATE_OF[what]
    rates = {name: getattr(MODEL, name) / 2 for name in (*RATE_OF.values(), "loss_backward_rate") if name}
    now, *slower = (
        eager.seconds(work, H200, replace(MODEL, **changed))[0]
        for changed in ({}, {own: rates.pop(own)} if own else {}, rates)
    )
    assert slower[1] == now and (slower[0] > now if own else slower[0] == now)


def test_slow_kernels_hardly_depend_on_the_memory_and_fast_ones_do() -> None:
    """The H100 has the multiprocessors of the H200 and 0.7 of its memory bandwidth; measured 1.03 to 1.11 and 1.22."""

    def ratio(work: EagerKernels) -> float:
        return eager.seconds(work, H100, MODEL)[0] / eager.seconds(work, H200, MODEL)[0]

    same, slower = (ratio(EagerKernels(what, 1e9, 0)) for what in ("activation", "adam"))
    assert 1 < same < 1.15
    assert slower == pytest.approx(H200.memory_bandwidth / H100.memory_bandwidth)


def test_kernels_of_whole_tensors_are_streams() -> None:
    streams, halves = (
        eager.seconds(EagerKernels("activation", 1e9, 2, vectorised=one), H200, MODEL) for one in (True, False)
    )
    assert streams == eager.seconds(EagerKernels("adam", 1e9, 2), H200, MODEL) and streams[0] < halves[0]


def test_only_frameworks_that_say_so_run_operations_as_several_kernels() -> None:
    work = Memory("rope", 84 * MB, 84 * MB)
    unfused, fused = (costs_on("h200-sxm", name).estimate(work).seconds for name in ("reference", "megatron-core"))
    assert unfused == pytest.approx(336e-6, rel=0.05), "measured, validation/measured/h200"
    assert fused < unfused / 4


def test_on_a_cpu_operations_are_those_of_its_calibration() -> None:
    work = Memory("rope", MB, MB)
    assert costs_on("cpu-core", "reference").kernels._eager == {}
    assert costs_on("cpu-core", "reference").estimate(work).seconds > 0


@pytest.mark.parametrize(("columns", "tp"), [(50257, 1), (50304, 1), (25136, 2)])
def test_unaligned_output_layers_are_slow_on_hopper_alone(columns: int, tp: int) -> None:
    work, aligned = Gemm(8192, columns, 1024), Gemm(8192, 50304 // tp, 1024)
    for gpu, slow in (("h200-sxm", True), ("a100-sxm-80", False)):
        costs = costs_on(gpu, "reference")
        ratio = costs.estimate(work).seconds / costs.estimate(aligned).seconds
        assert (ratio > 4) == (slow and columns % 8 > 0)


def test_a_calibration_of_the_machine_knows_its_sustained_rate_better_than_the_framework(tmp_path) -> None:
    entry = {"value": 0.7, "sigma": 0.05, "rows": 1, "meaning": "rate", "source": "test"}
    machine = Calibration.shipped().with_file("steps", {"hopper": {"sustained": entry}})
    cluster = costs_on("h200-sxm", "reference").cluster
    work = Gemm(8192, 8192, 8192)

    def seconds(calibration=None, **traits) -> float:
        return Costs(cluster, Mesh({"tp": 1}), KernelTraits(**traits), calibration).estimate(work).seconds

    alone, own = seconds(alone=True), seconds(sustained=0.93)
    assert alone < own < seconds()
    assert seconds(sustained=0.93, calibration=machine) == seconds(calibration=machine) > own


def test_conversions_are_kernels_of_their_own_where_formats_differ() -> None:
    job = {
        "model": {"preset": "llama3.2-1b", "layers": 2},
        "cluster": {"gpu": "h200-sxm", "gpus": 1},
        "framework": "reference",
        "batch": {"global": 1, "sequence": 1024},
    }

    def updates(**precision: str) -> dict[str, Memory]:
        plan = resolve_plan(load_job({**job, "precision": {"main_weights": "fp32", **precision}}))
        return {op.name: op.work for op in lower_stages(plan)[1][0].forward if isinstance(op.work, Memory)}

    same, converted = updates(compute="fp32", gradients="fp32"), updates(compute="bf16", gradients="bf16")
    elements = same["grad-norm"].read // 4
    assert "convert" not in same
    assert (converted["convert"].read, converted["convert"].write) == ((2 + 4) * elements, (4 + 2) * elements)
    assert all((one["adam"].read, one["adam"].write) == (16 * elements, 12 * elements) for one in (same, converted))


def test_compiled_layers_have_fused_kernels() -> None:
    """Of torchtitan's own RMS norm: 36 bytes an element forward and 92 backward, where fused kernels move 4 and 6."""
    titan = load_framework("torchtitan")
    eagerly = titan.model_copy(update={"compile": False})
    assert titan.kernel_traits.eager == {} and eagerly.kernel_traits.eager == titan.eager
    works = Memory("rms-norm", 2 * MB, 2 * MB), Memory("rms-norm", 4 * MB, 2 * MB, backward=True)
    made = [make_eager_kernels(work, titan.eager) for work in works]
    assert [one and one.nbytes for one in made] == pytest.approx([36 * MB, 92 * MB], rel=5e-3)
    cluster = load_job({"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 1}}).cluster
    costs = [Costs(cluster, Mesh({"tp": 1}), replace(one.kernel_traits, alone=True)) for one in (titan, eagerly)]
    compiled, unfused = (cost.estimate(Memory("rms-norm", 134 * MB, 134 * MB)).seconds for cost in costs)
    assert 6 < unfused / compiled < 12


def test_counted_kernels_take_no_further_factor() -> None:
    work, eagerly = Memory("rope", 84 * MB, 84 * MB), load_framework("torchtitan").model_copy(update={"compile": False})
    cluster = load_job({"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 1}}).cluster
    slower = eagerly.model_copy(update={"rates": {"memory_bound": 2.4}})
    first, second = (
        Costs(cluster, Mesh({"tp": 1}), replace(one.kernel_traits, alone=True)) for one in (eagerly, slower)
    )
    assert first.estimate(work) == second.estimate(work)
    other = Memory("residual", 168 * MB, 84 * MB)
    assert second.estimate(other).seconds == pytest.approx(2 * first.estimate(other).seconds, rel=0.02)


def gpt_oss_memory(framework: str | dict[str, object]) -> dict[tuple[str, bool], Memory]:
    """Memory-bound kernels of a layer of gpt-oss by kind and pass, on a rank with half of its experts."""
    job = {
        "model": {"preset": "gpt-oss-20b", "layers": 2},
        "cluster": {"gpu": "h100-sxm", "gpus": 2},
        "framework": framework,
        "batch": {"global": 2, "sequence": 1024},
        "plan": {"dp": 2, "ep": 2},
    }
    (stage,) = lower_stages(resolve_plan(load_job(job)))[0]
    ops = [op for run in stage.unit_runs for op in (*run.fragment.forward, *run.fragment.backward)]
    return {(op.work.what, op.work.backward): op.work for op in ops if isinstance(op.work, Memory)}


def test_clamps_and_biases_of_experts_are_counted_kernels_of_megatron_core() -> None:
    """Bytes an element of what is made: clamps 22 and 46, biases 28 and 40 (see the profile)."""
    eagerly, elements = load_framework("megatron-core").eager, 4 * 1024 * 2880
    works = gpt_oss_memory("megatron-core")
    for what, counted in {"clamped-activation": (22, 46), "expert-bias": (28, 40)}.items():
        made = [make_eager_kernels(works[what, backward], eagerly) for backward in (False, True)]
        assert [one and one.nbytes / elements for one in made] == pytest.approx(counted, rel=2e-3)
    fused = gpt_oss_memory({"name": "megatron-core", "set": {"compile": True}})
    assert {"clamped-activation", "expert-bias"}.isdisjoint(what for what, _ in fused)


def test_a_graph_of_the_whole_step_runs_experts_in_grouped_kernels() -> None:
    """Of MXFP8: their activation and its casts are in the kernels of the GEMMs, both ways."""
    job = {
        "model": {"preset": "qwen3-30b-a3b", "layers": 1},
        "cluster": {"gpu": "gb200", "gpus": 4},
        "batch": {"global": 4, "sequence": 1024},
        "plan": {"dp": 4, "ep": 4},
        "precision": {"compute": "mxfp8"},
    }

    def expert_ops(graphs: CudaGraphs) -> dict[str, list[Gemm | Memory]]:
        framework = {"name": "megatron-core", "set": {"cuda_graphs": graphs}}
        (stage,) = lower_stages(resolve_plan(load_job(job | {"framework": framework})))[0]
        ops = [op for run in stage.unit_runs for op in (*run.fragment.forward, *run.fragment.backward)]
        named: dict[str, list[Gemm | Memory]] = {}
        for op in ops:
            if "expert." in op.name and isinstance(op.work, Gemm | Memory):
                named.setdefault(op.name, []).append(op.work)
        return named

    whole, apart = expert_ops(True), expert_ops(("attn", "moe_router", "moe_preprocess"))
    for found, one_kernel in ((whole, True), (apart, False)):
        assert {work.one_kernel for works in found.values() for work in works if isinstance(work, Gemm)} == {one_kernel}
        fused = [*found["cast expert.act"], *found["expert.act"], *found["dexpert.act"]]
        assert all((work.bytes == 0) == one_kernel for work in fused)
        kinds = [work.what for work in found["dexpert.up"] if isinstance(work, Memory)]
        assert ("cast" in kinds) == (not one_kernel)
        assert "cast" in [work.what for work in found["dexpert.down"] if isinstance(work, Memory)]
