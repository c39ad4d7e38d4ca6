"""Entry point of `python -m txl_dist COMMAND`, which the `deepspeed` launcher runs, and of the `txl` script.

Any version of Python can read this file. So an old Python, or a Python outside the environment, prints a message of one
line instead of a traceback.
"""

import sys

_OLDEST = (3, 11)


def run():
    # type: () -> None
    """Run one command of `txl`. If this Python is too old or lacks packages, exit with a message."""
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
