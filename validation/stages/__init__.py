"""Pipeline stages run one device after another on a single real device, and the step assembled from their times."""
