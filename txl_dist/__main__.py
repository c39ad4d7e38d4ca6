"""`python -m txl_dist VERB`, the form that the `deepspeed` launcher starts."""

from txl_dist.cli import run

if __name__ == "__main__":
    run()
