"""A plan as Markdown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from dream_trainer.planning.planned_trainer import LEFT_OUT
from dream_trainer.planning.planner import MeshPlan, RankPlan, Tried
from dream_trainer.screen import format_bytes

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
_SHOWN_MODULES = 12


def _table(header: str, rows: Iterable[Iterable[object]]) -> list[str]:
    names = header.split(" | ")
    return ["", *(f"| {' | '.join(map(str, row))} |" for row in (names, ["---"] * len(names), *rows))]


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
    kinds = [name for name in _MEANS if worst.at_peak.get(name)]
    lines += _table("At the peak | Bytes | ", ([n, format_bytes(worst.at_peak[n]), _MEANS[n]] for n in kinds))
    if plan.tried:
        lines += _table("Change | Peak | Sent in a step | Flags", map(_row_of_change, plan.tried))
    lines += _searched(plan) if plan.meshes else []
    lines += _modules(worst)
    sent = "In a step | Over | Ranks | Calls | Bytes | A rank sends"
    rows = [
        [each.operation, each.dimensions, each.ranks, f"{each.calls:,}", f"{each.n_bytes:,}", format_bytes(each.sent)]
        for each in worst.traffic
    ]
    lines += _table(sent, rows) if rows else ["", "Nothing is sent."]
    if worst.read:
        lines += ["", "Asked for values, which a plan does not have; they got 1 or False:", ""]
        lines += [f"- {line}" for line in worst.read]
    lines += ["", f"Left out: {LEFT_OUT}. Kernels are those of the CPU."]
    return "\n".join(lines)


def _verdict(plan: MeshPlan) -> str:
    size, answer = format_bytes(plan.memory or 0), plan.answer
    if plan.fits:
        return f"It fits into {size}."
    told = f"It does not fit into {size} ({format_bytes(plan.worst.peak - (plan.memory or 0))} too much)"
    if answer is None or answer.plan is None:
        return f"{told}, nor with any change that was tried."
    return f"{told}. It does with `{answer.flags}`: {format_bytes(answer.plan.peak)}."


def _row_of_change(tried: Tried) -> list[str]:
    plan, numbers = tried.plan, [tried.error.replace("|", "/"), "-"]
    if plan is not None:
        numbers = [format_bytes(plan.peak), format_bytes(sum(row.sent for row in plan.traffic))]
    return [tried.change, *numbers, f"`{tried.flags}`"]


def _searched(plan: MeshPlan) -> list[str]:
    """Meshes that fit; then those that need too much memory, or cannot be planned."""
    rates, rows, too_large = plan.rates, list[list[str]](), list[str]()
    for each in plan.meshes:
        if each.plan is not None and each.cost is not None and each.fits(plan.memory):
            cost = each.cost
            parts = (cost.per_sample, *(seconds / cost.samples for seconds in (cost.compute, cost.host, cost.network)))
            numbers = [f"{1000 * seconds:.3g}" for seconds in parts]
            rows.append([f"`{each.flags}`", format_bytes(each.plan.peak), *numbers])
        elif each.plan is not None:
            too_large.append(f"`{each.flags}` ({format_bytes(each.plan.peak)})")
    header = "Mesh that fits | Peak | ms of a sample | Computing | In hosts | On the network"
    lines = _table(header, rows) if rows else ["", "No mesh that was planned fits."]
    given = f"{rates.tflops:g} TFLOP/s, {rates.host_gb:g} GB/s in a host and {rates.network_gb:g} GB/s between hosts"
    lines += ["", f"Counted with {given} (`--rates`), as if nothing overlapped."]
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
    if len(rows) > _SHOWN_MODULES:
        rows[_SHOWN_MODULES:] = [("others", [n_bytes for _, each in rows[_SHOWN_MODULES:] for n_bytes in each])]
    return _table(
        "At the peak, made by or part of | Modules | Bytes",
        ([name, len(each), format_bytes(sum(each))] for name, each in rows),
    )
