"""Gaussians over named parameters, one form of the precision matrix per file.

`form.py` says what every form can do. To add one (Kronecker factors, one block per layer), write one more file with a
subclass of `Gaussian`; products, ridge lines, prior losses and distances then work with it.
"""
