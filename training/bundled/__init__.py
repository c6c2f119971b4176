"""The bundled models: the scripts that make them and their texts, and the demonstration on them."""
