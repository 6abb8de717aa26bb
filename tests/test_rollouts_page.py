"""What docs/rollouts.md shows, run as it stands there, but with a small model; and the example that it names."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from twostroke.model import default_model

ROOT = Path(__file__).parent.parent


def test_the_snippet_learns_from_what_it_changes(small_dir, monkeypatch, capsys):
    """The new weights reach groups that begin later, the third at the latest."""
    monkeypatch.setattr(default_model, "default_model_dir", lambda: small_dir)
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "rollouts.md").read_text(), re.DOTALL).group(1)
    exec(code.replace("Engine(folder)", "Engine(folder, device='cpu', num_blocks=100)"), {})
    said = re.findall(r"group (\d) had weights (\d), now they are (\d)", capsys.readouterr().out)
    assert sorted(group for group, _, _ in said) == ["0", "1", "2", "3"]
    assert [int(new) for _, _, new in said] == [1, 2, 3, 4]
    assert all(int(new) - int(had) <= 3 for _, had, new in said)
    assert any(int(had) > 0 for _, had, _ in said)


@pytest.mark.parametrize("missing", ["trl", "datasets"])
def test_the_example_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--help"])
    with pytest.raises(SystemExit, match=r"^grpo\.py needs the package \w+: pip install trl$"):
        runpy.run_path(str(ROOT / "examples" / "grpo.py"), run_name="__main__")
