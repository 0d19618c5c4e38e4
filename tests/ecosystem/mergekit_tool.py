"""Merges checkpoints with themselves by mergekit, in a Python of its own, and runs what it wrote.

python mergekit_tool.py FOLDER ...   # prints {folder: error or null}

Reads FOLDER/asked.pt (an Auto class, tokens), and writes FOLDER-merged and FOLDER/found.pt, the first output of that.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from mergekit.scripts.run_yaml import main

MERGE = {"merge_method": "linear", "parameters": {"weight": 0.5}, "dtype": "float32"}


def merge(folder: Path) -> None:
    twin, out, settings = (folder.with_name(f"{folder.name}-{end}") for end in ("twin", "merged", "merge.yml"))
    shutil.copytree(folder, twin)
    settings.write_text(json.dumps({"models": [{"model": str(folder)}, {"model": str(twin)}], **MERGE}))
    main.main([str(settings), str(out), "--trust-remote-code"], standalone_mode=False)
    auto, tokens = torch.load(folder / "asked.pt")
    model = getattr(transformers, auto).from_pretrained(out, trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(input_ids=tokens)[0], folder / "found.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    failed: dict[str, str | None] = {}
    for name in sys.argv[1:]:
        try:
            merge(Path(name))
        except (Exception, SystemExit) as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            failed[name] = None
    print("\nRESULT " + json.dumps(failed), flush=True)
