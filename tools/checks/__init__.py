"""Programs that measure and guard the code base itself: counts, prose, names, moves."""
