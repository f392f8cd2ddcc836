"""What messages about wrong jobs suggest: values that would work."""
