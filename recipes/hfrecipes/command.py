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

from hfpatch.runtime.errors import PatchError

from .corpus import RecipeError


class TrainingError(RuntimeError):
    """Training went wrong; the last good state is on disk."""


class DivergedError(TrainingError):
    """A loss or gradient isn't finite."""


class Stopped(Exception):  # noqa: N818
    """Stopped on request, with everything saved."""


@contextmanager
def stop_requests(received: list[float] | None = None) -> Iterator[list[float]]:
    """Collects Ctrl-C and SIGTERM, so that a step is never cut in two; Ctrl-C two seconds later interrupts at once.

    Args:
        received: the list that times of requests are added to; none: a new one.
    """
    received = [] if received is None else received

    def note(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > 2:  # sooner, a launcher passes the first one on
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(recipe: str, argv: list[str], work: Callable[[str], Any], resumable: bool = True) -> int:
    """Do a recipe's work, given its command. Returns the exit status, and says on stderr what is to be done."""
    command = ["python", f"recipes/{recipe}", *(flag for flag in argv if flag != "--resume")]
    go_on = f"to go on: {shlex.join([*command, '--resume'])}"
    try:
        work(shlex.join(command))
        return 0
    except (RecipeError, PatchError) as error:
        status, told = 2, f"{type(error).__name__}: {error}"
    except DivergedError as error:
        advice = "start again with a lower --learning_rate; in the first step it is the model or the data that isn't"
        status, told = 1, f"{type(error).__name__}: {error}: {advice} sound"
    except TrainingError as error:
        status, told = 1, f"{type(error).__name__}: {error}\n{go_on}"
    except (Stopped, KeyboardInterrupt) as stop:
        status, told = 130, (str(stop) or "interrupted") + f"\n{go_on}" * resumable
    print(told, file=sys.stderr)
    return status
