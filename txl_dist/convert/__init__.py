"""Models and vocabularies of other codes, read into ours and written from ours."""
