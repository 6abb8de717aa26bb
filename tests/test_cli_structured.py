"""Structured output on the command line."""

from __future__ import annotations

import json
import re

import pytest
from command_line import run
from scripted import save_small

from twostroke import InvalidRequest, StructuredOutput
from twostroke.cli.flags import SamplingFlags
from twostroke.cli.prompts import gather

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def test_flags_and_lines_make_the_text_what_they_say(smollm2_dir, tmp_path):
    """A line's own `structured` takes the place of the flags."""
    model = save_small(smollm2_dir, tmp_path / "model", vocab_size=512)
    lines = (
        {"prompt": "x", "structured": {"regex": "[ab]{2,5}"}},
        {"prompt": "x"},
        {"prompt": "x", "structured": None},
    )
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    common = ("generate", "--model", model, "--device", "cpu", "--num-blocks", "64", "--json", "--max-tokens", "60")
    result = run(*common, "--choice", "yes", "--choice", "no", "--prompts-file", tmp_path / "lines.jsonl")
    assert result.exit_code == 0, result.output
    texts = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    assert re.fullmatch("[ab]{2,5}", texts[0])
    assert texts[1] in ("yes", "no")
    assert texts[2] not in ("yes", "no")
    wrong = run(*common, "--regex", "(", "--prompt", "x")
    assert wrong.exit_code == 2
    assert "structured.regex='('" in wrong.stderr


def test_each_flag_is_a_field(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    text = json.dumps(SCHEMA)
    assert SamplingFlags(json_schema=f"@{tmp_path}/schema.json").params().structured == StructuredOutput(
        json_schema=text
    )
    assert SamplingFlags(json_schema=text).params().structured == StructuredOutput(json_schema=text)
    assert SamplingFlags(json_object=True).params().structured == StructuredOutput(json_object=True)
    assert SamplingFlags(regex="@a").params().structured == StructuredOutput(regex="@a")
    assert SamplingFlags(grammar="start: /a/").params().structured == StructuredOutput(grammar="start: /a/")
    jumping = StructuredOutput(regex="a", jump_forward=True)
    assert SamplingFlags(regex="a", jump_forward=True).params().structured == jumping
    for wrong in (SamplingFlags(regex="a", choice=["a"]), SamplingFlags(jump_forward=True)):
        with pytest.raises(InvalidRequest, match="exactly one of"):
            wrong.params()
    with pytest.raises(InvalidRequest, match="grammar='@/no/such/file'"):
        SamplingFlags(grammar="@/no/such/file").params()


@pytest.mark.parametrize("flag", ["json_schema", "grammar"])
def test_a_file_without_an_at_sign_is_told_of_it(tmp_path, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "city.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=f"^{flag}='city.json' is the name of a file; '@city.json' has it read"):
        SamplingFlags(**{flag: "city.json"}).params()
    (tmp_path / "[a-z]+").write_text("")
    assert SamplingFlags(regex="[a-z]+").params().structured == StructuredOutput(regex="[a-z]+")


def test_unknown_keys_of_a_line_are_refused(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt": "x", "structured": {"regexp": "a"}}))
    with pytest.raises(InvalidRequest, match="unknown key 'regexp' in structured"):
        gather((), path, SamplingFlags().params(), False)
    path.write_text(json.dumps({"prompt": "x", "logits_processors": []}))
    with pytest.raises(InvalidRequest, match="unknown key 'logits_processors'"):
        gather((), path, SamplingFlags().params(), False)
