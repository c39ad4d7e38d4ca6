"""`python -m txl_dist VERB`, the form that the `deepspeed` launcher starts, and the entry point of the `txl` script.

Any Python can read this file, so that an old one, or one outside the environment, is answered in a line.
"""

import sys

_OLDEST = (3, 11)


def run():
    # type: () -> None
    """Run one verb, where this Python and its packages can."""
    if sys.version_info < _OLDEST:
        version = ".".join(str(number) for number in sys.version_info[:2])
        sys.stderr.write(
            "txl: error: this is Python " + version + "; 3.11 or newer is needed. Activate the project's environment "
            "(source .venv/bin/activate), or make one: PYTHON=python3.11 bash launch/quickstart.sh\n"
        )
        sys.exit(2)
    from txl_dist.errors import missing_package

    try:
        from txl_dist.cli.main import run as run_cli
    except ModuleNotFoundError as error:
        sys.stderr.write("txl: error: " + missing_package(error) + "\n")
        sys.exit(2)
    run_cli()


if __name__ == "__main__":
    run()
