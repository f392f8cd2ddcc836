"""Seconds of one kernel on one GPU: pure functions of the work, the GPU and the calibration.

Every cost model is written once for one kernel and for many: the numbers of a work may be arrays.
"""
