"""Read the contents of Python objects, so that they can be compared and restored later.

An object is either a value, which is compared directly, or it has parts: fixed data, such as the bits of a tensor or
the code of a function, and named children. The children of objects of Python classes are their attributes, regardless
of how their classes define pickling; those of built-in containers are their entries; those of other C objects are the
data that copying would copy. Objects without any of these, such as a file or an object of a C++ library, cannot be
compared.
"""

import copy
import dis
import enum
import functools
import gc
import itertools
import logging
import pathlib
import re
import struct
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._contextlib import _DecoratorContextManager


class Incomparable(TypeError):
    """The object has no parts that could be compared."""


@dataclass
class Parts:
    """Contents of an object at the time it was read.

    Attributes:
        fixed: data that is compared by ==.
        children: (label, object) in order; labels are parts of a path, such as ".name" and "[0]".
        restore: function that restores the object to the state in which it was read; None if there is nothing to do.
        spare: for an object that cannot be restored, such as an iterator, a copy that replaces it.
    """

    fixed: Any = None
    children: list[tuple[str, Any]] = field(default_factory=list)
    restore: Callable[[Callable[[Any], Any]], None] | None = None
    spare: Any = None


# Maps a child to the object to restore: an iterator that has advanced is replaced by its copy.
Replace = Callable[[Any], Any]

_VALUES = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType)
_INERT = (
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    *_DESCRIPTORS,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.jit.ScriptFunction,  # TorchScript has no globals that could change
    re.Pattern,
    np.dtype,
    np.ufunc,
)
# Objects of these classes have no state that matters, if their class is one of a library.
_INERT_IN_LIBRARIES = (
    _DecoratorContextManager,  # no_grad and similar contexts store the previous setting when they are entered
    torch.autocast,
    pathlib.PurePath,  # caches its string on first use
    logging.Handler,
    enum.Enum,
)
# State in these modules does not affect results: torch.compile, for example, caches compiled code.
_INERT_MODULES = ("typing.", "torch._library.", "torch.library.", "torch._dynamo.")
_PACKAGES = ("torch", "numpy", "onelip")
_STANDARD = sysconfig.get_path("stdlib")


def is_value(obj: Any) -> bool:
    """Whether the object has no parts: it is compared by `same_value`."""
    kind = type(obj)
    if kind in _VALUES or isinstance(obj, _INERT):
        return True
    if f"{kind.__module__}.".startswith(_INERT_MODULES) and not isinstance(obj, nn.Module):  # torch.compile(model)
        return True
    if isinstance(obj, types.ModuleType):
        return _is_of_library(vars(obj))
    if isinstance(obj, _INERT_IN_LIBRARIES):
        return is_library(kind.__module__, kind.__qualname__, kind)
    return isinstance(obj, type) and is_library(obj.__module__, obj.__qualname__, obj)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are identical bit for bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return struct.pack("dd", one.real, one.imag) == struct.pack("dd", other.real, other.imag)
    return isinstance(one, (*_VALUES, torch.device, pathlib.PurePath, np.dtype)) and bool(one == other)


def is_library(module: Any, name: str, obj: Any) -> bool:
    """Whether an object belongs to Python, torch, numpy or onelip, which are known to keep no state in it."""
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    if found is None or not _is_of_library(vars(found)):
        return False
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj


def _is_of_library(scope: dict[str, Any]) -> bool:
    """Whether a namespace is that of a module of Python, torch, numpy or onelip.

    A module of the user may have the name of one of the standard library, so the place of its file decides.
    """
    name = str(scope.get("__name__"))
    top = name.partition(".")[0]
    if top in _PACKAGES:
        return True
    if top not in sys.stdlib_module_names or name == "__main__" or vars(sys.modules.get(name, object)) is not scope:
        return False
    file = scope.get("__file__")
    return file is None or (str(file).startswith(_STANDARD) and "-packages" not in str(file))


class Copies:
    """Copies of the numbers of tensors. Equal tensors share one, such as the weights of a model and of its copies.

    Args:
        outer: further copies that can be shared.
    """

    def __init__(self, outer: "Iterable[Copies]" = ()) -> None:
        self._by_sample = {key: values for copies in outer for key, values in copies._by_sample.items()}

    def of(self, values: Tensor) -> Tensor:
        """Return a copy, which must not be written."""
        if values.numel() < 1024:
            return values.clone()
        bits = _integers(values)
        sample = bits[:: len(bits) // 16].tolist()
        key = (values.shape, values.dtype, values.device, *sample)
        known = self._by_sample.get(key)
        if known is None or not torch.equal(bits, _integers(known)):
            known = self._by_sample[key] = values.clone()
        return known


def parts_of(obj: Any, keep: Copies | None = None) -> Parts:
    """Return the parts of an object that is not a value.

    Args:
        obj: the object.
        keep: where to copy numbers, so that the parts stay valid when the object changes; None does not copy them.

    Raises:
        Incomparable: if it has none.
    """
    for kind, read in _READERS:
        if isinstance(obj, kind):
            return read(obj, keep)
    return _object(obj, keep)


class _Bits:
    """The bits and properties of a tensor."""

    def __init__(self, tensor: Tensor, keep: Copies | None = None) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.facts: tuple[Any, ...] = (tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)
            self.values: Tensor | None = None
            if is_lazy(tensor):
                return
            self.facts = (tensor.shape, *self.facts)
            if not tensor.is_meta:
                if tensor.layout != torch.strided or tensor.is_quantized:
                    raise Incomparable("sparse and quantised tensors are not supported")
                values = tensor.detach().resolve_conj().resolve_neg()
                self.values = values if keep is None else keep.of(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Bits) or self.facts != other.facts or (self.values is None) != (other.values is None):
            return False
        if self.values is None or other.values is None:
            return True
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return torch.equal(_integers(self.values), _integers(other.values))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _integers(tensor: Tensor) -> Tensor:
    """The same bits as integers, so that NaN equals NaN and -0 differs from 0."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensor(tensor: Tensor, keep: Copies | None) -> Parts:
    bits = _Bits(tensor, keep)
    own: Any = tensor.__dict__
    attributes = dict(own)
    grad = tensor.grad if tensor.is_leaf else None  # asked of others, torch warns
    memory = (
        tensor.data if keep is not None and bits.values is not None else None
    )  # the storage, even if .data is replaced

    def restore(replace: Replace) -> None:
        _refill(own, attributes, replace)
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad
        if memory is None or (_Bits(tensor) == bits and tensor.data_ptr() == memory.data_ptr()):
            return
        with torch.no_grad():
            memory.copy_(bits.values)  # pyright: ignore[reportArgumentType]
            tensor.data = memory  # neither write changes the version counter, so autograd graphs stay valid
            tensor.requires_grad_(bits.facts[-1])

    return Parts(bits, [(f".{name}", value) for name, value in attributes.items()] + [(".grad", grad)], restore)


def _array(array: np.ndarray, keep: Copies | None) -> Parts:
    if array.dtype.hasobject:
        return Parts((array.shape, str(array.dtype)), [(f"[{i}]", x) for i, x in enumerate(array.flat)])
    saved = array if keep is None else array.copy()

    def restore(replace: Replace) -> None:
        if array.flags.writeable and array.shape == saved.shape and array.tobytes() != saved.tobytes():
            array[...] = saved

    return Parts((array.shape, str(array.dtype), array.tobytes()), [], restore)


def _generator_of_torch(generator: torch.Generator, keep: Copies | None) -> Parts:
    state = generator.get_state()
    return Parts(state.numpy().tobytes(), [], lambda replace: generator.set_state(state) and None)


def _running_generator(generator: Any, keep: Copies | None) -> Parts:
    """Position and local variables of a Python generator, which cannot be restored."""
    frame = generator.gi_frame
    if frame is None:
        return Parts("ended")
    inner = [(" (yield from)", generator.gi_yieldfrom)]  # the position in `yield from` is that of the inner iterator
    return Parts(frame.f_lasti, inner + [(f" (local {name})", value) for name, value in frame.f_locals.items()])


def _function(function: types.FunctionType, keep: Copies | None) -> Parts:
    children: list[tuple[str, Any]] = [("()", function.__defaults__), ("()", function.__kwdefaults__)]
    children += [(f".{name}", value) for name, value in function.__dict__.items()]
    cells = function.__closure__ or ()
    children += [(f" (closure {name})", c) for name, c in zip(function.__code__.co_freevars, cells, strict=True)]
    if not _is_of_library(function.__globals__):
        children.append(("", Globals(function)))
    kept = function.__defaults__, function.__kwdefaults__, dict(function.__dict__)

    def restore(replace: Replace) -> None:
        function.__defaults__, function.__kwdefaults__ = kept[:2]
        _refill(function.__dict__, kept[2], replace)

    return Parts((id(function.__code__), id(function.__globals__)), children, restore)


# Names that the import system stores in a module.
_MODULE_FIELDS = {"__builtins__", "__cached__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}


class Globals:
    """The global names used by the code of a function."""

    def __init__(self, function: types.FunctionType) -> None:
        self.scope = function.__globals__
        names, self.escaping, imported = _names(function.__code__)
        # Other methods, such as one that builds models from a file, often do this and are not run in a call.
        is_run = function.__name__ in ("forward", "__call__")
        if is_run and (names & {"import_module", "__import__"} or {"sys", "modules"} <= names):
            raise Incomparable("its code looks up modules by name")
        package = self.scope.get("__package__") or ""
        self.imported = [found for name in imported for found in _imported(name, package)]
        # Code that reads the namespace itself may use every name.
        self.names = sorted(self.scope.keys() - _MODULE_FIELDS if names & {"globals", "exec", "eval"} else names)

    def places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield (label, namespace, name) of each existing name, and of the names used in modules of the user."""
        seen: set[int] = set()
        for name in self.names:
            if name in self.scope and (name in self.escaping or not isinstance(self.scope[name], types.ModuleType)):
                yield f" (global {name})", self.scope, name
            elif name in self.scope:
                yield from self._inside(self.scope[name], seen)
        for module in self.imported:
            yield from self._inside(module, seen)

    def _inside(self, module: types.ModuleType, seen: set[int]) -> Iterator[tuple[str, dict[str, Any], str]]:
        inside = vars(module)
        if id(module) in seen or _is_of_library(inside):
            return
        seen.add(id(module))
        for name in self.names:
            if isinstance(inside.get(name), types.ModuleType):
                yield from self._inside(inside[name], seen)
            elif name in inside:
                yield f" (global {module.__name__}.{name})", inside, name


@functools.lru_cache(maxsize=10_000)
def _names(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """Names that code uses, globals that it uses otherwise than for an attribute, and modules that it imports."""
    names, escaping, imported = set(code.co_names), set[str](), set[str]()
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
    attributes = [step for step in steps if step.opname.endswith(("_ATTR", "_METHOD"))]
    for step, following in itertools.zip_longest(steps, steps[1:]):
        if step.opname == "IMPORT_NAME":
            imported.add(str(step.argval))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and following not in attributes:
            escaping.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for mine, inner in zip((names, escaping, imported), _names(constant), strict=True):
                mine |= inner
    return names, escaping, imported


def _imported(name: str, package: str) -> Iterator[types.ModuleType]:
    """The modules of an import statement, absolute or relative to a package."""
    parents = [package.rsplit(".", i)[0] for i in range(package.count(".") + 1)] if package else []
    for path in (name, *(f"{parent}.{name}".rstrip(".") for parent in parents)):
        for length in range(path.count(".") + 1):
            found = sys.modules.get(path.rsplit(".", length)[0])
            if isinstance(found, types.ModuleType):
                yield found


def _module(module: types.ModuleType, keep: Copies | None) -> Parts:
    """All names of a module of the user that is stored in an object, or passed on."""
    scope = vars(module)
    saved = {name: value for name, value in scope.items() if not name.startswith("__")}

    def restore(replace: Replace) -> None:
        for name, value in saved.items():
            if scope.get(name) is not replace(value):
                scope[name] = replace(value)

    return Parts(None, [(f" (global {module.__name__}.{name})", value) for name, value in saved.items()], restore)


def _globals(names: Globals, keep: Copies | None) -> Parts:
    places = [(label, scope, name, scope[name]) for label, scope, name in names.places()]

    def restore(replace: Replace) -> None:
        for _, scope, name, value in places:
            if scope.get(name) is not replace(value):
                scope[name] = replace(value)

    return Parts(None, [(label, value) for label, _, _, value in places], restore)


def _method(method: types.MethodType, keep: Copies | None) -> Parts:
    return Parts(None, [(".__self__", method.__self__), (".__func__", method.__func__)])


def _cell(cell: types.CellType, keep: Copies | None) -> Parts:
    try:
        content = cell.cell_contents
    except ValueError:  # empty
        return Parts("empty")

    def restore(replace: Replace) -> None:
        cell.cell_contents = replace(content)

    return Parts(None, [("", content)], restore)


def _partial(partial: functools.partial, keep: Copies | None) -> Parts:
    _, _, (function, arguments, keywords, attributes) = partial.__reduce__()[:3]  # pyright: ignore
    children = [(".func", function), (".args", arguments), (".keywords", keywords), (".__dict__", attributes)]
    return Parts(None, children)


def _reference(reference: weakref.ref, keep: Copies | None) -> Parts:
    return Parts(None, [("()", reference())])


def _bound(function: Any, keep: Copies | None) -> Parts:
    """A function of C, or a method of an object of C such as `[].pop`."""
    owner = getattr(function, "__self__", None)
    is_alone = owner is None or isinstance(owner, types.ModuleType)
    return Parts(function.__name__, [] if is_alone else [(".__self__", owner)])


def _context_variable(variable: ContextVar, keep: Copies | None) -> Parts:
    value = variable.get(None)

    def restore(replace: Replace) -> None:
        if variable.get(None) is not replace(value):
            variable.set(replace(value))

    return Parts(None, [("()", value)], restore)


def _thread_local(local: threading.local, keep: Copies | None) -> Parts:
    attributes = local.__dict__
    saved = dict(attributes)
    children = [(f".{name}", value) for name, value in saved.items()]
    return Parts(None, children, lambda replace: _refill(attributes, saved, replace))


def _logger(logger: logging.Logger, keep: Copies | None) -> Parts:
    """The attributes that a user has added to a logger; its own do not change results."""
    own = vars(logging.Logger(""))
    return Parts(None, [(f".{name}", value) for name, value in vars(logger).items() if name not in own])


def _fx_graph(graph: torch.fx.Graph, keep: Copies | None) -> Parts:
    return Parts(str(graph))


def _cached_function(function: Any, keep: Copies | None) -> Parts:
    """The function, and the results that it holds, which only the garbage collector shows."""
    held = [function.__wrapped__]
    if not _is_of_library(getattr(function.__wrapped__, "__globals__", {})):
        for found in gc.get_referents(function):
            held += found.values() if type(found) is dict else [found]
    # Each by its identity: which result was used last decides the order. The links between results have no contents.
    children = {f" (result {id(x):#x})": x for x in held if not isinstance(x, type) and "lru_list" not in str(type(x))}
    return Parts(None, sorted(children.items()))


def _wrapper(wrapper: Any, keep: Copies | None) -> Parts:
    names = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")
    return Parts(None, [(f".{name}", inner) for name in names if (inner := getattr(wrapper, name, None)) is not None])


def _lock(lock: Any, keep: Copies | None) -> Parts:
    return Parts(re.sub(r" at 0x\w+|owner=\d+", "", repr(lock)))


# Names that Python itself stores in a class.
_CLASS_FIELDS = frozenset(
    f"__{name}__"
    for name in (
        *("dict", "weakref", "doc", "module", "qualname", "slots", "abstractmethods", "annotations", "parameters"),
        *("annotations_cache", "annotate_func", "orig_bases", "match_args", "hash", "firstlineno", "type_params"),
        *("static_attributes", "classcell", "dataclass_fields", "dataclass_params"),
    )
) | {"_abc_impl"}


def _class(kind: type, keep: Copies | None) -> Parts:
    """Attributes and bases of a user-defined class."""
    own = {name: value for name, value in vars(kind).items() if name not in _CLASS_FIELDS}

    def restore(replace: Replace) -> None:
        now = vars(kind)
        for name in [name for name in now if name not in own and name not in _CLASS_FIELDS]:
            type.__delattr__(kind, name)
        for name, value in own.items():
            if now.get(name) is not replace(value):
                type.__setattr__(kind, name, replace(value))

    children = [(f".{name}", value) for name, value in own.items()]
    if not is_value(type(kind)):
        children.append((f" (metaclass {type(kind).__name__})", type(kind)))
    return Parts(None, children + [(f".{base.__name__}", base) for base in kind.__bases__], restore)


def _object(obj: Any, keep: Copies | None) -> Parts:
    """Attributes, slots, and the contents of the built-in type that the class derives from."""
    kind = type(obj)
    restores: list[Callable[[Replace], None]] = []
    children: list[tuple[str, Any]] = []
    fixed: Any = None
    with_state = [base for base in kind.__mro__ if base is not object and _is_of_c(base)]
    if with_state:
        fixed = _built_in(obj, with_state[0], children, restores)
    attributes = _attributes(obj)
    if attributes is not None:
        saved = dict(attributes)
        children += [(f".{name}", value) for name, value in saved.items()]
        restores.append(lambda replace: _refill(attributes, saved, replace))
    for owner, name in _slots(kind):
        slot = vars(owner)[name]
        try:
            value = slot.__get__(obj, kind)
        except AttributeError:
            continue
        children.append((f".{name}", value))
        restores.append(functools.partial(_set_slot, slot, obj, value))
    if not is_value(kind):
        children.append((f" (class {kind.__name__})", kind))

    def restore(replace: Replace) -> None:
        for put in restores:
            put(replace)

    is_iterator = keep is not None and not restores and isinstance(obj, Iterator)
    return Parts(fixed, children, restore if restores else None, copy.deepcopy(obj) if is_iterator else None)


def _attributes(obj: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> Iterator[tuple[type, str]]:
    for owner in kind.__mro__:
        if not _is_of_c(owner):
            yield from ((owner, n) for n, v in vars(owner).items() if isinstance(v, types.MemberDescriptorType))


def _set_slot(slot: Any, obj: Any, value: Any, replace: Replace) -> None:
    slot.__set__(obj, replace(value))


def _is_of_c(kind: type) -> bool:
    """Whether objects of this class have memory that is not visible from Python."""
    return not kind.__flags__ & (1 << 9) or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)


def _built_in(obj: Any, base: type, children: list[tuple[str, Any]], restores: list[Callable[[Replace], None]]) -> Any:
    """Read the contents of a built-in type: append entries to `children` and return the fixed data."""
    if issubclass(base, (list, deque)):
        entries = list(base.__iter__(obj))
        children += [(f"[{i}]", entry) for i, entry in enumerate(entries)]
        restores.append(functools.partial(_refill_list, obj, base, entries))
        return len(entries), getattr(obj, "maxlen", None)
    if issubclass(base, tuple):
        children += [(f"[{i}]", entry) for i, entry in enumerate(tuple.__iter__(obj))]
        return None
    if issubclass(base, dict):
        saved = dict(dict.items(obj)) if base is not OrderedDict else dict(OrderedDict.items(obj))
        children += [(_key(key), value) for key, value in saved.items()]
        children += [(f" (key {_key(key)})", key) for key in saved if not is_value(key)]
        restores.append(functools.partial(_refill_dict, obj, base, saved))
        return getattr(obj, "default_factory", None)
    if issubclass(base, (set, frozenset)):
        entries = list(base.__iter__(obj))
        children += sorted(((_key(entry), entry) for entry in entries), key=lambda child: child[0])
        if issubclass(base, set):
            restores.append(functools.partial(_refill_set, obj, entries))
        return frozenset(map(_key, entries))
    if issubclass(base, (*_VALUES[1:7], bytearray, memoryview)):
        return bytes(obj) if isinstance(obj, (bytearray, memoryview)) else repr(base(obj))
    return _reduced(obj, children, restores)


def _reduced(obj: Any, children: list[tuple[str, Any]], restores: list[Callable[[Replace], None]]) -> Any:
    """Read the data that copying would copy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = obj.__reduce_ex__(4)
    except Exception as error:  # a class of the user may raise anything
        raise Incomparable(str(error)) from error
    if isinstance(found, str):
        return found
    made_by, arguments, *rest = found
    rest += [None] * (3 - len(rest))
    state, entries, items = rest[:3]
    is_usual = type(obj).__getstate__ is object.__getstate__
    if is_usual and getattr(made_by, "__name__", None) == "__newobj__" and _attributes(obj) is not None:
        state = None  # these are the attributes, which are read separately
    children += [(".__reduce__", arguments), (".__getstate__", state)]
    for more in (entries, items):
        if isinstance(more, Iterable):
            children += [(f"[{i}]", entry) for i, entry in enumerate(more)]
    put = getattr(obj, "__setstate__", None)
    if state is not None and put is not None:
        restores.append(lambda replace: put(state))
    return made_by if is_value(made_by) else getattr(made_by, "__qualname__", None)


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        return f"[({', '.join(map(_key, key))})]"
    return f"[{key!r}]" if type(key) in _VALUES else f"[{type(key).__name__} {id(key):#x}]"


def _refill(attributes: dict[str, Any], saved: dict[str, Any], replace: Replace) -> None:
    wanted = {name: replace(value) for name, value in saved.items()}
    if list(attributes) != list(wanted) or any(attributes[name] is not value for name, value in wanted.items()):
        attributes.clear()
        attributes.update(wanted)


def _refill_list(obj: Any, base: Any, entries: list[Any], replace: Replace) -> None:
    wanted = [replace(entry) for entry in entries]
    now = list(base.__iter__(obj))
    if len(now) != len(wanted) or any(a is not b for a, b in zip(now, wanted, strict=True)):
        base.clear(obj)
        base.extend(obj, wanted)


def _refill_dict(obj: Any, base: Any, saved: dict[Any, Any], replace: Replace) -> None:
    now = list(base.items(obj))
    wanted = [(key, replace(value)) for key, value in saved.items()]
    if len(now) != len(wanted) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, wanted, strict=True)):
        base.clear(obj)
        for key, value in wanted:
            base.__setitem__(obj, key, value)


def _refill_set(obj: Any, entries: list[Any], replace: Replace) -> None:
    if set(map(id, set.__iter__(obj))) != set(map(id, entries)):
        set.clear(obj)
        set.update(obj, entries)


_READERS: list[tuple[Any, Callable[[Any, Copies | None], Parts]]] = [
    (Tensor, _tensor),
    (np.ndarray, _array),
    (torch.Generator, _generator_of_torch),
    (types.GeneratorType, _running_generator),
    (Globals, _globals),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.CellType, _cell),
    (types.ModuleType, _module),
    (functools.partial, _partial),
    (weakref.ReferenceType, _reference),
    (property, _wrapper),
    (staticmethod, _wrapper),
    (classmethod, _wrapper),
    (functools.cached_property, _wrapper),
    (functools._lru_cache_wrapper, _cached_function),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _bound),
    (ContextVar, _context_variable),
    (threading.local, _thread_local),
    (logging.Logger, _logger),
    (torch.fx.Graph, _fx_graph),
    ((type(threading.Lock()), type(threading.RLock())), _lock),
    (type, _class),
]
