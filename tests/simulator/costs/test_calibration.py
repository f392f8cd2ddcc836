"""Coefficients: complete, sourced, within their bounds; what no file has is borrowed with a wider spread."""

from importlib import resources

import pytest

from hardware import load
from hardware.cluster import Tier
from simulator import simulate
from simulator.costs.calibration.calibration import (
    LAWS,
    LINKS,
    calibrations_in,
    family,
    law_of,
    lenders,
    link_law,
    names,
    network_law,
    sections,
    step_law,
)
from simulator.costs.coefficients import coefficients
from simulator.costs.collectives.links import NetworkLaw
from simulator.costs.collectives.processes import ProcessLaw
from validation.calibration.write import text, write

KINDS = LAWS | LINKS | {"network": NetworkLaw, "processes": ProcessLaw}
FILES = [name for name in names() if name != "steps"]
EACH = [(file, section) for file in FILES for section in sections(file)]


def blocks(data):
    return [("gpu", data["common"]), *(("library", library) for library in data["libraries"].values())]


def test_there_are_files():
    gpus = {"a100-sxm-80", "h100-sxm", "h200-sxm", "b200-sxm", "gb200", "b300-sxm", "l40s"}
    assert gpus | {"nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie", "infiniband", "efa"} <= set(FILES)
    for gpu in gpus:
        assert {"memory", "gemm", "attention"} <= set(sections(gpu))


@pytest.mark.parametrize(("file", "section"), EACH, ids=[f"{file}-{section}" for file, section in EACH])
def test_every_coefficient_is_measured_sourced_and_possible(file, section):
    known = coefficients(KINDS[section])
    for of, block in blocks(sections(file)[section]):
        assert block["rows"] > 0 and len(block["source"]) > 5
        for name, entry in block["coefficients"].items():
            assert set(entry) == {"value", "spread", "meaning"} and entry["meaning"] == known[name].meaning
            assert known[name].of == of and 0 <= entry["spread"] <= 1
            assert known[name].low <= entry["value"] * (1 + 1e-3) and entry["value"] <= known[name].high * (1 + 1e-3)
    for library in sections(file)[section]["libraries"].values():
        assert library["format"] in ("bf16", "fp8", "any") and 0 < library["spread"] < 1


@pytest.mark.parametrize("law", dict.fromkeys(KINDS.values()), ids=lambda law: law.__name__)
def test_a_law_has_few_coefficients_each_with_a_meaning(law):
    known = coefficients(law)
    assert sum(one.of == "gpu" for one in known.values()) <= 12
    assert sum(one.of == "library" for one in known.values()) <= 4
    for one in known.values():
        assert len(one.meaning) > 10 and one.low <= one.start <= one.high and one.low < one.high


@pytest.mark.parametrize(
    ("gpu", "first"), [("h100-sxm", "h100-sxm"), ("h20", "h100-sxm"), ("h200-nvl", "h200-sxm"), ("gb300", "gb300")]
)
def test_the_nearest_lends_first(gpu, first):
    lender, far = lenders(load("gpus", gpu))[0]
    assert (far == "") == (lender == gpu)
    assert lender == first


def test_a_gpu_that_nobody_measured_borrows_with_a_wider_spread():
    (own, silent), (kin, said) = (law_of(load("gpus", name), "gemm") for name in ("h100-sxm", "h800-sxm"))
    assert not silent and "h800-sxm" in said and "h100-sxm" in said
    assert kin.rate == own.rate and kin.spread > own.spread
    maker, told = law_of(load("gpus", "mi300x"), "gemm")
    assert maker.spread > law_of(load("gpus", "v100-sxm2-16"), "gemm")[0].spread > own.spread and "mi300x" in told


def test_what_one_gpu_lacks_comes_from_the_next():
    # No layouts of training were measured on this card, but on its kin.
    known = sections("a100-sxm-80")["gemm"]["common"]["coefficients"]
    assert "nt" not in known
    kin = sections("a100-pcie-80")["gemm"]["common"]["coefficients"]
    assert law_of(load("gpus", "a100-sxm-80"), "gemm")[0].nt == pytest.approx(kin["nt"]["value"])


def test_a_library_is_priced_by_its_own_coefficients_and_nobodys_by_the_middle():
    gpu, held = load("gpus", "h100-sxm"), sections("h100-sxm")["gemm"]["libraries"]
    rates = {name: one["coefficients"]["rate"]["value"] for name, one in held.items()}
    for name, rate in rates.items():
        assert law_of(gpu, "gemm", name)[0].rate == rate
    assert min(rates.values()) < law_of(gpu, "gemm")[0].rate < max(rates.values())
    assert law_of(gpu, "gemm", "a program of tomorrow")[0] == law_of(gpu, "gemm")[0]


@pytest.mark.parametrize(("gpu", "borrowed"), [("b300-sxm", True), ("b200-sxm", False)])
def test_a_forecast_says_whose_products_of_experts_it_borrows(gpu, borrowed):
    cluster = {"gpu": gpu, "gpus": 8, "gpus_per_node": 8}
    for model, named in (("mixtral-8x7b", borrowed), ("llama3-8b", False)):
        report = simulate({"model": model, "cluster": cluster, "plan": {"tp": 8}, "batch": {"global": 8}})
        assert any("grouped" in one for one in report.to_dict()["assumed"]) == named


def test_a_file_can_be_left_out():
    gpu = load("gpus", "h100-sxm")
    blind, said = law_of(gpu, "gemm", without="h100-sxm")
    assert "h200-sxm" in said and blind != law_of(gpu, "gemm")[0]


def test_a_folder_of_calibrations_comes_first(tmp_path):
    data = {"gemm": sections("h100-sxm")["gemm"]}
    entry = data["gemm"]["common"]["coefficients"]["depth"]
    gpu, before = load("gpus", "h100-sxm"), law_of(load("gpus", "h100-sxm"), "gemm")[0]
    changed = {**data["gemm"], "common": {**data["gemm"]["common"], "coefficients": {"depth": entry | {"value": 77.0}}}}
    write(tmp_path / "h100-sxm.yaml", "mine", {"gemm": changed})
    with calibrations_in(tmp_path):
        assert law_of(gpu, "gemm")[0].depth == 77.0
        assert law_of(gpu, "attention")[1], "the folder's file stands in for the whole of meshcast's"
    assert law_of(gpu, "gemm")[0] == before


def test_a_file_reads_back_as_it_was_written(tmp_path):
    for name in FILES:
        write(tmp_path / f"{name}.yaml", name, sections(name))
        shipped = resources.files("simulator.costs.calibration") / f"{name}.yaml"
        assert text("", sections(name)).splitlines()[1:] == shipped.read_text("utf-8").splitlines()[1:]
    originals = {name: sections(name) for name in FILES}
    with calibrations_in(tmp_path):
        assert {name: sections(name) for name in FILES} == originals


@pytest.mark.parametrize(
    ("kind", "lender"), [("nvlink3-a800", "nvlink3"), ("nvlink4-h800", "nvlink4"), ("nvlink4-bridge", "nvlink4")]
)
def test_links_borrow_from_their_family(kind, lender):
    (own, silent), (kin, said) = link_law(Tier(lender, 450e9, 0.0)), link_law(Tier(kind, 450e9, 0.0))
    assert kin.ring.share == own.ring.share and kin.ring.spread > own.ring.spread and family(kind) == lender
    assert not silent and kind in said and lender in said


@pytest.mark.parametrize("kind", ["infinity-fabric-3", "something"])
def test_other_links_borrow_plain_ones(kind):
    law, said = link_law(Tier(kind, 31e9, 0.0))
    assert law.ring.spread > link_law(Tier("nvlink3", 300e9, 0.0))[0].ring.spread and kind in said


def test_what_links_lack_comes_from_the_next():
    assert "message" not in sections("nvlink5") and "message" in sections("nvlink4")
    own, next_ = (link_law(Tier(kind, 900e9, 0.0))[0] for kind in ("nvlink5", "nvlink4"))
    assert own.message.share == next_.message.share and own.ring.share != next_.ring.share


def test_networks_of_another_family_borrow_as_well():
    (own, silent), (other, said) = (network_law(Tier(kind, 50e9, 0.0)) for kind in ("infiniband-xdr", "slingshot"))
    assert other.share == own.share and other.spread > own.spread
    assert not silent and "slingshot" in said and "InfiniBand" in said
    assert not network_law(Tier("efa", 50e9, 0.0))[1]


def test_a_long_step_takes_something_off():
    assert step_law("hopper").sustained < step_law("ampere").sustained < 1
    assert step_law("blackwell") == step_law("hopper") and step_law("volta") == step_law("ampere")
