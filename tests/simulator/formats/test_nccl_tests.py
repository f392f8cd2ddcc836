"""Tables and JSON of nccl-tests, of several versions, as its binaries write them; a broken file ends in one error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.nccl_tests import OPERATIONS, read

RANKS = "".join(
    f"#  Rank {rank:2d} Group  {{group}} Pid {1000 + rank:6d} on  node-{rank // 2:04d} device {rank % 2:2d} "
    f"[0000:{rank:02x}:00] NVIDIA H100 80GB HBM3\n"
    for rank in range(4)
)
ROWS = """\
        1024           256     float     sum      -1    15.05    0.07    0.10      0    14.98    0.07    0.10      0
     1048576        262144     float     sum      -1    27.76   37.78   56.67      0    27.49   38.15   57.22      0
  8589934592    2147483648     float     sum      -1  36502.1  235.33  353.00      0  36480.0  235.47  353.21    N/A
"""
TABLE = (
    """\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 8589934592 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 \
validation: 1 graph: 0 unalign: 0
#
# Using devices
"""
    + RANKS.format(group=0)
    + """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
    + ROWS
    + """\
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 136.59
#
# Collective test concluded: all_reduce_perf
"""
)

OLD = """\
$ ./build/broadcast_perf -b 8 -e 128M -f 2 -g 2
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid   4711 on       dgx device  0 [0x06] Tesla V100-SXM2-16GB
#   Rank  1 Pid   4711 on       dgx device  1 [0x07] Tesla V100-SXM2-16GB
#
#                                           out-of-place                       in-place
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
dgx:4711:4711 [0] NCCL INFO Launch mode Group/CGMD
       65536         16384   float       0    16.57    3.95    3.95  0e+00    13.83    4.74    4.74  0e+00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 4.3
"""


def document(**changes: Any) -> dict[str, Any]:
    """The output of -J with -I 1."""
    each = {"skipped_iterations": 1, "min_us": 26.0, "times_us": [40.0, 26.0, 28.0]}
    row = {
        "size": 1048576,
        "count": 262144,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": {"time": 27.76, "alg_bw": 37.78, "bus_bw": 56.67, "nwrong": 0.0},
        "out_of_place_per_iter": each,
        "in_place": None,
        "actual_iterations": 20,
        "experiment_name": "",
    }
    devices = [
        {"rank": i, "group": i % 2, "pid": 7, "hostname": "a", "device": i, "device_info": " NVIDIA B200"}
        for i in range(4)
    ]
    found = {
        "version": 3,
        "start_time": "2026-07-09 16:03:21",
        "args": ["/opt/nccl-tests/build/reduce_scatter_perf", "-b", "1M", "-J", "out.json"],
        "env": ["HOME=/home/somebody"],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": [row],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 56.67, "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-07-09 16:03:25",
    }
    return found | changes


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(text: str | bytes, name: str = "out.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_table_is_read_whole(put: Any) -> None:
    (run,) = read(put(TABLE))
    assert (run.operation, run.members, run.groups, run.clock, run.finished) == ("all_reduce", 4, 1, "gpu", True)
    assert run.devices == ("NVIDIA H100 80GB HBM3",) * 4 and run.hosts == ("node-0000", "node-0001")
    assert run.places == ((0, 0), (0, 1), (1, 0), (1, 1)) and run.nccl == "2.28.9"
    assert [size.nbytes for size in run.sizes] == [1024, 2**20, 2**33]
    assert run.sizes[1].seconds == pytest.approx({"out-of-place": 27.76e-6, "in-place": 27.49e-6})
    assert run.sizes[2].seconds["out-of-place"] == pytest.approx(0.0365021)
    # What was not checked is not counted as right.
    assert run.sizes[1].wrong == {"out-of-place": 0, "in-place": 0} and run.sizes[2].wrong == {"out-of-place": 0}
    assert (run.sizes[0].dtype, run.sizes[0].redop) == ("float", "sum")


def test_launchers_and_terminals_leave_no_trace(put: Any) -> None:
    plain = read(put(TABLE))
    tagged = "".join(f"[1,0]<stdout>: {line}\r\n" for line in TABLE.splitlines())
    labelled = "".join(f"0: \x1b[32m{line}\x1b[0m\n" for line in TABLE.splitlines())
    for text in (tagged, labelled):
        (run,) = read(put(text, "other.txt"))
        assert [s.seconds for s in run.sizes] == [s.seconds for s in plain[0].sizes] and run.members == 4
    (run,) = read(put(gzip.compress(TABLE.encode()), "packed"))
    assert run.sizes[1].seconds == plain[0].sizes[1].seconds


def test_older_tables_are_read_by_their_header(put: Any) -> None:
    (run,) = read(put(OLD))
    assert (run.operation, run.members, run.hosts) == ("broadcast", 2, ("dgx",))
    assert run.command == "./build/broadcast_perf -b 8 -e 128M -f 2 -g 2"
    assert run.sizes[0].seconds == pytest.approx({"out-of-place": 16.57e-6, "in-place": 13.83e-6})


def test_columns_of_single_calls_and_time_stamps(put: Any) -> None:
    timed = TABLE.replace("busbw  #wrong", "busbw  #wrong  i_min  i_max  i_p99  i_cv%").replace(
        "#wrong  i_min  i_max  i_p99  i_cv%\n", "#wrong  i_min  i_max  i_p99  i_cv%  timestamp\n"
    )
    row = "1048576 262144 float sum -1 27.76 37.78 56.67 0 20.1 30.2 30.1 4.2 27.49 38.15 57.22 0 20.2 31.2 30.0 4.9"
    (run,) = read(put(timed.replace(ROWS, f"{row} 2026-07-09 16:03:21\n")))
    assert run.sizes[0].seconds == pytest.approx({"out-of-place": 27.76e-6, "in-place": 27.49e-6})


def test_several_runs_in_one_file(put: Any) -> None:
    runs = read(put(TABLE + OLD + TABLE.replace("all_reduce_perf", "sendrecv_perf")))
    assert [(run.operation, run.members) for run in runs] == [("all_reduce", 4), ("broadcast", 2), ("send_recv", 4)]
    assert [len(run.sizes) for run in runs] == [3, 1, 3]


def test_groups_that_ran_at_once(put: Any) -> None:
    lines = RANKS.splitlines(keepends=True)
    split = "".join(line.format(group=rank % 2) for rank, line in enumerate(lines))
    (run,) = read(put(TABLE.replace(RANKS.format(group=0), split)))
    assert (run.members, run.groups, run.places) == (2, 2, ((0, 0), (1, 0)))


def test_a_stopped_run_is_reported(put: Any) -> None:
    (run,) = read(put(TABLE.partition("# Out of bounds")[0]))
    assert not run.finished and len(run.sizes) == 3


def test_times_of_the_host_are_distinguished(put: Any) -> None:
    (run,) = read(put(TABLE.replace("    time ", " cputime ")))
    assert run.clock == "cpu"


def test_json_is_read_whole(put: Any) -> None:
    (run,) = read(put(json.dumps(document()), "out.json"))
    assert (run.operation, run.members, run.groups, run.nccl) == ("reduce_scatter", 2, 2, "2.28.9")
    assert run.devices == ("NVIDIA B200",) * 4 and run.places == ((0, 0), (0, 2))
    size = run.sizes[0]
    assert size.seconds == pytest.approx({"out-of-place": 27.76e-6})
    assert size.times["out-of-place"] == pytest.approx((26e-6, 28e-6))  # the first was skipped


def test_a_device_that_names_no_group_is_of_the_first(put: Any) -> None:
    devices = [{"rank": rank, "group": 0} for rank in range(4)]
    devices[1].pop("group")
    (run,) = read(put(json.dumps(document(config={"devices": devices})), "out.json"))
    assert (run.members, run.groups) == (4, 1)


def test_fields_missing_in_the_file_can_be_given(put: Any) -> None:
    bare = put(ROWS)
    with pytest.raises(PlanError, match="which test it was"):
        read(bare)
    with pytest.raises(PlanError, match="lists no ranks"):
        read(bare, "all_gather")
    (run,) = read(bare, "all_gather", 16)
    assert (run.operation, run.members, run.places) == ("all_gather", 16, ())
    (named,) = read(put(ROWS, "alltoall_perf-8gpus.txt"), members=8)
    assert named.operation == "all_to_all"
    (pair,) = read(bare, "send_recv")
    assert pair.members == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table"),
        ("hello\nworld\n", "no table"),
        (TABLE.replace("  0.10      0\n", "  0.10"), ":14.*columns"),
        (TABLE.replace("27.49", "-27.49"), ":15 time.*zero or more"),
        (TABLE.replace("27.49", "nan"), ":15 time.*zero or more"),
        (TABLE.replace("   27.49", "    0.00"), "a time above 0"),
        (TABLE.replace("#       size         count", "#  something    else"), None),  # today's columns
        (TABLE.replace("all_reduce_perf", "hypercube_perf"), "no such collective"),
        (TABLE.replace("Rank  1 Group", "Rank  0 Group"), ":7 is 'Rank 0'.*MPI=1"),
        (TABLE.replace("Group  0 Pid   1003", "Group  1 Pid   1003"), "groups have 1, 3 ranks"),
        (json.dumps(document())[:-200], ":1.*JSON"),
        (json.dumps(document(results=None)), "results.*a list"),
        (json.dumps(document(results=[3])), "results.0"),
        (json.dumps(document(results=[])), "no table"),
        (json.dumps(document(config=[])), "config.*an object"),
        (json.dumps(document(args=None)), "which test it was"),
        (json.dumps(document(results=[{"size": 8, "out_of_place": {"time": "nan"}}])), "time"),
        (json.dumps(document(results=[{"size": 8}])), "neither"),
        (json.dumps(document(results=[{"size": 10**400, "out_of_place": {"time": 1}}])), "size"),
        ("{" * 100_000, "JSON"),
        ('{"a":' * 100_000, "JSON"),
    ],
)
def test_mistakes_end_in_one_error(put: Any, text: str, words: str | None) -> None:
    if words is None:
        assert len(read(put(text))[0].sizes) == 3
        return
    with pytest.raises(PlanError, match=words):
        read(put(text))


def test_files_that_cannot_be_read(tmp_path: Path, put: Any) -> None:
    for path in (tmp_path, tmp_path / "absent", put(b"\xff\xfe\x00"), put(gzip.compress(TABLE.encode())[:60])):
        with pytest.raises(PlanError):
            read(path)
    for wrong in ({"operation": "gather"}, {"members": 1}):
        with pytest.raises(PlanError, match="--"):
            read(put(TABLE), **wrong)


def test_every_operation_has_a_word() -> None:
    assert len(set(OPERATIONS.values())) == len(OPERATIONS)


@given(st.data())
def test_broken_files_end_in_one_error_or_are_read(tmp_path_factory: Any, data: Any) -> None:
    text = data.draw(st.sampled_from([TABLE, OLD, json.dumps(document(), indent=1)]))
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 40))
    put_in = data.draw(st.text(st.sampled_from(list('0189.-#{}[]",: \nenau\x00\u00b2')), max_size=6))
    path = tmp_path_factory.mktemp("fuzz") / "out.txt"
    path.write_text(text[:at] + put_in + text[at + length :], "utf-8")
    try:
        runs = read(path)
    except PlanError as error:
        assert str(path) in str(error) or "--" in str(error)
    else:
        assert all(t > 0 for run in runs for size in run.sizes for t in size.seconds.values())
