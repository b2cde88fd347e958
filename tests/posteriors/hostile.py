"""Texts that Markdown, HTML, YAML or a terminal could take for more than text."""

from __future__ import annotations

HOSTILE = [
    "<script>alert(1)</script>", "a|b", "a\nb", "# heading", "- item", "+ item", "1. first", "12) twelfth", "===",
    "---", "*bold* _em_ __strong__ ~~gone~~", "`code` ``more``", "[text](javascript:alert(1))", "![x](y)", "<b>",
    "&lt;script&gt;", "\\", "\\|", "a\\", "$x^2$", "```", "> quote", "{{ 7 * 7 }}", "{% raw %}", "snake_case stays",
    "    indented",
    "\x1b[31mred", "\u2028line", "\u202eright to left", "\x00", "a\r\n---\r\nb: c", "- ", "!!python/object:os.system",
    "]]>", "'", '"', "?: {}", "no", "null", "1.0",
]  # fmt: skip
