"""Scripts that measure conversions, with their results; they run in a checkout."""
