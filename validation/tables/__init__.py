"""Tables of measurements against their forecasts: what kernels and collectives have in common.

``table`` reads files and answers row by row, ``held`` is a sample of rows beside its forecasts, ``summary`` adds up.
"""
