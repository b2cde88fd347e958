"""The refusal of chains that do not fit the memory: without it the system may kill the process without a word."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from hf_bayes.core.config import MethodConfig

NUMBERS_PER_PARAMETER = 7
"""The numbers that a chain needs for each random parameter: positions and their copies, the gradient, the state.

It is a lower bound for all methods, so a run that passes may still need several times as much: an update makes a new
state beside the old one, and the states of some methods are larger.
"""

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux mounts the control groups, which limit memory, in the first. The second lists the groups of this process."""


def require_memory(num_parameters: int, num_chains: int, method: MethodConfig, device: torch.device, size: int) -> None:
    """Check that the memory that is free now holds the chains of this process, before they are made.

    The test is one of orders of magnitude: what the model's own passes need is not counted, so a run may still need
    more. With an accelerator, the chains must fit into its memory, and their draws into the memory of the machine.

    Args:
        num_parameters: d, the random parameters of a chain.
        num_chains: M, the chains of this process.
        size: bytes of a number.
    Raises:
        ValueError: naming both amounts and what to reduce.
    """
    unit = num_parameters * num_chains * size
    needed = {device.type: NUMBERS_PER_PARAMETER * unit}
    needed["cpu"] = needed.get("cpu", 0) + method.draws_per_chain * unit
    for kind, amount in needed.items():
        free = _free_bytes(device if kind == device.type else torch.device("cpu"))
        if free is not None and amount > free:
            raise ValueError(
                f"{method.name} with {num_chains:,} chains of {num_parameters:,} random parameters and "
                f"{method.draws_per_chain:,} draws of each needs at least {amount / 2**30:,.1f} GiB, and "
                f"{free / 2**30:,.1f} GiB are free on the {kind}: reduce num_chains, draws_per_chain, or the random "
                "parameters (a smaller LoRA rank, fewer layers, another subspace)"
            )


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None if it is not known."""
    if device.type == "cpu":
        return min([int(psutil.virtual_memory().available), *_group_bytes(GROUPS, OWN_GROUPS)])
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _group_bytes(root: Path, own: Path) -> list[int]:
    """Return the bytes that are left to each control group around this process that has a limit.

    A container, or a job of a cluster, is such a group: psutil sees the memory of the whole machine. Pages of files
    count as free, as in psutil, because the kernel drops them when memory runs short.
    """
    found = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, limit, usage = (
            (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else (root, "memory.max", "memory.current")
        )
        group = top / path.lstrip("/")
        # a container may see its own group as the top one, so the folder of its path may be missing
        for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
            if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                pages = sum(int(statistics[name]) for name in ("active_file", "inactive_file"))
                found.append(int(most) - int((folder / usage).read_text()) + pages)
    return found
