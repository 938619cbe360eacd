"""Ops over lists of tensors: compiled kernels, their reference in plain torch, and the calls that reach them."""
