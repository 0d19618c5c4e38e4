"""Run as a script in a process that can't import hfpatch: opens checkpoints that were exported, and says how they are.

`opener.py FOLDER` reads FOLDER/cases.pt and writes FOLDER/answers.json.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


class Blocker(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "hfpatch":
            raise ModuleNotFoundError(f"{fullname} must not be needed here.")


def load(folder: Path | str, auto: str, **options: Any) -> Any:
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)
    for parameter in model.parameters():  # mapped from a file it may lie unaligned, which moves the last bit
        parameter.data = parameter.data.clone()
    return model


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if "past_key" not in key:
                yield from tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def outputs(model: Any, given: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return [value.float() for value in tensors(model(**given))]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    if len(a) != len(b) or not a:
        return float("inf")
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def opened(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One checkpoint: as the class that it was saved from, saved again from there, and as every other head."""
    model = load(case["folder"], case["auto"])
    again = folder / "again" / case["name"]
    model.save_pretrained(again)
    found = {
        "module": type(model).__module__,
        "difference": difference(outputs(model, case["inputs"]), case["outputs"]),
        "again": difference(outputs(load(again, case["auto"]), case["inputs"]), case["outputs"]),
        "keys": list(model.state_dict()) == case["keys"],
        "model_type": model.config.to_dict()["model_type"],
        "stored": json.loads((again / "config.json").read_text())["model_type"],
        "code": (again / "modeling_hfpatch.py").read_text()
        == (Path(case["folder"]) / "modeling_hfpatch.py").read_text(),
        "heads": {},
    }
    if not case["heads"]:
        return found
    found["hidden"] = difference(outputs(model, {**case["inputs"], "output_hidden_states": True}), case["hidden"])
    for auto in json.loads((Path(case["folder"]) / "config.json").read_text())["auto_map"]:
        if auto not in ("AutoConfig", case["auto"]):
            found["heads"][auto] = type(load(case["folder"], auto)).__name__
    return found


# One model in many ways


def probe_copies(model: Any, case: dict[str, Any]) -> Any:
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    return [difference(outputs(one, case["inputs"]), case["outputs"]) for one in copies]


def probe_from_config(model: Any, case: dict[str, Any]) -> Any:
    auto = getattr(transformers, case["auto"])
    config = transformers.AutoConfig.from_pretrained(case["folder"], trust_remote_code=True)
    fresh = auto.from_config(config, trust_remote_code=True).eval()
    values = fresh.transformer.h[0].ln_1.alpha.item()
    fresh.load_state_dict(model.state_dict())
    config.n_layer = 4
    deep = auto.from_config(config, trust_remote_code=True)
    norms = [type(module).__name__ for module in deep.modules()].count("DynamicTanh")
    return values, difference(outputs(fresh, case["inputs"]), case["outputs"]), norms


def probe_opened_config(model: Any, case: dict[str, Any]) -> Any:
    """A config that was opened beforehand gives the patched model, trusted or not."""
    auto = getattr(transformers, case["auto"])
    found = []
    for trust in ({}, {"trust_remote_code": True}):
        config = transformers.AutoConfig.from_pretrained(case["folder"], trust_remote_code=True)
        fresh = auto.from_config(config, **trust)
        fresh.load_state_dict(model.state_dict())
        for one in (fresh, auto.from_pretrained(case["folder"], config=config, **trust)):
            found.append(difference(outputs(one.eval(), case["inputs"]), case["outputs"]))
    return found


def probe_pipeline(model: Any, case: dict[str, Any]) -> Any:
    generate = transformers.pipeline("text-generation", model=case["folder"], trust_remote_code=True)
    return generate("w3 w4 w5", max_new_tokens=5, do_sample=False)[0]["generated_text"]


def probe_loading_info(model: Any, case: dict[str, Any]) -> Any:
    auto = getattr(transformers, case["auto"])
    _, info = auto.from_pretrained(case["folder"], trust_remote_code=True, output_loading_info=True)
    return not any(info.values())


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
        load(case["folder"], case["auto"])
        return "opened"
    except ValueError as error:
        return str(error)
    finally:
        host.__init__ = made


PROBES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    name.removeprefix("probe_"): value for name, value in globals().items() if name.startswith("probe_")
}


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Blocker())
    torch.set_num_threads(1)
    stored = torch.load(folder / "cases.pt", weights_only=True)
    answers: dict[str, Any] = {"cases": {}, "probes": {}, "controls": {}}

    def tried(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception:
            return traceback.format_exc(limit=-4)

    for case in stored["cases"]:
        answers["cases"][case["name"]] = tried(lambda case=case: opened(case, folder))
    for case in stored["controls"]:
        answers["controls"][case["name"]] = tried(
            lambda case=case: difference(outputs(load(case["folder"], case["auto"]), case["inputs"]), case["outputs"])
        )
    case = stored["probed"]
    for name, probe in PROBES.items() if case is not None else ():
        answers["probes"][name] = tried(lambda probe=probe: probe(load(case["folder"], case["auto"]), case))
    answers["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "hfpatch")
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
