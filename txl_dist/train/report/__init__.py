"""Reports of a run: records and their loggers, validation, samples, profiles."""
