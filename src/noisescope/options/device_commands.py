"""Options of the commands about devices: inspect, record, compare, locate, passport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from noisescope.errors import InvalidInput, unknown
from noisescope.options.base import Naming
from noisescope.options.fields import DETAILS, ENGINES, LOCATE_METHODS, argument, changed, command_option, option
from noisescope.options.shared import (
    CheckingOptions,
    DeviceOptions,
    FileOptions,
    LoadingOptions,
    PrintingOptions,
    ProgressOptions,
    SamplingOptions,
    Source,
    TableOptions,
    checked_model,
    report_path,
)

PROMPT_FILES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
LOGPROB_FILES = (".jsonl", ".ndjson", ".json")
VERDICT_FILES = (".json", ".md", ".html")
_NOTES_LAYER, _NOTES_SCALE = 10, 0.05  # defaults of the original method notes' finder


def verdict_path(path: Path) -> Path:
    """The path, if its suffix is one that a verdict can be written as."""
    if path.suffix.lower() not in VERDICT_FILES:
        raise unknown("format of the verdict", path.suffix, VERDICT_FILES)
    return path


RECORDS = "records"
LOGPROBS = f"log-probability files ({', '.join(LOGPROB_FILES)})"
SYSTEMS = "systems such as vllm:MODEL"
_ONLY_OF = {
    RECORDS: ("layers", "max_mape", "sensitivity"),
    LOGPROBS: ("fields", "roundoff", "max_gap"),
    SYSTEMS: ("data", "engine_args", "generated"),
}  # options that make sense for one kind of comparison


def compared_kind(source: object) -> str:
    """What a side of a comparison is; from Python a subject or an engine is a system."""
    if not isinstance(source, (str, Path)):
        return RECORDS if type(source).__name__ == "Record" else SYSTEMS
    engine, colon, _ = str(source).partition(":")
    if colon and engine in ENGINES:
        return SYSTEMS
    return LOGPROBS if Path(source).suffix.lower() in LOGPROB_FILES else RECORDS


def compared_source(path: Path) -> Path:
    """A record's folder, a file of log-probabilities, or a system as ENGINE:MODEL."""
    engine, colon, model = str(path).partition(":")
    if colon and engine in ENGINES:
        checked_model(model)
        return path
    if colon and not path.exists() and engine.isidentifier():
        raise unknown("engine", engine, ENGINES)
    path = path.expanduser()
    if not path.exists():
        what = "file" if compared_kind(path) == LOGPROBS else "folder"
        raise InvalidInput(f"there is no {what} {path}: give a record, a .jsonl file, or a system such as vllm:MODEL")
    return path.absolute()


@dataclass(frozen=True, kw_only=True)
class InspectOptions(PrintingOptions, TableOptions):
    command: ClassVar[str] = "inspect"

    model: str = changed(
        LoadingOptions, "model", "demo", help="A Hugging Face folder or cached id, a .gguf file, demo, or tiny:NAME."
    )
    verbose: bool = command_option(False, "List every module with its operators.", short="-v")
    attn_implementation: str | None = option(None, "sdpa, eager ...", unit="NAME", default_text="the model's own")
    dtype: str | None = changed(DeviceOptions, "dtype", surface="both", default_text="as stored")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(SamplingOptions, LoadingOptions, FileOptions, ProgressOptions, PrintingOptions):
    command: ClassVar[str] = "record"

    output: Path = option(Path("noisescope.record"), "A new folder.", unit="DIR", short="-o")
    detail: str = option("sketch", "full keeps whole tensors of everything.", choices=DETAILS)
    full_layers: tuple[int, ...] = option((), "Blocks of which whole tensors are kept, such as 9,10.",
                                          least=0, default_text="none")  # fmt: skip
    inputs: bool = option(
        True, "With whole tensors: keep the inputs of modules too, for a replay.", negative="no-inputs"
    )
    dtype: str | None = changed(DeviceOptions, "dtype", default_text="as stored")
    samples: int = changed(SamplingOptions, "samples", 32)
    max_tokens: int = changed(SamplingOptions, "max_tokens", 128)
    batch: int = option(16, "Prompts of one length in one forward.", least=1)
    engine: str = command_option("transformers", "What runs the model.", choices=tuple(ENGINES))
    engine_args: tuple[str, ...] = command_option(
        (), "Arguments of the engine, such as max_num_seqs=8,dtype=float32.", default_text="none"
    )
    simulate: str | None = option(
        None, "A fault to simulate while recording, such as dead_zone:0.3@10; the record's notes name it.", unit="FAULT"
    )
    prompts: Sequence[Any] | None = option(
        None, "Texts or token ids, taken as they are instead of data.", surface="python", open=True
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SamplingOptions, CheckingOptions, ProgressOptions, PrintingOptions, TableOptions):
    command: ClassVar[str] = "compare"

    a: Path | Any = argument(
        "A", "The reference: a record, a dump of msprobe, a .jsonl file, or a system such as transformers:MODEL.",
        open=True, check=compared_source, aliases=("gpu_checkpoint",),
    )  # fmt: skip
    b: Path | Any = argument(
        "B", "The other record, dump, file or system, such as vllm:MODEL.", open=True, check=compared_source,
        aliases=("npu_checkpoint",),
    )  # fmt: skip
    engine_args: tuple[str, ...] = option(
        (), "Of systems: arguments of the engines, such as dtype=float32,b.temperature=0.7.", default_text="none"
    )
    generated: int = option(0, "Of systems: tokens that B generates after each prompt, which both then score.", least=0)
    samples: int = changed(SamplingOptions, "samples", 16)
    max_tokens: int = changed(SamplingOptions, "max_tokens", 64)
    layers: tuple[int, ...] | None = option(
        None, "Only these blocks, such as 9,10: rows, and what the MAPE is checked on.", least=0, default_text="all"
    )
    max_mape: float | None = option(
        None, "The check fails where the MAPE of a site is larger; needs whole tensors.", least=0
    )
    sensitivity: Path | Mapping[str, Any] | None = option(
        None, "The report.json of a diagnosis of this model: differences are given in nats.", open=True,
        check=report_path,
    )  # fmt: skip
    affordable: float | None = option(
        None, "With sensitivity: nats that the difference of a layer may cost.", above=0, default_text="0.01"
    )
    fields: tuple[str, ...] = option(
        (), "Of .jsonl files: the field of A and that of B, such as generation_logprobs,prev_logprobs.",
        default_text="the first one known",
    )  # fmt: skip
    roundoff: Path | Mapping[str, Any] | None = option(
        None, "Of .jsonl files: the report of robustness --rounding, which says what may remain.",
        unit="REPORT", open=True, check=report_path,
    )  # fmt: skip
    max_gap: float | None = option(
        None, "Of .jsonl files: the mean |difference| allowed where no cause is found, in nats per token.",
        unit="NATS", least=0,
    )  # fmt: skip
    output: Path | None = command_option(None, "Write the comparison there as JSON.", short="-o")

    @property
    def of_logprobs(self) -> bool:
        """Whether both sides are files of log-probabilities."""
        return compared_kind(self.a) == compared_kind(self.b) == LOGPROBS

    @property
    def of_systems(self) -> bool:
        """Whether two systems are to be run, and not two records read."""
        return compared_kind(self.a) == compared_kind(self.b) == SYSTEMS

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        kind, other = compared_kind(self.a), compared_kind(self.b)
        if kind != other:
            yield (
                f"{named('a')} and {named('b')} are of one kind: two {RECORDS} (folders), two {LOGPROBS}, or two "
                f"{SYSTEMS}; got {self.a} and {self.b}. `noisescope record MODEL --engine NAME` records a system"
            )
            return
        defaults = {field.name: field.default for field in fields(self)}
        for owner, names in _ONLY_OF.items():
            given = [name for name in names if vars(self)[name] != defaults[name]]
            if given and owner != kind:
                yield f"{named(given[0])} is for {owner}, and these are {kind}: leave it out"
        if len(self.fields) not in (0, 2):
            yield f"{named('fields')} are two names, that of A and that of B; got {', '.join(self.fields)}"
        if self.affordable is not None and self.sensitivity is None:
            yield (
                f"{named('affordable')} needs {named('sensitivity')}: the report of a diagnosis shows what a "
                "difference costs"
            )


@dataclass(frozen=True, kw_only=True)
class LocateOptions(CheckingOptions, LoadingOptions, FileOptions, ProgressOptions, PrintingOptions, TableOptions):
    command: ClassVar[str] = "locate"

    method: str = option("auto", "How to look for the fault.", choices=LOCATE_METHODS)
    dtype: str | None = changed(DeviceOptions, "dtype", default_text="as stored")
    simulate: str | None = changed(
        RecordOptions,
        "simulate",
        help="A fault to simulate and look for, such as dead_zone:0.3@10 or gain:0.01@3/linear.",
        python='In Python call ns.locate inside the fault: with ns.faulty(subject.model, "gain:0.01@3/linear"): ...',
        surface="command",
    )
    # The flags of the original method notes' finder scripts: `simulated` is the text that they come to.
    ground_truth_layer: int | None = command_option(None, "The block of a simulated fault.", least=0, hidden=True)
    fault_type: str | None = command_option(None, "Its family.", unit="NAME", hidden=True)
    fault_magnitude: float | None = command_option(None, "Its size.", hidden=True)
    hw_error_scale: float | None = command_option(None, "The size of simulated noise.", hidden=True)
    inputs: Any = option(
        None,
        "Prompts to run instead of built-in text: a .txt file with one in each line, or JSONL, JSON, CSV, Parquet.",
        python="A text, a list of texts, token ids, a batch (a dict of the model's arguments), batches, or a Path.",
        unit="FILE",
        default_text="built-in text",
        open=True,
    )
    tokens: int | None = option(None, "One shape instead of the usual ones: tokens per sequence.", least=1,
                                default_text="1 to 257")  # fmt: skip
    batch: int | None = option(None, "One shape instead of the usual ones: sequences in a batch.", least=1,
                               default_text="1, 2 and 8")  # fmt: skip
    decode: int | None = option(
        None,
        "One shape instead of the usual ones: decode steps with the model's cache; 0 for none.",
        least=0,
        default_text="2 or 4",
    )
    quick: bool = option(False, "Only a prefill of 2 x 32 tokens: no other shapes, no padding, no decode.")
    budget: float | None = option(
        None, "Start no further shapes after this time; the verdict names those left out.", above=0, unit="SECONDS"
    )
    repeat: int = option(0, "Run the base batch N more times, for a fault that comes and goes.", least=0)
    state: bool = option(
        True,
        "Also compare weights, buffers and attributes in memory with the checkpoint and the config.",
        negative="no-state",
    )
    backward: bool = option(
        False, "Also audit the gradients of micro-batches: of inputs, weights and what is accumulated."
    )
    failure: Source = option(
        None,
        "With method fingerprint: the suspect system's record; a simulated fault makes its own.",
        unit="RECORD",
        open=True,
        exists="folder",
    )
    reference: Source = option(
        None,
        "A good device's record; whole tensors in it are replayed here.",
        unit="RECORD",
        open=True,
        exists="folder",
    )
    seed: int = option(0, "Seed of the prompts and checks.")
    output: Path | None = command_option(
        None, "Write the verdict there: .json, .md or .html.", short="-o", check=verdict_path
    )

    @classmethod
    def from_command_line(cls, given: Mapping[str, Any], *, keys: Mapping[str, str] | None = None) -> Self:
        """On a command line, and in a file, `inputs` is the path of a file; in Python a text is a text."""
        if given.get("inputs") is not None:
            given = {**given, "inputs": Path(given["inputs"]).expanduser()}
        return super().from_command_line(given, keys=keys)

    @property
    def simulated(self) -> str | None:
        """The fault to simulate, as text: `simulate`, or what the flags of the original method notes come to.

        Those notes put noise into layer 10 by default, and locate it with fingerprint; the faults of their
        other finder have a layer of their own.
        """
        if self.simulate is not None:
            return self.simulate
        family, size = self.fault_type, self.fault_magnitude
        of_fingerprint = self.method == "fingerprint" and family is None and size is None
        if self.hw_error_scale is not None or (of_fingerprint and self.ground_truth_layer is not None):
            scale = _NOTES_SCALE if self.hw_error_scale is None else self.hw_error_scale
            return f"noise:{scale!r}@{_NOTES_LAYER if self.ground_truth_layer is None else self.ground_truth_layer}"
        if self.ground_truth_layer is None:
            return None
        return f"{family or 'dead_zone'}{'' if size is None else f':{size!r}'}@{self.ground_truth_layer}"

    def problems(self, named: Naming) -> Iterator[str]:
        yield from self._simulation_problems(named)
        if self.method == "fingerprint" and (self.failure is None) == (self.simulated is None):
            came = "neither" if self.failure is None else "both"
            yield (
                f"the fingerprint method compares recorded outputs of the suspect system: give them as "
                f"{named('failure')}, or simulate a fault; got {came}"
            )
        if self.method != "fingerprint" and self.failure is not None:
            yield f"{named('failure')} is for the method fingerprint, got method {self.method}"
        if self.reference is not None and self.method not in ("auto", "replay", "fingerprint"):
            yield (
                f"method {self.method} compares with no other system: leave {named('reference')} out, or use auto or "
                "replay"
            )
        takes_inputs = self.method in ("auto", "audit", "relations") and self.reference is None
        if self.inputs is not None and not takes_inputs:
            yield f"{named('inputs')} are for audit and relations: other methods have prompts of their own"
        yield from self._shape_problems(named)
        if self.method == "replay" and self.reference is None and self.simulated is None:
            yield f"a replay needs the record of a good device as {named('reference')}: record it with detail full"

    def _shape_problems(self, named: Naming) -> Iterator[str]:
        """Shapes are those of the audit's forwards; prompts of a file are read later, for that needs its tokenizer."""
        if isinstance(self.inputs, Path):
            if not self.inputs.is_file():
                yield f"there is no file {self.inputs} ({named('inputs')}): check the path"
            elif self.inputs.suffix.lower() not in PROMPT_FILES:
                yield str(unknown(f"format of {named('inputs')}", self.inputs.suffix, PROMPT_FILES))
        one_shape = [name for name in ("tokens", "batch", "decode") if vars(self)[name] is not None]
        if self.quick and one_shape:
            yield f"{named('quick')} runs 2 x 32 tokens and no others: leave it out, or {named(one_shape[0])}"
        shaped = [*one_shape, *(name for name in ("quick", "budget", "repeat", "backward") if vars(self)[name])]
        shaped += [] if self.state else ["state"]
        if shaped and (self.method not in ("auto", "audit") or self.reference is not None):
            came = "a reference" if self.reference is not None else f"method {self.method}"
            yield f"{named(shaped[0])} is for the audit (method auto or audit without a reference), got {came}"

    def _simulation_problems(self, named: Naming) -> Iterator[str]:
        """The flags of the notes describe one fault, given once."""
        flags = ("ground_truth_layer", "fault_type", "fault_magnitude", "hw_error_scale")
        given = [name for name in flags if vars(self)[name] is not None]
        if given and self.simulate is not None:
            yield f"the fault is given twice: as {named('simulate')} {self.simulate} and by {named(given[0])}; keep one"
        if self.hw_error_scale is not None and {"fault_type", "fault_magnitude"} & set(given):
            yield (
                f"{named('hw_error_scale')} is noise of that size, and {named('fault_type')} with "
                f"{named('fault_magnitude')} another fault: keep one"
            )
        if given and self.simulated is None:
            yield (
                f"{named(given[0])} needs {named('ground_truth_layer')}, the block that the simulated fault is put into"
            )


@dataclass(frozen=True, kw_only=True)
class PassportOptions(ProgressOptions, PrintingOptions):
    command: ClassVar[str] = "passport"

    device: str = changed(DeviceOptions, "device", surface="both")
    left_open: tuple[str, ...] = changed(DeviceOptions, "left_open")
    quick: bool = option(False, "Fewer points, sizes and repeats.")
    output: Path | None = command_option(None, "Write the passport to this file.", short="-o")
    diff: Path | None = command_option(None, "Another passport: print how they differ.")
    from_: Path | None = command_option(None, "Show this passport instead of measuring one.")
