"""The forward passes of an evaluation between the steps of a training run, and of a reference in every step, as jobs
of their own.

DPO and KTO compare the trained model with a frozen model (Rafailov et al. 2023, arXiv 2305.18290, equation 7). Behind
the forward pass of a micro-batch the reference reads the same tokens, without gradients and without recomputation
(huggingface/trl @f2cd5771, trl/trainer/dpo_trainer.py, _compute_loss).
"""

from __future__ import annotations

from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.job.job import Job, Train
from meshcast.simulator.plan.plan import Plan


def make_evaluation(plan: Plan) -> Job | None:
    """Returns the job of an evaluation under a plan; None where the job states no size of it, or trains nothing.

    A replica runs a micro-batch, of a pipeline as many as it has devices. Samples are whole sequences.
    """
    job, evaluation = plan.job, plan.job.run.evaluation
    if evaluation is None or evaluation.micro is None or job.forward_only:
        return None
    total = evaluation.micro * plan.ranks.replicas * plan.shape.p
    sizes = {"total": total, "micro": evaluation.micro, "sequence": evaluation.sequence or job.batch.longest}
    rest = {"microbatches": None, "documents": None, "lengths": (), "order": (), "samples": None}
    changes: dict[str, object] = {
        "batch": job.batch.model_copy(update=sizes | rest),
        "train": Train(mode="forward-only"),
        "run": job.run.model_copy(update={"evaluation": None}),
    }
    if job.framework.loss.chunk_tokens == "liger":  # fused while a model trains alone (skip_logits in liger_kernel)
        loss = load_framework(job.framework.name, release=job.release).loss
        changes["framework"] = job.framework.model_copy(update={"loss": loss})
    return job.model_copy(update=changes)


def make_reference(plan: Plan) -> Job | None:
    """Returns the job of the forward passes of a reference over the batch of a step; None where there is none."""
    job = plan.job
    if not job.train.reference:
        return None
    run = job.run.model_copy(update={"evaluation": None})
    return job.model_copy(update={"train": Train(mode="forward-only"), "run": run})
