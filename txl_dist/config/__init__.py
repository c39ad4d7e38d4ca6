"""Settings of a run: their sections and rules, loading, phases, and names in other programs and earlier versions."""
