"""Sweeps: the paper's grid searches on Ray Tune, from a laptop to a GPU cluster. The only package that imports Ray."""
