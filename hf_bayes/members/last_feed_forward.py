"""The feed-forward module of the last block, run only at positions whose logits are needed.

Keys and values are computed from the block's input, at every position. The block's output goes to the head, which needs
only the last position of a prompt. If the random layers are the last ones, the feed-forward of all members would be
most of the work of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_bayes.core.layout import decoder_blocks
from hf_bayes.members.context import Context

FEED_FORWARDS = ("mlp", "feed_forward", "ffn")
"""The names of the feed-forward module in transformers' decoder blocks. Under another name, it runs at all
positions."""


class LastFeedForward:
    """Hooks on the feed-forward module of the last block: it runs on the last positions, and the output is padded.

    The output is zero at all other positions.

    Attributes:
        kept: the number of positions at the end of each row that will be read; None means all.
        runs_once: True if a forward runs the block once (see ``count_calls``). None until this is known; until then
            nothing is cut.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        self.context = context
        self.kept: int | None = None
        self.runs_once: bool | None = None
        self.full: int | None = None  # T, while the module runs on fewer positions
        self._calls = 0
        self.module = _feed_forward(model)
        self.handles: list[Any] = []

    def install(self) -> None:
        """Register the hooks."""
        if self.module is not None:
            self.handles = [
                self.module.register_forward_pre_hook(self._cut),
                self.module.register_forward_hook(self._pad),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def count_calls(self, forward: Callable[[], object]) -> None:
        """Run ``forward`` and count how often the model calls its last block; if more than once, nothing is cut."""
        self._calls = 0
        forward()
        self.runs_once = self._calls == 1

    @contextmanager
    def on_last_positions(self, kept: int | None) -> Iterator[None]:
        """Within the block, only the last ``kept`` positions of the last block's output are computed."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = self.full = None  # ``full`` is still set if the module failed between the two hooks

    def _cuts(self, args: tuple[Any, ...]) -> bool:
        """Check that the only input is hidden states [rows, T, h] with more positions than will be read."""
        match args:
            case (Tensor(ndim=3) as hidden,) if self.kept is not None:
                return self.kept < hidden.shape[1] == self.context.num_positions
        return False

    def _cut(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        self._calls += 1
        if not self.runs_once or not self._cuts(args):
            return None
        assert self.kept is not None
        self.context.num_positions, self.full = self.kept, self.context.num_positions
        return (args[0][:, -self.kept :].contiguous(),)  # contiguous, because GPT-2 calls ``view`` on it

    def _pad(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.full is None:
            return None
        positions, self.full = self.full, None
        self.context.num_positions = positions
        return _padded(output, args[0].shape[:2], positions)


def _padded(output: Any, shape: tuple[int, int], positions: int) -> Any:
    """Return zeros [rows, T, ...] with ``output`` at the last positions.

    In a tuple (from a layer of experts), only the tensors with positions are padded.
    """
    match output:
        case tuple():
            return tuple(_padded(item, shape, positions) for item in output)
        case Tensor() if output.shape[:2] == shape:
            whole = output.new_zeros(shape[0], positions, *output.shape[2:])
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
