"""Recovery inside a running job: agents that replace lost ranks, their coordinator, and spare processes. No torch."""
