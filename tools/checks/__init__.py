"""Programs that measure and check the code base itself: sizes, prose, names, moved code and generated pages."""
