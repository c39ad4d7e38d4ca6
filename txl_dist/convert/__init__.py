"""Import of other programs' models and vocabularies, and export to their formats."""
