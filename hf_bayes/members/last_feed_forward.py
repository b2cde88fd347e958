"""The feed-forward module of the last block, run only at positions whose logits are needed.

Keys and values are computed from the block's input, at every position. The block's output goes to the head, which needs
only the last position of a prompt. If the random layers are the last ones, the feed-forward of all members would be
most of the work of a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_bayes.core.layout import decoder_blocks
from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.context import Context

FEED_FORWARDS = ("mlp", "feed_forward", "ffn")
"""The names of the feed-forward module in transformers' decoder blocks. Under another name, it runs at all
positions."""

CHECKED_POSITIONS = 8
"""The length of the prompt of ``LastFeedForward.count_calls``. A convolution that reads other positions reads the one
before, too."""


class LastFeedForward:
    """Hooks on the feed-forward module of the last block: it runs on the last positions, and the output is padded.

    The output is zero at all other positions.

    Attributes:
        kept: the number of positions at the end of each row that will be read; None means all.
        runs_once: True if a forward runs the block once (see ``count_calls``). None until this is known; until then
            nothing is cut.
        is_exact: True if nothing after the module reads its output at other positions (a convolution does, such as
            Inkling's). If not, or as long as this is not known, nothing is cut.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        self.context = context
        self.kept: int | None = None
        self.runs_once: bool | None = None
        self.is_exact = False
        self.full: int | None = None  # T, while the module runs on fewer positions
        self._calls = 0
        self._padding = 0.0  # the output at positions where the module did not run
        self.module = _feed_forward(model)
        self.handles: list[Any] = []

    def install(self) -> None:
        """Register the hooks."""
        if self.module is not None:
            self.handles = [
                self.module.register_forward_pre_hook(self._cut, with_kwargs=True),
                self.module.register_forward_hook(self._pad),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def count_calls(self, forward: Callable[[], tuple[Tensor, Any]]) -> None:
        """Find out whether the module may be cut: it runs once, and nothing reads its output at other positions.

        Args:
            forward: runs the backbone for one member on one token that is repeated ``CHECKED_POSITIONS`` times, and
                returns its hidden states first.
        """
        self._calls = 0
        forward()
        self.runs_once = self._calls == 1
        if not self.runs_once:
            return
        # a result that is computed from NaN is NaN in every precision; a small difference could be rounding
        self._padding, self.is_exact, is_exact = math.nan, True, False
        try:
            with self.on_last_positions(1):
                hidden, _ = forward()
            is_exact = not bool(hidden[:, -1].isnan().any())
        finally:
            self._padding, self.is_exact = 0.0, is_exact

    @contextmanager
    def on_last_positions(self, kept: int | None) -> Iterator[None]:
        """Within the block, only the last ``kept`` positions of the last block's output are computed."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = self.full = None  # ``full`` is still set if the module failed between the two hooks

    def _cuts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Check that the only tensor is hidden states [rows, T, h] with more positions than will be read.

        Other tensors may have positions, too: a module of DeepSeek-V4 takes the tokens.
        """
        match args:
            case (Tensor(ndim=3) as hidden,) if self.kept is not None and not tensors_in(kwargs):
                return self.kept < hidden.shape[1] == self.context.num_positions
        return False

    def _cut(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]] | None:
        self._calls += 1
        if not self.runs_once or not self.is_exact or not self._cuts(args, kwargs):
            return None
        assert self.kept is not None
        self.context.num_positions, self.full = self.kept, self.context.num_positions
        return (args[0][:, -self.kept :].contiguous(),), kwargs  # contiguous, because GPT-2 calls ``view`` on it

    def _pad(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.full is None:
            return None
        positions, self.full = self.full, None
        self.context.num_positions = positions
        return _padded(output, args[0].shape[:2], positions, self._padding)


def _padded(output: Any, shape: tuple[int, int], positions: int, padding: float) -> Any:
    """Return [rows, T, ...] with ``output`` at the last positions, and ``padding`` at the other ones.

    In a tuple (from a layer of experts), only the tensors with positions are padded.
    """
    match output:
        case tuple():
            return tuple(_padded(item, shape, positions, padding) for item in output)
        case Tensor() if output.shape[:2] == shape:
            size = (shape[0], positions, *output.shape[2:])
            whole = output.new_full(size, padding if output.is_floating_point() else 0)
            whole[:, -shape[1] :] = output
            return whole
    return output


def _feed_forward(model: nn.Module) -> nn.Module | None:
    """Return the feed-forward module of the last block, or None if it has none of the names."""
    found = decoder_blocks(model)
    if found is None:
        return None
    children = dict(found[1][-1].named_children())
    return next((children[name] for name in FEED_FORWARDS if name in children), None)
