"""Progress of repairs and sampling: logged at level INFO, and shown as tqdm bars inside `show_progress`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

_log = logging.getLogger("hfpatch")
_SHOWN: ContextVar[bool] = ContextVar("hfpatch_show_progress", default=False)


@contextmanager
def show_progress(enabled: bool = True) -> Iterator[None]:
    """Inside, hfpatch draws bars on stderr of what takes long: of a repair, and of sequences that a model draws.

    The logger "hfpatch" says the same at level INFO, here and elsewhere.

    Args:
        enabled: False does nothing, as for all but the main one of several processes.
    """
    before = _SHOWN.set(enabled or _SHOWN.get())
    try:
        yield
    finally:
        _SHOWN.reset(before)


class ProgressBar(tqdm):
    """A task's bar; use it as a context manager."""

    def __init__(self, task: str, total: int) -> None:
        self.task = task
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        hidden: dict[str, Any] = {} if _SHOWN.get() else {"disable": True}  # tqdm's own switch holds as well
        super().__init__(total=total, desc=task, bar_format=form, **hidden)

    def step(self, done: int, what: str) -> None:
        """`done` of the task's parts are done, and this comes next."""
        _log.info("%s, %d of %d done: %s", self.task, done, self.total, what)
        self.set_postfix_str(what, refresh=False)
        self.update(done - self.n)
        self.refresh()
