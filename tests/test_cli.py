"""The command line: flags, what is printed, exit codes."""

import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from command_line import lines_file, run
from scripted import save_small
from typer.testing import CliRunner

import twostroke
from twostroke import EngineDead, SamplingParams
from twostroke.bench.measure import Measured
from twostroke.cli import demo as demo_module
from twostroke.cli.flags import STRUCTURED, EngineFlags, SamplingFlags, with_flags

TINY = ("--model", "tiny", "--device", "cpu", "--num-blocks", "64", "--max-rows", "8", "--engine-seed", "1")


# The frame


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"twostroke {twostroke.__version__}\n")


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("generate", "bench", "demo"))


def test_every_sampling_parameter_is_a_flag_with_the_same_default() -> None:
    """A parameter added to the API and forgotten here, or a default that drifts apart."""
    plural = {name: f"{name}s" for name in ("stop_token_id", "allowed_token_id", "bad_word")}
    flags = {plural.get(f.name, f.name) for f in fields(SamplingFlags)}
    code = {"logits_processors"}  # no flag can hold it
    assert flags - set(STRUCTURED) | {"structured"} == {f.name for f in fields(SamplingParams)} - code
    assert SamplingFlags().params() == SamplingParams()


def test_every_engine_parameter_is_a_flag() -> None:
    parameters = set(inspect.signature(twostroke.Engine).parameters)
    assert {f.name.replace("engine_seed", "seed") for f in fields(EngineFlags)} == parameters
    assert EngineFlags().arguments() == {}
    assert EngineFlags(engine_seed=3, graphs=False).arguments() == {"seed": 3, "graphs": False}


# Flags


def test_stop_strings_and_special_tokens(smollm2_dir: Path, tmp_path: Path) -> None:
    """As flags, and as keys of a line, which take the place of the flags."""
    model = save_small(smollm2_dir, tmp_path / "model")
    common = ("generate", "--model", model, "--device", "cpu", "--num-blocks", "64", "--json")
    common += ("--temperature", "0", "--ignore-eos", "--max-tokens", "12")
    text = json.loads(run(*common, "--prompt", "Once upon").stdout)["text"]
    middle, late = text[10:14], text[20:24]
    assert text.index(middle) == 10

    def texts(*flags: object) -> list[str]:
        return [json.loads(line)["text"] for line in run(*common, *flags).stdout.splitlines()]

    assert texts("--prompt", "Once upon", "--stop", late, "--stop", middle) == [text[:10]]
    assert texts("--prompt", "Once upon", "--stop", middle, "--include-stop") == [text[:14]]
    lines = ({"stop": [late, middle]}, {"stop": middle, "include_stop": True}, {"stop": None}, {})
    path = lines_file(tmp_path, *({"prompt": "Once upon", **line} for line in lines))
    assert texts("--prompts-file", path, "--stop", text[5:8]) == [text[:10], text[:14], text, text[:5]]


def test_flags_of_text_reach_the_parameters() -> None:
    flags = SamplingFlags(stop=["a", "b"], include_stop=True, skip_special_tokens=False)
    assert flags.params() == SamplingParams(stop=["a", "b"], include_stop=True, skip_special_tokens=False)


def test_flags_of_tokens_reach_the_parameters() -> None:
    flags = SamplingFlags(logit_bias=["5=1.5", "7=-100"], allowed_token_id=[5, 7], bad_word=["a"], stop_token_id=[9])
    expected = dict(logit_bias={5: 1.5, 7: -100.0}, allowed_token_ids=[5, 7], bad_words=["a"], stop_token_ids=(9,))
    assert flags.params() == SamplingParams(**expected)
    seen: list[bool] = []

    def command(sampling: SamplingFlags) -> None:
        seen.append(sampling.skip_special_tokens)

    one = typer.Typer()
    one.command()(with_flags(command))
    for arguments in (["--no-skip-special-tokens"], ["--skip-special-tokens"], []):
        assert CliRunner().invoke(one, arguments).exit_code == 0
    assert seen == [False, True, True]


# What is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--max-tokens", "0"), "max_tokens=0"),
        (("--min-tokens", "9", "--max-tokens", "8"), "min_tokens=9"),
        (("--stop", ""), "stop[0]=''"),
        (("--logit-bias", "5:1"), "logit_bias='5:1'"),
        (("--logit-bias", "5=nan"), "logit_bias[5]=nan"),
        (("--slots", "0"), "slots=0"),
        (("--loop", "both"), "loop='both'"),
        (("--model", "./nowhere"), "model='./nowhere'"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_2(flags: tuple[str, ...], message: str) -> None:
    result = run("generate", *(() if "--model" in flags else TINY), "--prompt", "x", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_no_prompt_is_refused() -> None:
    result = run("generate", *TINY)
    assert result.exit_code == 2
    assert "--prompt" in result.stderr


def test_a_prompt_that_the_engine_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": [1, 2]}, {"prompt": [1, 10**6]})
    result = run("generate", *TINY, "--prompts-file", path, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}:2: prompt[1]=1000000" in result.stderr


def test_logprobs_that_nothing_would_show_are_refused(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": [1, 2]}, {"prompt": [1], "prompt_logprobs": 3})
    result = run("generate", *TINY, "--prompts-file", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}:2: prompt_logprobs=3 needs --json" in result.stderr
    assert "logprobs=0 needs --json" in run("generate", *TINY, "--prompt", "x", "--logprobs", "0").stderr


def test_text_for_a_model_without_a_tokenizer_is_refused_with_a_way_out() -> None:
    result = run("generate", *TINY, "--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'no tokenizer, give token ids (a line of --prompts-file FILE.jsonl: {"prompt": [1, 2, 3]})' in result.stderr


@pytest.mark.parametrize(
    ("command", "flag"), [(("profile", *TINY[:2], "--rows", "1"), "--out"), (("bench", "cpu-step"), "--json")]
)
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, command: tuple[str, ...], flag: str
) -> None:
    (tmp_path / "file").write_text("")
    result = run(*command, flag, tmp_path / "file" / "folder")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"twostroke: {flag} {tmp_path}/file/folder: Not a directory\n"


# The engine behind it


def test_json_prints_one_object_per_prompt_in_input_order(tmp_path: Path) -> None:
    """The longest prompt and answer comes first, so an output in order of completion would be seen."""
    lines = [{"prompt": list(range(1, 40)), "max_tokens": 12}, {"prompt": [5], "max_tokens": 1}, {"prompt": [7, 8]}]
    path = lines_file(tmp_path, *lines)
    flags = (*TINY, "--prompts-file", path, "--json", "--max-tokens", "3", "--ignore-eos", "--seed", "4")
    results = {loop: run("generate", *flags, "--loop", loop) for loop in ("sync", "async")}
    assert [result.exit_code for result in results.values()] == [0, 0]
    assert results["sync"].stdout == results["async"].stdout
    objects = [json.loads(line) for line in results["async"].stdout.splitlines()]
    names = {"index", "text", "token_ids", "prompt_tokens", "finish_reason", "seed"}
    assert [set(one) for one in objects] == [names] * 3
    assert [one["index"] for one in objects] == [0, 1, 2]
    assert [one["prompt_tokens"] for one in objects] == [39, 1, 2]
    assert [len(one["token_ids"]) for one in objects] == [12, 1, 3]
    assert {one["finish_reason"] for one in objects} == {"length"}
    assert {one["text"] for one in objects} == {None}


def test_several_samples_of_a_prompt(tmp_path: Path) -> None:
    flags = (*TINY, "--prompts-file", lines_file(tmp_path, {"prompt": [5, 6]}), "--n", "3", "--max-tokens", "4")
    (printed,) = run("generate", *flags, "--json", "--seed", "1").stdout.splitlines()
    assert set(json.loads(printed)) == {"index", "prompt_tokens", "outputs"}
    outputs = json.loads(printed)["outputs"]
    assert [set(one) for one in outputs] == [{"text", "token_ids", "finish_reason", "seed"}] * 3
    assert len({tuple(one["token_ids"]) for one in outputs}) == 3
    lines = run("generate", *flags, "--seed", "1").stdout.splitlines()
    assert lines[::2] == ["--- 1.1 ---", "--- 1.2 ---", "--- 1.3 ---"]
    assert [line.split() for line in lines[1::2]] == [[str(token) for token in one["token_ids"]] for one in outputs]


def test_an_unseeded_answer_can_be_repeated_by_its_seed(tmp_path: Path) -> None:
    flags = (*TINY, "--prompts-file", lines_file(tmp_path, {"prompt": [5, 6]}), "--max-tokens", "9", "--ignore-eos")
    first = json.loads(run("generate", *flags, "--json").stdout)
    again = json.loads(run("generate", *flags, "--json", "--seed", first["seed"]).stdout)
    assert again == first
    other = json.loads(run("generate", *flags, "--json", "--seed", first["seed"] ^ 1).stdout)
    assert other["token_ids"] != first["token_ids"]


def test_json_has_the_logprobs_that_were_asked_for(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": [5, 6, 7], "prompt_logprobs": 1}, {"prompt": [5], "n": 2, "best_of": 3})
    flags = (*TINY, "--prompts-file", path, "--max-tokens", "4", "--seed", "1", "--ignore-eos", "--logprobs", "2")
    first, second = (json.loads(line) for line in run("generate", *flags, "--json").stdout.splitlines())
    assert [entry["token_id"] for entry in first["logprobs"]] == first["token_ids"]
    assert set(first["logprobs"][0]) == {"token_id", "logprob", "rank", "top", "sampling_logprob"}
    assert [len(entry["top"]) for entry in first["logprobs"]] == [2] * 4
    assert first["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in first["prompt_logprobs"][1:]] == [6, 7]
    assert len(second["outputs"]) == 2
    assert "prompt_logprobs" not in second


def test_each_of_several_samples_has_a_heading(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": [5, 6, 7]}, {"prompt": [5], "n": 2, "best_of": 3})
    printed = run("generate", *TINY, "--prompts-file", path, "--max-tokens", "4", "--ignore-eos").stdout.splitlines()
    assert [line for line in printed if line.startswith("---")] == ["--- 1 ---", "--- 2.1 ---", "--- 2.2 ---"]


def test_plain_output_has_headings_and_a_closing_line(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": [1, 2, 3]}, {"prompt": [4]})
    result = run("generate", *TINY, "--prompts-file", path, "--temperature", "0", "--max-tokens", "4", "--ignore-eos")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- 1 ---", "--- 2 ---"]
    assert len(lines[1].split()) == 4
    assert re.fullmatch(r"8 tokens in \d+\.\d\d s: \d+\.\d tokens/s\n", result.stderr)
    assert "tokens/s" not in result.stdout


def process(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "twostroke", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def endless(tmp_path: Path) -> tuple[object, ...]:
    # NOTE: their texts are more than a pipe holds that nobody reads, so that the run cannot end by itself.
    path = lines_file(tmp_path, *[{"prompt": [1, 2, 3]}] * 64)
    return ("generate", *TINY[:4], "--prompts-file", path, "--max-tokens", "1000000", "--ignore-eos")


def test_ctrl_c_ends_a_run_with_130(tmp_path: Path) -> None:
    running = process(*endless(tmp_path))
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert (running.returncode, b"Traceback" in errors) == (130, False)


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    running = process(*endless(tmp_path))
    assert running.stdout.read(1)
    running.stdout.close()
    assert running.wait(timeout=30) != 0
    assert running.stderr.read() == b""


def shell(redirection: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = shlex.join([sys.executable, "-m", "twostroke", *map(str, arguments)])
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(f"{command} {redirection}", shell=True, capture_output=True, env=environment, timeout=60)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_stdout_that_is_closed_costs_nothing_but_the_text(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = lines_file(tmp_path, {"prompt": [1, 2, 3]})
    done = shell(">&-", "generate", *TINY, "--prompts-file", path, "--max-tokens", "3", *flags)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_full_disk_is_one_line_on_stderr(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = lines_file(tmp_path, {"prompt": [1, 2, 3]})
    done = shell(">/dev/full", "generate", *TINY, "--prompts-file", path, "--max-tokens", "3", *flags)
    assert done.returncode != 0
    assert b"twostroke: [Errno 28]" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_terminal_cannot_show_does_not_end_the_run(smollm2_dir: Path, encoding: str) -> None:
    flags = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--prompt", "日本語を話します。私は")
    done = shell("", "generate", "--model", smollm2_dir, "--device", "cpu", *flags, PYTHONIOENCODING=encoding)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert done.stdout.strip()


# Outcomes that a healthy engine does not give at will


class StubHandle:
    samples = (None,)
    sample = SimpleNamespace(request=SimpleNamespace(params=SamplingParams()))

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.cancelled = False

    def result(self) -> object:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def __iter__(self) -> Iterator[object]:
        yield SimpleNamespace(token_ids=[1], text="once")
        self.result()

    def cancel(self) -> None:
        self.cancelled = True


def output(reason: str, error: str | None = None, token_ids: tuple[int, ...] = (1,)) -> SimpleNamespace:
    sample = {"text": "t", "token_ids": list(token_ids), "finish_reason": reason, "error": error, "seed": 7}
    outputs = [SimpleNamespace(logprobs=None, **sample)]
    return SimpleNamespace(prompt_token_ids=[1], outputs=outputs, prompt_logprobs=None, **sample)


def stub_engine(monkeypatch: pytest.MonkeyPatch, *outcomes: object) -> list[StubHandle]:
    handles = [StubHandle(outcome) for outcome in outcomes]
    waiting = iter(handles)

    class StubEngine:
        tokenizer = object()

        def __init__(self, **arguments: object) -> None:
            pass

        def submit(self, prompt: object, params: SamplingParams) -> StubHandle:
            return next(waiting)

        def __enter__(self) -> "StubEngine":
            return self

        def __exit__(self, *exc: object) -> None:
            pass

    monkeypatch.setattr(twostroke, "Engine", StubEngine, raising=False)
    return handles


def test_a_request_that_ends_with_an_error_gives_exit_1_and_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_engine(monkeypatch, output("stop"), output("error", "logits are not finite"), output("length"))
    result = run("generate", "--prompt", "a", "--prompt", "b", "--prompt", "c", "--json")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert [one.get("error") for one in objects] == [None, "logits are not finite", None]


def test_an_interrupt_cancels_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = stub_engine(monkeypatch, output("stop"), KeyboardInterrupt(), output("stop"))
    result = run("generate", "--prompt", "a", "--prompt", "b", "--prompt", "c", "--json")
    assert result.exit_code == 130
    assert handles[2].cancelled


def test_what_interrupts_a_text_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's prompt, or the message, comes below it; for error and Ctrl-C alike."""
    for outcome, code in ((KeyboardInterrupt(), 130), (EngineDead("the engine failed"), 1)):
        stub_engine(monkeypatch, outcome)
        result = run("generate", "--prompt", "a")
        assert (result.exit_code, result.stdout) == (code, "once\n")


def test_a_dead_engine_gives_exit_1_and_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = EngineDead("the engine failed: ValueError: broken weights")
    stub_engine(monkeypatch, dead)
    result = run("generate", "--prompt", "a", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "twostroke: the engine failed: ValueError: broken weights\n"


@pytest.mark.parametrize(("tokens", "code"), [((1, 2), 0), ((1, 3), 1)], ids=["same", "different"])
def test_the_demo_compares_the_loops(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], code: int) -> None:
    ran = []

    def measure(loop: str, params: SamplingParams, given: dict[str, str]) -> Measured:
        ran.append(loop)
        outputs = [output("length", token_ids=(1, 2) if loop == "sync" else tokens)] * 8
        return Measured(outputs, seconds=2.0, steps=9, active=0.5, idle={}, cpu={})

    monkeypatch.setattr(demo_module, "_measure", measure)
    result = run("demo", "--device", "cpu")
    assert (result.exit_code, ran) == (code, ["sync", "async"])
    assert re.search(r"async +2\.00 +16 +8\.0 +50\.0%", result.stdout)
    assert "about the same time" in result.stdout
    assert ("DIFFERENT" in result.stdout) == bool(code)
