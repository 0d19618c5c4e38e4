"""`python -m hfpatch.cli`, the same as the command `hfpatch`."""

import sys

from . import app

if __name__ == "__main__":
    sys.exit(app())
