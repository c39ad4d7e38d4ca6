"""The lines that `txl plan` prints, made of the facts of `plan.make_plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from txl_dist.ops.plan.scaling import MOST_GPUS, REASONS
from txl_dist.tables import aligned, duration

Facts = dict[str, Any]
SMALL_SHARE = 0.05
"""Of a GPU's memory."""
SHORT_S = 600.0


def plan_lines(facts: Facts) -> Iterator[str]:
    """All of it, for a person."""
    chosen, rows, memory = facts["chosen"], facts["options"], facts["memory_gib"]
    host_share = chosen["step_by_part_ms"]["host"] / chosen["step_ms"] if chosen else 0.0
    # A model that is nothing to such a GPU: what would be said of its use and of scaling is of the host.
    is_small = host_share > 0.5 and max(row["needed_gib"] for row in rows) < SMALL_SHARE * memory["usable"]
    # The run is over before failures or saving matter.
    is_short = bool(chosen) and 86_400 * chosen["days"] < SHORT_S
    yield f"plan for {facts['gpus_used']} x {facts['gpu']}: predicted, not measured (docs/planning.md says from what)"
    if facts["gpus_used"] > 1 or not is_small:
        yield (
            f"machines: {facts['gpus_per_node']} GPUs each, bus bandwidth {facts['bus_gb_s']:g} GB/s among them, "
            f"network {facts['network_gb_s']:g} GB/s per machine"
        )
    yield from (f"note: {note}" for note in facts["notes"])
    yield f"model: {facts['parameters']:,} parameters with a vocabulary of {facts['vocab_size']:,}"
    yield f"work: {per_token(facts['flops_per_token'])}; {facts['tokens_per_step']:,} tokens per step"
    yield ""
    yield from _memory(facts, is_small=is_small)
    yield ""
    if chosen is None:
        least = min(rows, key=lambda row: row["needed_gib"])
        yield (
            f"nothing fits: at least {least['needed_gib']:.1f} GiB per GPU are needed (ZeRO {least['zero_stage']}). "
            "Take more GPUs, larger ones, or --engine.offload_optimizer True."
        )
        return
    yield from _choice(facts)
    yield ""
    yield from _time(chosen, is_small=is_small, is_short=is_short)
    yield ""
    if not is_short:
        yield from _checkpoint(facts["checkpoint"])
        yield ""
    if not is_small:
        yield from (_scaling(name, curve) for name, curve in facts["scaling"].items())
    else:
        share = f"{100 * host_share:.0f}% of a step is the host's"
        yield f"left out: memory by ZeRO stage, MFU and scaling, as the model is too small for such a GPU ({share})"
    if is_short:
        took = duration(86_400 * chosen["days"])
        yield f"left out: GPU-hours, failures and how often to save, as the run takes {took} only"


def per_token(flops_by_part: Mapping[str, float]) -> str:
    """Operations of a training step per token, and what they are for."""
    total = sum(flops_by_part.values())
    listed = ", ".join(f"{name} {100 * part / total:.0f}%" for name, part in flops_by_part.items() if part)
    return f"{total / 1e6:,.2f} MFLOP per token ({listed})"


def _memory(facts: Facts, *, is_small: bool) -> Iterator[str]:
    memory, rows = facts["memory_gib"], facts["options"]
    sizes = sorted({row["microbatch_lanes"] for row in rows})
    stages = sorted({row["zero_stage"] for row in rows})
    if is_small:
        yield (
            f"memory: every micro-batch of {sizes[0]:,} to {sizes[-1]:,} lanes fits at ZeRO "
            f"{', '.join(map(str, stages))}, in {max(row['needed_gib'] for row in rows):.2f} GiB at most of "
            f"{memory['usable']:.1f}"
        )
    else:
        yield (
            f"memory: {memory['gpu']:.1f} GiB, less {memory['context']:.1f} for CUDA and its libraries and "
            f"{memory['fragmentation']:.1f} for fragments: {memory['usable']:.1f} GiB. GiB per GPU needed, and "
            "tokens/s (without CUDA graphs, which the choice below may have):"
        )
        table: dict[str, dict[int, str]] = {}
        for row in rows:
            name = f"ZeRO {row['zero_stage']}" + (", recomputed" if row["activation_checkpointing"] else "")
            speed = f"{row['tokens_per_s']:,.0f}" if row["fits"] else "too large"
            table.setdefault(name, {})[row["microbatch_lanes"]] = f"{row['needed_gib']:.1f} {speed}"
        head = ["micro-batch, lanes", *(f"{size:,}" for size in sizes)]
        lines = [[name, *(cells.get(size, "") for size in sizes)] for name, cells in table.items()]
        yield from (f"  {line}" for line in aligned([head, *lines]))
    if absent := sorted(set(range(4)) - set(stages)):
        yield f"  (the settings rule out ZeRO {', '.join(map(str, absent))})"


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


def _time(chosen: Facts, *, is_small: bool, is_short: bool) -> Iterator[str]:
    step = chosen["step_ms"]
    parts = ", ".join(
        f"{name} {part:.1f} ({100 * part / step:.0f}%)" for name, part in chosen["step_by_part_ms"].items() if part
    )
    mfu = "" if chosen["mfu_pct"] is None or is_small else f", MFU {chosen['mfu_pct']:.0f}%"
    yield f"step: {step:.1f} ms, {chosen['tokens_per_s']:,.0f} tokens/s{mfu}"
    yield f"  ms: {parts}"
    epochs = "" if chosen["epochs"] is None else f" ({chosen['epochs']:.1f} epochs)"
    hours = "" if is_short else f", {chosen['gpu_hours']:,.0f} GPU-hours"
    yield f"run: {chosen['budget_tokens']:,} tokens{epochs} in {duration(86_400 * chosen['days'])}{hours}"


def _checkpoint(saved: Facts) -> Iterator[str]:
    yield (
        f"checkpoint: {saved['size_gib']:.1f} GiB; save every {saved['every_steps']:,} steps "
        f"({duration(saved['interval_s'])}), a step waiting about {saved['wait_s']:.0f} s"
    )
    yield (
        f"  with a failure every {duration(3600 * saved['mean_hours_between_failures'])} "
        f"({saved['failures_expected']:.2f} expected) saving and repeating take {saved['lost_pct']:.2f}% of the time"
    )


def _scaling(name: str, curve: Facts) -> str:
    what = {"strong": "the global batch fixed", "weak": "lanes per GPU fixed"}[name]
    last, broken = curve["points"][-1], curve["breaks_at"]
    if broken:
        why = REASONS.get(broken["limited_by"], "nothing in particular")
        pct = math.floor(1000 * broken["efficiency"]) / 10  # rounded it might be the 50 that it is not
        end = f"under 50% from {broken['gpus']:,} GPUs on ({pct:.1f}%): {why}"
    else:
        most = "" if last["gpus"] == MOST_GPUS else ", the most among which the lanes divide"
        why = REASONS.get(last["limited_by"], "nothing")
        end = f"still {100 * last['efficiency']:.0f}% at {last['gpus']:,} GPUs{most}; what takes most there: {why}"
    return f"{name} scaling ({what}): {end}"
