"""Stacked convolutions, with a kernel per member.

The channels of M members stand side by side in a convolution of M times as many groups. On CPUs, a convolution for each
member is faster (by 1.3 to 3 on one core), because the rows need not be rearranged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_bayes.members.context import Context
from hf_bayes.members.stacked_module import Stacked

CONVOLUTIONS: dict[type[nn.Module], Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}
"""Class of a convolution -> its function."""


class StackedConvolution(Stacked):
    """A stacked nn.Conv1d or nn.Conv2d, also a grouped one, with a kernel and a bias per member."""

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        super().__init__(module, names, context)
        self.pads = _pads(module) if module.padding_mode != "zeros" else None
        if self.pads == "same":
            raise ValueError(
                f"{next(iter(names.values()))}: a convolution with padding='same' and padding_mode="
                f"{module.padding_mode!r} is not supported as random. Give the padding as numbers, or freeze the layer"
            )

    def forward(self, x: Tensor) -> Tensor:
        context, single = self.context, self.single(x)
        weight = self.tensor("weight")  # [M, out, in / groups, *kernel]
        weight = weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)
        bias = None if self.module.bias is None else self.tensor("bias").to(weight.dtype)
        if single is not None:
            return self._of_equal_rows(single, weight, bias)
        rows = x.unflatten(0, (context.num_members, -1))  # [M, B, in, ...]
        if x.device.type == "cpu" and rows.shape[1] > 1:
            biases = [None] * len(weight) if bias is None else bias.unbind()
            parts = zip(rows.unbind(), weight.unbind(), biases, strict=True)
            each: list[Tensor] = [self._convolve(*part, self.module.groups) for part in parts]
            return torch.cat(each)
        side_by_side = rows.transpose(0, 1).flatten(1, 2)  # [B, M * in, ...]
        groups = context.num_members * self.module.groups
        y = self._convolve(side_by_side, weight.flatten(0, 1), None if bias is None else bias.flatten(), groups)
        return torch.unflatten(y, 1, (context.num_members, -1)).transpose(0, 1).flatten(0, 1)

    def _of_equal_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return M * B rows from the B rows that all members share: their kernels are further output channels."""
        members, groups = self.context.num_members, self.module.groups
        # output channels of a grouped convolution stand group by group
        weight = weight.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 2)
        y = self._convolve(x, weight, None, groups)
        y = torch.unflatten(y, 1, (groups, members, -1))  # [B, groups, M, out / groups, ...]
        y = y.movedim(2, 0).flatten(2, 3)  # [M, B, out, ...]
        if bias is not None:
            y = y + bias.view(members, 1, -1, *[1] * (y.ndim - 3))
        return y.flatten(0, 1)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        module, padding = self.module, self.module.padding
        if self.pads is not None:
            x, padding = F.pad(x, self.pads, mode=module.padding_mode), 0
        function = CONVOLUTIONS[type(module)]
        y: Tensor = function(x, weight, bias, module.stride, padding, module.dilation, groups)
        return y


def _pads(module: Any) -> Any:
    """Return the padding of a convolution in the order of ``torch.nn.functional.pad``, or its name."""
    if isinstance(module.padding, str):
        return [0, 0] * len(module.kernel_size) if module.padding == "valid" else module.padding
    return [size for size in reversed(module.padding) for _ in range(2)]
