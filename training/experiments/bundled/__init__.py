"""Scripts that make the bundled models and their texts, and the demonstration of these models."""
