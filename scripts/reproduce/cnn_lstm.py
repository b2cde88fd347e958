"""The CNN-LSTM of cold_posteriors (app. A.3, Keras's imdb_cnn_lstm) as a transformers classifier.

The layers are embedding, convolution over ``kernel_size`` words, ReLU, max-pooling, LSTM, and a dense layer on its last
state. All weights are random. Convolution and LSTM are written with linear layers, on windows of words and on (input,
state), which the member engine can stack. They are the same functions, with as many parameters as nn.Conv1d and one
bias of nn.LSTM.

This module is not a command: ``temperature_sweep`` imports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput


class CnnLstmConfig(PreTrainedConfig):
    """The sizes of the model. Keras has 20,000 words, 128, 64, 5, 4 and 70."""

    model_type = "cnn_lstm"

    def __init__(
        self,
        vocab_size: int = 1500,
        embedding_size: int = 24,
        num_filters: int = 32,
        kernel_size: int = 5,
        pool_size: int = 4,
        hidden_size: int = 32,
        num_hidden_layers: int = 1,
        **kwargs: object,
    ) -> None:
        self.vocab_size, self.embedding_size, self.num_filters = vocab_size, embedding_size, num_filters
        self.kernel_size, self.pool_size, self.hidden_size = kernel_size, pool_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class Lstm(nn.Module):
    """An LSTM [B, T, in] -> [B, T, h]. The gates have the order of nn.LSTM: input, forget, cell, output."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs, self.recurrent = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        driven, states = self.inputs(x), []
        state = cell = driven.new_zeros(len(driven), self.recurrent.in_features)
        for step in driven.unbind(1):
            enter, keep, new, out = (step + self.recurrent(state)).chunk(4, -1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)


class CnnLstmForSequenceClassification(PreTrainedModel):
    """The classifier. Padding on the left counts as zero vectors. Texts need kernel_size + pool_size - 1 positions."""

    config_class = CnnLstmConfig
    base_model_prefix = "cnn_lstm"

    def __init__(self, config: CnnLstmConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.convolution = nn.Linear(config.kernel_size * config.embedding_size, config.num_filters)
        widths = [config.num_filters, *[config.hidden_size] * config.num_hidden_layers]
        self.layers = nn.ModuleList(Lstm(into, out) for into, out in pairwise(widths))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def init_weights(self) -> None:
        """Keep the initial values that torch has given to a new model."""

    def _init_weights(self, module: nn.Module) -> None:
        """Give torch's initial values to a layer that a loaded file lacks."""
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: object
    ) -> SequenceClassifierOutput:
        x, config = self.embedding(input_ids), self.config
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        windows = x.unfold(1, config.kernel_size, 1).mT.flatten(2)  # [B, T - k + 1, k * embedding]
        x = self.convolution(windows).relu()
        whole = x.shape[1] // config.pool_size
        x = x[:, x.shape[1] - whole * config.pool_size :].unflatten(1, (whole, -1)).amax(2)
        for layer in self.layers:
            x = layer(x)
        logits = self.classifier(x[:, -1])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register("cnn_lstm", CnnLstmConfig, exist_ok=True)
AutoModelForSequenceClassification.register(CnnLstmConfig, CnnLstmForSequenceClassification, exist_ok=True)


def word_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the most frequent ``vocab_size`` lower-case words, padded on the left as in Keras."""
    steps = pre_tokenizers.Whitespace()
    counts = Counter(word for text in texts for word, _ in steps.pre_tokenize_str(text.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - 2]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), steps
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", padding_side="left", truncation_side="right"
    )


def build(directory: Path, texts: Iterable[str], *, num_labels: int, seed: int = 0, **sizes: int) -> None:
    """Write a new model and the tokenizer of its training texts to a folder that AutoClasses load."""
    config = CnnLstmConfig(num_labels=num_labels, **sizes)
    tokenizer = word_tokenizer(texts, config.vocab_size)
    config.vocab_size = len(tokenizer)
    set_seed(seed)
    CnnLstmForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
