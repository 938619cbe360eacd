"""Loss scales, skipped steps and their outcomes, and ``GradScaler``."""
