"""The job file: its schema, its short form, frameworks, and the published figure beside a forecast."""
