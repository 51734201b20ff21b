"""The federated posterior, its predictions, and their calibration."""
