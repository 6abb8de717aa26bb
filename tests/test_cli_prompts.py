"""Prompts on the command line: from flags and from files, each with its parameters and its place."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import lines_file, run

from twostroke import InvalidRequest, SamplingParams
from twostroke.cli.prompts import gather


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffone\r\n\n  two \n{"prompt": 1}\n \nü\u2028x'.encode())
    jobs = gather(["zero"], path, SamplingParams(), chat=False)
    assert [job.prompt for job in jobs] == ["zero", "one", "  two ", '{"prompt": 1}', "ü\u2028x"]
    assert [job.source for job in jobs][1:3] == [f"{path}:1", f"{path}:3"]


def test_json_lines_bring_their_own_parameters(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = ("text", {"prompt": "p", "max_tokens": 3}, {"prompt": [1, 2], "temperature": 0}, {"messages": chat})
    base = SamplingParams(max_tokens=7, top_k=5)
    jobs = gather((), lines_file(tmp_path, *map(json.dumps, lines)), base, chat=False)
    assert [job.prompt for job in jobs] == ["text", "p", [1, 2], chat]
    assert [job.params for job in jobs] == [base, replace(base, max_tokens=3), replace(base, temperature=0), base]


def test_chat_makes_texts_into_chats_and_leaves_chats(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    jobs = gather(["a"], lines_file(tmp_path, '"b"', {"messages": chat}), SamplingParams(), chat=True)
    assert [job.prompt for job in jobs] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
        chat,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 200_000, "not JSON", id="brackets without end"),
        ("[1, 2]", "must be a string, or an object"),
        ({"prompt": "x", "temprature": 1}, "unknown key 'temprature'"),
        ({"max_tokens": 1}, "exactly one of"),
        ({"prompt": "x", "messages": []}, "exactly one of"),
        ({"prompt": None}, "prompt=null"),
        ({"messages": ["x"]}, 'messages[0]="x"'),
        ({"prompt": "x", "top_p": 0}, "top_p=0"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens='many'"),
        ({"prompt": "x", "temperature": None}, "temperature=None"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]=''"),
        ({"prompt": "x", "stop": 3}, "stop=3"),
        ({"prompt": "x", "include_stop": "yes"}, "include_stop='yes'"),
        ({"prompt": "x", "skip_special_tokens": 0}, "skip_special_tokens=0"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = lines_file(tmp_path, '"good"', "", line)
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        gather((), path, SamplingParams(), chat=False)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_token_ids_cannot_be_a_chat(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r":1: .*--chat"):
        gather((), lines_file(tmp_path, {"prompt": [1]}), SamplingParams(), chat=True)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe\n"], ids=["missing", "empty", "blank", "bytes"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    result = run("generate", "--prompts-file", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--prompts-file" in result.stderr
    assert result.stderr.count(str(path)) <= 1
