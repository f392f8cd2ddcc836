"""Pipeline stages run device after device on a single real device, and the step assembled from their times."""
