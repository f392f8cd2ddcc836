"""Keys of a plan in a search: which jobs have bounds, and keys that name schemes."""
