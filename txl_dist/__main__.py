"""`python -m txl_dist COMMAND`, which the `deepspeed` launcher starts, and the entry point of the `txl` script.

Any version of Python can read this file. So an old one, or one outside the environment, prints one line.
"""

import sys

_OLDEST = (3, 11)


def run():
    # type: () -> None
    """Run one command, or exit with a message if this Python or its packages cannot."""
    if sys.version_info < _OLDEST:
        version = ".".join(str(number) for number in sys.version_info[:2])
        sys.stderr.write(
            "txl: error: this is Python " + version + "; 3.11 or newer is needed. Activate the project's environment "
            "(source .venv/bin/activate), or make one: PYTHON=python3.11 bash launch/quickstart.sh\n"
        )
        sys.exit(2)
    from txl_dist.errors import missing_package

    try:
        from txl_dist.cli.main import run_and_exit
    except ModuleNotFoundError as error:
        sys.stderr.write("txl: error: " + missing_package(error) + "\n")
        sys.exit(2)
    run_and_exit()


if __name__ == "__main__":
    run()
