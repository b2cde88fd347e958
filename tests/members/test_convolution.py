from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import select
from hf_bayes.members import Members
from tests.members.reference import relative_error, scattered

KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "padding": "same"},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "valid, circular": {"padding": "valid", "padding_mode": "circular"},
}


class Pictures(nn.Module):
    """Two convolutions. The first reads rows that all members share, the second one rows of each member."""

    def __init__(self, dims: int, **settings: object) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
        self.first, self.second = kind(4, 4, 3, **settings), kind(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def members_of(model: nn.Module, theta: Tensor, x: Tensor, *, folded: bool = False) -> Tensor:
    engine = Members(model, model, select(model, "all"))
    engine.install()
    with engine.bind(theta):
        return engine.forward({"x": x}, folded=folded).unflatten(0, (len(theta), -1))


def separate(model: nn.Module, theta: Tensor, xs: list[Tensor]) -> Tensor:
    layout = select(model, "all")
    return torch.stack([
        torch.func.functional_call(model, layout.unflatten(row), (x,)) for row, x in zip(theta, xs, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_members_equal_separate_convolutions(settings: dict[str, object], dims: int, num_rows: int) -> None:
    torch.manual_seed(0)
    model = Pictures(dims, **settings)
    theta = scattered(model, select(model, "all")).requires_grad_()
    x = torch.randn(3 * num_rows, 4, *[7] * dims)
    found, expected = members_of(copy.deepcopy(model), theta, x, folded=True), separate(model, theta, list(x.chunk(3)))
    assert relative_error(found.detach(), expected.detach()) < 1e-5  # float32
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((y * weights).sum(), theta)[0] for y in (found, expected)]
    assert relative_error(*gradients) < 1e-5


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_rows_that_members_share_are_read_once(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Pictures(2, **settings)
    theta, x = scattered(model, select(model, "all")), torch.randn(2, 4, 7, 7)
    engine = Members(model, model, select(model, "all"))
    engine.install()
    seen, own = [], engine.stacked[0]._convolve
    engine.stacked[0]._convolve = lambda rows, *rest: seen.append(len(rows)) or own(rows, *rest)
    with engine.bind(theta):
        engine.context.begin(2, 4, trunk=True)
        found = model(x)
    assert seen == [2]
    engine.remove()
    assert relative_error(found.unflatten(0, (3, 2)), separate(model, theta, [x] * 3)) < 1e-5


def test_on_an_accelerator_members_are_groups() -> None:
    """One row per member takes this path on CPUs, too; here its groups are counted."""
    model = Pictures(2, groups=2)
    engine = Members(model, model, select(model, "all"))
    engine.install()
    groups, own = [], engine.stacked[0]._convolve
    engine.stacked[0]._convolve = lambda *args: groups.append(args[-1]) or own(*args)
    with engine.bind(scattered(model, engine.layout)):
        engine.forward({"x": torch.randn(3, 4, 7, 7)}, folded=True)
    assert groups == [6]


def test_padding_by_name_and_mode_is_refused() -> None:
    model = Pictures(2, padding="same", padding_mode="reflect")
    with pytest.raises(ValueError, match=r"first\.\w+: a convolution with padding='same' and padding_mode='reflect'"):
        Members(model, model, select(model, "all"))


def test_another_class_of_convolution_is_refused() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 1))
    with pytest.raises(ValueError, match=r"0 \(torch.nn.modules.conv.ConvTranspose2d, .* not supported as random"):
        Members(model, model, select(model, "all"))
