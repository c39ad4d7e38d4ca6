"""Pages, tables and lines of text about runs, for people."""
