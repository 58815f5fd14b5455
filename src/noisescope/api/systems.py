"""Two systems run side by side and compared, and recordings of engines."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from noisescope import progress
from noisescope.api.reports import now, versions
from noisescope.api.roundoff import measure_band
from noisescope.comparison.records import Record, read_record
from noisescope.comparison.roundoff import RoundoffBand
from noisescope.comparison.system_comparison import SystemComparison
from noisescope.data.dataset import DataSet, built_in, read_data
from noisescope.engines.compare import compare_systems
from noisescope.engines.protocol import Engine, EngineCall, Ids, open_engine, read_arguments
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.errors import InvalidInput
from noisescope.model.loading import Subject
from noisescope.options.device_commands import CompareOptions, RecordOptions
from noisescope.options.shared import DataFile
from noisescope.runs.device_record_writer import Detail, Recording, write_batches
from noisescope.sites import WHOLE
from noisescope.text_escaping import last_part


def compare_models(options: CompareOptions) -> SystemComparison:
    """What the second system's divergence from the first is made of."""
    progress.begin("loading", 2)
    a = _opened(options.a, options.engine_args, "a")
    progress.step("loading")
    b = _opened(options.b, options.engine_args, "b")
    data = _data(options.source(), options.samples, demo=str(options.a).endswith(":demo"))
    prompts = (a.encode(data, options.max_tokens), b.encode(data, options.max_tokens))
    if options.generated:
        texts = [b.generate(ids, options.generated) for ids in progress.track("texts of B", prompts[1])]
        mine, its = (tuple((*ids, *text) for ids, text in zip(side, texts, strict=True)) for side in prompts)
        prompts = (mine, its)
    one_dtype = a.facts.dtype == b.facts.dtype
    band = roundoff_band(a, prompts[0]) if one_dtype else None  # no verdict of round-off is due between two
    return compare_systems(a, b, prompts, chat=data.kind == "chat", band=band)


def roundoff_band(engine: Engine, prompts: tuple[Ids, ...]) -> RoundoffBand | None:
    """The |difference| of the logits' log-probabilities that two healthy systems show here.

    None for engines other than transformers, in which it can't be measured here.
    """
    scored = [ids for ids in prompts if len(ids) > 1]
    if not isinstance(engine, TransformersEngine) or not scored:
        return None
    return measure_band(engine.subject, scored, reported=False)


def _opened(source: object, arguments: tuple[str, ...], side: str) -> Engine:
    """A system by name, or from Python a subject or an engine."""
    if isinstance(source, Subject):
        return TransformersEngine(source)
    if not isinstance(source, (str, Path)):
        engine: Engine = source  # type: ignore[assignment]
        return engine
    name, _, model = str(source).partition(":")
    return open_engine(name, model, read_arguments(arguments, side))


def _data(source: object, count: int, *, demo: bool) -> DataSet:
    if isinstance(source, DataSet):
        return source.take(count)
    if isinstance(source, (str, Path, DataFile)):
        return read_data(source, limit=count)
    if source is not None:
        raise InvalidInput(f"data is a file or a DataSet, got {type(source).__name__}")
    if demo:
        from noisescope.demo import test_file

        return read_data(test_file(), limit=count)
    return built_in().take(count)


def record_engine(options: RecordOptions) -> Record:
    """Write what an engine's operators give into the folder `output`, as `record` does for transformers."""
    if options.simulate is not None:
        raise InvalidInput(f"--simulate is for the engine transformers, got --engine {options.engine}")
    arguments = read_arguments(options.engine_args)
    if options.dtype is not None:
        arguments.setdefault("dtype", options.dtype)
    engine = open_engine(options.engine, options.model, arguments)
    data = _data(options.source(), options.samples, demo=options.model == "demo")
    prompts = tuple(_cut(ids) for ids in engine.encode(data, options.max_tokens))
    facts = engine.facts
    about = {
        "model": {
            "source": facts.model,
            "architecture": facts.architecture,
            "blocks": _blocks(engine),
        },
        "data": {"source": last_part(data.source), "samples": len(prompts)},
        "device": f"{facts.device}, {facts.engine} {facts.version}",
        "versions": {**versions(), facts.engine: facts.version},
        "created": now(),
        "dtype": facts.dtype,
        "notes": [
            f"attention {facts.attention}, chunked prefill {facts.chunked_prefill}, prefix cache {facts.prefix_cache}"
        ],
    }

    def run(ids: Tensor, recording: Recording) -> Tensor:
        def add(call: EngineCall) -> None:
            if call.site.operator != WHOLE:
                recording.add(call.site, call.output[None], call.inputs[None] if call.inputs.dim() > 1 else None)

        return engine.logits(tuple(ids[0].tolist()), add)[None, -1]

    detail = Detail(options.detail == "full", frozenset(options.full_layers), options.inputs)
    unknown = str  # the numbers that an engine holds are in no common form
    folder = write_batches(run, prompts, options.output, detail=detail, batch=1, about=about, fingerprint=unknown)
    return read_record(folder)


def _blocks(engine: Engine) -> int:
    return sum(site.operator == "residual" for site in engine.sites)


def _cut(ids: tuple[int, ...], grid: int = 16) -> tuple[int, ...]:
    """As `record` cuts its prompts, so that both records have the same."""
    return ids[: len(ids) // grid * grid] or ids
