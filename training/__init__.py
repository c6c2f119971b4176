"""Aligning and distilling converted models on the Hugging Face Trainer."""
