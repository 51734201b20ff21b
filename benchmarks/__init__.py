"""Speed and memory of the engines against bare loops, in one process and one thread: `python -m benchmarks`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch

torch.set_num_threads(1)
