"""Records of tokens as plain Python values: each token's text, its log-probability, TU, AU and EU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_bayes.decide.answers import answer_uncertainty
from hf_bayes.models.language.token_uncertainty import TokenRecord, TraceStreamer
from hf_bayes.posteriors.abstention import Abstention

Record = dict[str, Any]

PARTS = ("total", "aleatoric", "epistemic")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how decoding shows the bytes of half a character


class TokenRecords:
    """Build the records of a row's tokens in order, each as soon as its part of the text is known.

    Args:
        tokenizer: decodes the tokens.
        context: tokens before the first one; a decoder may drop a space at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
        self._held: Record | None = None  # the last record, if its text may still grow
        self._begin([token for token in context if token not in self._special])

    def _begin(self, context: list[int]) -> None:
        """Go on after a context. A character that begins in it belongs to the tokens that follow."""
        text = self._decode(context)
        self._context = context
        self._start = len(text.rstrip(_UNFINISHED))  # in the text of the context and the open tokens
        self._is_cut = self._start < len(text)
        self._open: list[int] = []  # the tokens since the context,
        self._text = text[self._start :]  # the text from the start,
        self._num_shown = 0  # and how much of it is in records

    def add(self, token: int, logprob: float, total: float, aleatoric: float, epistemic: float) -> Iterator[Record]:
        """Yield the records that are complete with one more token."""
        numbers = {"logprob": logprob, "total": total, "aleatoric": aleatoric, "epistemic": epistemic}
        if token in self._special:
            yield from self.close()
            yield {"token": str(self._tokenizer.convert_ids_to_tokens(token)), "id": token, **numbers}
            return
        before = self._text
        self._open.append(token)
        self._text = self._decode(self._context + self._open)[self._start :]
        whole = self._text.rstrip(_UNFINISHED)
        if len(whole) > len(before) and whole.startswith(before):  # those bytes are no character and never will be
            if self._held is not None:
                self._held["token"] += before[self._num_shown :]
            self._num_shown = len(before)
        if self._held is not None:
            yield self._held
        self._held = {"token": whole[self._num_shown :], "id": token, **numbers}
        self._num_shown = max(self._num_shown, len(whole))
        if len(self._text) <= self._num_shown:
            yield from self.close()

    def close(self) -> Iterator[Record]:
        """Yield the record that was held back, if there is one, with the rest of the text."""
        if self._held is not None:
            self._held["token"] += self._text[self._num_shown :]
            yield self._held
            self._held = None
            # the open tokens may begin within a character, whose beginning is in the context
            self._begin([*self._context, *self._open] if self._is_cut else self._open)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def scored(
    tokenizer: PreTrainedTokenizerBase, tokens: Tensor, scores: Mapping[str, Tensor], context: Sequence[int]
) -> Record:
    """Return the keys ``tokens`` and ``uncertainty`` of one row's record.

    Args:
        tokens: [n] ids.
        scores: the fields of ``Scores``, four of them [n] (NaN at places without a token of the row), two [].
        context: ids of the tokens before.
    """
    kept = ~scores["logprobs"].isnan()
    builder = TokenRecords(tokenizer, context)
    records: list[Record] = []
    columns = [tokens[kept].tolist(), *(scores[name][kept].tolist() for name in ("logprobs", *PARTS))]
    for row in zip(*columns, strict=True):
        records += builder.add(*row)
    records += builder.close()
    uncertainty = {part: sum(record[part] for record in records) / len(records) for part in PARTS}
    sequence = {name: scores[name].item() for name in ("sequence_logprob", "sequence_logprob_tokenwise")}
    return {"tokens": records, "uncertainty": uncertainty | sequence}


def decision(record: Record, rule: Abstention | None) -> Record:
    """Return the key "abstained" of a record, or nothing without a rule."""
    if rule is None:
        return {}
    return {"abstained": rule.abstains(getattr(answer_uncertainty(record), rule.measure))}


class UncertaintyStreamer(TraceStreamer):
    """A streamer for ``generate`` that calls ``on_record`` with each token's record as soon as the token is drawn.

    A token that leaves a character unfinished waits for the next one.

    Args:
        tokenizer: decodes the tokens.
        on_record: called with {"token", "logprob", "total", "aleatoric", "epistemic"}: a text and four numbers in nats.
    Raises:
        ValueError: in ``generate``, for more than one row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_record: Callable[[Record], None]) -> None:
        super().__init__()
        self._records, self._on_record = TokenRecords(tokenizer), on_record

    def on_step(self, tokens: Tensor, record: TokenRecord) -> None:
        if tokens.numel() != 1:
            raise ValueError(
                f"a stream holds one sequence, got {tokens.numel()} at once: give one prompt at a time "
                "(batch_size=1), with num_return_sequences=1"
            )
        numbers = (record.logprobs, record.total, record.aleatoric, record.epistemic)
        for entry in self._records.add(int(tokens), *(value.item() for value in numbers)):
            self._on_record(entry)

    def end(self) -> None:
        for entry in self._records.close():
            self._on_record(entry)
