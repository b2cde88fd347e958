from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from hf_bayes.core.text_safety import visible
from hf_bayes.pipelines.rendering import DARK, LIGHT, Theme, context_of, luminance, print_record, to_html, to_terminal
from hf_bayes.uncertainty.colour_scale import NUM_LEVELS

HOSTILE = ["<script>", "alert(1)", "</script>", '" onmouseover="x', "&lt;", "</span>", "{{ 7 * 7 }}", "</style>", "-->"]
SPACED = [" the", "\n", "\n\n    ", "\t", "  two  ", " ", "", "naïve", " 你好", "👩‍🔬"]


def record(tokens: list[str], prompt: str = "", step: float = 0.1, key: str = "generated_text") -> dict[str, Any]:
    """Token i has an epistemic uncertainty of i * step."""
    entries = [
        {"token": text, "id": i, "logprob": -0.5 * i, "total": 1 + i * step, "aleatoric": 1.0, "epistemic": i * step}
        for i, text in enumerate(tokens)
    ]
    means = {part: sum(entry[part] for entry in entries) / len(entries) for part in ("total", "aleatoric", "epistemic")}
    summary = {**means, "sequence_logprob": -12.345, "sequence_logprob_tokenwise": -13.579}
    return {key: prompt + "".join(tokens), "tokens": entries, "uncertainty": summary}


def spoilt(**values: Any) -> dict[str, Any]:
    """Return a record of three tokens, the second with other ``values``."""
    whole = record(["a", "b", "c"])
    whole["tokens"][1].update(values)
    return whole


class Page(HTMLParser):
    """Elements in order; the text and level of each token; everything the reader sees."""

    VOID = ("meta",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tokens: list[str] = []
        self.levels: list[int] = []
        self.numbers: list[str] = []
        self.text = ""
        self._open: list[tuple[str, bool]] = []
        self.feed(html)
        self.close()
        assert self._open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        classes = (dict(attrs).get("class") or "").split()
        is_token = "t" in classes
        if is_token:
            self.tokens.append("")
            self.levels.append(int(classes[1].removeprefix("u")))
            self.numbers.append(dict(attrs)["data-numbers"] or "")
        if tag not in self.VOID:
            self._open.append((tag, is_token))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not any(tag in ("style", "title") for tag, _ in self._open):
            self.text += data
        if any(is_token for _, is_token in self._open):
            self.tokens[-1] += data


def test_the_page_holds_every_token_as_it_is() -> None:
    assert Page(to_html(record(SPACED))).tokens == SPACED


def test_markup_in_tokens_is_inert() -> None:
    harmless = Page(to_html(record(["word"] * len(HOSTILE))))
    page = Page(to_html(record(HOSTILE, prompt="<img src=x>"), title="</title><script>"))
    assert page.tokens == HOSTILE
    assert "<img src=x>" in page.text
    assert "script" not in page.tags
    assert [tag for tag in page.tags if tag != "span"] == [tag for tag in harmless.tags if tag != "span"]
    assert {name for name, _ in page.attributes} == {name for name, _ in harmless.attributes}
    with pytest.raises(AssertionError):  # the twin: a page that does not escape
        assert "script" not in Page(to_html(record(HOSTILE)).replace("&lt;", "<").replace("&gt;", ">")).tags


def test_nothing_is_fetched_and_nothing_runs() -> None:
    html = to_html([record(SPACED), record(HOSTILE)])
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert all(str(value).startswith("#record-") for name, value in page.attributes if name == "href")
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lightness_follows_uncertainty(theme: Theme) -> None:
    brightness = [luminance(level.background) for level in theme.levels]
    assert brightness == sorted(brightness, reverse=theme is LIGHT)
    assert len(set(brightness)) == NUM_LEVELS + 1
    assert theme.levels[0].background == theme.page


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_leaves_its_text_readable(theme: Theme) -> None:
    for level in theme.levels:
        low, high = sorted((luminance(level.background), luminance(level.text)))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG AA


def test_levels_grow_with_uncertainty() -> None:
    page = Page(to_html(record([f"{i}" for i in range(400)], step=1 / 399)))
    assert page.levels == sorted(page.levels)
    assert (page.levels[0], page.levels[-1]) == (0, NUM_LEVELS)
    assert len(set(page.levels)) == NUM_LEVELS + 1
    by_aleatoric = Page(to_html(record(["a", "b", "c"]), measure="aleatoric"))
    assert set(by_aleatoric.levels) == {NUM_LEVELS // 2}  # all are 1.0, a quarter of the reference


def test_records_share_one_scale() -> None:
    weak, strong = record(["a", "b", "c"], step=1 / 36), record(["a", "b", "c"], step=1 / 9)
    apart = [Page(to_html(each)).levels for each in (weak, strong)]
    together = Page(to_html([[weak], [strong]])).levels
    assert together == apart[0] + apart[1]  # the scale does not depend on what is shown beside
    assert [2 * level for level in together[:3]] == pytest.approx(together[3:], abs=1)  # the root of 4 times as much


def test_vmax_fixes_the_scale_and_says_what_exceeds_it() -> None:
    page = Page(to_html(record(["a", "b", "c"], step=1.0), vmax=1.0))
    assert page.levels == [0, NUM_LEVELS, NUM_LEVELS]
    assert "≥ 1 nat" in page.text
    assert "darkest = 1 nat (1 of 3 tokens are above it, and drawn as dark)." in page.text
    assert "≥" not in Page(to_html(record(["a", "b", "c"], step=0.5))).text


def test_a_small_uncertainty_is_pale_whatever_stands_beside() -> None:
    page = Page(to_html(record(["a", "b", "c"], step=0.034)))  # 0.068 nats at most
    assert max(page.levels) <= NUM_LEVELS // 3
    assert luminance(LIGHT.levels[max(page.levels)].background) > 0.7
    assert "darkest = 1 nat." in page.text
    assert to_terminal(record(["a", "b", "c"], step=0.034)).plain.endswith(" 1 nat\ndarkest = 1 nat")


def test_the_legend_states_the_bound_of_the_members() -> None:
    eight, two = ({**record(["a"]), "num_members": members} for members in (8, 2))
    assert "darkest = 1 nat (log 8 = 2.08 is the largest possible)." in Page(to_html(eight)).text
    assert "log 2 = 0.693 is the largest possible" in to_terminal(two).plain
    assert "largest possible" not in Page(to_html([eight, two])).text  # there is no one bound
    assert "darkest = 4 nats." in Page(to_html(eight, measure="total")).text  # nor is it a bound of the total


def test_rounding_errors_of_equal_members_stay_white() -> None:
    assert set(Page(to_html(record(["a", "b", "c"], step=1e-7))).levels) == {0}
    assert set(Page(to_html(record(["a", "b", "c"], step=-1e-7))).levels) == {0}


def test_pointing_at_a_token_shows_its_numbers() -> None:
    numbers = Page(to_html(record(["a", "b", "c"]))).numbers[2]
    assert re.findall(r"[\w ]*?\S+ +(−?[\d.]+)", numbers.replace("log p", "log_p"))[:3] == ["0.200", "1.000", "1.200"]
    assert "−1.000" in numbers
    assert "36.8 %" in numbers  # exp(-1)


def test_the_summary_holds_the_means() -> None:
    text = Page(to_html(record(["a", "b", "c"]))).text
    for number in ("1.100", "1.000", "0.100", "−12.35", "−13.58"):
        assert number in text, number


def test_what_stands_before_the_tokens_is_shown_and_not_coloured() -> None:
    page = Page(to_html(record([" cell", "</s>"], prompt="The <b>")))
    assert page.tokens == [" cell", "</s>"]
    assert "The <b> cell</s>" in page.text
    without_end = {**record([" cell", "</s>"]), "generated_text": "The <b> cell"}
    assert "The <b> cell</s>" in Page(to_html(without_end)).text
    assert "The cell" in Page(to_html(record([" cell"], prompt="The", key="text"))).text
    unlike = {**record([" cell", ","]), "generated_text": "cleaned up, so that it cannot be aligned"}
    assert "cleaned up" not in Page(to_html(unlike)).text


def test_the_prompt_of_a_scored_answer_is_shown() -> None:
    scored = record([" of", " the"], key="text") | {"prompt": "The powerhouse"}
    assert to_terminal(scored).plain.splitlines()[0] == "The powerhouse of the"


@pytest.mark.parametrize("name", ["</s>", "<|im_end|>", "[SEP]"])
def test_special_tokens_among_others_leave_the_prompt(name: str) -> None:
    shown = ["A", name, " b", name, name]
    whole = record(shown) | {"generated_text": "The powerhouseA b"}
    assert to_terminal(whole).plain.splitlines()[0] == "The powerhouse" + "".join(shown)


def test_a_text_without_its_tokens_has_no_prompt() -> None:
    cut = record(["A", " b"]) | {"generated_text": "The powerhouse A b, and more"}
    assert to_terminal(cut).plain.splitlines()[0] == "A b"


def test_a_message_of_parts_shows_their_text() -> None:
    parts = [{"type": "image", "url": "x.png"}, {"type": "text", "text": "Hello "}, {"type": "text", "text": "list"}]
    begun = [{"type": "text", "text": "I say: Good day"}]
    chat = record(["Good", " day"])
    chat["generated_text"] = [{"role": "user", "content": parts}, {"role": "assistant", "content": begun}]
    context = context_of(chat)
    assert context.messages == [{"role": "user", "content": "[image]Hello list"}]
    assert context.prompt == "I say: "
    assert "user: [image]Hello list\nassistant: I say: Good day" in to_terminal(chat).plain
    chat["generated_text"][0]["content"] = ["Hello"]
    assert context_of(chat).messages[0]["content"] == "{'content': ['Hello']}"


def test_chats_show_who_speaks() -> None:
    chat = [{"role": "user", "content": "<b>Hello</b>"}, {"role": "assistant", "content": "Good day"}]
    page = Page(to_html({**record(["Good", " day"]), "generated_text": chat}))
    assert page.tokens == ["Good", " day"]
    assert "<b>Hello</b>" in page.text
    assert page.text.count("assistant") == 1
    assert "assistant: Good day" in to_terminal({**record(["Good", " day"]), "generated_text": chat}).plain


def test_a_call_of_a_tool_is_shown_as_what_it_is() -> None:
    chat = record(["12", " degrees"])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "<Oslo>"}}}]}
    chat["generated_text"] = [call, {"role": "assistant", "content": "12 degrees"}]
    assert "'town': '<Oslo>'" in Page(to_html(chat)).text
    assert "assistant: {'tool_calls': [{'function': {'name': 'weather'" in to_terminal(chat).plain


def test_control_characters_become_signs() -> None:
    acting = ["\x1b[31m", "\x00", "\r", "\u202e", "\x85", "\ud800", "\u2028", "\ufffe"]
    page = Page(to_html(record(acting)))
    assert page.tokens == ["U+001B[31m", "U+0000", "U+000D", "U+202E", "U+0085", "U+D800", "U+2028", "U+FFFE"]
    assert to_html(record(acting), title="".join(acting)).encode()
    plain = to_terminal(record(acting, prompt="\x1b]0;title\x07")).plain
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", plain)
    assert visible("\tkept\n as it is 你") == "\tkept\n as it is 你"


def test_characters_without_width_are_seen() -> None:
    hidden = ["pass\u200bword", "\u2060", "\ufeff", "soft\u00adhyphen", "\U000e0041", "👩\u200d🔬"]
    shown = ["passU+200Bword", "U+2060", "U+FEFF", "softU+00ADhyphen", "U+E0041", "👩\u200d🔬"]
    assert Page(to_html(record(hidden))).tokens == shown
    assert to_terminal(record(hidden)).plain.startswith("".join(shown))
    assert "U+202E" in to_terminal(record(["x"], prompt="a\u202eb")).plain


@pytest.mark.parametrize(("dark", "theme"), [(True, DARK), (False, LIGHT)], ids=["dark", "light"])
def test_the_terminal_has_the_colours_of_the_page(dark: bool, theme: Theme) -> None:
    tokens = [f"w{i} " for i in range(30)]
    text = to_terminal(record(tokens), dark=dark)
    assert text.plain.startswith("".join(tokens))
    console, start = Console(), 0
    for token, level in zip(tokens, Page(to_html(record(tokens))).levels, strict=True):
        style = text.get_style_at_offset(console, start)
        assert (style.bgcolor and style.bgcolor.name) == (theme.levels[level].background if level else None)
        start += len(token)


def test_printing_is_plain_where_there_are_no_colours() -> None:
    console = Console(width=200, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_record(record(["[bold]", "\n", " x"], prompt="The "), console=console)
    shown = capture.get()
    assert shown.startswith("The [bold]↵\n x\n")
    assert "epistemic 0.100 nats;  log p(sequence) −12.35,  Σ log p(token) −13.58" in shown
    assert shown.splitlines()[-2].endswith(" 1 nat")
    assert shown.splitlines()[-1] == "darkest = 1 nat"


def test_records_survive_json_on_the_way() -> None:
    original = record(SPACED)
    before = copy.deepcopy(original)
    assert to_html(json.loads(json.dumps(original))) == to_html(original)
    assert original == before


def test_a_token_that_is_impossible_is_shown_all_the_same() -> None:
    impossible = spoilt(logprob=-float("inf"))
    impossible["uncertainty"]["sequence_logprob"] = -float("inf")
    assert "\N{MINUS SIGN}inf  p 0 %" in to_html(impossible)
    assert "log p(sequence) \N{MINUS SIGN}inf" in to_terminal(impossible).plain


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ({"label": "A", "score": 1.0}, {}, "a record to render has 'tokens', .* got one with 'label', 'score'"),
        ([], {}, "no records"),
        ("The cell", {}, "a record to render is what .* returns, .* got 'The cell'"),
        (["The cell"], {}, "a record to render is what .* returns, .* got 'The cell'"),
        (None, {}, "a record to render is what .* returns, .* got None"),
        (spoilt(epistemic=float("nan")), {}, r"token 1 \('b'\) .* 'epistemic' is a finite number of nats, got nan"),
        (spoilt(total=float("inf")), {"measure": "epistemic"}, "'total' is a finite number of nats, got inf"),
        (spoilt(aleatoric=None), {}, "'aleatoric' is a finite number of nats, got None"),
        (spoilt(logprob=float("nan")), {}, "'logprob' is a log-probability, 0 or below, got nan"),
        (spoilt(logprob=2.5), {}, "'logprob' is a log-probability, 0 or below, got 2.5"),
        (spoilt(token=b"b"), {}, "token 1 of a record to render has its text as 'token'"),
        (
            {"tokens": record(["a"])["tokens"]},
            {},
            "has the means of its tokens as 'uncertainty', got one with 'tokens'",
        ),
        (record(["a"]), {"measure": "entropy"}, "measure is one of total, aleatoric, epistemic; got 'entropy'"),
        (record(["a"]), {"vmax": 0.0}, "a positive number of nats; got 0.0"),
        (record(["a"]), {"vmax": float("nan")}, "a positive number of nats; got nan"),
    ],
)
def test_what_cannot_be_rendered_is_refused(records: Any, options: dict[str, Any], message: str) -> None:
    for render in (to_html, to_terminal):
        with pytest.raises(ValueError, match=message):
            render(records, **options)
