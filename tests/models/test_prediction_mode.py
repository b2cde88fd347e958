from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from hf_bayes import attach
from hf_bayes.core.layout import initial, select
from tests.models.written import attached, prepared
from tests.tiny_models import batch, inputs_of, tiny_bert


def test_an_inner_model_in_training_mode_has_no_dropout() -> None:
    model = tiny_bert(hidden_dropout_prob=0.5)
    with attach(model, initial(model, select(model, "last_layer"))[None], subspace="last_layer") as bayesian:
        bayesian.eval()
        expected = bayesian(**inputs_of(model)).logits
        model.train()
        assert not bayesian.training
        assert torch.equal(bayesian(**inputs_of(model)).logits, expected)
        assert model.training
        assert model.bert.training


def test_threads_that_ask_one_model_take_turns() -> None:
    model, _, theta = prepared("llama-lora")
    inside, go_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            go_on.wait(20)

    with attached("llama-lora", model, theta) as bayesian, ThreadPoolExecutor(2) as pool:
        prompt, text = {"input_ids": batch()["input_ids"][:1, :3]}, batch()["input_ids"]
        options = {"do_sample": False, "max_new_tokens": 4}
        expected, scores = bayesian.generate(**prompt, **options), bayesian.score(text)
        bayesian.core.model.layers[1].register_forward_pre_hook(pause)
        written = pool.submit(bayesian.generate, **prompt, **options)  # type: ignore[arg-type]
        assert inside.wait(20)  # in the middle of a forward, its rows and members bound
        scored = pool.submit(bayesian.score, text)
        assert wait([scored], timeout=0.3).not_done
        go_on.set()
        assert torch.equal(written.result(20), expected)
        for found, alone in zip(scored.result(20), scores, strict=True):
            assert torch.equal(found.nan_to_num(), alone.nan_to_num())
