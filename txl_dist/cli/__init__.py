"""The commands of the command line: flags and help in a signature, one call, no logic."""
