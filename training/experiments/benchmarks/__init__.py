"""Scripts that measure training, with their results; they run in a checkout."""
