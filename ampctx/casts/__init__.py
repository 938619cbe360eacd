"""Casts: per op, per function, of a model's inputs and outputs, and of its weights."""
