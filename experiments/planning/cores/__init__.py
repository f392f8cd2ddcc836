"""Search algorithms that planners share: they know tables, graphs and stages, and no planner."""
