"""The verbs of the command line: flags and help in a signature, one call, no logic."""
