"""Entry point of an agent: `python -m txl_dist.distributed.recovery OPTIONS`.

OPTIONS is a JSON object, which only `supervise` writes.
"""

import os
import sys

from txl_dist.distributed.processes import name_process
from txl_dist.distributed.recovery.agent import run_agent
from txl_dist.distributed.recovery.seat import AgentOptions
from txl_dist.io.files import parse_object

if __name__ == "__main__":
    name_process(f"txl-agent-{os.environ.get('RANK', '0')}")
    given = parse_object(sys.argv[1])
    sys.exit(run_agent(given["words"], AgentOptions(**given["options"])))
