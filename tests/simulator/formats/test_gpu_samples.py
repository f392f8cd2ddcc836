"""Samples of GPUs as nvidia-smi writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.files import lines
from meshcast.simulator.formats.gpu_samples import holds_samples, read_samples

DMON = """\
#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %      %      %      %      %    MHz    MHz
 20260406   02:59:36      0    643     62     88     99     41      0      0      -      -   2619   1755
 20260406   02:59:36      1     71     35      -      0      0      0      0      -      -   2619    345
"""
QUERY = """\
timestamp, index, clocks.current.sm [MHz], power.draw [W], enforced.power.limit [W], temperature.gpu, \
utilization.gpu [%], clocks_event_reasons.active, clocks_event_reasons.hw_thermal_slowdown
2026/04/06 02:59:36.123, 0, 1755 MHz, 643.12 W, 700.00 W, 62, 97 %, 0x0000000000000004, Not Active
2026/04/06 02:59:36.123, 1, 1200 MHz, [N/A], 700.00 W, 91, 99 %, 0x0000000000000000, Active
"""


def test_dmon(tmp_path: Path) -> None:
    (path := tmp_path / "dmon.txt").write_text(DMON, "utf-8")
    first, second = read_samples(path)
    # With -o DT two columns of time are in front of the others.
    assert (first.gpu, first.clock, first.power, first.temperature, first.busy) == ("0", 1755, 643, 62, 0.99)
    assert (second.gpu, second.clock, second.busy) == ("1", 345, 0)
    assert holds_samples(lines(path, ""))


def test_query(tmp_path: Path) -> None:
    (path := tmp_path / "samples.csv").write_text(QUERY, "utf-8")
    first, second = read_samples(path)
    assert (first.gpu, first.clock, first.power, first.limit, first.reasons) == ("0", 1755, 643.12, 700, 4)
    assert (second.power, second.temperature, second.busy, second.reasons) == (None, 91, 0.99, 0x40)


def test_other_files_are_none(tmp_path: Path) -> None:
    (path := tmp_path / "other.csv").write_text("step,loss\n1,2\n", "utf-8")
    assert not holds_samples(lines(path, ""))
    with pytest.raises(PlanError, match="holds no samples"):
        read_samples(path)
