"""The vocabulary of lowering: mesh, layouts, modules and operators of a model, ops of a device, schemes' base."""
