"""Best of n by a posterior of reward models, against a synthetic gold reward.

    python -m scripts.reproduce.reward

A fixed, larger scorer is the gold reward. It labels pairs of token sequences, and a quarter of the labels is flipped.
Reward models are trained on the pairs with the likelihood of preferences. The best of n candidates is then chosen by
the members' mean reward, by its lower bound, by one model and by the model of averaged weights, and is given its gold
reward. Tokens have the frequencies of Zipf's law, so that a large n finds sequences of rare tokens, which the pairs
hardly contain.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes import BayesianTrainer, BayesianTrainingArguments, BradleyTerry, EnsembleConfig, SGHMCConfig
from hf_bayes.core.config import MethodConfig
from hf_bayes.models.attaching import attach
from scripts.reproduce.report import keep, table

NAME = "reward"
VOCABULARY, LENGTH, FEATURES = 64, 8, 12
NUM_PAIRS, FLIPPED = 600, 0.25
NUM_QUESTIONS, MOST = 400, 1024
COUNTS = tuple(2**power for power in range(11))
MEMBERS = 10
BOUND = 1.0
SEEDS = (0, 1, 2)
STEPS = 600


class TokensConfig(PretrainedConfig):
    """The width of the hidden layer."""

    model_type = "tokens"

    def __init__(self, hidden: int = 32, **options: Any) -> None:
        self.hidden = hidden
        super().__init__(num_labels=1, **options)


class TokensForSequenceClassification(PreTrainedModel):
    """Frozen features of the token at each position, and an MLP with one output."""

    config_class = TokensConfig

    def __init__(self, config: TokensConfig) -> None:
        super().__init__(config)
        self.features = nn.Embedding(VOCABULARY, FEATURES)
        self.layers = nn.Sequential(nn.Linear(LENGTH * FEATURES, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1))
        self.features.requires_grad_(False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights of torch."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return rewards [B, 1] of tokens [B, T]."""
        return SequenceClassifierOutput(logits=self.layers(self.features(input_ids).flatten(1)))


class Gold(nn.Module):
    """The gold reward: a larger network with features of its own, of standard deviation 1 over sequences."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.features = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.Sequential(
            nn.Linear(LENGTH * 32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
        )
        for layer in self.layers[::2]:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        with torch.no_grad():
            some = self.raw(sequences(4096, torch.Generator().manual_seed(seed)))
            self.shift, self.scale = float(some.mean()), float(some.std())

    def raw(self, tokens: Tensor) -> Tensor:
        """Return the reward [B] before it is standardised."""
        return self.layers(self.features(tokens).flatten(1))[:, 0]

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the reward [B] of tokens [B, T]."""
        return (self.raw(tokens) - self.shift) / self.scale


class Pairs(NamedTuple):
    """Pairs of sequences.

    Attributes:
        tokens: [n, 2, T].
        labels: [n] the index of the preferred one.
    """

    tokens: Tensor
    labels: Tensor


def sequences(count: int, rng: torch.Generator) -> Tensor:
    """Return [count, T] tokens with the frequencies 1 / rank."""
    frequencies = 1 / torch.arange(1, VOCABULARY + 1)
    return torch.multinomial(frequencies, count * LENGTH, replacement=True, generator=rng).view(count, LENGTH)


def labelled(gold: Gold, count: int, rng: torch.Generator, flipped: float) -> Pairs:
    """Return pairs with the labels of the gold reward, a share of them flipped."""
    tokens = sequences(2 * count, rng).view(count, 2, LENGTH)
    first, second = gold(tokens.flatten(0, 1)).view(count, 2).unbind(1)
    wrong = torch.rand(count, generator=rng) < flipped
    return Pairs(tokens, ((second > first) ^ wrong).long())


def members_of(method: MethodConfig, pairs: Pairs, seed: int, **settings: Any) -> Tensor:
    """Return the members [M, d] of a posterior of reward models."""
    rows = Dataset.from_dict({"input_ids": pairs.tokens.tolist(), "labels": pairs.labels.tolist()})
    with tempfile.TemporaryDirectory() as folder:
        args = BayesianTrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=50, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy="no", logging_strategy="no", seed=seed, **settings,
        )  # fmt: skip
        trainer = BayesianTrainer(model(seed), method, args, train_dataset=rows, likelihood=BradleyTerry())
        trainer.train()
        return torch.as_tensor(trainer.posterior.approximation.theta)


def model(seed: int) -> TokensForSequenceClassification:
    """Return a reward model with seeded weights."""
    torch.manual_seed(1000 + seed)
    return TokensForSequenceClassification(TokensConfig())


@torch.no_grad()
def rewards_of(theta: Tensor, tokens: Tensor, seed: int) -> Tensor:
    """Return the rewards [M, n] of tokens [n, T]."""
    with attach(model(seed), theta, likelihood=BradleyTerry()) as bayesian:
        return torch.cat([bayesian.member_logits({"input_ids": part})[..., 0] for part in tokens.split(4096)], 1)


def chosen(values: Tensor, gold: Tensor) -> dict[int, list[float]]:
    """Return the gold rewards of the best of the first n candidates of each question, for values [Q, MOST]."""
    found = {}
    for count in COUNTS:
        best = values[:, :count].argmax(1, keepdim=True)
        found[count] = gold.gather(1, best)[:, 0].tolist()
    return found


def values_of(members: Tensor, single: Tensor, average: Tensor) -> dict[str, Tensor]:
    """Return the values by which candidates are chosen, given rewards [M or 1, Q, MOST]."""
    centred = members - members.mean(2, keepdim=True)  # over the candidates of a question
    mean = centred.mean(0)
    std = (centred - mean).square().mean(0).sqrt()
    return {"mean": mean, "lower": mean - BOUND * std, "single": single[0], "average": average[0]}


METHODS: dict[str, tuple[MethodConfig, dict[str, Any]]] = {
    "ensemble": (EnsembleConfig(num_chains=MEMBERS, prior="he"), {"learning_rate": 1e-2}),
    "sghmc": (
        SGHMCConfig(num_chains=5, draws_per_chain=MEMBERS // 5, prior="he", warm_start_steps=200),
        {"learning_rate": 0.05},
    ),
}


def run_seed(seed: int) -> dict[str, Any]:
    """Return the gold rewards of the best of n, for each method and choice, and the accuracy on clean pairs."""
    gold, rng = Gold(seed), torch.Generator().manual_seed(seed)
    pairs = labelled(gold, NUM_PAIRS, rng, FLIPPED)
    clean = labelled(gold, 2000, rng, 0.0)
    candidates = sequences(NUM_QUESTIONS * MOST, rng)
    truth = gold(candidates).view(NUM_QUESTIONS, MOST)
    found: dict[str, Any] = {"oracle": _summary(chosen(truth, truth))}
    for name, (method, settings) in METHODS.items():
        theta = members_of(method, pairs, seed, **settings)
        parts = [rewards_of(rows, candidates, seed).view(-1, NUM_QUESTIONS, MOST)
                 for rows in (theta, theta[:1], theta.mean(0, keepdim=True))]  # fmt: skip
        choices = {choice: chosen(values, truth) for choice, values in values_of(*parts).items()}
        differences = {
            other: _summary({n: [a - b for a, b in zip(choices["lower"][n], choices[other][n], strict=True)]
                             for n in COUNTS})
            for other in ("mean", "single", "average")
        }  # fmt: skip
        found[name] = {choice: _summary(values) for choice, values in choices.items()}
        found[name]["lower_minus"] = differences
        log_odds = rewards_of(theta, clean.tokens.flatten(0, 1), seed).view(len(theta), -1, 2).log_softmax(-1)
        probs = log_odds.exp().mean(0)
        found[name]["accuracy"] = float((probs.argmax(1) == clean.labels).double().mean())
    return found


def _summary(values: Mapping[int, list[float]]) -> dict[str, list[float]]:
    """Return means over questions, and their standard errors, one for each n."""
    tensors = [torch.tensor(values[n], dtype=torch.float64) for n in COUNTS]
    return {
        "mean": [round(float(x.mean()), 4) for x in tensors],
        "std_error": [round(float(x.std() / math.sqrt(len(x))), 4) for x in tensors],
    }


def run() -> dict[str, Any]:
    """Run all seeds."""
    return {"seeds": list(SEEDS), "counts": list(COUNTS), "runs": [run_seed(seed) for seed in SEEDS]}


WORDS = {
    "mean": "mean of the members",
    "lower": "lower bound",
    "single": "one member",
    "average": "model of averaged weights",
}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    counts, runs = record["counts"], record["runs"]
    shown = [place for place, count in enumerate(counts) if count in (1, 4, 16, 64, 256, 1024)]
    columns = ["choice", *(f"n = {counts[place]}" for place in shown)]
    found = {}
    for name in METHODS:
        rows = [[words, *(_over(runs, place, name, choice) for place in shown)] for choice, words in WORDS.items()]
        rows += [
            [f"lower bound minus {WORDS[other]}", *(_over(runs, place, name, "lower_minus", other) for place in shown)]
            for other in ("mean", "single", "average")
        ]
        rows.append(["the best candidate in truth", *(_over(runs, place, "oracle") for place in shown)])
        found[name] = table(columns, rows)
    drops = [
        [name, choice_words, *_drop(runs, name, choice)] for name in METHODS for choice, choice_words in WORDS.items()
    ]
    found["drops"] = table(["method", "choice", "largest mean gold reward", "at n", "at n = 1024", "difference"], drops)
    found["accuracy"] = ", ".join(
        f"{name} {sum(run[name]['accuracy'] for run in runs) / len(runs):.3f}" for name in METHODS
    )
    return found


def _numbers(runs: list[Any], *keys: str) -> tuple[Tensor, Tensor]:
    """Return means over seeds [n] and their standard errors, which are those over questions."""
    parts = []
    for run in runs:
        for key in keys:
            run = run[key]
        parts.append(run)
    means = torch.tensor([part["mean"] for part in parts], dtype=torch.float64)
    errors = torch.tensor([part["std_error"] for part in parts], dtype=torch.float64)
    return means.mean(0), errors.square().sum(0).sqrt() / len(parts)


def _over(runs: list[Any], place: int, *keys: str) -> str:
    means, errors = _numbers(runs, *keys)
    return f"{float(means[place]):.2f} ± {float(errors[place]):.2f}"


def _drop(runs: list[Any], name: str, choice: str) -> list[str]:
    means, errors = _numbers(runs, name, choice)
    best = int(means.argmax())
    error = math.hypot(float(errors[best]), float(errors[-1]))
    last = f"{float(means[-1]):.2f} ± {float(errors[-1]):.2f}"
    largest = f"{float(means[best]):.2f} ± {float(errors[best]):.2f}"
    return [largest, str(COUNTS[best]), last, f"{float(means[-1] - means[best]):.2f} ± {error:.2f}"]


if __name__ == "__main__":
    keep(NAME, run)
