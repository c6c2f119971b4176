"""A transformer that recalls over long contexts, and what each mixer keeps of its recall after conversion."""
