from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaConfig, DebertaForSequenceClassification, Lfm2Config, Lfm2ForCausalLM

from hf_bayes.core.layout import initial, select
from hf_bayes.members import Members
from hf_bayes.members.single_member import as_single_model
from hf_bayes.models.attaching import attach
from tests.tiny_models import VOCABULARY, batch, tiny_llama, with_lora

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "pad_token_id": 0}  # fmt: skip


def deberta() -> nn.Module:
    config = DebertaConfig(**SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=32)
    return DebertaForSequenceClassification(config)


def lfm2() -> nn.Module:
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"]))


@pytest.mark.parametrize(
    ("make", "subspace", "named"),
    [(deberta, "rel_embeddings", r"encoder\.rel_embeddings\.weight"), (lfm2, "all", r"conv\.conv\.weight")],
    ids=["deberta", "lfm2"],
)
def test_weights_read_outside_their_module_are_no_prediction(
    make: Callable[[], nn.Module], subspace: str, named: str
) -> None:
    with attach(make(), subspace=subspace, num_members=2) as bayesian:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"1 random parameters were read outside .*{named}: .* base model"):
                bayesian(**batch())


def test_generation_checks_its_prompt() -> None:
    with (
        attach(lfm2(), subspace="all", num_members=2) as bayesian,
        pytest.raises(ValueError, match="read outside their module"),
    ):
        bayesian.generate(**batch(padding="left"), max_new_tokens=2)


class Table(nn.Module):
    """A table that is read past its module, in one of several ways."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.last, self.read = nn.Linear(2, 2), nn.Linear(2, 2), read

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(x, self.table.weight))


def written(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    x[:2] = weight
    return x


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, weight: x @ weight,
    "data": lambda x, weight: x + weight.data.sum(),
    "list": lambda x, weight: torch.cat([x, weight])[:-2],
    "cast": lambda x, weight: x + weight.to(torch.float64).sum(),
    "cast like": lambda x, weight: x + weight.type_as(x).sum(),
    "written": written,
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dtype": lambda x, weight: x.to(weight.dtype),
    "type of": lambda x, weight: x.type_as(weight),
    "cast like": lambda x, weight: x.to(weight),
    "shape of": lambda x, weight: x + x[:2].view_as(weight).sum() + torch.full_like(weight, 2.0).sum(),
    "shape": lambda x, weight: x + weight.shape[0] + weight.size(0) + torch.zeros_like(weight).sum(),
    "nothing": lambda x, weight: x,
}


def first_pass(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Table(read)
    layout = select(model, "all")
    engine = Members(model, model, layout)
    engine.install()
    with engine.bind(initial(model, layout)[None].repeat(2, 1)):
        engine.forward({"x": torch.ones(3, 2)})


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_every_read_of_the_values_is_found(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"1 random parameters were read outside their module, first table\.weight"):
        first_pass(read)


@pytest.mark.parametrize("read", HARMLESS.values(), ids=list(HARMLESS))
def test_a_parameter_without_a_read_of_its_values_is_accepted(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    first_pass(read)


def test_a_single_model_reads_its_own_weights() -> None:
    model = tiny_llama()
    with attach(model, subspace="all", num_members=2) as bayesian:
        theta = bayesian.theta.detach()
        with as_single_model(bayesian.members, theta[0]), bayesian.members.bind(theta[:1]):  # as DPO's reference
            bayesian.members.forward(batch())
        with pytest.raises(RuntimeError, match="is random: call the BayesianModel"):
            bayesian.members.forward(batch())


def test_only_the_first_pass_is_watched() -> None:
    def note(*_: object) -> None:
        seen.append(torch.overrides._is_torch_function_mode_enabled())

    seen: list[bool] = []
    model = tiny_llama()
    with torch.no_grad(), attach(model, subspace="all", num_members=2) as bayesian:
        model.model.norm.register_forward_hook(note)
        for _ in range(3):
            bayesian(**batch())
    assert seen[0]
    assert not any(seen[-2:])


def test_a_compiled_block_passes_the_check() -> None:
    model = with_lora(tiny_llama())
    with torch.no_grad(), attach(model, num_members=2) as bayesian:
        before = bayesian(**batch()).logits
    for block in model.get_base_model().model.layers:
        block.compile(backend="eager")
    with torch.no_grad(), attach(model, num_members=2) as bayesian:
        for _ in range(2):
            assert torch.allclose(bayesian(**batch()).logits, before, atol=1e-5)  # float32
