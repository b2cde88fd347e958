"""Windows of tokens over long texts, the rows that a causal language model is trained on."""

from __future__ import annotations

from typing import Any, NamedTuple

from datasets import Dataset

from hf_bayes.uncertainty.likelihoods import IGNORE


class Window(NamedTuple):
    """Tokens [start, end) of a text. Tokens [loss_start, end) count in the loss."""

    start: int
    end: int
    loss_start: int


def window_spans(
    num_tokens: int, *, length: int, overlap: int = 0, loss_tokens: int | None = None, score_start: bool = True
) -> list[Window]:
    """Return the windows over a text and the tokens that count in each (posteriors paper, app. F: 300, 100 and 50).

    A window starts every ``step = length - overlap`` tokens. Its last ``loss_tokens`` tokens count, so each of them has
    at least ``length - loss_tokens`` tokens of context. With ``loss_tokens = step``, the default, every token counts
    exactly once. The last window starts earlier instead of being short. It counts only tokens of no earlier window.

    Args:
        num_tokens: the number of tokens in the text.
        length: the number of tokens in a window. A shorter text is one shorter window.
        overlap: the number of tokens that two neighbouring windows share.
        loss_tokens: at most ``step``, because tokens would count twice otherwise.
        score_start: True counts all tokens of the first window, the first token without any context. False gives the
            first ``length - loss_tokens`` tokens no loss, as in the paper.
    Raises:
        ValueError: if the three lengths do not fit together.
    """
    step = length - overlap
    if length < 2 or not 0 <= overlap < length:
        raise ValueError(f"windows need length >= 2 and 0 <= overlap < length, got length={length}, overlap={overlap}")
    loss_tokens = step if loss_tokens is None else loss_tokens
    if not 1 <= loss_tokens <= step:
        raise ValueError(
            f"loss_tokens must be between 1 and length - overlap = {step}, or tokens would count more than once; got "
            f"{loss_tokens}: lower it, or lower overlap ({overlap})"
        )
    windows: list[Window] = []
    covered = 0  # tokens in the windows so far
    while covered < num_tokens:
        end = min(covered + (step if windows else length), num_tokens)
        loss_start = max(end - loss_tokens, covered)
        if not windows and score_start:
            loss_start = 0
        windows.append(Window(max(0, end - length), end, loss_start))
        covered = end
    return windows


def token_windows(
    texts: Dataset,
    tokenizer: Any,
    *,
    length: int,
    overlap: int = 0,
    loss_tokens: int | None = None,
    score_start: bool = True,
    text_column: str = "text",
    join: bool = False,
    close: bool = True,
) -> Dataset:
    """Return rows ``input_ids``, ``attention_mask``, ``labels`` for a causal LM; -100 where a token does not count.

    Labels are not shifted: the model shifts them, which drops the first token of a window. A window is left out if no
    token counts after the shift.

    Args:
        texts: rows of text.
        tokenizer: any tokenizer of transformers. Its special tokens begin each text.
        length, overlap, loss_tokens, score_start: see ``window_spans``.
        text_column: the column that holds the text.
        join: True joins all rows to one text, with the end-of-sequence token between them: for many short rows.
        close: True puts this token after the last of joined rows, too, so that training learns where each row
            ends. False is for evaluation: a text file may end anywhere, and does not hold the token.
    Raises:
        ValueError: if the lengths do not fit together, no text holds two tokens, or ``join`` lacks a separator.
    """
    lengths: dict[str, Any] = {
        "length": length,
        "overlap": overlap,
        "loss_tokens": loss_tokens,
        "score_start": score_start,
    }
    window_spans(0, **lengths)
    separator = [tokenizer.eos_token_id] if join else []
    if separator == [None]:
        raise ValueError("join=True needs an end-of-sequence token between texts, the tokenizer has none: join=False")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # verbose=False: without it the tokenizer warns that the uncut text is longer than the model's context.
        return {"input_ids": tokenizer(batch[text_column], verbose=False)["input_ids"]}

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        encoded = batch["input_ids"]
        if join:
            joined = [token for row in encoded for token in [*row, *separator]]
            encoded = [joined if close else joined[:-1]]
        for ids in encoded:
            for start, end, loss_start in window_spans(len(ids), **lengths):
                labels = [IGNORE] * (loss_start - start) + ids[loss_start:end]
                labels[0] = IGNORE  # the shift drops the first token, so N must not count it
                if any(label != IGNORE for label in labels):
                    rows["input_ids"].append(ids[start:end])
                    rows["attention_mask"].append([1] * (end - start))
                    rows["labels"].append(labels)
        return rows

    encoded = texts.map(encode, batched=True, remove_columns=texts.column_names)
    # Joined rows are one batch, because one text has one beginning.
    windows = encoded.map(cut, batched=True, batch_size=None if join else 1000, remove_columns=encoded.column_names)
    if len(windows) == 0:
        raise ValueError(f"no window with a token to predict in {len(texts)} rows of {text_column!r}: are they empty?")
    return windows


def window_length(given: int | None, longest: int | None, *, default: int, flag: str = "--window") -> int:
    """Return the number of tokens in a window: ``given``, or else ``default``, or the model's context if that is less.

    Args:
        longest: tokens of the model's context, see ``input_check.context_of``; None for no limit.
        flag: the argument that gives the number, for the error message.
    Raises:
        ValueError: if ``given`` is longer than the context.
    """
    if given is None:
        return default if longest is None else min(default, longest)
    if longest is not None and given > longest:
        raise ValueError(
            f"{flag}={given} is longer than the model's longest context, {longest} tokens: lower it to {longest}, or "
            "raise max_position_embeddings in the model's config if the model supports longer contexts"
        )
    return given
