"""Source text of definitions and of all that they need, taken from the files they stand in: nothing is rewritten.

Names are followed through a file's imports until they leave the package. Of a class those methods are left out that
nothing calls; of annotations those names that nothing else needs.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import keyword
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..core.scheme import Scheme
from ..runtime.errors import UnsupportedError
from .spelling import WIDTH

Key = tuple[str, str]  # a module's full name, and a name that is defined there
_PACKAGE = __name__.partition(".")[0]
_ALLOWED = {"torch", "transformers", *sys.stdlib_module_names}
_RUNS_ITSELF = {"__new__", "__init__", "__call__", "__getattr__", "__setattr__", "__getitem__", "__iter__", "__len__"}
_RUNS_ITSELF |= {"__init_subclass__", "__reduce_ex__"}
# what plans, records and command lines ask of a scheme; a model that runs doesn't
_OF_RECORDS = {"registry", "name", "to_json", "from_json", "resolve", "settled", "for_lengths", "check", "build"}
_OF_RECORDS |= {"build_bias", "__post_init__", "__hash__", "loss", "attends"}


@dataclass(frozen=True)
class Import:
    """`import module as name`, or `from module import attribute as name`."""

    name: str
    module: str
    attribute: str | None = None


class File:
    """One module's source, and what its top-level names stand for."""

    def __init__(self, module: str):
        self.module = module
        loaded = importlib.import_module(module)
        self.text = inspect.getsource(loaded)
        self.is_package = hasattr(loaded, "__path__")
        self.tree = ast.parse(self.text)
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.nodes: dict[str, ast.stmt] = {}
        self.together: dict[str, str] = {}  # names that one statement assigns, and the first of them
        self.imports: dict[str, Import] = {}
        for node in self.tree.body:
            self._enter(node)

    def _enter(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [one for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            self.nodes.update((target.id, node) for target in targets[:1])
            self.together.update((target.id, targets[0].id) for target in targets)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self.nodes[node.target.id] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.imports[name] = Import(name, alias.name if alias.asname else name)
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                name = alias.asname or alias.name
                self.imports[name] = Import(name, base, alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.module.split(".")
        up = node.level - 1 if self.is_package else node.level
        return ".".join([*here[: len(here) - up], *(node.module or "").split(".")]).strip(".")

    @property
    def heading(self) -> str:
        """Comment lines with the file's path and what its docstring begins with."""
        subject = (ast.get_docstring(self.tree) or "").partition("\n\n")[0].rstrip(".:")
        lines = textwrap.wrap(f"{self.module.replace('.', '/')}.py: {subject}", WIDTH - 2)
        return "\n".join(f"# {line}" for line in lines)

    def offset(self, line: int, column: int) -> int:
        """Of a place as ast gives it: lines from 1, columns in bytes."""
        text = self.text[self.starts[line - 1] : self.starts[line]]
        return self.starts[line - 1] + len(text.encode()[:column].decode())


@functools.cache
def _file(module: str) -> File:
    return File(module)


def defined(value: Any) -> Key:
    """Where a class or function is defined.

    Raises:
        UnsupportedError: inside a function, or in a session, where its source can't be taken.
    """
    module, name = value.__module__, value.__qualname__
    try:
        known = "." not in name and name in _file(module).nodes
    except (OSError, TypeError, SyntaxError, ImportError) as error:
        raise _no_source(module, name, repr(error)) from error
    if not known:
        raise _no_source(module, name, "it isn't defined at the top of a file")
    return module, name


def _no_source(module: str, name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} of {module} can't be written into a modeling file: {why}. Define it in a module of its own, which "
        "needs torch and hfpatch alone, or publish the checkpoint for hfpatch."
    )


@dataclass
class Extract:
    """The definitions that roots need, as source text.

    Args:
        roots: where they are defined.
        attributes: names of methods and attributes that are used from outside.
        taken: names that definitions must not have.
        whole: classes of which every member is kept.
    """

    roots: list[Key]
    attributes: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    whole: set[Key] = field(default_factory=set)
    kept: dict[Key, None] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attributes = set(self.attributes)
        for root in self.roots:
            self.kept[root] = None
        size = -1
        while size != len(self.kept) + len(self.attributes) + len(self.imports):  # each of them only grows
            size = len(self.kept) + len(self.attributes) + len(self.imports)
            for key in list(self.kept):
                self._follow(key)
        self._follow_annotations()
        self._name()

    # what is needed

    def _follow(self, key: Key) -> None:
        for node in self._parts(key):
            for inner in _walk(node):
                if isinstance(inner, ast.Attribute):
                    self.attributes.add(inner.attr)
                elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value.isidentifier():
                    self.attributes.add(inner.value)  # getattr(lens, "finish", None)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                    self._need(key, inner.id)

    def _need(self, where: Key, name: str) -> None:
        found = self._resolve(where[0], name)
        if isinstance(found, Import):
            root = found.module.partition(".")[0]
            if root not in _ALLOWED:
                raise _no_source(*where, f"it needs {root}")
            clash = self.imports.setdefault(found.name, found)
            if clash != found:
                raise _no_source(*where, f"{found.name} stands for several things")
        elif found is not None:
            self.kept.setdefault(found)

    def _resolve(self, module: str, name: str) -> Key | Import | None:
        """What a name of a module stands for; None for built-in and local names."""
        file = _file(module)
        name = file.together.get(name, name)
        if name in file.nodes:
            return module, name
        if name not in file.imports:
            return None
        found = file.imports[name]
        root = found.module.partition(".")[0]
        if root != _PACKAGE and root != module.partition(".")[0]:
            return found
        if root in _ALLOWED or found.attribute is None:
            return found
        return self._resolve(found.module, found.attribute) or (found.module, found.attribute)

    def _parts(self, key: Key) -> Iterator[ast.AST]:
        """The nodes of a definition that are kept, without its annotations."""
        node = _file(key[0]).nodes[key[1]]
        if not isinstance(node, ast.ClassDef):
            yield node
            return
        yield from (*node.bases, *node.keywords, *self._decorators(node))
        for member in node.body:
            if self._keeps(key, member):
                yield member

    def _decorators(self, node: ast.ClassDef | ast.FunctionDef) -> list[ast.expr]:
        return [one for one in node.decorator_list if not _registers(one)]

    def _keeps(self, key: Key, member: ast.stmt) -> bool:
        """Whether a member of a class is needed."""
        if key in self.whole:
            return True
        cls = getattr(importlib.import_module(key[0]), key[1])
        if isinstance(member, ast.FunctionDef):
            name = member.name
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            name = member.target.id
            if dataclasses.is_dataclass(cls) and name in {field.name for field in dataclasses.fields(cls)}:
                return True
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            name = member.targets[0].id
        else:
            return isinstance(member, ast.Expr)  # the docstring
        if issubclass(cls, Scheme) and name in _OF_RECORDS:
            return False
        if issubclass(cls, nn.Module) and _is_property(member):
            return True  # hosts may read it of what stands in their module's place
        if name in _RUNS_ITSELF or name in self.attributes:
            return not self._overridden(cls, name)
        return any(hasattr(base, name) for base in cls.__mro__[1:] if not _ours(base) and base is not object)

    def _overridden(self, cls: type, name: str) -> bool:
        """Whether every class that is kept and derives from this scheme has a method of its own."""
        if not issubclass(cls, Scheme):
            return False
        classes = [getattr(importlib.import_module(module), name_, None) for module, name_ in self.kept]
        below = [one for one in classes if isinstance(one, type) and issubclass(one, cls) and one is not cls]
        leaves = [one for one in below if not any(issubclass(other, one) and other is not one for other in below)]
        return bool(leaves) and all(
            any(name in vars(b) for b in one.__mro__[: one.__mro__.index(cls)]) for one in leaves
        )

    def _follow_annotations(self) -> None:
        """Names in annotations: those from outside are imported, short names of types are kept; others become Any."""
        for key in list(self.kept):
            for _, name in self._annotated(key):
                found = self._resolve(key[0], name.id)
                if isinstance(found, Import):
                    self._need(key, name.id)
                elif found is not None and found not in self.kept:
                    if self._is_alias(found):
                        self.kept.setdefault(found)
                        self._follow(found)
                    else:
                        self.imports.setdefault("Any", Import("Any", "typing", "Any"))

    def _is_alias(self, key: Key) -> bool:
        node = _file(key[0]).nodes[key[1]]
        if not isinstance(node, ast.Assign):
            return False
        names = [inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)]
        return all(hasattr(builtins, name) or isinstance(self._resolve(key[0], name), Import) for name in names)

    def _annotated(self, key: Key) -> Iterator[tuple[ast.expr, ast.Name]]:
        for part in self._parts(key):
            for annotation in _annotations(part):
                for inner in ast.walk(annotation):
                    if isinstance(inner, ast.Name):
                        yield annotation, inner

    def _name(self) -> None:
        taken = {*self.imports, *self.taken, *keyword.kwlist}
        for module, name in self.kept:
            free = name
            while free in taken:
                free = f"{free}_{module.rpartition('.')[2]}"
            taken.add(free)
            self.names[module, name] = free

    # its text

    def text(self) -> str:
        """The definitions, each after what must be there when it is made, under the subjects of their files."""
        pieces, last = [], None
        for key in self._ordered():
            if key[0] != last:
                pieces.append(_file(key[0]).heading)
                last = key[0]
            pieces.append(self._cut(key))
        return _spaced(pieces)

    def _ordered(self) -> Iterator[Key]:
        ranks = {module: rank for rank, module in enumerate(_modules(key[0] for key in self.kept))}
        keys = sorted(self.kept, key=lambda key: (ranks[key[0]], _file(key[0]).nodes[key[1]].lineno))
        done: dict[Key, None] = {}

        def visit(key: Key) -> Iterator[Key]:
            if key in done:
                return
            done[key] = None
            for name in self._made_with(key):
                found = self._resolve(key[0], name)
                if isinstance(found, tuple):
                    yield from visit(found)
            yield key

        for key in keys:
            yield from visit(key)

    def _made_with(self, key: Key) -> Iterator[str]:
        """Names that are read when a definition is made, not later when it runs."""
        for part in self._parts(key):
            reads: list[Any] = [part]
            if isinstance(part, ast.FunctionDef):
                reads = [*part.decorator_list, *part.args.defaults, *part.args.kw_defaults]
            elif isinstance(part, ast.AnnAssign):
                reads = [part.value]
            for node in filter(None, reads):
                yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))

    def _cut(self, key: Key) -> str:
        file, node = _file(key[0]), _file(key[0]).nodes[key[1]]
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        start, end = file.starts[first - 1], file.offset(node.end_lineno or 0, node.end_col_offset or 0)
        cuts = [(start, end, "")][:0]
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            cuts += [self._line(file, one) for one in node.decorator_list if _registers(one)]
        if isinstance(node, ast.ClassDef):
            kept = [member for member in node.body if self._keeps(key, member)]
            cuts += [self._member(file, node, member) for member in node.body if member not in kept]
            if not kept:
                cuts.append((end, end, "\n    pass"))
            cuts += self._shortened(key, node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            end = file.starts[node.end_lineno or 0] - 1  # with the comment behind it
        cuts += self._renamings(key)
        text, at = "", start
        for begin, stop, new in sorted(cuts):
            if begin >= at:
                text += file.text[at:begin] + new
                at = stop
        return (text + file.text[at:end]).rstrip()

    def _shortened(self, key: Key, node: ast.ClassDef) -> Iterator[tuple[int, int, str]]:
        """Of a scheme's docstring the first paragraph: the rest tells those who choose its options."""
        file, cls = _file(key[0]), getattr(importlib.import_module(key[0]), key[1])
        first = node.body[0]
        if issubclass(cls, Scheme) and isinstance(first, ast.Expr):
            start, end = (
                file.offset(first.lineno, first.col_offset),
                file.offset(first.end_lineno or 0, first.end_col_offset or 0),
            )
            paragraph, _, rest = file.text[start:end].partition("\n\n")
            if rest:
                yield start, end, f'{paragraph.rstrip()}"""'

    @staticmethod
    def _line(file: File, node: ast.expr) -> tuple[int, int, str]:
        return file.starts[node.lineno - 1], file.starts[node.end_lineno or 0], ""

    @staticmethod
    def _member(file: File, cls: ast.ClassDef, member: ast.stmt) -> tuple[int, int, str]:
        """A member with its decorators and the empty lines before it."""
        first = min([member.lineno, *(one.lineno for one in getattr(member, "decorator_list", []))])
        lines = file.text.splitlines()
        while first > cls.lineno + 1 and (not lines[first - 2].strip() or lines[first - 2].lstrip().startswith("#")):
            first -= 1
        return file.starts[first - 1], file.starts[member.end_lineno or 0], ""

    def _renamings(self, key: Key) -> Iterator[tuple[int, int, str]]:
        file, node = _file(key[0]), _file(key[0]).nodes[key[1]]
        annotated = {id(name) for _, name in self._annotated(key)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                found = self._resolve(key[0], inner.id)
                new = self.names.get(found) if isinstance(found, tuple) else None
                if file.together.get(inner.id, inner.id) != inner.id:
                    new = inner.id
                if isinstance(found, tuple) and new is None and id(inner) in annotated:
                    new = "Any"
                if new not in (None, inner.id):
                    start = file.offset(inner.lineno, inner.col_offset)
                    yield start, start + len(inner.id), str(new)
        if self.names[key] != key[1] and isinstance(node, ast.ClassDef | ast.FunctionDef):
            word = "class " if isinstance(node, ast.ClassDef) else "def "
            start = file.text.index(word, file.starts[node.lineno - 1]) + len(word)
            yield start, start + len(key[1]), self.names[key]


def import_lines(imports: Iterable[Import]) -> list[str]:
    """Import statements, the standard library's first, one for each module."""
    whole = [one for one in imports if one.attribute is None]
    parts: dict[str, set[str]] = {}
    for one in imports:
        if one.attribute is not None:
            alias = one.attribute if one.attribute == one.name else f"{one.attribute} as {one.name}"
            parts.setdefault(one.module, set()).add(alias)
    lines = [
        (f"import {one.module}" + (f" as {one.name}" if one.name != one.module else ""), one.module) for one in whole
    ]
    lines += [
        (f"from {module} import {', '.join(sorted(names, key=_constants_first))}", module)
        for module, names in parts.items()
    ]
    standard = sorted(
        {line for line, module in lines if module.partition(".")[0] in sys.stdlib_module_names}, key=_plain_first
    )
    others = sorted({line for line, _ in lines} - set(standard), key=_plain_first)
    return [*standard, *([""] if standard and others else []), *others]


def _plain_first(line: str) -> tuple[bool, str]:
    return not line.startswith("import "), line


def _constants_first(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[:1].isupper(), name


def _modules(modules: Iterable[str]) -> list[str]:
    """Modules of a package, each after those that it imports."""
    wanted, found = dict.fromkeys(modules), {}

    def visit(module: str) -> None:
        if module in found or module.partition(".")[0] in _ALLOWED:
            return
        found[module] = module in wanted
        try:
            file = _file(module)
        except (OSError, TypeError, ImportError):
            return
        roots = {_PACKAGE, module.partition(".")[0]}
        for one in file.imports.values():
            if one.module.partition(".")[0] in roots:
                visit(one.module)
        found[module] = found.pop(module)

    for module in wanted:
        visit(module)
    return [module for module, asked in found.items() if asked]


def _registers(decorator: ast.expr) -> bool:
    """Whether a decorator only enters a scheme in a registry."""
    called = isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)
    return called and decorator.func.attr == "register"  # type: ignore[attr-defined]


def _is_property(member: ast.stmt) -> bool:
    decorators = getattr(member, "decorator_list", [])
    return any(isinstance(one, ast.Name) and one.id == "property" for one in decorators)


def _ours(base: type) -> bool:
    return base.__module__.partition(".")[0] not in _ALLOWED


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    for inner in ast.walk(node):
        for name in ("annotation", "returns"):
            found = getattr(inner, name, None)
            if isinstance(found, ast.expr):
                yield found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree but those of annotations and decorators that only register."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST) and not (name == "decorator_list" and _registers(item)):  # type: ignore[arg-type]
                yield from _walk(item)


def _spaced(pieces: list[str]) -> str:
    """Definitions two empty lines apart; constants of one file stay together."""
    text = ""
    for i, piece in enumerate(pieces):
        plain = [not one.startswith(("def ", "class ", "@", "#")) for one in (pieces[i - 1], piece)]
        if i:
            text += "\n" if plain[1] and (plain[0] or pieces[i - 1].startswith("#")) else "\n\n\n"
        text += piece
    return text + "\n"
