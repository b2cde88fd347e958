"""A page that streams text from posteriors of language models and shows the uncertainty of every token.

The page is a gradio app (``pip install 'hf-bayes[demo]'``). It sends nothing to another server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hf_bayes.pipelines.demo_html import styles, tokens_html
from hf_bayes.pipelines.text_generation import BayesianTextGenerationPipeline

_MEASURES = ("epistemic", "aleatoric", "total")
_INTRODUCTION = (
    "# Uncertainty, token by token\nType a prompt. The colour of a token shows how uncertain the posterior is where it "
    "stands: **epistemic**, what its members disagree about; **aleatoric**, what every member leaves open; **total**, "
    "their sum."
)
_THRESHOLD = 0.5
_EXAMPLES = ("The mitochondrion is the", "Once upon a time", "The capital of Atlantis is")


class Controls(NamedTuple):
    """The controls of the page that a text depends on."""

    max_new_tokens: int
    do_sample: bool
    temperature: float

    @property
    def of_generate(self) -> dict[str, Any]:
        """The arguments of ``generate``."""
        drawn = {"temperature": float(self.temperature)} if self.do_sample else {}
        return {"max_new_tokens": int(self.max_new_tokens), "do_sample": bool(self.do_sample), **drawn}


class View(NamedTuple):
    """The state of one posterior's part of the page."""

    prompt: str = ""
    tokens: tuple[Mapping[str, Any], ...] = ()
    running: bool = False
    error: str | None = None


def require_gradio() -> Any:
    """Return the module gradio.

    Raises:
        ImportError: if it is not installed, with the command that installs it.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the demo needs gradio: pip install 'hf-bayes[demo]'") from error
    return gradio


def texts(
    pipelines: Mapping[str, BayesianTextGenerationPipeline], prompt: str, settings: Controls
) -> Iterator[list[View]]:
    """Yield the views of all posteriors, again for each new token. Each posterior continues the prompt by itself.

    An error of one posterior, such as a prompt that is too long, ends its own text only.
    """
    views = {name: View(prompt, running=True) for name in pipelines}
    with contextlib.ExitStack() as stack:
        streams = {}
        for name, pipeline in pipelines.items():
            streams[name] = stack.enter_context(contextlib.closing(pipeline.stream(prompt, **settings.of_generate)))
        while streams:
            for name, stream in list(streams.items()):
                try:
                    views[name] = views[name]._replace(tokens=(*views[name].tokens, next(stream)))
                except StopIteration:
                    views[name] = views[name]._replace(running=False)
                    del streams[name]
                except ValueError as error:
                    views[name] = views[name]._replace(running=False, error=str(error))
                    del streams[name]
            yield list(views.values())


def demo_page(pipelines: Mapping[str, BayesianTextGenerationPipeline]) -> Any:
    """Return the page as ``gradio.Blocks``; ``launch_options`` has arguments for its ``launch``.

    Args:
        pipelines: the name of a posterior -> its text-generation pipeline. Several are shown side by side.
    Raises:
        ImportError: if gradio is not installed.
    """
    gr = require_gradio()
    empty = [View()] * len(pipelines)
    with gr.Blocks(title="hf_bayes: uncertainty, token by token", analytics_enabled=False) as page:
        gr.Markdown(_INTRODUCTION)
        state = gr.State(empty)
        controls = _controls(gr)
        shown = []
        with gr.Row():
            for value in _rendered(pipelines, empty, _MEASURES[0], _THRESHOLD):
                with gr.Column(min_width=320):
                    shown.append(gr.HTML(value))
        gr.Examples([[text] for text in _EXAMPLES], [controls.prompt])
        _connect(gr, pipelines, controls, state, shown)
    return page


class _Controls(NamedTuple):
    """The controls of the page."""

    prompt: Any
    start: Any
    stop: Any
    measure: Any
    threshold: Any
    generation: list[Any]


def _controls(gr: Any) -> _Controls:
    prompt = gr.Textbox(label="Prompt", lines=2, value=_EXAMPLES[0], elem_id="prompt", autofocus=True)
    with gr.Row():
        start = gr.Button("Generate", variant="primary", scale=3, min_width=160, elem_id="generate")
        stop = gr.Button("Stop", min_width=80, elem_id="stop")
    with gr.Row():
        measure = gr.Radio(_MEASURES, value=_MEASURES[0], label="Colours and marks show", elem_id="measure")
        threshold = gr.Slider(0, 4, value=_THRESHOLD, step=0.01, label="Mark tokens above (nats)", elem_id="threshold")
    with gr.Accordion("Generation", open=False):
        length = gr.Slider(1, 200, value=40, step=1, label="New tokens, at most", elem_id="length")
        sample = gr.Checkbox(False, label="Draw tokens, in place of the most probable ones", elem_id="sample")
        temperature = gr.Slider(0.1, 2, value=1, step=0.05, label="Temperature of the draws")
    return _Controls(prompt, start, stop, measure, threshold, [length, sample, temperature])


def _connect(
    gr: Any, pipelines: Mapping[str, BayesianTextGenerationPipeline], controls: _Controls, state: Any, shown: list[Any]
) -> None:
    """Let the controls of the page act."""

    def generate(prompt: str, measure: str, threshold: float, *generation: Any) -> Iterator[list[Any]]:
        if not prompt.strip():
            raise gr.Error("Type a prompt first.", print_exception=False)
        for views in texts(pipelines, prompt, Controls(*generation)):
            yield [views, *_rendered(pipelines, views, measure, threshold)]

    def show(views: Any, measure: str, threshold: float) -> list[Any]:
        return [views, *_rendered(pipelines, _views(views), measure, threshold)]

    def end(views: Any, measure: str, threshold: float) -> list[Any]:
        return show([view._replace(running=False) for view in _views(views)], measure, threshold)

    view, page = [state, controls.measure, controls.threshold], [state, *shown]  # gradio unpacks two outputs or more
    given = [controls.prompt, controls.measure, controls.threshold, *controls.generation]
    running = []
    for event in (controls.start.click, controls.prompt.submit):
        running.append(event(generate, given, page, show_progress="hidden"))
        # the measure or the threshold may have changed while tokens came
        running[-1].then(show, view, page, show_progress="hidden")
    controls.stop.click(end, view, page, cancels=running, show_progress="hidden")
    for control in (controls.measure, controls.threshold):
        control.change(show, view, page, show_progress="hidden")


def _rendered(
    pipelines: Mapping[str, BayesianTextGenerationPipeline], views: list[View], measure: str, threshold: float
) -> list[str]:
    """Return the HTML of each posterior's part of the page."""
    return [
        tokens_html(name, view.prompt, view.tokens, measure=measure, threshold=threshold, running=view.running,
                    error=view.error, num_members=_num_members(pipeline))
        for (name, pipeline), view in zip(pipelines.items(), views, strict=True)
    ]  # fmt: skip


def launch_options() -> dict[str, Any]:
    """Return arguments of ``launch``: the look of the page, with fonts of the system only."""
    gr = require_gradio()
    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="gray", font=sans, font_mono=mono)
    return {"theme": theme, "css": styles(), "footer_links": []}


def _views(found: Any) -> list[View]:
    return [View(*view) for view in found]


def _num_members(pipeline: BayesianTextGenerationPipeline) -> int | None:
    return None if pipeline.model.is_closed_form else int(pipeline.model.num_members)
