"""Coefficients: complete, sourced, physical; unknown hardware borrows them with a wider spread."""

from importlib import resources

import pytest

from hardware.cluster import Tier
from simulator.costs.calibration import KINDS, coefficients, load_calibration, load_links

FILES = sorted(
    f.name[:-5] for f in resources.files("simulator.costs.calibration").iterdir() if f.name.endswith(".yaml")
)
EACH = [(f, s, k, e) for f in FILES for s, entries in coefficients(f).items() for k, e in entries.items()]
SHARES = (
    "rate",
    "share",
    "memory",
    "stream",
    "ring",
    "all_reduce",
    "gather",
    "all_to_all",
    "send",
    "in_switch",
    "backward",
)


def test_there_are_files():
    assert {"a100-sxm-80", "h100-sxm", "nvlink3", "nvlink4", "network"} <= set(FILES)


@pytest.mark.parametrize(("file", "section", "key", "entry"), EACH, ids=[f"{f}-{s}-{k}" for f, s, k, _ in EACH])
def test_a_coefficient_is_complete(file, section, key, entry):
    assert entry["kind"] in KINDS and entry["source"] and len(entry["meaning"]) > 10
    assert entry["value"] >= 0 and 0 <= entry["spread"] < 1
    assert entry["rows"] is None or entry["rows"] > 0
    assert (entry["kind"] == "assumed") == (entry["rows"] is None) or entry["value"] == 0
    if key in SHARES or key.endswith("_share"):
        assert entry["value"] <= 1, "work would beat the hardware"


def test_a_gpu_without_a_file_borrows_with_a_wider_spread():
    own, kin, other = (load_calibration(*of) for of in [("h100-sxm", "hopper"), ("h200-sxm", "hopper"), ("x", "y")])
    assert own.assumed == "" and "h100-sxm" in kin.assumed and "h100-sxm" in other.assumed
    assert own.gemm.rate == kin.gemm.rate == other.gemm.rate
    assert own.gemm.spread < kin.gemm.spread < other.gemm.spread


def test_links_of_another_family_borrow_as_well():
    nvlink, infiniband, efa = (Tier(k, 450e9, 0.0) for k in ("nvlink4", "infiniband-ndr", "efa"))
    own, network = load_links(nvlink, infiniband)
    kin, other = load_links(Tier("nvlink5", 900e9, 0.0), efa)
    assert kin.in_switch == own.in_switch > 0 and kin.spread > own.spread
    assert other.ring == network.ring and other.spread > network.spread
    assert load_links(Tier("nvlink3", 300e9, 0.0), infiniband)[0].in_switch == 0
