"""Why a run is slower than its forecast: what its log, traces and samples show, cause by cause."""
