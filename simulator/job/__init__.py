"""The job file: its schema, its short form, frameworks, and published figures to compare with."""
