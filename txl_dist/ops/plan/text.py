"""The lines that `txl plan` prints, made of the facts of `plan.make_plan`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from txl_dist.ops.plan.scaling import MOST_GPUS, REASONS, Point
from txl_dist.tables import duration

Facts = dict[str, Any]
SMALL_SHARE = 0.05
"""Of a GPU's memory."""
SHORT_S = 600.0


def plan_lines(facts: Facts) -> Iterator[str]:
    """All of it, for a person."""
    yield (f"plan for {facts['gpus_used']} x {facts['gpu']}: predicted, not measured (docs/planning.md says from what)")
    if facts["gpus_used"] > 1 or not _is_small(facts):
        yield _machines(facts)
    yield from (f"note: {note}" for note in facts["notes"])
    yield from _model(facts)
    yield ""
    yield from _memory_at_a_glance(facts) if _is_small(facts) else _memory(facts)
    yield ""
    if facts["chosen"] is None:
        least = min(facts["options"], key=lambda row: row["needed_gib"])
        yield (
            f"nothing fits: at least {least['needed_gib']:.1f} GiB per GPU are needed (ZeRO {least['zero_stage']}). "
            "Take more GPUs, larger ones, or --engine.offload_optimizer True."
        )
        return
    yield from _choice(facts)
    yield ""
    yield from _time(facts)
    yield ""
    if not _is_short(facts):
        yield from _checkpoint(facts)
        yield ""
    if not _is_small(facts):
        yield from _scaling(facts)
    yield from _left_out(facts)


def _is_small(facts: Facts) -> bool:
    """Whether the model is nothing to such a GPU: what would then be said of its use and of scaling is of the host."""
    chosen = facts["chosen"]
    if chosen is None:
        return False
    needed = max(row["needed_gib"] for row in facts["options"])
    return bool(needed < SMALL_SHARE * facts["memory_gib"]["usable"] and _host_share(chosen) > 0.5)


def _host_share(chosen: Facts) -> float:
    return float(chosen["step_by_part_ms"]["host"] / chosen["step_ms"])


def _is_short(facts: Facts) -> bool:
    """Whether the run is over before failures, or saving matter."""
    return bool(86_400 * facts["chosen"]["days"] < SHORT_S)


def _left_out(facts: Facts) -> Iterator[str]:
    chosen = facts["chosen"]
    if _is_small(facts):
        share = f"{100 * _host_share(chosen):.0f}% of a step is the host's"
        yield f"left out: memory by ZeRO stage, MFU and scaling, as the model is too small for such a GPU ({share})"
    if _is_short(facts):
        yield (
            "left out: GPU-hours, failures and how often to save, as the run takes "
            f"{duration(86_400 * chosen['days'])} only"
        )


def _machines(facts: Facts) -> str:
    return (
        f"machines: {facts['gpus_per_node']} GPUs each, bus bandwidth {facts['bus_gb_s']:g} GB/s among them, network "
        f"{facts['network_gb_s']:g} GB/s per machine"
    )


def _model(facts: Facts) -> Iterator[str]:
    parts = facts["flops_per_token"]
    total = sum(parts.values())
    listed = ", ".join(f"{name} {100 * part / total:.0f}%" for name, part in parts.items() if part)
    yield f"model: {facts['parameters']:,} parameters with a vocabulary of {facts['vocab_size']:,}"
    yield f"work: {total / 1e6:,.1f} MFLOP per token ({listed}); {facts['tokens_per_step']:,} tokens per step"


def _memory_at_a_glance(facts: Facts) -> Iterator[str]:
    rows, stages = facts["options"], sorted({row["zero_stage"] for row in facts["options"]})
    sizes = [row["microbatch_lanes"] for row in rows]
    yield (
        f"memory: every micro-batch of {min(sizes):,} to {max(sizes):,} lanes fits at ZeRO "
        f"{', '.join(map(str, stages))}, in {max(row['needed_gib'] for row in rows):.2f} GiB at most of "
        f"{facts['memory_gib']['usable']:.1f}"
    )
    yield from _ruled_out(stages)


def _memory(facts: Facts) -> Iterator[str]:
    memory = facts["memory_gib"]
    yield (
        f"memory: {memory['gpu']:.1f} GiB, less {memory['context']:.1f} for CUDA and its libraries and "
        f"{memory['fragmentation']:.1f} for fragments: {memory['usable']:.1f} GiB. GiB per GPU needed, and tokens/s "
        "(without CUDA graphs, which the choice below may have):"
    )
    rows = facts["options"]
    sizes = sorted({row["microbatch_lanes"] for row in rows})
    yield "  micro-batch, lanes" + "".join(f"{size:>16,}" for size in sizes)
    kinds = sorted({(row["zero_stage"], row["activation_checkpointing"]) for row in rows})
    for stage, recomputed in kinds:
        cells = {row["microbatch_lanes"]: row for row in rows if _kind(row) == (stage, recomputed)}
        name = f"  ZeRO {stage}" + (", recomputed" if recomputed else "")
        yield f"{name:<20}" + "".join(f"{_cell(cells[size]) if size in cells else '':>16}" for size in sizes)
    yield from _ruled_out(stage for stage, _ in kinds)


def _ruled_out(stages: Iterable[int]) -> Iterator[str]:
    if absent := sorted(set(range(4)) - set(stages)):
        yield f"  (the settings rule out ZeRO {', '.join(map(str, absent))})"


def _kind(row: Facts) -> tuple[int, bool]:
    return row["zero_stage"], row["activation_checkpointing"]


def _cell(row: Facts) -> str:
    speed = f"{row['tokens_per_s']:,.0f}" if row["fits"] else "too large"
    return f"{row['needed_gib']:.1f} {speed}"


def _choice(facts: Facts) -> Iterator[str]:
    chosen, given = facts["chosen"], facts["as_configured"]
    flags = " ".join(chosen["flags"])
    yield f"choose: {flags}" if flags else "choose: the settings as they are"
    yield from (f"  {reason}" for reason in _reasons(facts))
    parts = ", ".join(f"{name} {size:.2f}" for name, size in chosen["needed_by_part_gib"].items() if size)
    yield f"  GiB per GPU: {chosen['needed_gib']:.2f} ({parts})"
    if "error" in given:
        yield f"  as configured it cannot run: {given['error']}"
    elif flags:
        fits = "" if given["fits"] else ", more than there is"
        bound = "at most " if given["memory_is_bound"] else ""
        size = f"{bound}{given['needed_gib']:.2f} GiB per GPU{fits}"
        yield f"  as configured: {given['precision']}, {given['tokens_per_s']:,.0f} tokens/s, {size}"


def _reasons(facts: Facts) -> Iterator[str]:
    chosen, rows = facts["chosen"], facts["options"]
    given = facts["as_configured"]
    if given.get("precision", chosen["precision"]) != chosen["precision"]:
        yield f"{chosen['precision']}: half the bytes of fp32, and the tensor cores' rate"
    stages = {row["zero_stage"] for row in rows}
    if len(stages) == 1:
        yield f"ZeRO {chosen['zero_stage']}: the only stage that the other settings allow"
    else:
        what = f"ZeRO {chosen['zero_stage']}, micro-batches of {chosen['microbatch_lanes']}"
        yield f"{what}: of what fits the fastest, or within 2 % of it and with least memory"
    if chosen["activation_checkpointing"]:
        yield "recomputing blocks: what would be faster without does not fit"
    if chosen["cuda_graph"]:
        yield "a CUDA graph: without one the host issues work more slowly than the GPU does it"
    if chosen["attention"] != "kernels":
        yield f"attention is {chosen['attention']}: the Triton kernels need bf16 or fp16, and Ampere or later"


def _time(facts: Facts) -> Iterator[str]:
    chosen = facts["chosen"]
    step = chosen["step_ms"]
    parts = ", ".join(
        f"{name} {part:.1f} ({100 * part / step:.0f}%)" for name, part in chosen["step_by_part_ms"].items() if part
    )
    mfu = "" if chosen["mfu_pct"] is None or _is_small(facts) else f", MFU {chosen['mfu_pct']:.0f}%"
    yield f"step: {step:.1f} ms, {chosen['tokens_per_s']:,.0f} tokens/s{mfu}"
    yield f"  ms: {parts}"
    epochs = "" if chosen["epochs"] is None else f" ({chosen['epochs']:.1f} epochs)"
    hours = "" if _is_short(facts) else f", {chosen['gpu_hours']:,.0f} GPU-hours"
    yield f"run: {chosen['budget_tokens']:,} tokens{epochs} in {duration(86_400 * chosen['days'])}{hours}"


def _checkpoint(facts: Facts) -> Iterator[str]:
    saved = facts["checkpoint"]
    yield (
        f"checkpoint: {saved['size_gib']:.1f} GiB; save every {saved['every_steps']:,} steps "
        f"({duration(saved['interval_s'])}), a step waiting about {saved['wait_s']:.0f} s"
    )
    yield (
        f"  with a failure every {duration(3600 * saved['mean_hours_between_failures'])} "
        f"({saved['failures_expected']:.2f} expected) saving and repeating take {saved['lost_pct']:.2f}% of the time"
    )


def _scaling(facts: Facts) -> Iterator[str]:
    for name, what in (("strong", "the global batch fixed"), ("weak", "lanes per GPU fixed")):
        curve = facts["scaling"][name]
        last, broken = curve["points"][-1], curve["breaks_at"]
        if broken:
            why = REASONS.get(broken["limited_by"], "nothing in particular")
            pct = math.floor(1000 * broken["efficiency"]) / 10  # rounded it might be the 50 that it is not
            end = f"under 50% from {broken['gpus']:,} GPUs on ({pct:.1f}%): {why}"
        else:
            most = "" if last["gpus"] == MOST_GPUS else ", the most among which the lanes divide"
            why = REASONS.get(last["limited_by"], "nothing")
            end = f"still {100 * last['efficiency']:.0f}% at {last['gpus']:,} GPUs{most}; what takes most there: {why}"
        yield f"{name} scaling ({what}): {end}"


def curves_of(facts: Facts) -> dict[str, list[Point]]:
    """The curves of the facts, for `scaling.picture`."""
    return {
        f"{name} scaling": [Point(**point) for point in facts["scaling"][name]["points"]] for name in ("strong", "weak")
    }
