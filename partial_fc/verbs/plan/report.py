"""`partial-fc plan`: does it fit, what does a step cost, does sampling help? Formulas: counts.py."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .options import PlanOptions

if TYPE_CHECKING:
    from . import counts as plan

# The fraction of the product rate that a kernel reaches, beside exponentials and row reads. cpu and plain: measured on
# the machine of docs/benchmarks.md at D = 512, batch 128; triton: assumed.
KERNEL_SHARE = {"cpu": 0.85, "plain": 0.4, "triton": 0.6}


_SHOWN = ("classes", "local_classes", "sampled", "dim", "gpus", "batch", "sample_rate", "place", "impl")


def report(options: PlanOptions) -> None:
    """Prints the plan. Raises ValueError for invalid options."""
    figures = make_all(options) if options.heads else make(options)
    text = table_of_heads if options.heads else table
    print(json.dumps(figures) if options.json else text(figures))


def make_all(options: PlanOptions) -> dict[str, Any]:
    """Returns the figures of several heads, as `make` those of one, and what they are together: their memory is added,
    as are their times. The backbone counts once."""
    from . import counts as plan

    alone: dict[str, Any] = {"backbone_parameters": 0, "memory": None, "step_ms": None, "images_per_s": None}
    each = {name: make(replace(one, **alone)) for name, one in options.each().items()}
    backbone = plan.backbone_bytes(options.backbone_parameters, options.optimizer)
    sent = 2 * (options.gpus - 1) * 4 * options.backbone_parameters // options.gpus
    limit = None if options.memory is None else num_bytes(options.memory) - num_bytes(options.reserve)
    seconds = {
        rate: sum(sum(figures["seconds"][rate].values()) for figures in each.values()) for rate in ("all", "sampled")
    }
    memory_total = sum(figures["memory_total"] for figures in each.values()) + sum(backbone.values())
    verdict = []
    if limit is not None:
        fits = "Fits" if memory_total <= limit else "Does not fit"
        verdict.append(f"{fits}: {_size(memory_total)} of {_size(limit)}.")
    beside = _backbone_seconds(options)
    share = "" if beside is None else f", {seconds['sampled'] / (beside + seconds['sampled']):.0%} of it"
    sampled, full = _time(seconds["sampled"]), _time(seconds["all"])
    verdict += [f"The heads take {sampled} of a step{share}; {full} with all classes.", *_on_accuracy(options)]
    return {
        "heads": each, "backbone": backbone, "backbone_sent": sent, "memory_total": memory_total, "limit": limit,
        "seconds": seconds, "verdict": verdict,
    }  # fmt: skip


def table_of_heads(figures: dict[str, Any]) -> str:
    """Formats the plan of several heads as a table with a column for each."""
    each = list(figures["heads"].values())
    lines = [_row("", *figures["heads"], "together")]

    def add(name: str, values: list[float], text: Callable[[float], str] = "{:,}".format) -> None:
        lines.append(_row(name, *map(text, values), text(sum(values))))

    for name, key in {"classes": "classes", "  of a process": "local_classes", "  in a step": "sampled"}.items():
        add(name, [one[key] for one in each])
    lines += ["", "memory of a process"]
    for part in dict.fromkeys(part for one in each for part in one["memory"]):
        add(f"  {part}", [one["memory"].get(part, 0) for one in each], _size)
    for part, size in figures["backbone"].items():
        if size:
            lines.append(_row(f"  {part}", *[""] * len(each), _size(size)))
    totals = [one["memory_total"] for one in each]
    lines.append(_row("  together", *map(_size, totals), _size(figures["memory_total"])))
    if any(one["elsewhere"] for one in each):
        add("  beside it, elsewhere", [one["elsewhere"] for one in each], _size)
    lines += ["", "sent in a step"]
    for part in each[0]["collectives"]:
        add(f"  {part}", [one["collectives"][part]["sent"] for one in each], _size)
    if figures["backbone_sent"]:
        lines.append(_row("  backbone", *[""] * len(each), _size(figures["backbone_sent"])))
    lines += ["", "time of a step"]
    for part in each[0]["seconds"]["sampled"]:
        add(f"  {part}", [one["seconds"]["sampled"][part] for one in each], _time)
    add("  together", [sum(one["seconds"]["sampled"].values()) for one in each], _time)
    add("  with all classes", [sum(one["seconds"]["all"].values()) for one in each], _time)
    return "\n".join([*lines, "", *figures["verdict"]])


def make(options: PlanOptions) -> dict[str, Any]:
    """Returns the table's figures, in bytes and seconds."""
    from . import counts as plan

    workload = _resolved(options)
    machine = _machine(options, workload)
    gexp_per_s = machine.rates.gexp_per_s
    memory = plan.memory(workload)
    if options.backbone_parameters:
        memory |= plan.backbone_bytes(options.backbone_parameters, options.optimizer)
    limit = None if options.memory is None else num_bytes(options.memory) - num_bytes(options.reserve)
    rates = {"all": 1.0, "sampled": options.sample_rate}
    seconds = {name: plan.head_seconds(replace(workload, sample_rate=rate), machine) for name, rate in rates.items()}
    operations = {name: plan.operations(replace(workload, sample_rate=rate)) for name, rate in rates.items()}
    handed_in, sent = plan.collective_bytes(workload), plan.link_bytes(workload)
    if options.backbone_parameters:
        handed_in["backbone"] = 4 * options.backbone_parameters
        sent["backbone"] = 2 * (workload.gpus - 1) * handed_in["backbone"] // workload.gpus
    figures: dict[str, Any] = {
        **{name: getattr(workload, name) for name in _SHOWN},
        "rates": {**asdict(machine.rates), "gexp_per_s": gexp_per_s if math.isfinite(gexp_per_s) else None},
        "memory": memory,
        "memory_total": sum(memory.values()),
        "elsewhere": plan.elsewhere_bytes(workload),
        "limit": limit,
        "collectives": {name: {"handed_in": handed_in[name], "sent": sent[name]} for name in handed_in},
        "operations": operations,
        "seconds": seconds,
        "backbone_seconds": _backbone_seconds(options),
        "dense_update_seconds": plan.dense_update_bytes(workload) / (machine.rates.gbytes_per_s * 1e9),
    }
    if limit is not None:
        others = figures["memory_total"] - sum(plan.memory(workload).values())
        figures["largest_classes"] = plan.largest_classes(workload, limit - others)
    figures["verdict"] = verdict(figures) + _on_accuracy(options)
    return figures


def verdict(figures: dict[str, Any]) -> list[str]:
    """Returns conclusions from the figures: does it fit, does sampling help?"""
    sentences = []
    if figures["limit"] is not None:
        fits = figures["memory_total"] <= figures["limit"]
        sentences.append(
            f"{'Fits' if fits else 'Does not fit'}: {_size(figures['memory_total'])} of {_size(figures['limit'])}; "
            f"at most {figures['largest_classes']:,} classes on {figures['gpus']} process(es)."
        )
    full, sampled = (sum(figures["seconds"][name].values()) for name in ("all", "sampled"))
    rate, backbone = figures["sample_rate"], figures["backbone_seconds"]
    if rate == 1.0:
        sentences.append(f"The head takes {_time(full)} of a step with all classes; see --sample-rate.")
    elif backbone is None:
        sentences.append(
            f"The head takes {_time(full)} with all classes, {_time(sampled)} with {rate:.0%} of them. Whether that "
            "matters depends on the rest of the step: give --step-ms or --images-per-s."
        )
    else:
        gain = (backbone + full) / (backbone + sampled)
        shares = f"the head is {full / (backbone + full):.0%} of a step with all classes, "
        shares += f"{sampled / (backbone + sampled):.0%} with {rate:.0%} of them"
        if gain < 1.1:
            sentences.append(f"Sampling does not pay: {shares}; a step would be {gain - 1:.0%} faster.")
        else:
            sentences.append(f"Sampling makes a step {gain:.2f} times as fast: {shares}.")
    if rate < 1.0:
        rows = figures["seconds"]["sampled"]["rows"]
        sentences.append(
            f"Rows that take part are moved in {_time(rows)}; a dense optimizer would pass over all rows and a "
            f"gradient of their size in {_time(figures['dense_update_seconds'])}. What exact catch-up adds is not "
            "counted (docs/head.md)."
        )
        if not figures["elsewhere"]:
            sentences.append("Sampling saves time, no memory: every class keeps its row.")
    return sentences


def _on_accuracy(options: PlanOptions) -> list[str]:
    """Returns where it stands what sampling does to a trained network."""
    sampled = min(one.sample_rate for one in (options.each().values() or [options])) < 1.0
    return ["What sampling does to the error of the trained network: docs/fidelity.md."] if sampled else []


def table(figures: dict[str, Any]) -> str:
    """Formats the plan as a table."""
    seconds = figures["seconds"]
    lines = [
        f"{figures['classes']:,} classes, D {figures['dim']}, batch {figures['batch']:,}, "
        f"{figures['gpus']:,} process(es) of {figures['local_classes']:,} classes; "
        f"{figures['sampled']:,} take part at rate {figures['sample_rate']:g}",
        "",
        "memory of a process",
        *(_row(f"  {name}", _size(size)) for name, size in figures["memory"].items()),
        _row("  together", _size(figures["memory_total"])),
    ]
    if figures["elsewhere"]:
        where = "the host's memory" if figures["place"] == "host" else "files"
        lines.append(_row(f"  beside it, in {where}", _size(figures["elsewhere"])))
    lines += ["", _row("collectives of a step", "handed in", "sent")]
    for name, size in figures["collectives"].items():
        lines.append(_row(f"  {name}", _size(size["handed_in"]), _size(size["sent"])))
    lines += ["", _row("time of the head in a step", "all classes", f"rate {figures['sample_rate']:g}")]
    for part, all_classes in seconds["all"].items():
        if all_classes or seconds["sampled"][part]:
            lines.append(_row(f"  {part}", _time(all_classes), _time(seconds["sampled"][part])))
    lines.append(_row("  together", *(_time(sum(seconds[rate].values())) for rate in ("all", "sampled"))))
    rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in figures["rates"]["gflops"].items())
    lines += [
        f"  (kernel {figures['impl']}; {rates}; memory {figures['rates']['gbytes_per_s']:,.0f} GB/s;",
        f"  {figures['operations']['all']:,.0f} and {figures['operations']['sampled']:,.0f} operations, "
        f"{figures['rates']['launch_us']:.1f} us to launch one)",
        "",
    ]
    return "\n".join(lines + figures["verdict"])


def _row(name: str, *cells: str) -> str:
    return f"{name:34}" + "".join(f"{cell:>12}" for cell in cells)


def num_bytes(text: str) -> int:
    """Parses "80GiB", "24 GB" or "1e9" as bytes."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([KMGT])(I?))?B?\s*", text.upper().replace("E", "e"))
    if not match:
        raise ValueError(f"memory {text!r}; expected a number with a unit, such as 80GiB or 24GB")
    number, prefix, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** ("", "K", "M", "G", "T").index(prefix))


def _resolved(options: PlanOptions) -> PlanOptions:
    """Returns the options, checked, with defaults resolved."""
    import torch

    from partial_fc.machine import has_bf16

    device, impl = options.device, options.impl
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available() and options.tflops is None and options.rates is None:
        raise ValueError("--device cuda: no GPU here to measure; give --tflops and --bandwidth, or --rates")
    if impl == "auto":
        impl = "triton" if device == "cuda" else "cpu"
    precision = options.precision
    if precision == "auto":
        is_here = device == "cpu" or torch.cuda.is_available()
        precision = "fp32" if is_here and not has_bf16(torch.device(device)) else "bf16"
    if impl == "plain":
        precision = "fp32"
    return replace(options, device=device, impl=impl, precision=precision)


def _machine(options: PlanOptions, workload: PlanOptions) -> "plan.Machine":
    import torch

    from . import counts as plan
    from .machine import Rates, measure_rates

    if options.launch_us and not options.tflops:
        raise ValueError(
            "--launch-us describes another machine, as --tflops and --bandwidth do: give all three, or none"
        )
    if options.rates:
        given = json.loads(options.rates.read_text())
        rates = Rates(**given.get("rates", given))
        rates = replace(rates, gexp_per_s=rates.gexp_per_s or math.inf)
    elif options.tflops and options.bandwidth:
        # The rate of exponentials on another machine is unknown: they are not counted.
        rates = Rates({workload.precision: options.tflops * 1e3}, options.bandwidth, math.inf)
        rates = replace(rates, launch_us=options.launch_us or rates.launch_us)
    elif options.tflops or options.bandwidth:
        raise ValueError("--tflops and --bandwidth describe another machine: give both, or none to measure this one")
    else:
        torch.set_num_threads(options.threads)
        rates = measure_rates(torch.device(workload.device), options.batch, options.dim)
    if workload.precision not in rates.gflops:
        raise ValueError(f"the rates know {', '.join(rates.gflops)}, not --precision {workload.precision}")
    return plan.Machine(
        rates,
        KERNEL_SHARE[workload.impl],
        options.link_gbps / 8,
        options.latency_us * 1e-6,
        options.place_bandwidth or {"device": math.inf, "host": 50.0}[options.place],
    )


def _backbone_seconds(options: PlanOptions) -> float | None:
    if options.step_ms is not None and options.images_per_s is not None:
        raise ValueError("--step-ms and --images-per-s say the same; give one of them")
    if options.images_per_s is not None:
        return options.batch / options.gpus / options.images_per_s
    return None if options.step_ms is None else options.step_ms / 1e3


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
