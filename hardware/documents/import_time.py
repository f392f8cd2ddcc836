"""When this process imported meshcast: a file that has changed since may differ from what the process works with."""

import time

IMPORTED_NS = time.time_ns()
"""Begin of the first import, in nanoseconds as of files."""
