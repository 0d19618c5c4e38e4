"""What Python runs first in each process under `hfpatch run`: hfpatch is imported there right after transformers.

A process that doesn't import transformers imports nothing more. Written for any Python 3, since a command may start
one that isn't hfpatch's.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


class AfterTransformers:
    """A finder of modules by which the import of transformers ends with that of hfpatch."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """What the other finders find for transformers, with a loader that imports hfpatch as well."""
        if name != "transformers":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not cls and find is not None else None
            if spec is not None:
                loader, load = spec.loader, spec.loader.exec_module

                def load_both(module, load=load):  # type: ignore[no-untyped-def]
                    load(module)
                    _import_hfpatch()

                loader.exec_module = load_both  # of this one loader: a spec has one of its own
                return spec
        return None


def _import_hfpatch():  # type: ignore[no-untyped-def]
    """Import hfpatch, or say that this process can't: without it only checkpoints in other forms open."""
    try:
        import hfpatch  # noqa: F401
    except Exception as error:
        print(
            "hfpatch run: "
            + sys.executable
            + " can't import hfpatch ("
            + type(error).__name__
            + ": "
            + str(error)
            + "), "
            "so checkpoints that need it won't open here. Install hfpatch where this command is installed, or take "
            "the form for trust_remote_code.",
            file=sys.stderr,
        )


def _run_shadowed():  # type: ignore[no-untyped-def]
    """Run the environment's own sitecustomize, which Python doesn't see behind this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, AfterTransformers)
_run_shadowed()
