"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from twostroke.model.default_model import default_model_dir


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model's directory; downloaded and converted once, then cached."""
    return default_model_dir()
