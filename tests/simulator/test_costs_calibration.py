"""Coefficients: complete, sourced, physical; unknown hardware borrows them with a wider spread."""

from importlib import resources

import pytest

from hardware.cluster import Tier
from simulator.costs.calibration import KINDS, coefficients, link_law, load_calibration, network_law

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


@pytest.mark.parametrize(
    ("kind", "lender"), [("volta", "a100"), ("ada", "a100"), ("blackwell", "h100"), ("cdna3", "h100")]
)
def test_a_gpu_of_another_architecture_borrows_with_a_still_wider_one(kind, lender):
    made, kin = load_calibration("some-gpu", kind), load_calibration("some-gpu", "hopper")
    assert f"those measured on {lender}" in made.assumed and "some-gpu" in made.assumed
    assert made.gemm.spread > kin.gemm.spread
    assert load_calibration("mi300x", "cdna3").gemm.spread > load_calibration("b200-sxm", "blackwell").gemm.spread


@pytest.mark.parametrize(
    ("kind", "lender"),
    [("nvlink2", "nvlink3"), ("nvlink3-a800", "nvlink3"), ("nvlink4-h800", "nvlink4"), ("nvlink5", "nvlink4")],
)
def test_links_borrow_from_their_family(kind, lender):
    (own, silent), (kin, said) = link_law(Tier(lender, 450e9, 0.0)), link_law(Tier(kind, 450e9, 0.0))
    assert kin.all_reduce == own.all_reduce and kin.in_switch == own.in_switch and kin.spread > own.spread
    assert not silent and kind in said and lender in said


@pytest.mark.parametrize("kind", ["pcie4", "infinity-fabric-3", "something"])
def test_other_links_borrow_plain_ones(kind):
    law, said = link_law(Tier(kind, 31e9, 0.0))
    assert law.in_switch == 0 and law.spread > link_law(Tier("nvlink2", 150e9, 0.0))[0].spread and kind in said


def test_what_has_no_switch_cannot_add_in_it():
    assert link_law(Tier("nvlink4-bridge", 300e9, 0.0, switched=False))[0].in_switch == 0
    assert link_law(Tier("nvlink4", 450e9, 0.0))[0].in_switch > 0 == link_law(Tier("nvlink3", 300e9, 0.0))[0].in_switch


def test_networks_of_another_family_borrow_as_well():
    (own, silent), (other, said) = (network_law(Tier(kind, 50e9, 0.0)) for kind in ("infiniband-xdr", "efa"))
    assert other.ring == own.ring and other.spread > own.spread
    assert not silent and "efa" in said and "InfiniBand" in said
