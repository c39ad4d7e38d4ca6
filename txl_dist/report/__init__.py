"""Pages and tables about runs that were made."""
