from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from hf_bayes.pipelines.demo_page import Controls, demo_page, require_gradio, texts


class Scripted:
    """A pipeline whose streams are given."""

    def __init__(self, *tokens: str, fails: bool = False) -> None:
        self.tokens, self.fails, self.closed, self.asked = tokens, fails, False, {}

    def stream(self, prompt: str, **settings: Any) -> Iterator[dict[str, Any]]:
        self.asked = {"prompt": prompt, **settings}
        try:
            for token in self.tokens:
                yield {"token": token}
            if self.fails:
                raise ValueError("the prompt is too long")
        finally:
            self.closed = True


def test_posteriors_stream_side_by_side_until_each_ends() -> None:
    pipelines: Any = {"a": Scripted("x", "y", "z"), "b": Scripted("u")}
    steps = list(texts(pipelines, "p", Controls(5, False, 1.0)))
    assert [[len(view.tokens) for view in views] for views in steps] == [[1, 1], [2, 1], [3, 1], [3, 1]]
    assert [view.running for view in steps[1]] == [True, False]
    assert not any(view.running for view in steps[-1])
    assert pipelines["a"].asked == {"prompt": "p", "max_new_tokens": 5, "do_sample": False}


def test_an_error_ends_one_text_and_is_shown() -> None:
    pipelines: Any = {"a": Scripted("x", fails=True), "b": Scripted("u", "v", "w")}
    last = list(texts(pipelines, "p", Controls(5, True, 0.5)))[-1]
    assert last[0].error == "the prompt is too long"
    assert len(last[1].tokens) == 3
    assert pipelines["a"].asked["temperature"] == 0.5


def test_a_stopped_page_closes_its_streams() -> None:
    pipelines: Any = {"a": Scripted("x", "y")}
    running = texts(pipelines, "p", Controls(5, False, 1.0))
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert pipelines["a"].closed


def test_a_missing_gradio_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_gradio(name: str, *args: Any) -> Any:
        if name == "gradio":
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_gradio)
    with pytest.raises(ImportError, match=r"the demo needs gradio: pip install 'hf-bayes\[demo\]'"):
        require_gradio()
    with pytest.raises(ImportError, match="gradio"):
        demo_page({})
