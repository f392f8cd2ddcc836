"""Seconds of a kernel on a GPU: pure functions of the work, the GPU and the calibration.

Every cost model is written once for a kernel and for many: the numbers of a work may be arrays.
"""
