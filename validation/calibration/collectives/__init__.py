"""Tables of measured collectives: readers, predictions, calibrations."""
