"""Where the time of a prefill on a CUDA device goes, by operation of torch and kernel of ours."""

from __future__ import annotations

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_OWN_KERNEL = re.compile(r"minference::(?:\w+::)*(\w+)[<(]")


def operation_times(run, device: str) -> list[dict]:
    """What the device does in `run()`: [{"name", "seconds", "calls"}], the longest first.

    A kernel's time counts under the operation of torch that started it; our kernels, which none does, stand
    under their own names.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize(device)
    rows = []
    for event in recorded.key_averages():
        name = event.key
        if event.device_type != DeviceType.CPU:
            own = _OWN_KERNEL.search(name.replace("(anonymous namespace)::", ""))
            if own is None:
                continue
            name = f"minference {own[1]}"
        if event.self_device_time_total > 0:
            rows.append({"name": name, "seconds": 1e-6 * event.self_device_time_total, "calls": event.count})
    return sorted(rows, key=lambda row: -row["seconds"])


def table(rows: list[dict], most: int) -> str:
    """The `most` longest rows, and sums."""
    total = sum(row["seconds"] for row in rows)
    rest = {"name": "the rest", "seconds": sum(row["seconds"] for row in rows[most:])}
    lines = [f"  {'operation':<48}{'ms':>10}{'%':>7}{'calls':>8}"]
    for row in (*rows[:most], rest, {"name": "all", "seconds": total}):
        share = 100 * row["seconds"] / total if total > 0 else 0
        lines.append(
            f"  {row['name'][:47]:<48}{1e3 * row['seconds']:>10.1f}{share:>7.1f}{row.get('calls', ''):>8}"
        )
    return "\n".join(lines)
