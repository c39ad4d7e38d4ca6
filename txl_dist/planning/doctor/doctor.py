"""`txl doctor`: looks at this machine, or under a launcher at every node and between them, and says what to mend.

    alone               facts of this machine (`machine`) -> verdicts (`checks`)
    under a launcher    ranks meet, each node is looked at once, differences and all-reduces (`fabric`) are judged too

A finding is a line that begins with the verdict:

    problem  node-b/rank8  disk  /runs (nfs4): 0.3 GiB free -> Free some: a save that finds no room is lost.

If ranks do not meet, the first rank of each node that came reports its own node and who is missing.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from txl_dist.console.formatting import counted
from txl_dist.distributed.collectives import RankInfo, distributed_context, gather_objects
from txl_dist.errors import ConfigError, TxlError
from txl_dist.planning.doctor import fabric
from txl_dist.planning.doctor.checks import Finding, Verdict, differences, judge, judge_reduce
from txl_dist.planning.doctor.fabric import Reduce
from txl_dist.planning.doctor.machine import Facts, gather
from txl_dist.train.monitoring.run_lock import prove_shared

SHARED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Report:
    """What was found. A node is called by its host, and in a job by its first rank too."""

    nodes: dict[str, Facts]
    findings: dict[str, list[Finding]]
    """By node; those between nodes under "all"."""
    all_reduce: list[Reduce]
    """Measured between ranks; empty for one."""

    def count(self, verdict: Verdict) -> int:
        """Findings of a verdict. With a problem a run fails."""
        return sum(finding.verdict == verdict for those in self.findings.values() for finding in those)

    def lines(self) -> list[str]:
        """A line per finding, and a summary."""
        width = max(map(len, self.findings))
        lines = [
            f"{finding.verdict:<7}  {node:<{width}}  {finding.name}  {finding.found}"
            + (f" -> {finding.remedy}" if finding.remedy else "")
            for node, those in self.findings.items()
            for finding in those
        ]
        looked_at = f"{len(lines)} checks on {_nodes(len(self.nodes))}"
        return [
            *lines,
            f"{looked_at}: {counted(self.count('problem'), 'problem')}, {counted(self.count('warning'), 'warning')}",
        ]


def examine(*, run_dir: Path, data: str = "", timeout_s: int = 60) -> Report | None:
    """Look at everything. None on ranks for which another speaks; its verdict is theirs.

    `timeout_s`: longest wait for other ranks, at each step.
    """
    facts = gather(run_dir=run_dir, data=data) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    if facts and os.environ.get("WORLD_SIZE", "1") == "1":
        return Report({facts.host: facts}, {facts.host: judge(facts)}, [])
    met = False
    try:
        with distributed_context(timeout_s=timeout_s) as ranks:
            met = True
            return _examine_job(ranks, facts)
    except (TxlError, RuntimeError) as error:  # torch's errors of communication are RuntimeErrors
        if facts is None:
            return None
        is_several = str(facts.num_local_ranks) != os.environ["WORLD_SIZE"]
        what, _, remedy = str(error).partition(". ")
        remedy = remedy if isinstance(error, TxlError) else "Look at the network between the nodes."
        failed = Finding("communication" if met else "meeting", "problem", what, remedy)
        return Report({facts.host: facts}, {facts.host: judge(facts, is_cut_off=is_several), "all": [failed]}, [])


def _examine_job(ranks: RankInfo, facts_here: Facts | None) -> Report | None:
    """All ranks, the first of each node with its facts."""
    facts = gather_objects(facts_here)
    nodes = {f"{one.host}/rank{rank}": one for rank, one in enumerate(facts) if one is not None}
    between = [Finding("meeting", "ok", f"{counted(ranks.world_size, 'rank')} on {_nodes(len(nodes))}")]
    if len(nodes) > 1:
        folder = Path(next(iter(nodes.values())).disk.folder)
        between += [*differences(nodes), _judge_shared(ranks, folder, num_nodes=len(nodes))]
    reduces = fabric.measure_reduce(ranks)
    between.append(judge_reduce(reduces, num_nodes=len(nodes), on_gpu=ranks.device.type == "cuda"))
    findings = {node: judge(one) for node, one in nodes.items()} | {"all": between}
    return Report(nodes, findings, reduces) if ranks.is_rank0 else None


def _judge_shared(ranks: RankInfo, folder: Path, *, num_nodes: int) -> Finding:
    """All ranks: whether all nodes write to one folder."""
    try:
        prove_shared(folder, nonce=secrets.token_hex(8), ranks=ranks, seen_within_s=SHARED_WITHIN_S)
    except ConfigError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding("shared folder", "problem", what, remedy)
    return Finding("shared folder", "ok", f"{folder} is the same on {counted(num_nodes, 'node')}")


def _nodes(count: int) -> str:
    return counted(count, "node")
