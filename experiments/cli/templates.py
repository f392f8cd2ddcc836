"""First files of a plug-in: ``meshcast init mine/schemes/pipeline/my_order.py`` writes one of ours under this name."""

from __future__ import annotations

import re
from pathlib import Path

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import CATALOG
from meshcast.simulator.ir.registry import scheme_file
from meshcast.simulator.models.load import PRESETS

SIMPLEST = {
    "pipeline": "gpipe",
    "data": "ddp",
    "tensor": "megatron",
    "sequence": "all-gather",
    "expert": "all-to-all",
    "memory": "recompute-full",
}
"""Of every family of schemes one that is short."""

USUAL = {"gpus": "h100-sxm", "links": "nvlink4", "nodes": "dgx-h100"}

FRAMEWORK = """\
# Every trait that is not stated here is that of the base: meshcast schema framework lists them.
base: megatron-core
title: {title}
source: "repository @commit, and the files that say so"
"""


def find_template(file: Path) -> str | None:
    """Returns the first content of a file of a plug-in, by the folder that it lies in; None for other files.

    Raises PlanError for a family of schemes that there is not.
    """
    folder, name = file.parent.name, file.stem
    if file.parent.parent.name == "schemes":
        if folder not in SIMPLEST:
            raise PlanError("FILE", "there is no such family of schemes", nearest(folder, SIMPLEST), folder)
        text = scheme_file(f"{folder}/{SIMPLEST[folder]}").read_text("utf-8")
        return re.sub(r"^class \w+\(", f"class {_write_class(name)}(", text, count=1, flags=re.MULTILINE)
    if folder in USUAL and file.suffix == ".yaml":
        return (CATALOG / folder / f"{USUAL[folder]}.yaml").read_text("utf-8")
    if folder == "models" and file.suffix == ".yaml":
        text = (PRESETS / "llama3-8b.yaml").read_text("utf-8")
        return re.sub(r"^name: .*", f"name: {name}", text, count=1, flags=re.MULTILINE)
    if folder == "frameworks" and file.suffix == ".yaml":
        return FRAMEWORK.format(title=name)
    if folder == "programs" and file.suffix == ".py":
        template = Path(__file__).with_name("first_program.txt").read_text("utf-8")
        return template.replace("NAME", name.replace("_", "-")).replace("CONSTANT", name.upper())
    return None


def _write_class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
