"""fp32 master weights, their gradients in and between ``scale_loss`` blocks, and clipping."""
