"""The pipeline of taggers, against the members' own logits and against transformers' pipeline of one member."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn
from transformers import Cache, TokenClassificationPipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_bayes import LaplaceConfig, fit_laplace
from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.pipelines.factory import BayesianTokenClassificationPipeline, pipeline
from tests import tiny_models as models
from tests.members.reference import entropies, mixture, scattered, separate_logits, showing
from tests.members.subject_models import bert_tagger, llama_tagger
from tests.pipelines.built import PARTS, approximately
from tests.runs import token_rows

LABELS = {0: "O", 1: "B-PER", 2: "I-PER"}
TEXTS = list(models.TEXTS)
STRATEGIES = ["simple", "first", "average", "max"]

pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # a byte-level one does not


def labelled_tagger(make: Callable[[torch.dtype], nn.Module] = bert_tagger) -> nn.Module:
    model = make(torch.float32)
    model.config.id2label, model.config.label2id = LABELS, {name: index for index, name in LABELS.items()}
    return model


def bayesian(make: Callable[[torch.dtype], nn.Module] = bert_tagger, num_members: int = 3) -> BayesianModel:
    model = labelled_tagger(make)
    layout = select(model, "last_block")
    return attach(model, scattered(model, layout, num_members), subspace="last_block").eval()


@pytest.fixture(scope="module")
def tag() -> BayesianTokenClassificationPipeline:
    return pipeline("bayesian-token-classification", bayesian(), models.tiny_tokenizer())


@pytest.fixture(scope="module")
def stock() -> Iterator[TokenClassificationPipeline]:
    """transformers' own, on the single member of ``single``."""
    model = labelled_tagger()
    layout = select(model, "last_block")
    with showing(model, layout, scattered(model, layout, 1)[0]):
        yield TokenClassificationPipeline(model=model, tokenizer=models.tiny_tokenizer())


@pytest.fixture(scope="module")
def single() -> BayesianTokenClassificationPipeline:
    return pipeline("bayesian-token-classification", bayesian(num_members=1), models.tiny_tokenizer())


def member_logits(text: str, **tokenizer_kwargs: Any) -> tuple[Tensor, Any]:
    """[M, B, T, C] of the members of ``tag``, each run by itself, and the encoding."""
    model = labelled_tagger()
    layout = select(model, "last_block")
    encoded = models.tiny_tokenizer()(text, return_tensors="pt", return_offsets_mapping=True, **tokenizer_kwargs)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return separate_logits(model, layout, scattered(model, layout), inputs), encoded


def without_uncertainty(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "uncertainty"} for record in records]


def test_tokens_have_the_mixtures_probabilities_and_entropies(tag: BayesianTokenClassificationPipeline) -> None:
    records = tag(TEXTS[0], ignore_labels=[])
    logits, encoded = member_logits(TEXTS[0])
    scores, labels = mixture(logits)[0].exp().max(-1)
    offsets = encoded["offset_mapping"][0].tolist()
    assert [[record["start"], record["end"]] for record in records] == offsets
    assert [record["index"] for record in records] == list(range(len(offsets)))
    assert [record["entity"] for record in records] == [LABELS[label] for label in labels.tolist()]
    found = [[record["score"], *(record["uncertainty"][part] for part in PARTS)] for record in records]
    expected = torch.stack([scores, *(part[0] for part in entropies(logits))], -1)
    # float32 forwards of folded rows against separate ones
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)
    of_mean_logits = logits.double().mean(0)[0].softmax(-1).amax(-1)
    assert not torch.allclose(of_mean_logits, scores, atol=1e-3)  # the test would see it
    assert list(records[0]) == ["entity", "score", "index", "word", "start", "end", "uncertainty"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


@pytest.mark.parametrize("strategy", ["none", *STRATEGIES])
@pytest.mark.parametrize("ignored", [None, [], ["PER", "B-PER"]], ids=["default", "nothing", "persons"])
def test_one_member_gives_the_records_of_transformers(
    strategy: str, ignored: list[str] | None, single: Any, stock: TokenClassificationPipeline
) -> None:
    found = single(TEXTS, aggregation_strategy=strategy, ignore_labels=ignored)
    expected = stock(TEXTS, aggregation_strategy=strategy, ignore_labels=ignored)
    # 1e-6: the softmax of log-probabilities against that of logits
    exact = [[{**record, "score": pytest.approx(float(record["score"]), abs=1e-6)} for record in e] for e in expected]
    assert [without_uncertainty(records) for records in found] == exact
    assert any(found) or ignored
    assert {record["uncertainty"]["epistemic"] for records in found for record in records} <= {0.0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_entity_has_the_mean_over_its_tokens(strategy: str, tag: BayesianTokenClassificationPipeline) -> None:
    several = 0
    for text in TEXTS:
        logits, encoded = member_logits(text)
        parts = dict(zip(PARTS, (part[0] for part in entropies(logits)), strict=True))
        offsets = encoded["offset_mapping"][0]
        for entity in tag(text, aggregation_strategy=strategy, ignore_labels=[]):
            own = (offsets[:, 0] >= entity["start"]) & (offsets[:, 1] <= entity["end"])
            several += int(own.sum() > 1)
            assert entity["uncertainty"] == {p: pytest.approx(parts[p][own].mean().item(), abs=1e-5) for p in PARTS}
            assert "tokens" not in entity
    assert several > 4


def test_a_linearised_tagger_reports_what_is_defined() -> None:
    model = bayesian()
    rows = [{**row, "labels": [token % 3 for token in row["input_ids"]]} for row in token_rows([8, 8, 8])]
    model.posterior = fit_laplace(model, rows, LaplaceConfig(check_gradient=False))
    tag = pipeline("bayesian-token-classification", model.linearise("probit"), models.tiny_tokenizer())
    for strategy in ("none", "simple"):
        records = tag(TEXTS[0], aggregation_strategy=strategy, ignore_labels=[])
        assert {tuple(record["uncertainty"]) for record in records} == {("total",)}


@pytest.mark.parametrize("make", [bert_tagger, llama_tagger], ids=["bert", "llama"])
@pytest.mark.parametrize("strategy", ["none", "first"])
def test_batches_generators_and_data_sets_equal_single_texts(make: Any, strategy: str) -> None:
    tag = pipeline("bayesian-token-classification", bayesian(make), models.tiny_tokenizer())
    options = {"aggregation_strategy": strategy, "ignore_labels": []}
    expected = approximately([tag(text, **options) for text in TEXTS])
    assert tag(TEXTS, batch_size=3, **options) == expected
    assert tag(tuple(TEXTS), batch_size=2, **options) == expected
    assert list(tag((text for text in TEXTS), batch_size=2, **options)) == expected
    assert list(tag(KeyDataset(Dataset.from_dict({"text": TEXTS}), "text"), batch_size=4, **options)) == expected
    assert tag(TEXTS[::-1], batch_size=3, **options) != expected


def test_a_causal_tagger_fills_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tag, filled, update = pipeline(model=bayesian(llama_tagger), tokenizer=models.tiny_tokenizer()), [], Cache.update
    monkeypatch.setattr(Cache, "update", lambda *args, **kwargs: filled.append(1) or update(*args, **kwargs))
    assert tag(TEXTS[0], ignore_labels=[])
    assert filled == []
    tag.model(**models.batch())
    assert filled  # the default


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("strategy", ["simple", "max"])
def test_long_texts_are_tagged_in_chunks(
    strategy: str, batch_size: int, single: Any, stock: TokenClassificationPipeline
) -> None:
    text, options = " ".join(TEXTS), {"stride": 4, "aggregation_strategy": strategy, "ignore_labels": []}
    tag = pipeline("bayesian-token-classification", bayesian(), models.tiny_tokenizer())
    for each in (single, stock, tag):
        each.tokenizer.model_max_length = 16
    try:
        found, expected = single([text, TEXTS[0]], batch_size=batch_size, **options), stock([text, TEXTS[0]], **options)
        exact = [[{**r, "score": pytest.approx(float(r["score"]), abs=1e-6)} for r in e] for e in expected]
        assert [without_uncertainty(records) for records in found] == exact
        records = tag([text], batch_size=batch_size, **options)[0]
    finally:
        for each in (single, stock):
            each.tokenizer.model_max_length = 64
    chunks = {"return_overflowing_tokens": True, "padding": True, "truncation": True, "stride": 4, "max_length": 16}
    logits, encoded = member_logits(text, **chunks)
    total, _, epistemic = entropies(logits)
    real = encoded["attention_mask"].bool()
    first = 0
    for record in records:
        own = (encoded["offset_mapping"][..., 0] >= record["start"]) & (
            encoded["offset_mapping"][..., 1] <= record["end"]
        )
        means = [
            (
                total[chunk][own[chunk] & real[chunk]].mean().item(),
                epistemic[chunk][own[chunk] & real[chunk]].mean().item(),
            )
            for chunk in range(len(real))
        ]
        uncertainty = (record["uncertainty"]["total"], record["uncertainty"]["epistemic"])
        matching = [chunk for chunk, mean in enumerate(means) if mean == pytest.approx(uncertainty, abs=1e-5)]
        assert matching, record
        first += matching == [0]
    assert 0 < first < len(records) / 2  # most entities are of later chunks


def test_lists_of_words_are_tagged(tag: BayesianTokenClassificationPipeline, single: Any, stock: Any) -> None:
    words = [text.split() for text in TEXTS]
    options = {"is_split_into_words": True, "aggregation_strategy": "simple", "ignore_labels": []}
    several = tag(words, batch_size=2, **options)
    assert several == approximately([tag(each, **options)[0] for each in words])
    found, expected = single(words, delimiter="_", **options), stock(words, delimiter="_", **options)
    assert [[(r["start"], r["end"], r["word"]) for r in records] for records in found] == [
        [(r["start"], r["end"], r["word"]) for r in records] for records in expected
    ]


def test_words_from_a_generator_are_not_lost(tag: BayesianTokenClassificationPipeline) -> None:
    taken = []

    def words() -> Iterator[list[str]]:
        for text in TEXTS:
            taken.append(text)
            yield text.split()

    results = iter(tag(words(), is_split_into_words=True))
    first = next(results)
    assert len(taken) < len(TEXTS)
    assert [first, *results] == tag([text.split() for text in TEXTS], is_split_into_words=True)


def test_offsets_may_be_given_for_one_text(tag: BayesianTokenClassificationPipeline) -> None:
    offsets = [(0, index + 1) for index in range(len(tag.tokenizer(TEXTS[0])["input_ids"]))]
    for inputs in (TEXTS[0], [TEXTS[0]]):
        records = tag(inputs, offset_mapping=offsets, ignore_labels=[])
        records = records[0] if isinstance(inputs, list) else records
        assert [(record["start"], record["end"]) for record in records] == offsets
    for several in (TEXTS[:2], (text for text in TEXTS)):
        with pytest.raises(ValueError, match="offset_mapping is that of one text"):
            tag(several, offset_mapping=[offsets, offsets])
    with pytest.raises(ValueError, match="offset_mapping is that of a whole text, and with stride= every chunk"):
        tag(TEXTS[0], offset_mapping=offsets, stride=2)


def test_a_list_of_words_leaves_later_texts_as_they_are(tag: BayesianTokenClassificationPipeline) -> None:
    chunked = pipeline(
        "bayesian-token-classification", tag.model, tag.tokenizer, stride=4, aggregation_strategy="simple"
    )
    before = chunked(TEXTS[0], ignore_labels=[])
    chunked(TEXTS[1].split(), is_split_into_words=True)
    assert chunked(TEXTS[0], ignore_labels=[]) == before


def test_a_text_without_tokens_is_refused(tag: BayesianTokenClassificationPipeline) -> None:
    for inputs in ("", [TEXTS[0], ""]):
        with pytest.raises(ValueError, match="a text needs a token or more to be tagged, got none in ''"):
            tag(inputs, batch_size=2)


@pytest.mark.parametrize("name", ["is_split_into_words", "delimiter", "offset_mapping"])
def test_what_an_input_is_like_belongs_to_its_call(name: str, tag: BayesianTokenClassificationPipeline) -> None:
    with pytest.raises(ValueError, match=f"{name}: what one input is like, and no default of a pipeline"):
        pipeline("bayesian-token-classification", tag.model, tag.tokenizer, **{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function_to_apply": "none"}, "takes no function_to_apply: a token has one record"),
        ({"top_k": 2}, r"takes no top_k: .* it takes ignore_labels, aggregation_strategy"),
        ({"aggregation_strategy": "median"}, "unknown aggregation_strategy 'median': expected one of 'none', 'simple'"),
        ({"ignore_labels": "O"}, r"ignore_labels is a list of labels, got the text 'O': give \['O'\]"),
        ({"stride": -1, "aggregation_strategy": "simple"}, "stride is by how many tokens chunks overlap, got -1"),
        ({"stride": 64, "aggregation_strategy": "simple"}, "`stride` must be less than"),
        ({"stride": 2, "aggregation_strategy": "none"}, "`stride` was provided to process all the text but"),
    ],
)
@pytest.mark.parametrize("at", ["construction", "call"])
def test_arguments_without_a_meaning_are_refused(
    options: dict[str, Any], message: str, at: str, tag: BayesianTokenClassificationPipeline
) -> None:
    def attempt() -> Any:
        if at == "call":
            return tag(TEXTS[0], **options)
        return pipeline("bayesian-token-classification", tag.model, tag.tokenizer, **options)

    with pytest.raises(ValueError, match=message):
        attempt()


def test_arguments_of_construction_hold_for_calls(tag: BayesianTokenClassificationPipeline) -> None:
    options = {"aggregation_strategy": "average", "ignore_labels": [], "batch_size": 2}
    ours = pipeline("bayesian-token-classification", tag.model, tag.tokenizer, **options)
    assert ours(TEXTS) == tag(TEXTS, **options)


def test_transformers_own_factory_knows_taggers(tag: BayesianTokenClassificationPipeline) -> None:
    stock = transformers.pipeline("bayesian-token-classification", model=tag.model, tokenizer=tag.tokenizer)
    assert stock(TEXTS[1]) == tag(TEXTS[1])
    with pytest.raises(ValueError, match="needs a BayesianModelForTokenClassification, got BertForTokenClassification"):
        transformers.pipeline("bayesian-token-classification", model=labelled_tagger(), tokenizer=tag.tokenizer)
