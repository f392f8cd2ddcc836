"""From a forecast to a run: all that a simulated run depends on, from the job, its forecast and the catalog."""

from __future__ import annotations

import math
from dataclasses import replace

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import load
from meshcast.hardware.records import dataclass
from meshcast.hardware.reliability import Reliability, Unit
from meshcast.simulator.costs.power import power_model
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.run_keys import Checkpoints, Failures, Recovery, RunStragglers
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.checkpoints import StateSize, StoreRates, make_tiers, state_size, store_rates
from meshcast.simulator.runs.endless import refuse_endless
from meshcast.simulator.runs.failure_log import read_failure_log
from meshcast.simulator.runs.failures import FailingUnits, FailureLog, FailureSource
from meshcast.simulator.runs.replicas import ForecastSteps, make_elasticity, with_healing
from meshcast.simulator.runs.stragglers import Episodes, Jitter
from meshcast.simulator.runs.training import MAX_EVENTS, RunSetting

SEEDS = 32
"""Simulated runs of a job that does not state their number."""


MIN_TIME = 1e-9
"""Mean times between failures, and between slow episodes, count as this if they are shorter [s]: never 0."""


@dataclass(frozen=True)
class RunPlan:
    """A run that can be simulated.

    report: forecast of its steps.
    setting: all figures of a simulated run.
    seeds, seed: number of runs, and of their random numbers.
    size, rates: of checkpoints and their store.
    mtbf: mean time between failures of the job [s].
    assumed: a sentence each.
    """

    report: Report
    setting: RunSetting
    seeds: int
    seed: int
    size: StateSize
    rates: StoreRates
    mtbf: float
    assumed: tuple[str, ...]

    @property
    def job(self) -> Job:
        return self.report.job

    @property
    def nodes(self) -> int:
        """Nodes that are paid for, spare ones included."""
        return self.job.cluster.nodes + (self.setting.spares or 0)

    @property
    def busy_watts(self) -> float:
        """Power of all nodes while steps run [W]."""
        return self.report.energy.watts + self._watts_of_spares

    @property
    def idle_watts(self) -> float:
        """Power of all nodes while training stands still [W]."""
        energy = self.report.energy
        return self.job.cluster.gpus * (self._idle_gpu + energy.beside) * energy.pue + self._watts_of_spares

    @property
    def _idle_gpu(self) -> float:
        return power_model(self.job.cluster.gpu).idle_watts

    @property
    def _watts_of_spares(self) -> float:
        energy, gpus = self.report.energy, (self.setting.spares or 0) * self.job.cluster.gpus_per_node
        return gpus * (self._idle_gpu + energy.beside) * energy.pue


@dataclass(frozen=True)
class RunConditions:
    """What a run of a job depends on besides its plan.

    sources, episodes: all that fails, and all that is slow.
    mtbf: mean time between failures of the job [s].
    detection: from a failure until it is known [s].
    restart: until training goes on, without loading [s].
    repair: mean time until a lost node is back [s].
    checkpoints, recovery: as the job states them.
    store: rates.
    assumed: a sentence each.
    """

    sources: tuple[FailureSource, ...]
    episodes: tuple[Episodes, ...]
    mtbf: float
    detection: float
    restart: float
    repair: float
    checkpoints: Checkpoints
    recovery: Recovery
    store: StoreRates
    assumed: tuple[str, ...]


def read_conditions(job: Job) -> RunConditions:
    """Returns the conditions of the runs of a job. Raises PlanError for a log of failures that cannot be read."""
    run = job.run
    failures, recovery = run.failures or Failures(), run.recovery or Recovery()
    checkpoints, stragglers = run.checkpoints or Checkpoints(), run.stragglers or RunStragglers()
    rates = load("reliability", "llama3-405b" if failures.rates == "none" else failures.rates)
    sources, store = _list_sources(job, failures, rates), store_rates(job.cluster, checkpoints)
    scheduling, warm_up = _first(recovery.scheduling_s, rates.scheduling), _first(recovery.warm_up_s, rates.warm_up)
    untimed = checkpoints.every_s is None and checkpoints.every_steps is None
    daly = untimed and checkpoints.kind in ("full", "sharded", "asynchronous")
    states_store = checkpoints.kind == "none" or checkpoints.write_s is not None
    assumed = [
        *([f"failures at the rates of {rates.title} (run.failures)"] if run.failures is None else []),
        *([f"{checkpoints.kind} checkpoints (run.checkpoints)"] if run.checkpoints is None else []),
        *(["interval of checkpoints: the best one by Daly's formula (run.checkpoints)"] if daly else []),
        *([store.assumed] if store.assumed and not states_store else []),
        *_name_recovery(recovery, rates),
        *(["another node at once for every one that fails (run.recovery.spares)"] if recovery.spares is None else []),
    ]
    return RunConditions(
        sources=sources,
        episodes=_list_episodes(job, stragglers, failures),
        mtbf=_mean_time(sources),
        detection=_first(recovery.detection_s, rates.detection),
        restart=scheduling + warm_up,
        repair=recovery.repair_hours * 3600 if recovery.repair_hours is not None else float(rates.repair),
        checkpoints=checkpoints,
        recovery=recovery,
        store=store,
        assumed=tuple(assumed),
    )


def make_jitter(job: Job, barrier: int) -> Jitter:
    """Returns how the durations of steps vary. barrier: steps after which replicas wait for each other."""
    stragglers = job.run.stragglers or RunStragglers()
    return Jitter(stragglers.jitter, stragglers.distribution, stragglers.ranks or job.cluster.gpus, barrier)


def make_run(report: Report, known: ForecastSteps | None = None) -> RunPlan:
    """Returns the run of a job. known: see `make_elasticity`. Raises PlanError for a run without a length, for keys
    that its plan does not admit, and for a run that is not expected to end."""
    job, run = report.job, report.job.run
    steps = run.steps if run.steps is not None else math.ceil(report.steps_of_run) if report.steps_of_run else None
    if steps is None and run.days is None:
        rule = "the run has no length"
        raise PlanError("run", rule, "State run.tokens, run.steps or run.days, for example with --set run.days=54")
    # Replicas wait for each other once in a period of the data scheme.
    conditions, jitter = read_conditions(job), make_jitter(job, report.play.plan.passes.period)
    step = report.step_time * jitter.mean_duration()
    size = state_size(report, conditions.checkpoints)
    elasticity = make_elasticity(report, conditions.recovery, known)
    if elasticity.policy == "quorum":
        elasticity = with_healing(elasticity, size, job.cluster, conditions.restart)
    setting = RunSetting(
        elasticity=elasticity,
        steps=steps,
        horizon=math.inf if run.days is None else run.days * 86_400,
        jitter=jitter,
        episodes=conditions.episodes,
        sources=conditions.sources,
        tiers=make_tiers(conditions.checkpoints, size, conditions.store, job.cluster, conditions.mtbf, step),
        detection=conditions.detection,
        restart=conditions.restart,
        spares=conditions.recovery.spares,
        repair=conditions.repair,
        evaluation=run.evaluation.pause if run.evaluation else None,
        most_events=run.most_events or MAX_EVENTS,
        most_seconds=None if run.most_days is None else run.most_days * 86_400,
    )
    refuse_endless(setting)
    assumed = (*conditions.assumed, *(["steps of equal duration (run.stragglers.jitter)"] if jitter.sigma == 0 else []))
    return RunPlan(report, setting, run.seeds or SEEDS, run.seed or 0, size, conditions.store, conditions.mtbf, assumed)


def replace_run_keys(report: Report, job: Job) -> Report:
    """Returns the forecast of a job under another job that differs in keys of `run` alone."""
    plan = report.play.plan
    changed = replace(plan, job=plan.job.model_copy(update={"run": job.run}))
    return type(report)(replace(report.play, plan=changed), report.step_kinds)


def _first(stated: float | None, other: float) -> float:
    return float(other) if stated is None else stated


def _name_recovery(recovery: Recovery, rates: Reliability) -> list[str]:
    unstated = {
        "detection": (recovery.detection_s, rates.detection),
        "scheduling": (recovery.scheduling_s, rates.scheduling),
        "warm_up": (recovery.warm_up_s, rates.warm_up),
    }
    assumed = [f"{name} {float(value):g} s" for name, (stated, value) in unstated.items() if stated is None]
    return [f"after a failure: {', '.join(assumed)} (run.recovery)"] if assumed else []


def count_units(cluster: Cluster, per: Unit, nodes_per_switch: int) -> int:
    """Counts the parts of a cluster that fail or are slow."""
    ports = int(cluster.node.nics.count) if cluster.node.nics else 1
    return {
        "gpu": cluster.gpus,
        "nic": cluster.nodes * ports,
        "node": cluster.nodes,
        "switch": -(-cluster.nodes // nodes_per_switch),
        "job": 1,
    }[per]


def _list_sources(job: Job, failures: Failures, rates: Reliability) -> tuple[FailureSource, ...]:
    if failures.log is not None:
        return (FailureLog(read_failure_log(job.folder / failures.log, job.cluster.nodes).failures),)
    cluster, units_by_name = job.cluster, dict[str, FailingUnits]()
    if failures.rates != "none":
        for name, part in rates.components.items():
            units = count_units(cluster, part.per, failures.nodes_per_switch)
            lost = _nodes_lost(None, part.per, part.loses, failures)
            mtbf = max(rates.mtbf(name) * failures.mtbf_factor, MIN_TIME)
            units_by_name[name] = FailingUnits(name, units, mtbf, 1.0, lost, cluster.nodes)
    for name, stated in failures.components.items():
        units = count_units(cluster, stated.per, failures.nodes_per_switch)
        lost = _nodes_lost(stated.nodes, stated.per, stated.loses, failures)
        mtbf = max(stated.mtbf_hours * 3600 * failures.mtbf_factor, MIN_TIME)
        units_by_name[name] = FailingUnits(name, units, mtbf, stated.shape, lost, cluster.nodes)
    return tuple(units_by_name.values())


def _nodes_lost(stated: int | None, per: Unit, loses: str, failures: Failures) -> int:
    if loses == "nothing":
        return 0
    return stated or (failures.nodes_per_switch if per == "switch" else 1)


def _mean_time(sources: tuple[FailureSource, ...]) -> float:
    """Returns the mean time between failures of the job [s]; infinity without failures."""
    rate = 0.0
    for source in sources:
        if isinstance(source, FailingUnits):
            rate += source.rate
        elif isinstance(source, FailureLog) and source.entries and source.entries[-1].time:
            rate += len(source.entries) / source.entries[-1].time
    return 1 / rate if rate else math.inf


def _list_episodes(job: Job, stragglers: RunStragglers, failures: Failures) -> tuple[Episodes, ...]:
    episodes = []
    for stated in stragglers.episodes.values():
        units = count_units(job.cluster, stated.per, failures.nodes_per_switch)
        every = max(stated.every_hours * 3600 / units, MIN_TIME)
        episodes.append(Episodes(every, stated.minutes * 60, stated.slowdown, stated.pause_s))
    if (stalls := job.run.data_stalls) is not None:
        episodes.append(Episodes(max(stalls.every_hours * 3600, MIN_TIME), pause=stalls.seconds, data=True))
    return tuple(episodes)
