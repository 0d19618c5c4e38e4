"""What takes minutes tells of itself through `logging`, on the logger "hfpatch"; `show_progress` makes bars of that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def tell(logger: logging.Logger, task: str, done: int, total: int, what: str) -> None:
    """One message at level INFO: `done` of a task's `total` parts are done, and what comes next is this.

    The record carries the same as attributes: task, done, total and what.
    """
    told = {"task": task, "done": done, "total": total, "what": what}
    logger.info("%s, %d of %d done: %s", task, done, total, what, extra=told, stacklevel=2)


@contextmanager
def show_progress(enabled: bool = True) -> Iterator[None]:
    """Inside, hfpatch draws bars on stderr of what takes long: of a repair, and of sequences that a model draws.

    The same is told by `logging.getLogger("hfpatch")` at level INFO, which nobody sees unless they ask for it.

    Args:
        enabled: False does nothing, as for all but the main one of several processes.
    """
    logger = logging.getLogger("hfpatch")
    if not enabled:
        yield
        return
    bars, before = Bars(logging.INFO), (logger.level, logger.propagate)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
        logger.propagate = False  # other handlers weren't to show it
    logger.addHandler(bars)
    try:
        yield
    finally:
        logger.removeHandler(bars)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        bars.close()


class Bars(logging.Handler):
    """Draws what `tell` says: a bar for each task, one after another."""

    bar: Any = None
    shown: tuple[str, int, int] = ("", 0, 0)  # what it shows: task, total, done

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm.auto import tqdm

        if not hasattr(record, "task"):
            return
        task, done, total, what = (getattr(record, name) for name in ("task", "done", "total", "what"))
        if self.bar is None or self.shown[:2] != (task, total) or done < self.shown[2]:
            self._end()
            self.bar = tqdm(total=total, desc=task, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]")
            self.shown = (task, total, 0)
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update(done - self.shown[2])
        self.bar.refresh()
        self.shown = (task, total, done)

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
