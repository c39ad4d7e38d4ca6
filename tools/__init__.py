"""Programs for the development of the package, run from the checkout's root: `python -m tools.benchmarks.step
--help`."""
