"""Federated learning on heterogeneous data: FOLA and its rivals on PyTorch Lightning, Ray Tune and MLflow."""

from fl_lightning import compatibility

compatibility.silence_telemetry()
compatibility.declare_torchvision_operators()
