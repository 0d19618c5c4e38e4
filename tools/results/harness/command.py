"""A recipe as a command: how it is stopped, and what it says and returns where it fails.

0    done
1    training went wrong: TrainingError
2    bad input: RecipeError, or hfpatch's PatchError
130  stopped, with the command to go on: Stopped, or Ctrl-C
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import tqdm
from methods import keep_freed_memory
from texts import RecipeError

from hfpatch.runtime.patch_errors import PatchError

from .results import TrainingError, require_own_folder
from .settings import check


class DivergedError(TrainingError):
    """A loss or gradient isn't finite."""


class Stopped(Exception):  # noqa: N818
    """Stopped on request, with everything saved."""


@contextmanager
def stop_requests(received: list[float]) -> Iterator[None]:
    """Adds times of Ctrl-C and SIGTERM to `received`, so that a step is never cut in two.

    Ctrl-C two seconds later interrupts at once.
    """

    def note(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > 2:  # sooner, a launcher passes the first one on
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_recipe(
    recipe: str,
    argv: list[str] | None,
    about: str,
    read: Callable[[list[str], str, str], Any],
    work: Callable[[Any, str], Any],
    resumable: bool = True,
) -> int:
    """Read and check the settings, and do the work. Returns the exit status, and says on stderr what is to be done.

    Args:
        recipe: the script's name.
        argv: the flags; None: those of the command line.
        about: the script's docstring, whose second paragraph --help shows.
        read: settings from flags, the script's name and that paragraph.
        work: what is done, given the settings and the command.
    """
    if argv is None:
        keep_freed_memory()
        argv = sys.argv[1:]
    command = ["python", f"tools/results/{recipe}", *(flag for flag in argv if flag != "--resume")]
    go_on = f"to go on: {shlex.join([*command, '--resume'])}"
    try:
        config = read(argv, recipe, about.split("\n\n")[1])
        check(config)
        require_own_folder(recipe, config.output_dir)
        work(config, shlex.join(command))
        return 0
    except (RecipeError, PatchError) as error:
        status, told = 2, f"{type(error).__name__}: {error}"
    except DivergedError as error:
        advice = "start again with a lower --learning_rate; if it was the first step, check the model and the data"
        status, told = 1, f"{type(error).__name__}: {error}: {advice}"
    except TrainingError as error:
        status, told = 1, f"{type(error).__name__}: {error}\n{go_on}"
    except (Stopped, KeyboardInterrupt) as stop:
        status, told = 130, (str(stop) or "interrupted") + f"\n{go_on}" * resumable
    print(told, file=sys.stderr)
    return status


def progress(task: str, total: int, done: int = 0) -> Any:
    """A bar of the main process: drawn anew ten times a second in a terminal, now and then in a log."""
    return tqdm(desc=task, total=total, initial=done, mininterval=0.1 if sys.stderr.isatty() else 30)
