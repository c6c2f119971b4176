"""What writes the documents: tables of README files and model cards, from committed measurements."""
