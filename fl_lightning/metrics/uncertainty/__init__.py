"""What a model knows about what it does not know: calibration, the federated posterior, and its predictions."""
