"""Chat templates in use pass; programs that run for ever or fill memory do not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hf_bayes.posteriors.chat_templates import MAX_TEXT, check_chat_template

CHATML = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)
TOOLS = (
    "{%- macro render(spec, depth=0) -%}{{- '  ' * depth }}{%- if spec.type == 'array' -%}"
    "{{- render(spec['items']) }}[]"
    "{%- elif spec.enum -%}{{- spec.enum|join('|') }}{%- else -%}{%- for name, part in spec.properties.items() -%}"
    "{{- name + ': ' + render(part, depth + 1) }}{%- if not loop.last %}, {% endif -%}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1, text='') %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and not(message.content.startswith('<tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}"
    "{%- else %}{%- set content = '' %}{%- for part in message.content %}{%- set content = content + part.text %}"
    "{%- endfor %}{%- endif %}{%- set ns.text = ns.text + content %}{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{%- for key, value in call.arguments|items %}"
    "{{- '<' + key + '>' + (value|tojson if value is mapping else value|string) }}{%- endfor %}{%- endfor %}"
    "{%- for tool in tools %}{{- tool|tojson(indent=4)|replace('\"', \"'\") + render(tool.parameters) }}{%- endfor %}"
    "{{- strftime_now('%d %b %Y') }}{%- if loop.first %}{%- continue %}{%- endif %}{%- endfor %}"
)


TYPES = (
    "{% macro types(properties) %}{% for key, value in properties|dictsort %}"
    "{% for name, item in value['items']|dictsort %}"
    "{{ types(item, value['required']|default([])) }}{% endfor %}{% endfor %}{% endmacro %}{{ types(tools) }}"
)
SEEN = (
    "{% for tool in tools %}{% set name = tool.name %}{% set ns.seen = ns.seen + [name] %}{% endfor %}"
    "{% for name in ns.seen %}{{ name }}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, TOOLS, TYPES, SEEN, "", "no tag at all"])
def test_templates_in_use_are_accepted(template: str) -> None:
    check_chat_template(template)


DOUBLING = "".join(f"{{% set a{i + 1} = a{i} ~ a{i} %}}" for i in range(40))
LOOP = "{{% for i in {} %}}{{% for j in {} %}}x{{% endfor %}}{{% endfor %}}".format
ENDLESS = {
    "a range": ("{% for i in range(10**9) %}x{% endfor %}", "a power"),
    "a large range": ("{% for i in range(99999) %}x{% endfor %}", "the number"),
    "ranges in ranges": (LOOP("range(9999)", "range(9999)"), "own within another loop"),
    "a list in a loop": (LOOP("messages", [1, 2, 3]), "own within another loop"),
    "a macro's range in a loop": (
        "{% macro m() %}{% for i in range(9999) %}x{% endfor %}{% endmacro %}{% for i in range(9999) %}{{ m() }}"
        "{% endfor %}",
        "own within another loop",
    ),
    "a macro that calls itself in a loop": (
        "{% macro m() %}{% for i in messages %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
        "not on the parts of its argument",
    ),
    "a long text": ("{{ 'x' * 99999999999 }}", "the number"),
    "a long product": ("{% set a = 'x' * 9999 %}{% set b = a * 9999 %}{{ b * 2 }}", "copies of a text"),
    "two unknowns": ("{{ x * y }}", "a product of two unknowns"),
    "a text twice": ("{% for m in messages %}{% set x = x + x %}{% endfor %}", "more than one copy of itself"),
    "a text twice by a detour": (
        "{% for m in messages %}{% set ns.y = ns.x %}{% set ns.x = ns.x ~ ns.y %}{% endfor %}",
        "more than one copy of itself",
    ),
    "a list's own elements": (
        "{% for m in messages %}{% for x in ns.l %}{% set ns.l = ns.l + [x] %}{% endfor %}{% endfor %}",
        "more than one copy of itself",
    ),
    "a list twice": ("{% for m in messages %}{% set x = [x, x] %}{% endfor %}", "more than one copy of itself"),
    "a block twice": ("{% for m in messages %}{% set x %}{{ x }}{{ x }}{% endset %}{% endfor %}", "copy of itself"),
    "forty doublings": ("{% set a0 = 'x' %}" + DOUBLING, "copies of a text"),
    "a text between its letters": (
        "{% set a = m.replace('', m) %}{% set b = a.replace('', a) %}{% set c = b.replace('', b) %}", "copies of a text"
    ),
    "a wide format": ("{{ '%999999999d' % 1 }}", "a format with a width"),
    "a wide field": ("{{ '{:999999999}'.format(1) }}", "a format with a width"),
    "deep brackets": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nested too deep"),
    "no template": ("{% for %}", "not a jinja2 template: line 1"),
    "a book": ("x" * (MAX_TEXT + 1), "100,001 characters is refused"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_template_is_refused_in_words_at_once(kind: str) -> None:
    template, words = ENDLESS[kind]
    started = time.process_time()
    with pytest.raises(ValueError, match=words):
        check_chat_template(template)
    assert time.process_time() - started < 1


def test_the_templates_that_trl_brings_are_accepted() -> None:
    trl = pytest.importorskip("trl", reason="its chat templates are real ones")
    folder = Path(trl.__file__).parent / "chat_templates"
    for file in folder.glob("*.jinja"):
        check_chat_template(file.read_text())
