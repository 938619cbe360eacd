"""Ops over lists of tensors: compiled kernels, their plain-torch reference, and the Python calls."""
