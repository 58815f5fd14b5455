"""Options of `plan`: precision, smoothquant, migration, fault-tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from noisescope.options.base import Naming
from noisescope.options.fields import (
    CACHE_TOOLS,
    GRANULARITIES,
    NARROWEST_BITS,
    TARGETS,
    TOOLS,
    WIDEST_BITS,
    changed,
    command_option,
    option,
)
from noisescope.options.shared import (
    CheckingOptions,
    PrintingOptions,
    ProgressOptions,
    ReportModelOptions,
    ReportOptions,
    SamplingOptions,
    Source,
    TableOptions,
    checked_model,
)


@dataclass(frozen=True, kw_only=True)
class FormatOptions(SamplingOptions):
    formats: tuple[str, ...] | None = option(
        None, "Number formats to choose from.", default_text="all that were scored"
    )


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(FormatOptions):
    average_bits: float | None = option(
        None,
        "Average bits per weight over the linears of the blocks: from 3 (int3) to 16 (bf16).",
        unit="B",
        least=NARROWEST_BITS,
        most=WIDEST_BITS,
    )
    max_megabytes: float | None = option(None, "Size of these weights with their scales, in 10^6 bytes.", above=0)
    latency_table: Source = option(
        None, "JSON {module: {format: milliseconds}}; '*' is for a million weights.", exists="file", open=True
    )
    max_milliseconds: float | None = option(None, "With a latency table: the sum over all modules.", above=0)
    granularity: str = option("module", "layer gives all modules of a block one format.", choices=GRANULARITIES)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(FormatOptions):
    random: int = option(32, "With verify: random plans to compare with.", least=0)
    seed: int = option(0, "Seed of the random plans.", surface="python")
    samples: int = changed(
        SamplingOptions, "samples", 64, help="With verify: samples to measure on, after those that formats were "
        "scored on.",
    )  # fmt: skip
    data: Source = changed(SamplingOptions, "data", default_text="the report's")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(
    VerifyOptions, BudgetOptions, ReportModelOptions, ProgressOptions, PrintingOptions, TableOptions
):
    command: ClassVar[str] = "plan precision"

    refine: int = option(
        0,
        "Rounds of improving the plan on the model, on the samples that formats were scored on; each costs about four "
        "forwards of them.",
        least=0,
    )
    verify: bool = option(False, "Carry the plan out on the model, and measure.")
    export: str | None = option(None, "Write the plan for another tool.", unit="TOOL", choices=TOOLS)
    output: Path | None = option(None, "With export: the file to write.", short="-o")

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        if (self.export is None) != (self.output is None):
            yield f"{named('export')} and {named('output')} belong together: the tool, and the file to write for it"
        if self.refine and self.granularity != "module":
            yield f"{named('refine')} changes single linears: it goes with {named('granularity')} module alone"


@dataclass(frozen=True, kw_only=True)
class KvCacheOptions(SamplingOptions, ReportModelOptions, ProgressOptions, PrintingOptions, TableOptions):
    command: ClassVar[str] = "plan kv-cache"

    keep_layers: int | None = option(None, "Number of layers that keep 16 bits, the costliest.", least=0)
    max_kl: float | None = option(
        None,
        "Nats per token that the rounded layers may cost together: as few layers are kept as that allows.",
        least=0,
        default_text="a tenth of what rounding all layers costs",
    )
    verify: bool = option(False, "Carry the plan out on the model, and measure.")
    samples: int = changed(
        SamplingOptions, "samples", 64, help="With verify: samples to measure on, after those of the report."
    )
    data: Source = changed(SamplingOptions, "data", default_text="the report's")
    export: str | None = option(None, "Write the plan for another tool.", unit="TOOL", choices=CACHE_TOOLS)
    output: Path | None = option(None, "With export: the file to write.", short="-o")

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        if self.keep_layers is not None and self.max_kl is not None:
            yield f"{named('keep_layers')} and {named('max_kl')} both decide how many layers are kept: give one of them"
        if (self.export is None) != (self.output is None):
            yield f"{named('export')} and {named('output')} belong together: the tool, and the file to write for it"


@dataclass(frozen=True, kw_only=True)
class SmoothquantOptions(SamplingOptions, ReportModelOptions, ProgressOptions, PrintingOptions, TableOptions):
    command: ClassVar[str] = "plan smoothquant"

    alpha: float | None = option(
        None,
        "Migration strength from 0 to 1, or search: the best for each fold.",
        unit="A",
        least=0,
        most=1,
        words={"search": None},
        default_text="search",
    )
    target: str = option("W8A8", "The format that recommendations are for.", choices=TARGETS)
    samples: int = changed(SamplingOptions, "samples", 32, help="Half of them calibrate, half measure.")
    data: Source = changed(SamplingOptions, "data", default_text="the report's")
    output: Path | None = command_option(None, "Write the result there as JSON.", short="-o")


@dataclass(frozen=True, kw_only=True)
class MigrationOptions(ReportOptions, PrintingOptions, TableOptions):
    command: ClassVar[str] = "plan migration"

    device: str = option("cuda", "The new machine's device, for the commands: cuda, npu ...", unit="D")
    model: str | None = option(
        None, "The model, for the commands.", unit="M", default_text="as the report names it", check=checked_model
    )
    data: Path | None = option(
        None, "The data, for the commands.", unit="FILE", default_text="as the report names it", exists="file"
    )
    output: Path | None = command_option(None, "Write the plan there as JSON.", short="-o")


@dataclass(frozen=True, kw_only=True)
class FaultTestOptions(
    CheckingOptions, SamplingOptions, ReportModelOptions, ProgressOptions, PrintingOptions, TableOptions
):
    command: ClassVar[str] = "plan fault-tests"

    run: bool = option(False, "Carry the tests out with the fault simulator.")
    data: Source = changed(SamplingOptions, "data", default_text="the report's")
    samples: int = changed(SamplingOptions, "samples", 32)
    limit: int | None = option(None, "Only the first N tests.", least=1, default_text="all")
    csv: Path | None = changed(TableOptions, "csv", help="Write the tests to this file as CSV.")
    junit: Path | None = command_option(None, "With run: write the results there as JUnit XML.")
    output: Path | None = command_option(
        None, "Folder for fault_tests.csv, .json and the results.", unit="DIR", short="-o"
    )

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        if self.junit is not None and not self.run:
            yield f"{named('junit')} holds the results of tests, and none are carried out: give {named('run')}, too"
