"""Entry point of an agent: `python -m txl_dist.recovery OPTIONS`, where OPTIONS is JSON. Only `supervise` writes it."""

import sys

from txl_dist.io.files import parse_object
from txl_dist.recovery.agent import run_agent

if __name__ == "__main__":
    options = parse_object(sys.argv[1])
    sys.exit(run_agent(options["words"], silent_s=options["silent_s"], max_in_row=options["max_in_row"]))
