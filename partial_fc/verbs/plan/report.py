"""`partial-fc plan`: does it fit, what does a step cost, does sampling help? Formulas: counts.py."""

import json
import math
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .options import PlanOptions

if TYPE_CHECKING:
    from .counts import Rates

_SHOWN = ("classes", "local_classes", "sampled", "dim", "gpus", "batch", "sample_rate", "device")


def report(options: PlanOptions) -> None:
    """Prints the plan. Raises ValueError for invalid options."""
    figures = make(options)
    print(json.dumps(figures) if options.json else table(figures))


def make(options: PlanOptions) -> dict[str, Any]:
    """Returns the table's figures, in bytes and seconds."""
    from . import counts as plan

    workload = _resolved(options)
    rates = _rates(options, workload)
    memory = plan.memory(workload)
    if options.backbone_parameters:
        in_fp32 = 4 * options.backbone_parameters  # without activations
        moments = 1 if options.optimizer == "sgd" else 2
        memory |= {"backbone": in_fp32, "its gradient": in_fp32, "its optimizer state": moments * in_fp32}
    limit = None if options.memory is None else num_bytes(options.memory) - num_bytes(options.reserve)
    shares = {"all": 1.0, "sampled": options.sample_rate}
    seconds = {name: plan.head_seconds(replace(workload, sample_rate=share), rates) for name, share in shares.items()}
    handed_in, sent = plan.collective_bytes(workload), plan.link_bytes(workload)
    if options.backbone_parameters:
        handed_in["backbone"] = 4 * options.backbone_parameters
        sent["backbone"] = 2 * (workload.gpus - 1) * handed_in["backbone"] // workload.gpus
    figures: dict[str, Any] = {
        **{name: getattr(workload, name) for name in _SHOWN},
        "rates": {**asdict(rates), "gexp_per_s": rates.gexp_per_s if math.isfinite(rates.gexp_per_s) else None},
        "memory": memory,
        "memory_total": sum(memory.values()),
        "limit": limit,
        "collectives": {name: {"handed_in": handed_in[name], "sent": sent[name]} for name in handed_in},
        "seconds": seconds,
        "backbone_seconds": options.images_per_s and options.batch / options.gpus / options.images_per_s,
    }
    if limit is not None:
        others = figures["memory_total"] - sum(plan.memory(workload).values())
        figures["largest_classes"] = plan.largest_classes(workload, limit - others)
    figures["verdict"] = verdict(figures)
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
            "matters depends on the rest of the step: give --images-per-s."
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
        sentences.append("What sampling does to the error of the trained network: docs/fidelity.md.")
    return sentences


def table(figures: dict[str, Any]) -> str:
    """Formats the plan as a table."""
    seconds = figures["seconds"]
    lines = [
        f"{figures['classes']:,} classes, D {figures['dim']}, batch {figures['batch']:,}, "
        f"{figures['gpus']:,} process(es) of {figures['local_classes']:,} classes",
        f"{figures['sampled']:,} take part at rate {figures['sample_rate']:g}",
        "",
        "memory of a process",
        *(_row(f"  {name}", _size(size)) for name, size in figures["memory"].items()),
        _row("  together", _size(figures["memory_total"])),
    ]
    lines += ["", _row("collectives of a step", "handed in", "sent")]
    for name, size in figures["collectives"].items():
        lines.append(_row(f"  {name}", _size(size["handed_in"]), _size(size["sent"])))
    lines += ["", _row("time of the head in a step", "all classes", f"rate {figures['sample_rate']:g}")]
    for part, all_classes in seconds["all"].items():
        if all_classes or seconds["sampled"][part]:
            lines.append(_row(f"  {part}", _time(all_classes), _time(seconds["sampled"][part])))
    lines.append(_row("  together", *(_time(sum(seconds[rate].values())) for rate in ("all", "sampled"))))
    rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in figures["rates"]["gflops"].items())
    lines += [f"  ({figures['device']}; {rates}; memory {figures['rates']['gbytes_per_s']:,.0f} GB/s)", ""]
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

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available() and options.tflops is None:
        raise ValueError("--device cuda: no GPU here to measure; give --tflops and --bandwidth")
    precision = options.precision
    if precision == "auto":
        is_here = device == "cpu" or torch.cuda.is_available()
        precision = "fp32" if is_here and not has_bf16(torch.device(device)) else "bf16"
    return replace(options, device=device, precision=precision)


def _rates(options: PlanOptions, workload: PlanOptions) -> "Rates":
    import torch

    from .counts import Rates, measure_rates

    if options.tflops and options.bandwidth:
        # The rate of exponentials on another machine is unknown: they are not counted.
        rates = Rates({workload.precision: options.tflops * 1e3}, options.bandwidth, math.inf)
    elif options.tflops or options.bandwidth:
        raise ValueError("--tflops and --bandwidth describe another machine: give both, or none to measure this one")
    else:
        torch.set_num_threads(options.threads)
        rates = measure_rates(torch.device(workload.device), options.batch, options.dim)
    if workload.precision not in rates.gflops:
        raise ValueError(f"the rates know {', '.join(rates.gflops)}, not --precision {workload.precision}")
    return rates


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
