"""fp32 master params, their gradients in and between ``scale_loss`` blocks, and clipping."""
