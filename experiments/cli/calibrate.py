"""``meshcast calibrate`` fits coefficients to measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from meshcast.experiments.cli.console import AsJson, emit_or_show
from meshcast.experiments.cli.measured_files import (
    MEASURED,
    Data,
    More,
    check_writable_folder,
    list_files,
    require_files,
    require_torch,
)
from meshcast.experiments.options import Options, argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.schemas import model_validator

KINDS = (*MEASURED, "campaign")


class CalibrateOptions(Options):
    """Options of ``meshcast calibrate``."""

    kind: Annotated[str | None, argument("KIND", "kernels, collectives or campaign.")] = None
    more: More = ()
    data: Data = ()
    out: Annotated[Path, option("--out", "Folder for the files, one per GPU or kind of link.", "FOLDER")] = Path(
        "calibration"
    )
    only: Annotated[tuple[str, ...], option("--only", "Fit only this GPU or link; may be repeated.", "NAME")] = ()
    leave_out: Annotated[
        bool, option("--leave-out/--no-leave-out", "Also fit without each library in turn, and report its errors.")
    ] = True
    device: Annotated[str | None, option("--device", "Measure this machine instead of tables.", "cpu|cuda")] = None
    processes: Annotated[
        int, option("--processes", "--device: processes of the collectives; 1: no collectives.", "N", min=1)
    ] = 2
    as_json: AsJson = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.device is not None:
            if self.kind is not None or self.data or self.more or self.only:
                rule = "with it this machine is measured, not tables"
                raise PlanError("--device", rule, "Leave out KIND, --data and --only, or --device", self.device)
        elif self.kind is None:
            raise PlanError("KIND", "it is required without --device", f"Write {' or '.join(KINDS)}")
        elif self.kind not in KINDS:
            raise PlanError("KIND", "there is no kind of this name", nearest(self.kind, KINDS), self.kind)
        return self


def calibrate(options: CalibrateOptions) -> None:
    """Fits coefficients to tables or a campaign, or to what it measures on this machine, and writes them as YAML."""
    from meshcast.experiments.render.terminal import calibration as pages

    out = options.out
    if options.kind in MEASURED:
        paths = list_files(options.data, options.more)
        require_files(paths, options.kind)
        check_writable_folder(out)
        answer = pages.calibrate_tables(options.kind, paths, out, options.only, options.leave_out)
        emit_or_show(options.as_json, answer, lambda: pages.calibration_page(answer, out))
        if answer["missing"]:
            say(f"meshcast: interrupted, not fitted: {', '.join(answer['missing'])}", err=True)
            raise KeyboardInterrupt
        return
    answer = _calibrate_device(options) if options.device is not None else _calibrate_campaign(options)
    emit_or_show(options.as_json, answer, lambda: pages.device_page(answer, out))


def _calibrate_device(options: CalibrateOptions) -> dict[str, Any]:
    """Measures this machine."""
    from meshcast.experiments.render.terminal.calibration import calibrate_device

    assert options.device is not None
    require_torch()
    check_writable_folder(options.out)
    return calibrate_device(options.device, options.out, options.processes)


def _calibrate_campaign(options: CalibrateOptions) -> dict[str, Any]:
    """Fits the rows of a campaign."""
    folders = list_files(options.data, options.more)
    require_torch()
    from meshcast.validation.calibration.device.from_campaign import calibrate_from

    if len(folders) != 1:
        raise PlanError("campaign", "one folder is fitted", "Name the --out of meshcast measure campaign", len(folders))
    check_writable_folder(options.out)
    return calibrate_from(folders[0], options.out)
