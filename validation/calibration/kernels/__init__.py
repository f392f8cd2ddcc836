"""Tables of measured kernels: readers, predictions, calibrations."""
