"""Run as a script in a process that can't import hfpatch: opens checkpoints that were exported, and says how they are.

`opener.py FOLDER` reads FOLDER/cases.pt and writes FOLDER/answers.json.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "hfpatch/export"))
from fresh_process import Blocker, import_file

sys.path.pop()
measured = import_file("measure.outputs")


def load(case: dict[str, Any], folder: Path | str | None = None, auto: str | None = None) -> Any:
    cls = getattr(transformers, auto or case["auto"])
    model = cls.from_pretrained(folder or case["folder"], trust_remote_code=True)
    for parameter in model.parameters():  # mapped from a file it may lie unaligned, which moves the last bit
        parameter.data = parameter.data.clone()
    return model


def outputs(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """The outputs of one forward and, where it is asked for them, the stream after each layer."""
    with torch.no_grad():
        found = measured.Outputs.of(model(**given))
    layers = {f"{name} {i}": layer for name, stream in found.streams.items() for i, layer in enumerate(stream)}
    return {name: value.float() for name, value in (found.floats | layers).items()}


def difference(model: Any, case: dict[str, Any]) -> float:
    return measured.max_error(case["outputs"], outputs(model, case["inputs"]))


def opened(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One checkpoint: as the class that it was saved from, saved again from there, and as every other head."""
    model, again, code = load(case), folder / "again" / case["name"], "modeling_hfpatch.py"
    model.save_pretrained(again)
    found = {
        "module": type(model).__module__,
        "difference": difference(model, case),
        "again": difference(load(case, again), case),
        "keys": list(model.state_dict()) == case["keys"],
        "model_type": model.config.to_dict()["model_type"],
        "stored": json.loads((again / "config.json").read_text())["model_type"],
        "code": (again / code).read_text() == Path(case["folder"], code).read_text(),
    }
    others = json.loads(Path(case["folder"], "config.json").read_text())["auto_map"] if case["heads"] else {}
    others = [auto for auto in others if auto not in ("AutoConfig", case["auto"])]
    return found | {"heads": {auto: type(load(case, auto=auto)).__name__ for auto in others}}


# One model in many ways


def probe_copies(model: Any, case: dict[str, Any]) -> Any:
    return [difference(one, case) for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))]


def probe_from_config(model: Any, case: dict[str, Any]) -> Any:
    auto = getattr(transformers, case["auto"])
    config = transformers.AutoConfig.from_pretrained(case["folder"], trust_remote_code=True)
    fresh = auto.from_config(config, trust_remote_code=True).eval()
    values = fresh.transformer.h[0].ln_1.alpha.item()
    fresh.load_state_dict(model.state_dict())
    config.n_layer = 4
    deep = auto.from_config(config, trust_remote_code=True)
    norms = [type(module).__name__ for module in deep.modules()].count("DynamicTanh")
    return values, difference(fresh, case), norms


def probe_opened_config(model: Any, case: dict[str, Any]) -> Any:
    """A config that was opened beforehand gives the patched model, trusted or not."""
    auto = getattr(transformers, case["auto"])
    found = []
    for trust in ({}, {"trust_remote_code": True}):
        config = transformers.AutoConfig.from_pretrained(case["folder"], trust_remote_code=True)
        fresh = auto.from_config(config, **trust)
        fresh.load_state_dict(model.state_dict())
        for one in (fresh, auto.from_pretrained(case["folder"], config=config, **trust)):
            found.append(difference(one.eval(), case))
    return found


def probe_without_trust(model: Any, case: dict[str, Any]) -> Any:
    """In the process that has run the code before, too."""
    found = []
    for options in ({}, {"trust_remote_code": False}):
        for auto in ("AutoConfig", "AutoModel", case["auto"]):
            try:
                getattr(transformers, auto).from_pretrained(case["folder"], **options)
                found.append("opened")
            except ValueError as error:
                found.append("trust_remote_code" in str(error) or "hfpatch" in str(error))
    return found


def probe_host_with_patched_config(model: Any, case: dict[str, Any]) -> Any:
    """The host's class, which reads no config.json when it is given a config; the host's own config is the control."""
    found = []
    for config in (model.config, transformers.GPT2Config()):
        try:
            transformers.GPT2LMHeadModel.from_pretrained(case["folder"], config=config, ignore_mismatched_sizes=True)
            found.append("opened")
        except ValueError as error:
            found.append("open it with an Auto class" in str(error))
    return found


def probe_overridden_settings(model: Any, case: dict[str, Any]) -> Any:
    """One that the patch's norms don't read, one as it is on disk, and one that the host's own modules read."""
    auto, found, on_disk = getattr(transformers, case["auto"]), [], model.config.layer_norm_epsilon
    for changed in ({"layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": on_disk}, {"attn_pdrop": 0.5}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            auto.from_pretrained(case["folder"], trust_remote_code=True, **changed)
        found.append(any("which has no effect" in str(one.message) for one in caught))
    return found


def probe_another_version(model: Any, case: dict[str, Any]) -> Any:
    """A host whose modules have other names than when the file was written."""
    cls = type(model)
    host = cls.__mro__[-1 - cls.__mro__[::-1].index(transformers.GPT2LMHeadModel)]
    made = host.__init__

    def renamed(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        for block in self.transformer.h:
            block.norm_1 = block._modules.pop("ln_1")

    host.__init__ = renamed
    try:
        load(case)
        return "opened"
    except ValueError as error:
        return str(error)
    finally:
        host.__init__ = made


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Blocker())
    torch.set_num_threads(1)
    stored = torch.load(folder / "cases.pt", weights_only=True)

    def tried(do: Callable[..., Any], *given: Any) -> Any:
        try:
            return do(*given)
        except Exception:
            return traceback.format_exc(limit=-4)

    probes = {name.removeprefix("probe_"): do for name, do in globals().items() if name.startswith("probe_")}
    case = stored["probed"]
    answers = {
        "cases": {case["name"]: tried(opened, case, folder) for case in stored["cases"]},
        "controls": {case["name"]: tried(lambda one: difference(load(one), one), case) for case in stored["controls"]},
        "probes": {name: tried(lambda do: do(load(case), case), do) for name, do in probes.items() if case},
        "imported": sorted(name for name in sys.modules if name.partition(".")[0] == "hfpatch"),
    }
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
