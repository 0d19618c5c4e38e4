"""Progress of repairs and sampling, with the time that is left: logged at level INFO, and tqdm bars in a terminal."""

from __future__ import annotations

import logging
import os
import sys
from contextvars import ContextVar
from time import monotonic
from typing import Any

from tqdm.auto import tqdm

_log = logging.getLogger("hfpatch")
_SHOWN: ContextVar[bool | None] = ContextVar("hfpatch_show_progress", default=None)


class show_progress:  # noqa: N801 - used as torch.set_grad_enabled is
    """Draw bars on stderr of what takes long (a repair, sequences that a model draws), or, with False, draw none.

    From the call on, or inside of it as a context manager. Otherwise they are drawn where stderr is a terminal, by the
    first process of several on a machine. The logger "hfpatch" says the same at level INFO, whatever is drawn.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = _SHOWN.set(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: Any) -> None:
        _SHOWN.reset(self._before)


def _is_shown() -> bool:
    setting = _SHOWN.get()
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0" if setting is None else setting


class ProgressBar(tqdm):
    """A task's bar; use it as a context manager."""

    def __init__(self, task: str, total: int) -> None:
        self.task = task
        self.began = self.stepped = monotonic()
        self.done = self.done_before = 0
        self.has_parts, self.at_the_end = False, 0.0
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        hidden: dict[str, Any] = {} if _is_shown() else {"disable": True}  # tqdm's own switch holds as well
        super().__init__(total=total, desc=task, bar_format=form, **hidden)

    def begin_parts(self, done: int) -> None:
        """The first time: what came before isn't among the parts, and takes as long again after the last one."""
        if not self.has_parts:
            self.has_parts, self.done, self.done_before = True, done, done
            self.stepped = monotonic()
            self.at_the_end, self.began = self.stepped - self.began, self.stepped

    def step(self, done: int, what: str) -> None:
        """`done` of the task's parts are done, and this comes next."""
        if done > self.done:
            self.done, self.stepped = done, monotonic()
        left = self._left()
        _log.info("%s, %d of %d done%s: %s", self.task, done, self.total, left and f", {left}", what)
        self.set_postfix_str(f"{left}, {what}" if left else what, refresh=False)
        self.update(done - self.n)
        self.refresh()

    def _left(self) -> str:
        """The time that the rest will take, once a part is done; "" before and at the end."""
        parts = (self.total or 0) - self.done
        if self.done == self.done_before or parts <= 0:
            return ""
        each = (self.stepped - self.began) / (self.done - self.done_before)
        seconds = each * parts + self.at_the_end - (monotonic() - self.stepped)
        return f"about {tqdm.format_interval(max(0, seconds))} left"
