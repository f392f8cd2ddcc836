"""Claims of the papers, run as jobs and judged: `meshcast validate claims`. One YAML file a system."""
