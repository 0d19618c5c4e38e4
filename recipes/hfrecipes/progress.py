"""Progress of long loops: hfpatch's own bar in a terminal, a line every ten percent in a log."""

import sys

from hfpatch.core.progress import ProgressBar, show_progress


def in_terminal(main: bool = True) -> bool:
    """Whether bars are drawn: by the main one of several processes, and not into a log."""
    return main and sys.stderr.isatty()


class Progress(ProgressBar):
    """A loop's bar; use it as a context manager. It is drawn at most every `mininterval`, tqdm's tenth of a second."""

    def __init__(self, task: str, total: int, done: int = 0, main: bool = True) -> None:
        with show_progress(in_terminal(main)):
            super().__init__(task, total)
        self.n = self.initial = self.last_print_n = self.done = done
        self.logged = main and not sys.stderr.isatty()

    def step(self, done: int, what: str) -> None:
        """`done` of the loop's parts are done; `what` stands behind."""
        if self.logged and 10 * done // self.total > 10 * self.done // self.total:
            print(f"{self.task}: {100 * done // self.total} %, {what}", file=sys.stderr, flush=True)
        self.set_postfix_str(what, refresh=False)
        self.update(done - self.done)
        self.done = done
