"""Run as a script in a process that can't import hfpatch: what servers make of checkpoints.

`server_opener.py FOLDER FORM ...` reads FOLDER/CASE/FORM and FOLDER/CASE/wanted.pt, and prints {case: {form: {server:
difference or reason}}} as its last line.
"""

from __future__ import annotations

import json
import site
import sys
from pathlib import Path

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))
site.addsitedir(str(Path(__file__).resolve().parent))

import torch
import transformers
from opener import Blocker
from server_backends import SERVERS, outcome

sys.meta_path.insert(0, Blocker())
torch.set_num_threads(1)

names = set(dir(transformers))
answers: dict[str, dict[str, dict[str, float | str]]] = {}
for file in sorted(Path(sys.argv[1]).glob("*/wanted.pt")):
    wanted, case = torch.load(file), file.parent
    answers[case.name] = {
        form: {server: outcome(case / form, server, wanted, names) for server in SERVERS}
        for form in sys.argv[2:]
        if (case / form).exists()
    }
print("\n" + json.dumps(answers))
