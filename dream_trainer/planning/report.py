"""A plan as Markdown."""

from __future__ import annotations

import re
from collections import defaultdict

from dream_trainer.loggers.formatting import format_bytes
from dream_trainer.planning.planner import MeshPlan
from dream_trainer.planning.rank_plan import RankPlan, Tried

_MEANS = {
    "parameters": "this rank's part",
    "buffers": "",
    "gradients": "this rank's part, and whole ones on their way",
    "optimizer state": "",
    "inputs": "batches on the device",
    "communication": "gathered parameters, and what is sent or received",
    "activations": "made in forward, or again by recomputation",
    "temporaries": "made in backward, or by the optimizer",
}
_SHOWN_MODULES, _SHOWN_LINES = 12, 5


def markdown(plan: MeshPlan) -> str:
    """The whole report."""
    worst = plan.worst
    mesh = " x ".join(f"{name}={size}" for name, size in worst.mesh.items() if size > 1)
    ranks = f"{worst.world_size} ranks ({mesh})" if mesh else "one rank"
    others = ", ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in plan.ranks.items() if rank != worst.rank)
    lines = [f"# Plan of {worst.trainer} on {ranks}", ""]
    lines += [f"Peak of a step on rank {worst.rank}: {format_bytes(worst.peak)}{f' ({others})' if others else ''}."]
    if plan.memory is not None:
        lines[-1] += f" {_verdict(plan)}"
    lines += ["", "| At the peak | Bytes | |", "| --- | --- | --- |"]
    kinds = [name for name in _MEANS if worst.at_peak.get(name)]
    lines += [f"| {name} | {format_bytes(worst.at_peak[name])} | {_MEANS[name]} |" for name in kinds]
    lines += ["", *_tried(plan)] if plan.tried else []
    lines += ["", *_searched(plan)] if plan.meshes else []
    lines += ["", *_modules(worst), "", *_traffic(worst), *_reads(worst)]
    took = f"{worst.seconds:.0f} s and {format_bytes(worst.process_bytes)} of this machine"
    lines += ["", f"Left out: {worst.left_out}. Kernels are those of the CPU. Took {took}."]
    return "\n".join(lines)


def _verdict(plan: MeshPlan) -> str:
    assert plan.memory is not None
    if plan.fits:
        return f"It fits into {format_bytes(plan.memory)}."
    answer, over = plan.answer, format_bytes(plan.worst.peak - plan.memory)
    if answer is None or answer.plan is None:
        return (
            f"It does not fit into {format_bytes(plan.memory)} ({over} too much), nor with any change that was tried."
        )
    peak = format_bytes(answer.plan.peak)
    return f"It does not fit into {format_bytes(plan.memory)} ({over} too much). It does with `{answer.flags}`: {peak}."


def _tried(plan: MeshPlan) -> list[str]:
    rows = ["| Change | Peak | Sent in a step | Flags |", "| --- | --- | --- | --- |"]
    return rows + [f"| {each.change} | {_numbers(each)} | `{each.flags}` |" for each in plan.tried]


def _numbers(tried: Tried) -> str:
    if tried.plan is None:
        return f"{tried.error.replace('|', '/')} | -"
    return f"{format_bytes(tried.plan.peak)} | {format_bytes(sum(row.sent for row in tried.plan.traffic))}"


def _searched(plan: MeshPlan) -> list[str]:
    """Meshes that fit; then those that need too much memory, or cannot be planned."""
    rates = plan.rates
    fitting = [each for each in plan.meshes if each.fits and each.plan and each.cost]
    lines = ["| Mesh that fits | Peak | ms of a sample | Computing | In hosts | On the network |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"] if fitting else []
    for each in fitting:
        assert each.plan is not None
        assert each.cost is not None
        cost, n = each.cost, each.cost.samples
        parts = " | ".join(f"{1000 * seconds / n:.3g}" for seconds in (cost.compute, cost.host, cost.network))
        lines.append(f"| `{each.flags}` | {format_bytes(each.plan.peak)} | {1000 * cost.per_sample:.3g} | {parts} |")
    if not fitting:
        lines = ["No mesh that was planned fits."]
    lines += [
        "",
        f"Counted with {rates.tflops:g} TFLOP/s, {rates.host_gb:g} GB/s in a host and {rates.network_gb:g} GB/s",
    ]
    lines[-1] += " between hosts (`--rates`), as if nothing overlapped."
    too_large = [
        f"`{each.flags}` ({format_bytes(each.plan.peak)})" for each in plan.meshes if each.plan and not each.fits
    ]
    lines += ["", f"Too large: {', '.join(too_large)}."] if too_large else []
    for each in plan.meshes:
        lines += ["", f"Not possible: `{each.flags}`: {each.error}"] if each.error else []
    return lines


def _modules(plan: RankPlan) -> list[str]:
    """Modules that are alike, such as blocks, in one row."""
    found: dict[str, list[int]] = defaultdict(list)
    for name, n_bytes in plan.modules.items():
        if n_bytes:
            found[re.sub(r"\.\d+(?=\.|$)", ".*", name) or "(loss and backward, outside of modules)"].append(n_bytes)
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    lines = ["| At the peak, made by or part of | Modules | Bytes |", "| --- | --- | --- |"]
    lines += [f"| {name} | {len(each)} | {format_bytes(sum(each))} |" for name, each in rows[:_SHOWN_MODULES]]
    if rest := rows[_SHOWN_MODULES:]:
        n_bytes = sum(sum(each) for _, each in rest)
        lines.append(f"| others | {sum(len(each) for _, each in rest)} | {format_bytes(n_bytes)} |")
    return lines


def _traffic(plan: RankPlan) -> list[str]:
    if not plan.traffic:
        return ["Nothing is sent."]
    lines = ["| In a step | Over | Ranks | Calls | Bytes | A rank sends |", "| --- | --- | --- | --- | --- | --- |"]
    return lines + [
        f"| {each.operation} | {each.dimensions} | {each.ranks} | {each.calls:,} | {each.n_bytes:,} | "
        f"{format_bytes(each.sent)} |"
        for each in plan.traffic
    ]


def _reads(plan: RankPlan) -> list[str]:
    """Lines of the user's."""
    if not plan.read:
        return []
    shown = [f"- {line}" for line in list(plan.read)[:_SHOWN_LINES]]
    more = [f"- and {len(plan.read) - _SHOWN_LINES} more"] if len(plan.read) > _SHOWN_LINES else []
    return ["", "Asked for values, which a plan does not have; they got 1 or False:", "", *shown, *more]
