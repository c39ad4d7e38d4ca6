"""`txl doctor`: looks at this machine, or under a launcher at every node and between them, and says what to mend.

    alone               facts of this machine (`machine`) -> verdicts (`checks`)
    under a launcher    ranks meet, each node is looked at once, differences and all-reduces (`fabric`) are judged too

A finding is a line that begins with the verdict:

    problem  node-b/rank8  disk  /runs (nfs4): 0.3 GiB free -> Free some: a save that finds no room is lost.

If ranks do not meet, the first rank of each node that came reports its own node and who is missing.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple

from txl_dist.dist import Ranks, gather_objects, joined_ranks
from txl_dist.errors import ConfigError, TxlError
from txl_dist.ops.doctor import fabric
from txl_dist.ops.doctor.checks import Finding, Verdict, differences, judge, judge_reduce
from txl_dist.ops.doctor.machine import Facts, gather
from txl_dist.train.watch.run_lock import prove_shared

SHARED_WITHIN_S = 10.0


class Report(NamedTuple):
    """What was found. The findings of one node stand under its host and first rank, those between nodes under "all"."""

    nodes: dict[str, Facts]
    findings: list[tuple[str, Finding]]
    figures: dict[str, Any]
    """Measurements between ranks; empty for one."""

    def count(self, verdict: Verdict) -> int:
        """Findings of a verdict. With a problem a run fails."""
        return sum(finding.verdict == verdict for _, finding in self.findings)

    def lines(self) -> list[str]:
        """A line per finding, and a summary."""
        width = max(len(name) for name, _ in self.findings)
        lines = [
            f"{finding.verdict:<7}  {node:<{width}}  {finding.name}  {finding.found}"
            + (f" -> {finding.remedy}" if finding.remedy else "")
            for node, finding in self.findings
        ]
        looked_at = f"{len(self.findings)} checks on {_nodes(len(self.nodes))}"
        return [*lines, f"{looked_at}: {self.count('problem')} problems, {self.count('warning')} warnings"]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "time_s": time.time(),
            "problems": self.count("problem"),
            "findings": [{"node": node, **finding._asdict()} for node, finding in self.findings],
            "nodes": {node: dataclasses.asdict(facts) for node, facts in self.nodes.items()},
            "figures": self.figures,
        }


def examine(*, run_dir: Path, data: str = "", timeout_s: int = 60) -> Report | None:
    """Look at everything. None on ranks for which another speaks; its verdict is theirs.

    `timeout_s`: longest wait for other ranks, at each step.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        facts = gather(run_dir=run_dir, data=data)
        return Report({facts.host: facts}, [(facts.host, finding) for finding in judge(facts)], {})
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    met = False
    try:
        with joined_ranks(timeout_s=timeout_s) as ranks:
            met = True
            return _examine_job(ranks, run_dir=run_dir, data=data)
    except (TxlError, RuntimeError) as error:  # torch's errors of communication are RuntimeErrors
        if not is_first_of_node:
            return None
        facts = gather(run_dir=run_dir, data=data)
        is_several = str(facts.num_local_ranks) != os.environ["WORLD_SIZE"]
        findings = [(facts.host, finding) for finding in judge(facts, is_several=is_several)]
        what, _, remedy = str(error).partition(". ")
        remedy = remedy if isinstance(error, TxlError) else "Look at the network between the nodes."
        name = "communication" if met else "meeting"
        return Report({facts.host: facts}, [*findings, ("all", Finding(name, "problem", what, remedy))], {})


def _examine_job(ranks: Ranks, *, run_dir: Path, data: str) -> Report | None:
    facts = gather_objects(gather(run_dir=run_dir, data=data) if ranks.local_rank == 0 else None)
    nodes = {f"{one.host}/rank{rank}": one for rank, one in enumerate(facts) if one is not None}
    is_several = len(nodes) > 1
    folder = Path(next(iter(nodes.values())).disk.folder)
    shared = [_judge_shared(ranks, folder, num_nodes=len(nodes))] if is_several else []
    reduces = fabric.measure_reduce(ranks)
    if not ranks.is_first:
        return None
    between = [
        Finding("meeting", "ok", f"{ranks.world_size} ranks on {_nodes(len(nodes))}"),
        *(differences(nodes) if is_several else ()),
        *shared,
        judge_reduce(reduces, num_nodes=len(nodes), on_gpu=ranks.device.type == "cuda"),
    ]
    findings = [
        (node, finding) for node, one in nodes.items() for finding in judge(one, is_several=is_several, has_met=True)
    ]
    figures = {"all_reduce": [one._asdict() for one in reduces]}
    return Report(nodes, [*findings, *(("all", finding) for finding in between)], figures)


def _judge_shared(ranks: Ranks, folder: Path, *, num_nodes: int) -> Finding:
    """All ranks: whether all nodes write to one folder."""
    try:
        prove_shared(folder, nonce=secrets.token_hex(8), ranks=ranks, seen_within_s=SHARED_WITHIN_S)
    except ConfigError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding("shared folder", "problem", what, remedy)
    return Finding("shared folder", "ok", f"{folder} is the same on {num_nodes} nodes")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
