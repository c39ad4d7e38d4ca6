"""Text that `txl plan` prints, made from the facts of `plan.make_plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from txl_dist.console.formatting import counted, format_bytes, format_duration, format_table
from txl_dist.planning.hardware import CONTEXT_GIB
from txl_dist.planning.plan import Option, Plan, PlannedOption, SavingPlan
from txl_dist.planning.recovery_cost import RecoveryCost
from txl_dist.planning.scaling import MOST_GPUS, REASONS, Point, breaking_point
from txl_dist.train.preflight import MANY_EPOCHS, warnings_on_size

SMALL_SHARE = 0.05
"""A model is called small if it needs less than this share of a GPU's memory."""
SHORT_S = 600.0


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield all lines that `txl plan` prints for people."""
    question = plan.question
    chosen = plan.chosen
    cluster = question.cluster
    # A model that is nothing to such a GPU: what would be said of its use and of scaling is of the host.
    if chosen:
        host_share = chosen.step.host / chosen.step.total_s
    else:
        host_share = 0.0
    most_needed_gib = max(option.needed_gib for option in plan.options)
    is_small = host_share > 0.5 and most_needed_gib < SMALL_SHARE * plan.usable_gib
    yield f"plan for {plan.gpus_used} x {cluster.gpu.device}: predicted, not measured (sources: docs/planning.md)"
    yield (
        f"machines: {counted(cluster.gpus_per_node, 'GPU')} each, bus bandwidth {cluster.gpu.bus_gb_s:g} GB/s "
        "among them, "
        f"network {cluster.network_gb_s:g} GB/s per machine"
    )
    for note in plan.notes:
        yield f"note: {note}"
    yield f"model: {plan.parameters:,} parameters with a vocabulary of {question.vocab_size:,}"
    if question.corpus_tokens:
        for warning in warnings_on_size(plan.parameters, tokens=question.corpus_tokens):
            yield f"  warning: {warning}"
    yield f"work: {per_token(plan.flops_per_token)}; {plan.tokens_per_step:,} tokens per step"
    yield ""
    yield from _memory(plan, is_small=is_small)
    yield ""
    if chosen is None:
        least = min(plan.options, key=lambda option: option.needed_gib)
        yield (
            f"nothing fits: at least {least.needed_gib:.1f} GiB per GPU are needed (ZeRO {least.engine.zero_stage}). "
            "Use more GPUs, larger GPUs, or --engine.offload_optimizer True."
        )
        return
    is_short = chosen.length_s < SHORT_S  # over before failures or saving matter
    yield from _choice(plan, chosen)
    yield ""
    yield from _time(chosen, is_small=is_small, is_short=is_short)
    yield ""
    if is_short:
        took = format_duration(chosen.length_s)
        yield f"not shown: GPU-hours, failures and how often to save, because the run takes only {took}"
    else:
        yield from _saving(chosen.saving)
        yield from _recovery(chosen.recovery)
    yield ""
    if is_small:
        share = f"the host takes {100 * host_share:.0f}% of a step"
        yield (
            f"not shown: memory by ZeRO stage, MFU and scaling, because the model is too small for such a GPU ({share})"
        )
    else:
        yield f"strong scaling (the global batch fixed): {_scaling(chosen.strong)}"
        yield f"weak scaling (lanes per GPU fixed): {_scaling(chosen.weak)}"


def per_token(flops_by_part: Mapping[str, float]) -> str:
    """Describe the operations of a training step per token, and the parts of the model that need them."""
    total = sum(flops_by_part.values())
    shares = []
    for name, part in flops_by_part.items():
        if part:
            shares.append(f"{name} {100 * part / total:.0f}%")
    listed = ", ".join(shares)
    return f"{total / 1e6:,.2f} MFLOP per token ({listed})"


def _memory(plan: Plan, *, is_small: bool) -> Iterator[str]:
    full = plan.question.cluster.gpu.memory_gib
    usable = plan.usable_gib
    sizes = sorted({option.lanes for option in plan.options})
    stages = sorted({option.engine.zero_stage for option in plan.options})
    if is_small:
        most = max(option.needed_gib for option in plan.options)
        listed = ", ".join(map(str, stages))
        fits = f"lanes fits at ZeRO {listed}, in {most:.2f} GiB at most of {usable:.1f}"
        yield f"memory: every micro-batch of {sizes[0]:,} to {sizes[-1]:,} {fits}"
    else:
        is_auto = plan.options[0].engine.cuda_graph == "auto"
        if is_auto:
            graphs = ""
        else:
            graphs = " (without CUDA graphs, which the choice below may have)"
        yield (
            f"memory: {full:.1f} GiB, less {CONTEXT_GIB:.1f} for CUDA and its libraries and "
            f"{full - CONTEXT_GIB - usable:.1f} for fragments: {usable:.1f} GiB. "
            f"GiB per GPU needed, and tokens/s{graphs}:"
        )
        table: dict[str, list[str]] = {}
        for option in plan.options:  # by stage, and in it by size
            name = f"ZeRO {option.engine.zero_stage}"
            if option.engine.activation_checkpointing:
                name += ", recomputed"
            if option.fits:
                speed = f"{option.tokens_per_s:,.0f}"
            else:
                speed = "too large"
            row = table.setdefault(name, [name])
            row.append(f"{option.needed_gib:.1f} {speed}")
        head = ["micro-batch, lanes"]
        for size in sizes:
            head.append(f"{size:,}")
        for line in format_table([head, *table.values()]):
            yield f"  {line}"
    absent = sorted({0, 1, 2, 3} - set(stages))
    if absent:
        listed = ", ".join(str(stage) for stage in absent)
        yield f"  (the settings rule out ZeRO {listed})"


def _choice(plan: Plan, chosen: PlannedOption) -> Iterator[str]:
    given = plan.as_configured
    flags = " ".join(chosen.flags) or "the settings as they are"
    yield f"choose: {flags}"
    if isinstance(given, Option) and given.engine.precision != chosen.engine.precision:
        yield f"  {chosen.engine.precision}: half the bytes of fp32, and the tensor cores' rate"
    stages = {option.engine.zero_stage for option in plan.options}
    if len(stages) == 1:
        yield f"  ZeRO {chosen.engine.zero_stage}: the only stage that the other settings allow"
    else:
        what = f"ZeRO {chosen.engine.zero_stage}, micro-batches of {chosen.lanes}"
        yield f"  {what}: least memory of the options that fit and are at most 2 % slower than the fastest"
    if chosen.engine.activation_checkpointing:
        yield "  recomputing blocks: faster options without recomputing do not fit"
    if chosen.engine.cuda_graph == "on":
        yield "  a CUDA graph: without it the host issues work more slowly than the GPU computes it"
    if chosen.attention != "kernels":
        reason = "need bf16 or fp16, and Ampere or later"
        if chosen.config.model.any_order:
            reason = "compute causal attention only (model.any_order)"
        yield f"  attention is {chosen.attention}: the Triton kernels {reason}"
    parts = []
    for name, gib in chosen.needed_by_part_gib.items():
        if gib:
            parts.append(f"{name} {gib:.2f}")
    listed = ", ".join(parts)
    yield f"  GiB per GPU: {chosen.needed_gib:.2f} ({listed})"
    if isinstance(given, str):
        yield f"  the settings without changes cannot run: {given}"
    elif chosen.flags:
        # There fused attention is counted as plain attention, which needs more.
        if given.attention == "fused" and given.engine.dtype == "fp32":
            bound = "at most "
        else:
            bound = ""
        if given.fits:
            fits = ""
        else:
            fits = ", more than the GPU has"
        needs = f"{bound}{given.needed_gib:.2f} GiB per GPU{fits}"
        yield f"  as configured: {given.engine.precision}, {given.tokens_per_s:,.0f} tokens/s, {needs}"


def _time(chosen: PlannedOption, *, is_small: bool, is_short: bool) -> Iterator[str]:
    total = chosen.step.total_s
    parts = []
    for name, part in asdict(chosen.step).items():
        if part:
            parts.append(f"{name} {1e3 * part:.1f} ({100 * part / total:.0f}%)")
    if is_small:
        mfu = ""
    else:
        mfu = f", MFU {chosen.mfu_pct:.0f}%"
    yield f"step: {1e3 * total:.1f} ms, {chosen.tokens_per_s:,.0f} tokens/s{mfu}"
    yield f"  ms: {', '.join(parts)}"
    if chosen.epochs is None:
        epochs = ""
    else:
        epochs = f" ({chosen.epochs:.1f} epochs)"
    if is_short:
        hours = ""
    else:
        hours = f", {chosen.gpu_hours:,.0f} GPU-hours"
    yield f"run: {chosen.budget_tokens:,} tokens{epochs} in {format_duration(chosen.length_s)}{hours}"
    if chosen.epochs is not None and chosen.epochs > MANY_EPOCHS:
        yield (
            f"  warning: the text is read {chosen.epochs:,.0f} times. After more than {MANY_EPOCHS} epochs a model "
            "memorizes the text: lower train.max_steps, or prepare more text"
        )
    if chosen.stages:
        rows = [["steps", "lanes x segment", "memory", "micro-batch", "GiB", "ms per step", "tokens/s"]]
        for stage in chosen.stages:
            rows.append(
                [
                    f"{stage.first_step:,} to {stage.last_step:,}",
                    f"{stage.num_lanes:,} x {stage.segment_len:,}",
                    f"{stage.memory_len:,}",
                    f"{stage.microbatch_lanes:,}",
                    f"{stage.needed_gib:.2f}",
                    f"{1e3 * stage.step_s:.1f}",
                    f"{stage.tokens_per_s:,.0f}",
                ]
            )
        yield "by stage:"
        for line in format_table(rows):
            yield f"  {line}"


def _saving(saving: SavingPlan) -> Iterator[str]:
    parts = []
    for name, gib in saving.size_by_part_gib.items():
        part_size = format_bytes(round(gib * 2**30))
        parts.append(f"{name} {part_size}")
    listed = ", ".join(parts)
    size = format_bytes(round(saving.size_gib * 2**30))
    steps = counted(saving.every_steps, "step")
    interval = format_duration(saving.interval_s)
    yield (
        f"checkpoint: {size} ({listed}); save every {steps} ({interval}); training waits about "
        f"{saving.wait_s:.0f} s for each save"
    )
    between_failures = format_duration(saving.between_failures_s)
    yield (
        f"  with a failure every {between_failures} ({saving.failures_expected:.2f} expected) "
        f"saving and repeating take {saving.lost_pct:.2f}% of the time"
    )


def _steps(number: int) -> str:
    """Return an interval in steps as words, for example "step" or "4 steps"."""
    return "step" if number == 1 else counted(number, "step")


def _recovery(cost: RecoveryCost) -> Iterator[str]:
    version = format_bytes(cost.version_gib * 2**30)
    host = format_bytes(cost.host_gib * 2**30)
    yield (
        f"recovery inside the job (recover.spares; CPUs only so far): {version} per GPU and version, "
        f"{host} of host memory per node"
    )
    copies = f"  copies: {1e3 * cost.copy_s:.2f} ms into host memory every {_steps(cost.copy_every)}"
    if cost.has_partner:
        copies += f", {1e3 * cost.partner_s:.2f} ms to the next node every {_steps(cost.partner_steps)}"
    yield f"{copies}: {cost.step_pct:.0f}% of a step, of which it waits for {cost.wait_pct:.0f}%"
    if not cost.has_partner:
        more = f", and up to {counted(cost.most_repeated_steps, 'finished step')}" if cost.most_repeated_steps else ""
        yield f"  a lost rank repeats the step in flight{more}. A lost node ends the job: no other node has copies"
    elif cost.most_repeated_steps:
        repeated = counted(cost.most_repeated_steps, "finished step")
        yield f"  a lost node repeats the step in flight, and up to {repeated}"
    else:
        yield "  a lost node repeats only the step in flight"
    for goodput in (cost.goodput, cost.reference):
        yield (
            f"  goodput of {counted(goodput.gpus, 'GPU')} with a failure every "
            f"{format_duration(goodput.between_failures_s)}: {goodput.without_pct:.2f}% with restarts, "
            f"{goodput.with_pct:.2f}% if each failure is survived"
        )


def _scaling(curve: Sequence[Point]) -> str:
    last = curve[-1]
    broken = breaking_point(curve)
    if broken:
        pct = math.floor(1000 * broken.efficiency) / 10  # rounded it might be the 50 that it is not
        return f"under 50% from {counted(broken.gpus, 'GPU')} on ({pct:.1f}%): {REASONS[broken.limited_by]}"
    if last.gpus == MOST_GPUS:
        most = ""
    else:
        most = ", the largest number that divides the lanes"
    why = REASONS.get(last.limited_by, "nothing")
    return f"still {100 * last.efficiency:.0f}% at {counted(last.gpus, 'GPU')}{most}; largest cost there: {why}"
