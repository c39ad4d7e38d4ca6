"""Settings: sections and their rules, loading, phases, the names that other code bases use."""
