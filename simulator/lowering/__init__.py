"""From modules to ops: local sizes, collectives between layouts, and rewrites of lowered fragments."""
