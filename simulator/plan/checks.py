"""Rules that hold for a whole plan; every function ``check_...`` raises a PlanError if its rule is broken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from meshcast.hardware.errors import ModelError, PlanError
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import (
    AccumulatesByUnit,
    AnnotatesOperators,
    GathersLogits,
    HoldsStates,
    MeetsPeriodically,
    RequiresRoles,
    ShardsStates,
    TakesProjectedKeys,
    UpdatesMatrices,
    VariesSteps,
    schemes_with,
)
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.linear_attention_operators import LinearMixer
from meshcast.simulator.ir.mamba_operators import Mamba, Scan
from meshcast.simulator.ir.modules import Operator, walk
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.ir.scheme import Scheme, SequenceScheme
from meshcast.simulator.job.framework import Format, QuantisedRecipe
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.models.branches import share_tokens
from meshcast.simulator.models.undescribed import mixes_tokens
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import Schedule, nearest_multiple
from meshcast.simulator.scheduling.vocabulary import ShardsVocabulary

DIM_NAMES = {
    "b": "batch.micro x data-parallel ranks",
    "s": "batch.sequence",
    "u": "model.frames",
    "h": "model.hidden",
    "a": "model.heads (and kv_heads)",
    "f": "model.ffn",
    "v": "the padded vocabulary",
    "e": "model.moe.experts",
}

EXPERT_NAMES = {**DIM_NAMES, "f": "model.moe.expert_ffn"}
"""Names of dims for operators of experts."""

MAMBA_NAMES = {**DIM_NAMES, "a": "model.ssm.groups (and heads)"}
"""Names of dims for operators of Mamba-2 blocks."""

LINEAR_NAMES = {**DIM_NAMES, "a": "model.linear_attention.key_heads (and heads)"}
"""Names of dims for operators of layers with linear attention."""

MIXER_NAMES: dict[type, Mapping[str, str]] = {Mamba: MAMBA_NAMES, LinearMixer: LINEAR_NAMES}
"""The same by the class of the module that mixes tokens."""

BRANCH_NAMES = {**DIM_NAMES, "a": "heads (and kv_heads) of a branch", "f": "ffn of a branch"}
"""Names of dims for operators of branches."""

MAX_CLASSES = 500
"""Most classes of micro-batches: each is lowered for every distinct stage, 20 to 50 ms."""


def check_formats(plan: Plan) -> None:
    """Checks that the GPU has a peak rate for the number format of the GEMMs."""
    gpu, framework = plan.job.cluster.gpu, plan.job.framework
    number = QUANTISED[framework.quantised].dtype if framework.quantised else framework.weights
    if framework.quantised == "mxfp8" and "fp4" not in gpu.peak and "fp8" in gpu.peak:
        rule = f"{gpu.name} has no GEMMs with a scale per block of 32 elements; GPUs that have them also have fp4"
        raise PlanError("precision.compute", rule, "Use fp8-blockwise or fp8-tensorwise", framework.quantised)
    if number not in gpu.peak:
        words = [word for word in get_args(QuantisedRecipe) if QUANTISED[word].dtype in gpu.peak]
        known = ", ".join([*(word for word in get_args(Format) if word in gpu.peak), *words])
        rule = f"{gpu.name} has no peak rate for GEMMs in {number}"
        raise PlanError("precision.compute", rule, f"Use one of {known}", plan.job.precision.compute)


def check_world(plan: Plan) -> None:
    """Checks that the mesh uses every GPU once."""
    gpus = plan.job.cluster.gpus
    if plan.mesh.world != gpus:
        product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.named_axes.items())
        rule = f"the product of the axes ({product} = {plan.mesh.world}) must be the {gpus} GPUs of the cluster"
        others = {axis: plan.mesh.world // size for axis, size in plan.mesh.named_axes.items()}
        fits = [f"{axis} = {gpus // rest}" for axis, rest in others.items() if gpus % rest == 0]
        remedy = f"{' or '.join(fits)} would work" if fits else "Change an axis, or the number of nodes"
        raise PlanError("plan.mesh", rule, remedy, dict(plan.mesh.named_axes))


def check_axes(plan: Plan) -> None:
    """Checks that every axis larger than 1 belongs to a single scheme, or to a data scheme and a scheme behind it that
    shares its axes."""
    owners: dict[str, Scheme] = {}
    for scheme in plan.schemes:
        for axis in scheme.axes:
            if axis in owners and not (isinstance(scheme, AnnotatesOperators) and owners[axis].family == "data"):
                rule = f"{owners[axis].use} and {scheme.use} both have the axis {axis!r}"
                shared = isinstance(owners[axis], AnnotatesOperators) and scheme.family == "data"
                remedy = f"Name {scheme.use} first" if shared else "Give each scheme an axis of its own"
                raise PlanError("plan.schemes", rule, remedy)
            owners[axis] = scheme
    for axis, size in plan.mesh.named_axes.items():
        if size > 1 and axis not in owners and not set(plan.mesh.parts(axis)) <= owners.keys():
            remedy = f"Add a scheme with `over: {axis}`, for example data/ddp"
            raise PlanError(f"plan.mesh.{axis}", "no scheme says what this axis does", remedy, size)


def check_batch(plan: Plan) -> None:
    """Checks that the global batch is a multiple of micro-batch x data-parallel ranks, for every micro-batch of a
    forward pass; the samples of a forward pass are divisible by the number of backward passes."""
    batch, joint, parts = plan.job.batch, plan.schedule.microbatches_per_forward, plan.schedule.backwards_per_forward
    assert batch.total is not None
    if batch.micro * joint % parts:
        rule = f"{plan.schedule.use} runs {parts} backward passes, each of a part of {batch.micro * joint} samples"
        raise PlanError("batch.micro", rule, f"{nearest_multiple(batch.micro, parts)} would work", batch.micro)
    multiple = batch.micro * joint * plan.ranks.replicas
    if batch.total % multiple:
        near = max(1, round(batch.total / multiple)) * multiple
        joined = f", {joint} to a forward pass" if joint > 1 else ""
        product = " x ".join(map(str, (batch.micro, *([joint] if joint > 1 else []), plan.ranks.replicas)))
        rule = f"it must be a multiple of batch.micro x data-parallel ranks{joined} = {product} = {multiple}"
        raise PlanError("batch.global", rule, f"{near} would work", batch.total)


def check_branches(plan: Plan) -> None:
    """Checks that the branches of a model have whole numbers of tokens of a sequence."""
    model, seq = plan.job.model, plan.job.batch.sequence
    assert seq is not None
    if model.branches:
        try:
            share_tokens(model.stated_tokens, seq, "batch.sequence")
        except ModelError as error:
            raise PlanError(error.where, error.rule, error.remedy, error.value) from None


def check_decoder(plan: Plan) -> None:
    """Checks that a decoder behind an encoder has ranks with whole sequences, on a single mesh."""
    job, model = plan.job, plan.job.model
    if not model.cross_attention:
        return
    rule = f"the decoder of {model.name} attends to the output of an encoder"
    for scheme in plan.schemes:
        if scheme.family == "sequence" and plan.mesh.size(scheme.axes) > 1 and not model.diffusion:
            remedy = "Use tensor, data and pipeline parallelism"
            raise PlanError("plan.schemes", f"{rule}, which {scheme.use} does not shard", remedy, scheme.use)
    parts = {"batch.documents": job.batch.documents, "batch.lengths": job.batch.lengths}
    rule = f"{rule}, which is forecast with equal sequences, stages and replicas"
    for where, stated in (*parts.items(), ("plan.stages", job.plan.stages), ("plan.replicas", job.plan.replicas)):
        if stated:
            raise PlanError(where, rule, "Leave it out")


def check_contrastive(plan: Plan) -> None:
    """Checks that a contrastive loss is computed once for all samples of a batch, which are alike and trained in
    full."""
    model, job = plan.job.model, plan.job
    if model.contrastive is None:
        return
    rule = f"the contrastive loss of {model.name} couples all samples of a batch"
    if job.forward_only:
        raise PlanError("train.mode", f"{rule}, and is forecast with its backward pass", "Leave it out")
    if job.adapters is not None:
        raise PlanError("train", f"{rule}, and both branches are trained in full", "Leave it out")
    if job.batch.lengths or job.plan.replicas or job.plan.share == "by-speed":
        where = "batch.lengths" if job.batch.lengths else "plan.replicas"
        raise PlanError(where, f"{rule}, so micro-batches and replicas are alike", "Leave it out")
    schedule, m = plan.schedule, plan.shape.m
    alone = plan.shape.p == 1 and m == 1
    if not schedule.couples_samples and not alone:
        many = f"{m} micro-batches" if m > 1 else "the stages of a pipeline"
        remedy = "Use pipeline/distmm, or one micro-batch without a pipeline"
        raise PlanError("plan.schemes", f"{rule}, which {schedule.use} does not for {many}", remedy, schedule.use)


def check_attention(plan: Plan) -> None:
    """Raises PlanError for FlashAttention-3 on a GPU that is not of Hopper."""
    framework, gpu = plan.job.framework, plan.job.cluster.gpu
    if framework.attention_library == "flash-3" and gpu.architecture != "hopper":
        rule = f"FlashAttention-3 runs on Hopper GPUs, and {gpu.name} is of architecture {gpu.architecture}"
        raise PlanError("framework.set.attention_library", rule, "flash-2 would work", framework.attention_library)


def check_whole_vocabulary(plan: Plan) -> None:
    """Checks that schemes that shard the vocabulary gather the logits of a loss over all of it."""
    if not plan.job.framework.loss.whole_vocabulary:
        return
    for scheme in plan.schemes:
        of_pipeline = isinstance(scheme, ShardsVocabulary)
        of_tensors = scheme.family == "tensor" and plan.mesh.size(scheme.axes) > 1
        if of_pipeline or (of_tensors and not isinstance(scheme, GathersLogits)):
            rule = f"{scheme.use} computes the loss where its shards of the logits are"
            others = "pipeline/1f1b" if of_pipeline else "tensor/megatron or tensor/megatron-sp"
            raise PlanError("framework.set.loss.whole_vocabulary", rule, f"Leave it out, or use {others}", True)


def check_documents(plan: Plan) -> None:
    """Checks that attention within documents is computed where a rank has all keys of a sequence."""
    if plan.job.batch.documents is not None and len(plan.schedule.slices) != 1:
        rule = f"{plan.schedule.use} brings the keys of a sequence part by part, whatever documents are in it"
        raise PlanError("batch.documents", rule, "Use a schedule of whole sequences, or leave it out")


def check_projected_keys(plan: Plan) -> None:
    """Keys and values that are projected along the sequence are of all its positions, and whole on every rank."""
    model, batch = plan.job.model, plan.job.batch
    if model.projected_keys is None:
        return
    rule = f"{model.name} projects keys and values of {model.seq} positions"
    if model.branches:
        raise PlanError("model.branches", f"{rule}, all of them of one input", "Leave them out")
    if batch.sequence != model.seq:
        raise PlanError("batch.sequence", rule, f"Leave it out, or give model.seq: {batch.sequence}", batch.sequence)
    for scheme in plan.schemes:
        if isinstance(scheme, Schedule) and len(scheme.slices) != 1:
            raise PlanError("plan.schemes", f"{rule} at once, and {scheme.use} slices them", "Use 1f1b", scheme.use)
        shards = isinstance(scheme, SequenceScheme) and plan.mesh.size(scheme.axes) > 1
        if shards and not isinstance(scheme, TakesProjectedKeys):
            remedy = "Use sequence/rsa or tensor/megatron, or leave model.projected_keys out"
            raise PlanError("plan.schemes", f"{rule}, and {scheme.use} shards them otherwise", remedy, scheme.use)


def check_index(plan: Plan) -> None:
    """Checks that an indexer has whole sequences, among whose keys it chooses, and that compressed entries do."""
    model = plan.job.model
    named = {
        "the indexer of {} (model.mla.index) is": model.mla and model.mla.index,
        "the entries of {} (model.compressed) are": model.compressed,
        "the blocks of keys of {} (model.blocks) are": model.blocks,
        "scores of {} with a bias by distance (model.distance_profiles) are": model.distance_profiles,
    }
    what = next((name.format(model.name) for name, part in named.items() if part), "")
    for scheme in plan.schemes if what else ():
        if scheme.family == "sequence" and plan.mesh.size(scheme.axes) > 1:
            rule = f"{what} forecast over whole sequences"
            raise PlanError("plan.schemes", rule, "Use tensor, data and pipeline parallelism", scheme.use)


def check_undescribed(plan: Plan) -> None:
    """Checks that what no part of a traced model describes has whole sequences, if it mixes their tokens."""
    model = plan.job.model
    if not mixes_tokens(model):
        return
    for scheme in plan.schemes:
        if scheme.family == "sequence" and plan.mesh.size(scheme.axes) > 1:
            rule = f"what no part of {model.name} describes (model.other) is forecast over whole sequences"
            raise PlanError("plan.schemes", rule, "Use tensor, data and pipeline parallelism", scheme.use)


def check_frames(plan: Plan) -> None:
    """Sequences of a model of videos are whole videos, of equally many tokens in every frame."""
    frames, batch = plan.job.model.frames, plan.job.batch
    if not frames:
        return
    assert batch.sequence is not None
    tokens = round(plan.job.model.trunk_tokens(batch.sequence))
    if tokens % frames:
        rule = f"every one of the {frames} frames of {plan.job.model.name} has equally many tokens"
        near = max(1, round(tokens / frames)) * frames + batch.sequence - tokens
        raise PlanError("batch.sequence", rule, f"{near} would work", batch.sequence)
    sliced = len(plan.schedule.slices) != 1
    parts = {"batch.documents": batch.documents, "batch.lengths": batch.lengths, "plan.schemes": sliced}
    for where, stated in parts.items():
        if stated:
            rule = f"a sequence of {plan.job.model.name} is one video, whose attention runs along two axes"
            raise PlanError(where, rule, "Leave out documents, lengths and slices of sequences")


def check_diffusion(plan: Plan) -> None:
    """Checks that a sequence of a diffusion transformer is a sample, and that ranks have all of its width."""
    job, model = plan.job, plan.job.model
    if model.diffusion is None:
        return
    if job.batch.documents is not None or len(plan.schedule.slices) != 1:
        where = "plan.schemes" if job.batch.documents is None else "batch.documents"
        rule = f"a sequence of {model.name} is one sample, whose patches attend to all"
        raise PlanError(where, rule, "Leave out documents and slices of sequences")
    if job.train.has_adapters:
        rule = f"{model.name} is forecast with all weights in training"
        raise PlanError("train.mode", rule, "Give full, or leave it out", job.train.mode)
    for scheme in plan.schemes:
        if scheme.family == "tensor" and len(scheme.axes) > 1 and plan.mesh.size(scheme.axes) > 1:
            rule = f"{model.name} modulates the whole width of its stream, which {scheme.use} shards"
            raise PlanError("plan.schemes", rule, "Use tensor/megatron or tensor/megatron-sp", scheme.use)


def check_classes(plan: Plan) -> None:
    """Checks that micro-batches of different lengths pass the stages singly, whole, and all of them in every step."""
    if not plan.job.batch.lengths:
        return
    if (count := len(plan.job.batch.lengths)) > MAX_CLASSES:
        rule = f"micro-batches are of at most {MAX_CLASSES} classes"
        raise PlanError("batch.lengths", rule, "Round lengths up to a larger multiple (batch.samples.multiple)", count)
    schedule = plan.schedule
    whole = [scheme.use for scheme in schemes_with(plan.schemes, AccumulatesByUnit) if scheme.accumulates_by_unit]
    if whole:
        rule = (
            f"micro-batches of different lengths do not go with {whole[0]}, whose layers run all of a step as one pass"
        )
        raise PlanError("batch.lengths", rule, "Set layered: false, or use micro-batches that are alike")
    reasons = {
        "slices sequences of one length": len(schedule.slices) != 1,
        "runs several micro-batches in one pass": schedule.microbatches_per_forward > 1,
        "divides the samples of a micro-batch": schedule.backwards_per_forward > 1,
        "is forecast in the steady state of equal steps": not (schedule.barrier or plan.job.forward_only),
    }
    for reason, holds in reasons.items():
        if holds:
            rule = f"micro-batches of different lengths do not go with {schedule.use}, which {reason}"
            raise PlanError("batch.lengths", rule, "Use pipeline/1f1b, or micro-batches that are alike")


def check_noise(plan: Plan) -> None:
    """Checks that the pipeline flushes between steps with noise, which are played singly."""
    if plan.job.noise is not None and not plan.schedule.flush:
        rule = f"noise needs a pipeline that flushes after each step, and {plan.schedule.use} has no flush"
        raise PlanError("noise", rule, "Leave it out, or use pipeline/1f1b")


def check_reference(plan: Plan) -> None:
    """Checks that the passes of a reference are forecast behind those of a step from an empty to an empty pipeline."""
    kind = plan.job.train.reference
    if kind and (plan.job.noise is not None or not plan.schedule.barrier or plan.passes.period > 1):
        rule = "a step with a reference ends with a barrier of the pipeline, and is forecast without noise"
        raise PlanError("train.reference", rule, "Leave it out, or use pipeline/1f1b without noise", kind)


def check_period(plan: Plan) -> None:
    """Steps of a period end with an update; they are forecast as their mean, without noise and with a barrier after
    each."""
    if plan.passes.period > 1 and (plan.job.noise is not None or not plan.schedule.barrier or plan.job.forward_only):
        meeting = schemes_with(plan.schemes, MeetsPeriodically)
        index = next(plan.schemes.index(scheme) for scheme in meeting if scheme.period > 1)
        rule = "a period of several steps is forecast without noise, and with a barrier of the pipeline after each step"
        if plan.job.forward_only:
            rule = "a period counts updates of the weights, and a forward-only job has none"
        where, remedy = f"plan.schemes[{index}].period", "Set it to 1, or leave the other out"
        raise PlanError(where, rule, remedy, plan.passes.period)


def check_steps(plan: Plan) -> None:
    """Checks that steps that differ can be forecast singly, each from an empty to an empty pipeline, by equal ranks."""
    varying = [scheme for scheme in schemes_with(plan.schemes, VariesSteps) if scheme.steps > 1]
    if not varying:
        return
    reasons = {
        "noise": plan.job.noise is not None,
        f"{plan.schedule.use}, which has no flush": not plan.schedule.flush,
        "a period of several steps": plan.passes.period > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            rule = f"routing that changes from step to step does not go with {reason}"
            index = plan.schemes.index(varying[0])
            raise PlanError(f"plan.schemes[{index}].routing", rule, "Give the routing of one step, or leave that out")


def check_alike(plan: Plan, who: str) -> None:
    """Checks that all stages have the same degrees, and all replicas the same stages and micro-batches. who: asks for
    that."""
    if plan.pipelines or plan.stage_plans:
        where = "plan.replicas" if plan.pipelines else "plan.stages"
        rule = f"{who} needs a plan whose stages and replicas are alike"
        raise PlanError(where, rule, "Give pp, tp and dp in place of it")


def check_roles(plan: Plan) -> None:
    """Checks that every role (schedule, recompute scheme) has a single scheme at most, and the required roles of
    schemes are filled."""
    for role in sorted({scheme.role for scheme in plan.schemes} - {""}):
        uses = [scheme.use for scheme in plan.schemes if scheme.role == role]
        if len(uses) > 1:
            raise PlanError("plan.schemes", f"a plan has one {role}", "Keep one", uses)
    for scheme in schemes_with(plan.schemes, RequiresRoles):
        for role in scheme.required_roles:
            if not any(other.role == role for other in plan.schemes):
                uses = [use for use in scheme_names() if find_scheme(use).role == role]
                rule = f"{scheme.use} needs a {role}, and the plan has none"
                raise PlanError("plan.schemes", rule, f"Add {' or '.join(uses)}")


def check_offloading(plan: Plan) -> None:
    """Checks that a single scheme at most offloads a state."""
    for state in ("parameters", "gradients", "optimizer"):
        uses = [scheme.use for scheme in schemes_with(plan.schemes, HoldsStates) if scheme.offloaded_to(state)]
        if len(uses) > 1:
            what = "optimizer states" if state == "optimizer" else state
            rule = f"{uses[0]} offloads {what} already"
            raise PlanError("plan.schemes", rule, "Let one of them offload them", uses[1])


def check_matrices(plan: Plan) -> None:
    """Checks that replicas can share the update of matrices as the optimizer does."""
    update = plan.job.framework.update
    if update.states.of_matrix is None or plan.job.forward_only:
        return
    sharding = schemes_with(plan.schemes, ShardsStates)
    for scheme in sharding:
        if not isinstance(scheme, UpdatesMatrices):
            able = [use for use in scheme_names() if issubclass(find_scheme(use), UpdatesMatrices)]
            rule = f"{scheme.use} updates weights element by element, and {update.optimizer} updates matrices"
            raise PlanError("optimizer", rule, f"Use {' or '.join(able)}, or adam", update.optimizer)
    if any(scheme.offloaded_to("optimizer") for scheme in schemes_with(plan.schemes, HoldsStates)):
        rule = "its states lie in host memory, where no program orthogonalises matrices"
        raise PlanError("optimizer", rule, "Keep them on the GPU, or use adam", update.optimizer)
    shards = {state for scheme in sharding for state in scheme.shards}
    cut, replicas = "parameters" in shards, update.matrices.replicas
    wrong = {
        "owner": (cut, "no rank has whole weights", "exchange or gather"),
        "exchange": (not cut, "ranks have whole weights", "owner, gather or all"),
        "gather": ("optimizer" not in shards, "ranks have all states", "all"),
        "all": ("optimizer" in shards, "ranks have shares of the states", "exchange or gather" if cut else "owner"),
    }
    if update.optimizer in ("soap", "shampoo") and (cut or (update.matrices.cuts and "optimizer" in shards)):
        rule = f"ranks have shards of matrices, and {update.optimizer} has factors of whole ones"
        raise PlanError("optimizer", rule, "Use data/ddp, or data/zero-1 of Megatron-Core, or adam", update.optimizer)
    if update.optimizer == "dion" and "optimizer" in shards and not cut:
        rule = "ranks have shares of the states of whole weights, which no program updates with dion"
        raise PlanError("optimizer", rule, "Use data/ddp or data/fsdp, or muon", update.optimizer)
    is_wrong, rule, others = wrong.get(replicas, (False, "", ""))
    if is_wrong:
        raise PlanError("optimizer.replicas", rule, f"Write {others}, or leave it out", replicas)


def check_experts(plan: Plan) -> None:
    """Checks that a model without experts has no view of experts; axes of the view other than the first belong to a
    scheme."""
    if plan.job.plan.views and plan.job.model.moe is None:
        rule = f"{plan.job.model.name} has no experts"
        raise PlanError("plan.views", rule, "Leave out ep and views, or choose a model with experts")
    for name, view in plan.job.plan.views.items():
        for axis in list(view)[1:]:
            if view[axis] > 1 and axis not in plan.ranks.claimed_axes:
                remedy = (
                    f"Add {{use: expert/all-to-all, over: {axis}}}; experts are replicated along the first axis only"
                )
                raise PlanError(f"plan.views.{name}.{axis}", "no scheme says what this axis does", remedy, view[axis])


def check_divisible(plan: Plan, known: dict[Hashable, None], held: tuple[int, ...] | None = None) -> None:
    """Checks that the options of every scheme fit the operators, and every dim is divisible by the axes that shard it.

    known: keys of plans that are known as divisible; new keys are added.
    held: the parts of the model that the ranks of the plan hold; default: all.
    """
    architecture = plan.model_parts.backward_architecture
    # The samples of all replicas are divisible by any number of replicas; schemes without axes shard nothing.
    key = (
        replace(architecture, replicas=1),
        tuple(plan.mesh.views),
        held and (plan.layers, held),
        *(scheme.lowering_key for scheme in plan.stage_schemes if scheme.axes),
    )
    remember(known, key, partial(_check_operators, plan, held))


def _check_operators(plan: Plan, held: tuple[int, ...] | None) -> None:
    """Checks the operators of a plan as `check_divisible` does, whatever is known."""
    architecture = plan.model_parts.backward_architecture
    operators = [operator for unit in architecture.units for operator in unit.operators()]
    for scheme in schemes_with(plan.schemes, AnnotatesOperators):
        where = f"plan.schemes[{plan.schemes.index(scheme)}]"
        scheme.check_operators(operators, len(plan.job.model.every_layer), where)
    units = architecture.units
    if held is not None:
        units = [unit for part in held for unit in plan.model_parts.stage(part, architecture).units]
    scope, of_branches = Scope(plan.mesh, plan.stage_schemes), _names_in_branches(plan)
    for unit in units:
        mixers = [MIXER_NAMES[type(module)] for module in unit.children if type(module) in MIXER_NAMES]
        names = mixers[0] if mixers else of_branches.get(unit.children, DIM_NAMES)
        walk(unit, partial(_check_operator, plan, scope, names))


def _names_in_branches(plan: Plan) -> dict[Hashable, Mapping[str, str]]:
    """Returns the names of dims for the units of branches, by the modules of a unit."""
    names: dict[Hashable, Mapping[str, str]] = {}
    builders = plan.model_parts.backward_architecture.branches
    # Equal branches share their units, and errors name the first.
    for branch, builder in reversed([*zip(plan.model_parts.model.branches, builders, strict=True)]):
        called = BRANCH_NAMES | {"s": f"tokens of branch {branch.name}", "h": f"hidden of branch {branch.name}"}
        for unit in builder.branch_units(range(branch.layers)) if branch.layers else ():
            names[unit.children] = called
    return names


def _check_operator(plan: Plan, scope: Scope, called: Mapping[str, str], operator: Operator) -> None:
    """Raises PlanError unless every dim of an operator is divisible by the axes that shard it.

    called: names of dims.
    """
    for tensor, dim, sharding in scope.sharded_dims(operator):
        size, count = tensor.dims[dim], plan.mesh.size(sharding)
        divides_scan = isinstance(operator, Scan) and dim == "s"
        if size.is_divisible_by(count) and not divides_scan:
            continue
        axes = list(dict.fromkeys(plan.ranks.axis_of(part, operator.view) for part in sharding))
        if divides_scan:
            _refuse_divided_scan(plan, axes)
        names = EXPERT_NAMES if operator.view else called
        _refuse_shards(names, dim, int(size.size // size.unit), count, axes)


def check_slices(plan: Plan) -> None:
    """Checks that every slice of a sequence is a whole number of tokens, divisible by the axes that shard positions."""
    model, sequence, grain = plan.job.model, plan.job.batch.sequence, plan.passes.slice_granularity
    assert sequence is not None
    where = next(f"plan.schemes[{i}].slices" for i, e in enumerate(plan.job.plan.schemes) if e.use == plan.schedule.use)
    reasons = {
        f"the state of the linear attention of {model.name} is forecast over whole sequences": model.linear_attention,
        f"the indexer of {model.name} is forecast over whole sequences": model.mla and model.mla.index,
        f"the entries of {model.name} (model.compressed) are forecast over whole sequences": model.compressed,
        f"the blocks of keys of {model.name} (model.blocks) are forecast over whole sequences": model.blocks,
        f"the biases by distance of {model.name} are forecast over whole sequences": model.distance_profiles,
        f"the scan of the state-space layers of {model.name} is forecast over whole sequences": model.ssm,
        f"layers of {model.name} have work that no part describes (model.other)": mixes_tokens(model),
        f"the trunk of {model.name} joins whole sequences of all branches": model.branches,
    }
    for reason, holds in reasons.items():
        if holds:
            raise PlanError(where, reason, "Use a schedule without slices of sequences, for example pipeline/1f1b")
    for share in plan.schedule.slices:
        tokens = share * sequence
        if abs(tokens - round(tokens)) > 1e-6 or round(tokens) % grain:
            multiple = f"a multiple of {grain} tokens" if grain > 1 else "a whole number of tokens"
            rule = f"every slice of a sequence of {sequence} is {multiple}"
            number = min(list_divisors(sequence // grain), key=lambda n: abs(n - len(plan.schedule.slices)))
            raise PlanError(where, rule, f"{number} would work", f"{tokens:g} tokens")


def _refuse_divided_scan(plan: Plan, axes: Sequence[str]) -> None:
    """Raises PlanError where ranks hold parts of the sequences that a Mamba-2 block or linear attention scans."""
    sharding = [scheme.use for scheme in plan.schemes if {*scheme.axes} & {*axes}]
    layers = "state-space layers" if plan.job.model.ssm else "layers with linear attention"
    rule = f"{sharding[0]} shards the sequences that the {layers} of {plan.job.model.name} scan"
    remedy = "Use sequence/megatron-cp or sequence/ulysses, which shard the heads of the scan"
    raise PlanError("plan.schemes", rule, remedy, sharding)


def _refuse_shards(called: Mapping[str, str], dim: str, units: int, parts: int, axes: Sequence[str]) -> None:
    """Raises PlanError for a dim of `units` units that `axes`, of `parts` ranks, cannot shard evenly."""
    fits = list_divisors(units)
    below, above = max(n for n in fits if n <= parts), next((n for n in fits if n >= parts), None)
    axis = " x ".join(axes)
    rule = f"{called.get(dim, dim)} = {units} must divide by {axis}"
    choices = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
    padded = dim == "a" and called is not MAMBA_NAMES and called is not LINEAR_NAMES
    pads = ", or plan.pad_heads: true" if padded else ""
    raise PlanError(f"plan.{axis}", rule, f"{axis} = {choices} would work{pads}", parts)


ALWAYS = (
    check_formats,
    check_world,
    check_axes,
    check_roles,
    check_offloading,
    check_matrices,
    check_experts,
    check_batch,
    check_branches,
    check_attention,
    check_whole_vocabulary,
    check_documents,
    check_frames,
    check_diffusion,
    check_index,
    check_undescribed,
    check_projected_keys,
    check_noise,
    check_reference,
    check_period,
    check_steps,
)
"""The checks of every plan that need no stages."""


def check_stated_chunks(plan: Plan) -> None:
    """Checks that a short plan that names a schedule of several chunks states how many."""
    written, shape, layers = plan.job.as_written.get("plan", {}), plan.shape, plan.job.model.layers
    schedule = written.get("schedule")
    least = plan.schedule.least_chunks
    if (
        shape.v >= least
        or schedule is None
        or "chunks" in written
        or (isinstance(schedule, Mapping) and "chunks" in schedule)
    ):
        return
    counts = [n for n in range(least, layers + 1) if shape.p > 1 and layers % (shape.p * n) == 0]
    remedy = f"Add chunks: {counts[0] if counts else least} to the plan"
    if len(counts) > 1:
        remedy += f"; {layers} layers / pp {shape.p} admit {', '.join(map(str, counts))}"
    rule = f"it has at least {least} chunks (virtual stages) a device, and plan.chunks is not stated"
    raise PlanError("plan.schedule", rule, f"{remedy}. Or leave schedule out", schedule)
