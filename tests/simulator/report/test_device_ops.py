"""The ops of a device, computed from the states before its actions, are those of the whole step."""

import numpy as np
import pytest

from meshcast.simulator import simulate
from meshcast.simulator.report.device_ops import device_ops
from tests.golden.rewrite import stored

JOBS = ("data-fsdp", "pipeline-zb-v", "pipeline-dualpipe", "all-five-axes", "asymmetric-replicas")


@pytest.mark.parametrize("name", JOBS)
def test_ops_of_a_device_have_the_times_of_the_longest_path(name: str) -> None:
    report = simulate(stored(name).job)
    step, table = report.play.step, report.play.program.timetable
    by_device = [device_ops(step, device) for device in range(report.play.program.devices)]
    flat, times = step.flat, step.times
    for device, (ops, moments) in enumerate(by_device):
        assert len(ops.ops) == flat.device.count(device)
        for action in range(table.starts[device], table.starts[device + 1]):
            alone, whole = (slice(program.first[action], program.behind[action]) for program in (ops, flat))
            assert ops.ops[alone] == flat.ops[whole] and ops.seconds[alone] == flat.seconds[whole]
            np.testing.assert_allclose(moments.begin[alone], times.begin[whole], rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(moments.end[alone], times.end[whole], rtol=1e-11, atol=1e-12)
        for key, numbers in ops.queues.items():
            begins = np.array(times.begin)[flat.queues[key]]
            np.testing.assert_allclose(np.array(moments.begin)[numbers], begins, rtol=1e-11, atol=1e-12)


def test_known_times_of_all_ops_are_used() -> None:
    step = simulate(stored("data-fsdp").job).play.step
    times = step.times
    assert device_ops(step, 0) == (step.flat, times)
