"""Federated learning on heterogeneous data: FOLA and its rivals on PyTorch Lightning, Ray Tune and MLflow."""

import lazy_loader

from fl_lightning.system import environment

# Before anything imports torchvision, Lightning, MLflow or Ray.
environment.silence_telemetry()
environment.keep_servers_lean()
environment.repair_torchvision_when_imported()

# The names of `__init__.pyi`, imported when they are asked for: a list of methods need not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
