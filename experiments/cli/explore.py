"""``meshcast explore``: a page on this machine on which a job is changed by controls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import Changes
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say


class ExploreOptions(LaunchFileOptions):
    """Options of ``meshcast explore``."""

    job: Annotated[Path, argument("JOB", "A job or a launch file.")]
    change: Changes = ()
    port: Annotated[
        int, option("--port", "Port of the page on this machine; 0: any that is free.", "N", min=0, max=65535)
    ] = 0
    browser: Annotated[bool, option("--browser/--no-browser", "Open the page in a browser.")] = True


def explore(options: ExploreOptions) -> None:
    """Serves a page on which the job is changed by controls, until Ctrl-C."""
    from meshcast.experiments.render.bokeh.library import check_library

    check_library()
    tell_launch(options.job, options.change)
    job = load_with_plan(options.job, options.change)
    logging.getLogger("bokeh").setLevel(logging.ERROR)  # windows that are closed are no news
    from meshcast.experiments.explorer.server import ExplorerServer

    def show(address: str) -> None:
        say(f"meshcast: {address} (Ctrl-C ends it)", err=True)
        if options.browser:
            import webbrowser

            webbrowser.open(address)

    ExplorerServer(job, options.port).serve(show)
