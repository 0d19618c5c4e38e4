"""The fuzzer: a fixed sample in every run, all of it on request, and whether it sees what it looks for.

What a case must keep is in fuzz_requests.py and fuzz_files.py; anything else is a *finding*.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fuzz_files
import fuzz_requests
import pytest
from fuzz_models import FAMILIES, Finding
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hfpatch.core.transaction import Transaction


@dataclass(frozen=True)
class Kind:
    """A kind of cases: how they are drawn and checked, and how many are in the default run, or in all of the chunks.

    A check returns what became of the case, in a few words, or raises Finding.
    """

    cases: Callable[[tuple[str, ...]], st.SearchStrategy[Any]]
    check: Callable[[Any], list[str]]
    sample: int
    chunks: int
    size: int


KINDS = {
    "requests": Kind(fuzz_requests.cases, fuzz_requests.check, 5, 21, 100),
    "interrupts": Kind(fuzz_requests.interrupts, fuzz_requests.check, 1, 6, 20),
    "files": Kind(fuzz_files.cases, fuzz_files.check, 18, 21, 250),
}
QUIETLY: Any = {"database": None, "deadline": None, "suppress_health_check": HealthCheck}
PARTS = 20  # of the families; a chunk draws from one of them
FEW = ("bart", "gpt2", "gpt_neox", "llama", "roberta", "siglip_text_model", "vit")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_sample(name: str) -> None:
    kind = KINDS[name]

    @settings(max_examples=kind.sample, **QUIETLY)
    @given(kind.cases(FEW))
    def every(case: Any) -> None:
        kind.check(case)

    every()


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "number"), [(name, i) for name, kind in KINDS.items() for i in range(kind.chunks)])
def test_a_chunk(name: str, number: int) -> None:
    kind, became = KINDS[name], Counter[str]()

    @seed(number)
    @settings(max_examples=kind.size, **QUIETLY)
    @given(kind.cases(FAMILIES[number % PARTS :: PARTS]))
    def every(case: Any) -> None:
        became.update(kind.check(case))

    every()
    print(became.most_common())  # pytest -rP shows it
    assert len(became) > 1, "all of them came to the same"


def asked(*checks: str, dtype: str = "float32", **more: Any) -> fuzz_requests.Case:
    return fuzz_requests.Case("gpt2", False, dtype, ({"pos": "rope"},), frozenset(checks), **more)


class TestFailuresAreSeen:
    """Controls."""

    def test_a_patch_that_is_not_undone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = asked(strike=0.9)
        assert fuzz_requests.check(case) == ["restored to the bit", "no change", "ran"]
        monkeypatch.setattr(Transaction, "undo", lambda self, length=0: None)
        with pytest.raises(Finding, match=r"changed: .*call \d+ of \d+"):
            fuzz_requests.check(case)

    def test_a_warning_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = asked(dtype="float64")
        assert fuzz_requests.check(case) == ["approximate, with a warning", "ran"]
        monkeypatch.setattr("hfpatch.patch._warn", lambda *args: None)
        with pytest.raises(Finding, match="silent"):
            fuzz_requests.check(case)

    def test_an_error_of_another_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **how: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(fuzz_requests, "patch_model", fail)
        with pytest.raises(Finding, match="untyped: patch_model: ZeroDivisionError"):
            fuzz_requests.check(asked())

    def test_a_plan_that_changes_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = fuzz_requests.plan_patch

        def careless(model: Any, **how: Any) -> Any:
            model.wte.weight.data[0, 0] += 1
            return original(model, **how)

        monkeypatch.setattr(fuzz_requests, "plan_patch", careless)
        with pytest.raises(Finding, match=r"plan_patch.*wte"):
            fuzz_requests.check(asked("plan"))

    def test_another_function_from_a_config(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = fuzz_files.Case("llama", 0, fuzz_files.Setting(("rope_parameters", "rope_theta"), "500.0"))
        assert fuzz_files.check(case) == ["opened with a warning, other outputs"]
        monkeypatch.setattr("hfpatch.checkpoint.pretrained.ConfigFile.require_unchanged", lambda *_, **__: None)
        with pytest.raises(Finding, match="silent"):
            fuzz_files.check(case)

    def test_a_hang(self) -> None:
        def endless() -> None:
            while True:
                pass

        with pytest.raises(fuzz_files.TooLong), fuzz_files.guarded(0.05):
            endless()

    def test_code_that_is_run(self) -> None:
        with pytest.raises(fuzz_files.Forbidden, match=r"subprocess\.Popen"), fuzz_files.guarded():
            subprocess.run(["true"], check=False)

    @pytest.mark.slow
    def test_a_damage_that_the_full_check_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cases = (fuzz_files.Case("gpt2", 0, fuzz_files.Damage("zeros", number)) for number in range(200))
        passed = next(case for case in cases if "opened, changed" in fuzz_files.check(case)[0])
        monkeypatch.setattr(fuzz_files, "FULL", {"check_fingerprint": True})
        with pytest.raises(Finding, match="silent"):
            fuzz_files.check(passed)
