"""mCAP: the partition of a pipeline whose fullest GPU is least full.

Stages are ranges of layers, each on a GPU or, of several replicas, on a GPU of each; the depth of least memory counts.
Profiles give the memory of every range on every stage, with the micro-batches in flight there, and the largest is
minimised (Dreuning et al. 2022, https://doi.org/10.1007/978-3-031-12597-3_10). `partition: by-memory` finds the same
partition from forecasts of the whole step.
"""

from __future__ import annotations

from meshcast.experiments.planning.cores.ordered_stages import partition_stages
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.pricing.job import require_job
from meshcast.experiments.planning.pricing.pipelines import pipeline_plan, uniform_pipelines
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.simulator.ir.scheme import Paper


class McapPlanner(Planner):
    paper = Paper(
        "https://doi.org/10.1007/978-3-031-12597-3_10",
        "mCAP: Memory-Centric Partitioning for Large-Scale Pipeline-Parallel DNN Training",
        2022,
    )
    restrictions = ("shard tensors", "recompute", "look at time", "cut inside a layer")
    unit = "bytes"

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        job = require_job(problem)
        table = job.stages(recompute=False).select(lambda option: bool(option.plan["tp"] == 1))
        pipelines = [*uniform_pipelines(job, table)]
        if not pipelines:
            raise self.nothing_fits(problem, "Give fewer GPUs, or a model of more layers: mCAP shards no tensors")
        partitions = [
            partition_stages([pipeline.stage_bytes(stage, job.microbatches) for stage in range(pipeline.depth)])
            for pipeline in pipelines
        ]
        fitting = [
            (partition, pipeline)
            for partition, pipeline in zip(partitions, pipelines, strict=True)
            if partition and partition.value <= job.memory
        ]
        if not fitting:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        best, pipeline = min(fitting, key=lambda candidate: candidate[0].value)
        visited = sum(partition.visited for partition in partitions if partition)
        proof = PlanProof(best.value, best.value, "dynamic programming over stages")
        return Proposal(pipeline_plan(job, pipeline.option, best.layers), best.value, visited, proof)
