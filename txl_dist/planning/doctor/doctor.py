"""`txl doctor`: check this machine, or under a launcher all nodes and their network, and say what to repair.

    alone               facts of this machine (`machine`) -> verdicts (`checks`)
    under a launcher    each node once, then differences between nodes, then all-reduces (`fabric`)

A finding is a line that begins with the verdict:

    problem  node-b/rank8  disk  /runs (nfs4): 0.3 GiB free -> Free disk space. A checkpoint that does not fit is lost.

If the rendezvous of the ranks fails, the first rank of each node reports its own node and the missing ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txl_dist.console.formatting import counted
from txl_dist.distributed.collectives import RankInfo, distributed_context, gather_objects
from txl_dist.errors import ConfigError, TxlError
from txl_dist.planning.doctor import fabric
from txl_dist.planning.doctor.checks import Finding, Verdict, differences, judge, judge_reduce
from txl_dist.planning.doctor.fabric import Reduce
from txl_dist.planning.doctor.machine import Facts, gather_facts
from txl_dist.train.monitoring.run_lock import prove_shared

SHARED_WITHIN_S = 10.0
"""Seconds within which a file that one node writes must be visible on all other nodes."""


@dataclass(frozen=True)
class Report:
    """Facts and findings for each node. A node's name is its host name, followed by its first rank in a job."""

    nodes: dict[str, Facts]
    findings: dict[str, list[Finding]]
    """Findings by node. Findings about several nodes have the key "all"."""
    all_reduce: list[Reduce]
    """Times of all-reduces between the ranks, by size. The list is empty if there is only one rank."""

    def count(self, verdict: Verdict) -> int:
        """Return the number of findings with this verdict. If a finding has the verdict problem, a run on the checked
        machines fails or gives wrong results."""
        return sum(finding.verdict == verdict for _, finding in self._all_findings())

    def lines(self) -> list[str]:
        """Return the report as text: one line per finding, then a summary."""
        width = max(map(len, self.findings))
        lines = []
        for node, finding in self._all_findings():
            line = f"{finding.verdict:<7}  {node:<{width}}  {finding.name}  {finding.found}"
            if finding.remedy:
                line += f" -> {finding.remedy}"
            lines.append(line)
        checks = f"{len(lines)} checks on {_nodes(len(self.nodes))}"
        problems = counted(self.count("problem"), "problem")
        warnings = counted(self.count("warning"), "warning")
        return [*lines, f"{checks}: {problems}, {warnings}"]

    def _all_findings(self) -> Iterator[tuple[str, Finding]]:
        """Yield pairs of a node's name and a finding."""
        for node, findings in self.findings.items():
            for finding in findings:
                yield node, finding


def examine(*, run_dir: Path, data: str = "", timeout_s: int = 60) -> Report | None:
    """Check this machine, or all nodes of a job, and return the report.

    Returns None on a rank if another rank reports this rank's findings. `timeout_s` is the longest wait for other ranks
    at each step, in seconds.
    """
    facts = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        facts = gather_facts(run_dir=run_dir, data=data)
    if facts and os.environ.get("WORLD_SIZE", "1") == "1":
        return Report({facts.host: facts}, {facts.host: judge(facts)}, [])
    has_met = False
    try:
        with distributed_context(timeout_s=timeout_s) as ranks:
            has_met = True
            return _examine_job(ranks, facts)
    except (TxlError, RuntimeError) as error:  # torch's errors of communication are RuntimeErrors
        if facts is None:
            return None
        is_several = str(facts.num_local_ranks) != os.environ["WORLD_SIZE"]
        problem, _, remedy = str(error).partition(". ")
        if not isinstance(error, TxlError):
            remedy = "Check the network between the nodes."
        if has_met:
            name = "communication"
        else:
            name = "meeting"
        findings = {
            facts.host: judge(facts, is_cut_off=is_several),
            "all": [Finding(name, "problem", problem, remedy)],
        }
        return Report({facts.host: facts}, findings, [])


def _examine_job(ranks: RankInfo, facts_here: Facts | None) -> Report | None:
    """Check all nodes together and return the report on rank 0. All ranks must call this function.

    `facts_here` is None except on the first rank of a node.
    """
    nodes: dict[str, Facts] = {}
    for rank, facts in enumerate(gather_objects(facts_here)):
        if facts is not None:
            nodes[f"{facts.host}/rank{rank}"] = facts
    between = [Finding("meeting", "ok", f"{counted(ranks.world_size, 'rank')} on {_nodes(len(nodes))}")]
    if len(nodes) > 1:
        first_node = next(iter(nodes.values()))
        folder = Path(first_node.disk.folder)
        between += [*differences(nodes), _judge_shared(ranks, folder, num_nodes=len(nodes))]
    reduces = fabric.measure_reduce(ranks)
    between.append(judge_reduce(reduces, num_nodes=len(nodes), on_gpu=ranks.device.type == "cuda"))
    findings = {node: judge(facts) for node, facts in nodes.items()}
    findings["all"] = between
    if not ranks.is_rank0:
        return None
    return Report(nodes, findings, reduces)


def _judge_shared(ranks: RankInfo, folder: Path, *, num_nodes: int) -> Finding:
    """Check whether all nodes write to the same folder. All ranks must call this function."""
    try:
        prove_shared(folder, nonce=secrets.token_hex(8), ranks=ranks, seen_within_s=SHARED_WITHIN_S)
    except ConfigError as error:
        problem, _, remedy = str(error).partition(". ")
        return Finding("shared folder", "problem", problem, remedy)
    return Finding("shared folder", "ok", f"{folder} is the same on {counted(num_nodes, 'node')}")


def _nodes(count: int) -> str:
    return counted(count, "node")
