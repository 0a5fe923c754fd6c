"""Chat templates: rendered as Hugging Face does, from either file, with clear errors."""

import json

import pytest

from examples.make_random_checkpoint import byte_level_tokenizer
from rlt_jax.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def load(folder, *, template=None, tokenizer_config=None):
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def chat(template, messages=({"role": "user", "content": "hi"},), *, generate=True, **variables):
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=template)
    return tokenizer.render_chat(messages, add_generation_prompt=generate, **variables)


def test_chat_renders_messages_and_the_generation_prompt():
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert chat(CHATML, messages, generate=False) == text
    assert chat(CHATML, messages) == text + "<|im_start|>assistant\n"


def test_chat_passes_variables_to_the_template():
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat(CHATML, enable_thinking=False).endswith(closed)
    assert chat(CHATML, enable_thinking=True).endswith("<|im_start|>assistant\n")


def test_chat_template_file_wins_over_tokenizer_config(tmp_path):
    tokenizer = load(tmp_path, template="file", tokenizer_config={"chat_template": "config"})
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "file"


@pytest.mark.parametrize("template", ["T", [{"name": "default", "template": "T"}]])
def test_chat_template_of_tokenizer_config_is_read(tmp_path, template):
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": template})
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "T"


def test_a_template_list_without_default_is_refused(tmp_path):
    templates = [{"name": "rag", "template": "T"}]
    with pytest.raises(ValueError, match=r"chat_template = .*has no default"):
        load(tmp_path, tokenizer_config={"chat_template": templates})


def test_special_tokens_are_template_variables(tmp_path):
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    tokenizer = load(tmp_path, template="{{ bos_token }}-{{ eos_token }}", tokenizer_config=config)
    message = {"role": "user", "content": ""}
    assert tokenizer.render_chat([message]) == "<|endoftext|>-<|im_end|>"


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        (
            "{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}",
            "13",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ tools is none }}{{ missing }}", "True"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_template_helpers_act_as_in_hugging_face(template, expected):
    assert chat(template) == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "cannot be compiled"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "chat template: .*str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_failing_template_is_one_clear_error(template, message):
    with pytest.raises(ValueError, match=message):
        chat(template, [{"role": "user", "content": "hi"}])


def test_a_checkpoint_without_template_says_so():
    with pytest.raises(ValueError, match=r"chat_template = None: .*chat_template\.jinja"):
        Tokenizer(byte_level_tokenizer()).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], r"messages = \[\]: must be a non-empty list"),
        ("hi", "messages = 'hi': must be a non-empty list"),
        (["hi"], r"messages\[0\] = 'hi': must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role = None: must be a non-empty string"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]\.role = 5: must be a non-empty string"),
        ([{"role": "user"}], r"messages\[0\]\.content = None: must be a string or a list"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content = 5: must be a string"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] = 'x': .* a type"),
    ],
)
def test_malformed_messages_name_field_value_and_rule(messages, message):
    with pytest.raises(ValueError, match=message):
        chat(CHATML, messages)


def test_content_may_be_missing_beside_tool_calls():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert chat("{{ messages[0].tool_calls[0].name }}", [message]) == "f"
