"""Starts another program's command line with hfpatch imported in each Python process that it starts.

A folder with a `sitecustomize.py` goes first on PYTHONPATH, which child processes inherit: Python runs that file when
it starts, and the file has hfpatch imported once transformers is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import OptionError

STARTUP = Path(__file__).with_name("startup")


def launch(command: Sequence[str]) -> NoReturn:
    """Run a command in place of this process; if the system can't (Windows), in a child, and exit as the child does.

    Args:
        command: a program and its arguments; or a Python file, or `-m` and a module, and theirs.

    Raises:
        OptionError: there is no such program or file.
    """
    words, environment = resolve_command(command), with_startup(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":
        sys.exit(subprocess.call(words, env=environment))
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, a program started by a shell doesn't
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(words[0], words, environment)


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command with its program's path. A program is looked for beside this Python first, then in PATH.

    Raises:
        OptionError: as in `launch`.
    """
    if not command:
        raise OptionError("run takes a command, such as: hfpatch run -- lm_eval --model hf ...")
    first = command[0]
    if first.endswith(".py") and not Path(first).is_file():
        raise OptionError(f"{first}: there is no such file to run.")
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *command]
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    program = shutil.which(first, path=places)
    if program is None:
        raise OptionError(
            f"{first}: no program of this name can be run, beside {sys.executable} or in PATH. "
            "Install it there, or give its path."
        )
    return [program, *command[1:]]


def with_startup(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose Python processes run the `sitecustomize.py` of this package."""
    path = [str(STARTUP), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
