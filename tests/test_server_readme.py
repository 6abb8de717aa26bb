"""The README's section on the server, run as it stands there, but at another port."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import served
from watching import PATIENCE

SECTION = (Path(__file__).parent.parent / "README.md").read_text().partition("## As a server")[2].partition("\n## ")[0]
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server():
    with served(
        "smollm2-135m", "--served-model-name", "smollm2-135m", "--num-blocks", "100", "--no-log-requests"
    ) as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_line(server):
    line = re.search(r"^ +(curl (?:.*\\\n)*.*)$", SECTION, re.MULTILINE).group(1)
    assert URL in line
    line = line.replace(URL, server.url)
    assert (
        "Paris" in subprocess.run(line, shell=True, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    )


def test_the_snippet(server, capsys):
    code = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL).group(1)
    assert URL in code
    exec(code.replace(URL, server.url), {})
    assert "Whales" in capsys.readouterr().out
