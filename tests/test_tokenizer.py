"""Tokenizer and chat template against transformers' on the same directory."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from twostroke.errors import InvalidRequest, UnsupportedModel
from twostroke.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "def f(x):\n\treturn  x ** 2   # squared\n\n\n",
    "In 2024,  1234567 people paid $3.50; ½ of them ²",
    "日本語のテキスト、中文和한국어",
    "🙂🙂 👩‍👩‍👧 naïve café\r\n\u00a0end ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end",
    "a�b",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": 'Be <brief> & "kind".'}, {"role": "user", "content": "héé 🙂\n"}],
    [
        {"role": "user", "content": "<|im_end|>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " x "},
    ],
]
LOOP_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if not loop.first and message.role == messages[loop.index0 - 1].role %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% generation %}[{{ message['role'] | upper }}] {{ message | tojson(indent=1) }}{% endgeneration %}

{% endfor %}
{% if tools is not none or documents is not none %}{{ tools | length }}{% endif %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
"""
NAMESPACE_TEMPLATE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.name is defined %}"
    "{{ m.name }}:{% endif %}{{ m.content.strip() }}{{ eos_token }}{% endfor %}{{ ns.n }}{{ strftime_now('%Y') }}"
)


@pytest.fixture(scope="module")
def ours(smollm2_dir: Path) -> Tokenizer:
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path):
    return AutoTokenizer.from_pretrained(smollm2_dir)


def write_directory(folder: Path, backend: Backend, config: dict, template: str | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def small_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id_ for id_, token in enumerate(["<s>", "</s>", *alphabet, "he", "hello"])}
    backend = Backend(models.BPE(vocab, [("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(ours: Tokenizer, theirs, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 50_000), max_size=12))
def test_any_text_and_any_ids_equal_transformers(smollm2_pair, text: str, ids: list[int]) -> None:
    ours, theirs = smollm2_pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.fixture(scope="module")
def smollm2_pair(ours: Tokenizer, theirs):
    return ours, theirs


def test_text_comes_back_and_special_tokens_are_read(ours: Tokenizer) -> None:
    for text in TEXTS:
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.encode("<|im_end|>") == [2]
    assert ours.decode([2, 0]) == ""
    assert ours.special_ids == frozenset(range(17))
    assert ours.vocab_size == 49152


def test_ids_that_name_no_token_have_no_text(ours: Tokenizer) -> None:
    hello = ours.encode("hello")
    assert ours.decode([-1, *hello, 49152, 2**32, 2**70]) == "hello"


@pytest.mark.parametrize("text", [None, 3, b"x", ["a"], "a\ud800b"])
def test_a_text_that_is_none_is_refused(ours: Tokenizer, text: object) -> None:
    with pytest.raises(InvalidRequest, match="text"):
        ours.encode(text)


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_what_is_put_around_a_text_equals_transformers(tmp_path: Path, processor: bool, config: dict) -> None:
    backend = small_backend()
    if processor:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    write_directory(tmp_path, backend, {**names, **config})
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.encode("hello", special_tokens=False) == theirs.encode("hello", add_special_tokens=False)
    assert (ours.encode("hello")[0] == 0) == processor


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "hello", "pad_token": "<pad>"},
        {"eos_token": {"content": "</s>", "lstrip": True, "__type": "AddedToken"}, "bos_token": None},
        {"extra_special_tokens": ["<a>", "he"], "pad_token": "<pad>"},
        {"additional_special_tokens": ["<a>", "</s>"]},
        {
            "added_tokens_decoder": {
                "260": {"content": "<think>", "special": False, "normalized": False},
                "0": {"content": "<s>", "special": True, "normalized": False},
            },
            "eos_token": "</s>",
        },
    ],
)
def test_special_tokens_of_the_config_equal_transformers(tmp_path: Path, config: dict) -> None:
    write_directory(tmp_path, small_backend(), config)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<s>hello he<a> <pad><think></s>"
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_of_an_older_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, small_backend(), {"eos_token": "he"}, template="{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.decode([*ours.encode("he"), 1]) == theirs.decode([*theirs.encode("he"), 1], skip_special_tokens=True)
    assert ours.apply_chat_template(CHATS[0]) == [1]


def test_the_older_file_is_not_read_beside_the_newer_list(tmp_path: Path) -> None:
    added = {"0": {"content": "<s>", "special": True, "normalized": False}}
    config = {"eos_token": "he", "added_tokens_decoder": added}
    write_directory(tmp_path, small_backend(), config, template="{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHATS[0], return_dict=False)
    assert ours.apply_chat_template(CHATS[0]) == expected == [theirs.convert_tokens_to_ids("he")]


def test_padding_and_truncation_of_a_training_run_are_dropped(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(write_directory(tmp_path, backend, {})).encode("a" * 100)) == 100


def test_other_formats_go_through_transformers(tmp_path: Path) -> None:
    vocab = small_backend().get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ bos_token }}he"}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("hello <s> 🙂") == theirs.encode("hello <s> 🙂")
    assert ours.apply_chat_template(CHATS[0]) == [vocab["<s>"], vocab["he"]]


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_the_chat_equals_transformers(ours: Tokenizer, theirs, chat: list, prompt: bool) -> None:
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", [*CHATS, [{"role": "user", "content": "x", "name": "Ann"}]])
@pytest.mark.parametrize("template", [LOOP_TEMPLATE, NAMESPACE_TEMPLATE])
def test_written_templates_equal_transformers(tmp_path: Path, template: str, chat: list, prompt: bool) -> None:
    backend = small_backend()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    write_directory(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == expected
    assert expected.count(0) == (template is LOOP_TEMPLATE)  # the begin token stands there once, if the template has it


@pytest.mark.parametrize(
    "entry", ["he", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "he"}]]
)
def test_a_template_in_the_config(tmp_path: Path, entry: object) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, small_backend(), {"chat_template": entry}))
    assert tokenizer.decode(tokenizer.apply_chat_template(CHATS[0])) == "he"


def test_a_key_that_is_none_is_not_there(tmp_path: Path) -> None:
    """As newer transformers has it; older ones would print a null."""
    template = "{{ messages[0] | tojson }}{{ 'name' in messages[0] }}"
    tokenizer = load_tokenizer(write_directory(tmp_path, small_backend(), {}, template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x", "name": None}])
    assert tokenizer.decode(ids) == '{"role": "user", "content": "x"}False'


def test_no_template_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, small_backend(), {}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hi", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (None, "must be a list"),
        ([], "at least one"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([CHATS[0][0], {"content": "x"}], r"messages\[1\] has no 'role'"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] must be a string, not None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\['role'\]"),
    ],
)
def test_bad_messages_are_refused_by_name(ours: Tokenizer, messages: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ours.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP_TEMPLATE, "roles must alternate"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{% if %}", "Expected"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_failing_template_is_an_invalid_request(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, small_backend(), {}, template))
    with pytest.raises(InvalidRequest, match=said):
        tokenizer.apply_chat_template([*CHATS[0], *CHATS[0]])


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\x00"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path.name} has no tokenizer that can be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"added_tokens_decoder": {"a": 1}}', b'{"chat_template": [{}]}'])
def test_damaged_settings_are_refused(tmp_path: Path, content: bytes) -> None:
    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=f"{tmp_path.name} has no tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_threads_share_a_tokenizer(ours: Tokenizer) -> None:
    expected = [(ours.encode(text), ours.encode(text, special_tokens=False)) for text in TEXTS]
    wrong = []

    def work() -> None:
        for _ in range(20):
            got = [(ours.encode(text), ours.encode(text, special_tokens=False)) for text in TEXTS]
            chat = ours.decode(ours.apply_chat_template(CHATS[0]), skip_special_tokens=False)
            if got != expected or "France?<|im_end|>" not in chat:
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_added_token_keeps_its_flags(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_special_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    write_directory(tmp_path, backend, {"eos_token": "<x>"})
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("he  <x> he") == theirs.encode("he  <x> he")
    assert len(ours.encode("he  <x>")) == 2
