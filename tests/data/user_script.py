"""A script of a user, which mypy accepts under --strict."""

from pathlib import Path

from meshcast import Job, MeshcastError, Report, SearchResult, SweepResult, load_job, search, simulate, sweep

job: Job = load_job(Path("job.yaml"), ["plan.tp=4"])
report: Report = simulate(job)
step: float = report.step_time
low: float = report.interval_90[0]
columns: list[str] = [str(name) for name in report.to_frame().columns]
report.timeline().savefig("timeline.png")
report.memory().savefig("memory.png")
report.breakdown().savefig("breakdown.png")
gemms: float = report.breakdown.parts["gemm"]
rows: SweepResult = sweep({"job": "job.yaml", "vary": {"plan.tp": [1, 2]}}, workers=1)
found: SearchResult = search("job.yaml", top=3)
best: Report = found.best[0].report
try:
    simulate({"model": "llama3-8b"})
except MeshcastError as error:
    rule: str = error.rule
