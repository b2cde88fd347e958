"""Leave out of the last block what nobody reads: its feed-forward at positions whose logits are not asked for.

Keys and values need what enters the block, at every position; what leaves it goes to the head, of a prompt at its last
position only. There the feed-forward of all members is most of a prefill whose random layers are the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_bayes.core.layout import decoder_blocks
from hf_bayes.members.context import Context

FEED_FORWARDS = ("mlp", "feed_forward", "ffn")
"""What transformers' decoder blocks call it; a block that calls it otherwise computes all positions."""


class Tail:
    """Hooks on the last block's feed-forward: the last positions of its input go in, zeros stand for the others after.

    Attributes:
        kept: positions at the end of each row that will be read; None means all.
        once: whether a forward runs the block once, see ``look``; None until that is known, and nothing is cut.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        self.context = context
        self.kept: int | None = None
        self.once: bool | None = None
        self.before: int | None = None  # T, while the module runs on fewer
        self._calls = 0
        self.module = _feed_forward(model)
        self.handles: list[Any] = []

    def install(self) -> None:
        if self.module is not None:
            self.handles = [
                self.module.register_forward_pre_hook(self._cut),
                self.module.register_forward_hook(self._pad),
            ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def look(self, forward: Callable[[], object]) -> None:
        """See by a forward how often the model runs its last block: where it does again, all positions are read."""
        self._calls = 0
        forward()
        self.once = self._calls == 1

    @contextmanager
    def only(self, kept: int | None) -> Iterator[None]:
        """While open, of each row only the last ``kept`` positions of the last block's output are right."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = self.before = None  # also of a module that failed between the two hooks

    def _cuts(self, args: tuple) -> bool:
        """Whether the module was given hidden states [rows, T, h] and nothing else, of more positions than are read."""
        if self.kept is None or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim != 3:
            return False
        return self.kept < args[0].shape[1] == self.context.num_positions

    def _cut(self, module: nn.Module, args: tuple) -> tuple | None:
        self._calls += 1
        if not self.once or not self._cuts(args):
            return None
        assert self.kept is not None
        self.context.num_positions, self.before = self.kept, self.context.num_positions
        return (args[0][:, -self.kept :].contiguous(),)  # as a block gives it: GPT-2 takes a view of it

    def _pad(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self.before is None:
            return None
        positions, self.before = self.before, None
        self.context.num_positions = positions
        return _padded(output, args[0].shape[:2], positions)


def _padded(output: Any, shape: tuple[int, int], positions: int) -> Any:
    """Zeros [rows, T, ...] whose last positions are ``output``; of a tuple (an expert layer's), what has positions."""
    if isinstance(output, tuple):
        return tuple(_padded(item, shape, positions) for item in output)
    if not isinstance(output, Tensor) or output.shape[:2] != shape:
        return output
    whole = output.new_zeros(shape[0], positions, *output.shape[2:])
    whole[:, -shape[1] :] = output
    return whole


def _feed_forward(model: nn.Module) -> nn.Module | None:
    found = decoder_blocks(model)
    if found is None:
        return None
    children = dict(found[1][-1].named_children())
    return next((children[name] for name in FEED_FORWARDS if name in children), None)
