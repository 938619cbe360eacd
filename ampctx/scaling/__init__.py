"""Loss scales, steps that an overflow skips, what became of them, and ``GradScaler``."""
