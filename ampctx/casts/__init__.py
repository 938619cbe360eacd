"""What changes the dtype of values: per op, per function, at a model's inputs and outputs, and of its weights."""
