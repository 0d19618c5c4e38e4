"""Run as a script in a process that can't import hfpatch: which class servers build, and what it computes.

`server_opener.py FOLDER` reads FOLDER/plugin, FOLDER/remote and FOLDER/wanted.pt, and prints a line for each answer.
"""

from __future__ import annotations

import site
import sys
from pathlib import Path

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))
site.addsitedir(str(Path(__file__).resolve().parent))

import torch
from opener import Blocker
from server_backends import SERVERS, packed, resolved, served

sys.meta_path.insert(0, Blocker())

folder = Path(sys.argv[1])
given = torch.load(folder / "wanted.pt")
for server in SERVERS:
    for form in ("plugin", "remote"):
        try:
            answer = resolved(folder / form, ["LlamaForCausalLM"], server)
        except Exception as error:
            answer = type(error).__name__
        print(f"{server} {form}: {answer}")
    found = packed(served(folder / "remote", server), given["sequences"])
    error = max(float((a - b).abs().max()) for a, b in zip(found, given["states"], strict=True))
    print(f"{server} difference {error}")
