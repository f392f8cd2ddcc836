"""Keeps modules of the working directory from being imported in place of packages that meshcast needs.

``python -m`` searches the working directory first, where a `yaml.py` or `torch.py` of the user may lie. Imports nothing
that Python has not loaded at its start, since that would be searched for there, too.
"""

import os
import sys


def drop_working_directory() -> None:
    """Takes the folder that ``python -m`` has put in front out of the import path, unless meshcast itself is in it.

    Call it before other imports, only from a module that runs as ``__main__``.
    """
    own = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()) != own:
        del sys.path[0]
