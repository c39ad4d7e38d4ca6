"""Import of other programs' models and vocabularies, and export of this package's models to other formats."""
