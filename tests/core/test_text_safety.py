"""Safe display of text from a posterior's files."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.core.text_safety import ACTING, HIDDEN, is_plain_line, readable_errors, visible, visible_line
from hf_bayes.posteriors.posterior import Posterior
from tests.faults.edits import edit_tensors, sign
from tests.faults.posteriors import config, draws

NAN = torch.full((1,), float("nan"))
ESCAPE = "\x1b]0;owned\x07\u202egnp.exe"


def test_every_character_that_acts_is_shown_as_its_code() -> None:
    assert visible("a\x1b[2Jb\x9b\u202ec\u2066") == "aU+001B[2JbU+009BU+202EcU+2066"
    assert visible("\tkept\n as it is 你 👩‍🔬") == "\tkept\n as it is 你 👩‍🔬"
    assert visible_line("two\nlines") == "twoU+000Alines"
    assert not is_plain_line("two\nlines")


def test_characters_without_width_are_hidden_ones() -> None:
    hidden = "\u200b\u200d\u2060\ufeff\u00ad\ufe0f\U000e0041\u3164"
    assert HIDDEN.sub("", hidden) == ""
    assert ACTING.sub("", hidden) == hidden
    assert HIDDEN.search("👩‍🔬 ❤️ one person, one heart") is None


def test_errors_are_readable_with_those_they_follow_from() -> None:
    @readable_errors()
    def fail() -> None:
        try:
            raise ValueError(f"inner {ESCAPE}")
        except ValueError as error:
            raise OSError(2, "no such file", f"outer {ESCAPE}") from error

    with pytest.raises(OSError, match=r"U\+001B\]0;owned") as raised:
        fail()
    assert "\x1b" not in "".join(traceback.format_exception(raised.value))


def test_an_error_without_such_characters_stays_as_it_is() -> None:
    @readable_errors()
    def fail() -> None:
        raise FileNotFoundError("no such directory: x")

    with pytest.raises(FileNotFoundError, match=r"^no such directory: x$"):
        fail()


def test_a_verdict_is_warned_of_in_safe_words(tmp_path: Path) -> None:
    bad = {"converged": False, "verdict": f"R-hat\n{ESCAPE}"}
    Posterior(draws(2).approximation, config(num_members=2, diagnostics=bad)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"R-hatU\+000AU\+001B\]0;ownedU\+0007U\+202Egnp") as told:
        Posterior.from_pretrained(tmp_path)
    assert is_plain_line(str(told[0].message))


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": [[f"w{ESCAPE}", [1]]]},
        {"method": {"name": f"sghmc{ESCAPE}"}},
        {"subspace": "last\nlayer"},
        {"base_model": {**config().base_model, "name_or_path": f"x{ESCAPE}"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_names_that_act_on_a_terminal_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a line of text without control characters") as raised:
        config(**changes)
    assert "\x1b" not in str(raised.value)


def test_an_error_about_a_posterior_s_files_is_readable(tmp_path: Path) -> None:
    draws(2).save_pretrained(tmp_path)
    edit_tensors(tmp_path / "members/member_000/model.safetensors", lambda tensors: tensors.update({ESCAPE: NAN}))
    sign(tmp_path)
    with pytest.raises(ValueError, match=r"unknown tensors \['\\x1b\]0;owned") as raised:
        Posterior.from_pretrained(tmp_path)
    assert "\x1b" not in "".join(traceback.format_exception(raised.value))
