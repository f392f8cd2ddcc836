"""``meshcast plan`` and ``plan-module``: what published planners propose."""
