"""The transformers engine: a model in this process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.data import tokens
from noisescope.data.dataset import DataSet
from noisescope.engines.logprob_processing import reported_rows
from noisescope.engines.protocol import EngineCall, EngineFacts, Ids, OnCall, Reported, Sampling, Setting
from noisescope.errors import InvalidInput, unknown
from noisescope.localization.config_state import plain_attributes
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.forwards import device_name, dtype_of, evaluating, input_device, without_cache
from noisescope.model.loading import Subject, load
from noisescope.probe.functions import with_tensor
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import WHOLE, Site
from noisescope.text_escaping import last_part

_CONFIG = "config"  # before the names of settings that forwards read from the config
_IDLE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "model_type", "pad_token_id",
         "bos_token_id", "eos_token_id", "attn_implementation", "_attn_implementation"}  # fmt: skip
_LEAVES = {"linear", "norm", "embedding"}


class TransformersEngine:
    """A subject as an engine."""

    def __init__(self, subject: Subject, sampling: Sampling | None = None) -> None:
        self.subject = subject
        self.model: Any = subject.model
        self._sampling = sampling or Sampling()
        self._anatomy = _watched(subject.anatomy)
        self._sites = {unit.module: unit.site(unit.operators[0]) for unit in self._anatomy.units}
        self._last: dict[str, RecordedCall] = {}  # of each module, in the last prompt

    @functools.cached_property
    def facts(self) -> EngineFacts:
        import transformers

        config = self.model.config
        return EngineFacts(
            engine="transformers",
            version=transformers.__version__,
            model=last_part(self.subject.source),
            architecture=self.subject.anatomy.architecture,
            dtype=dtype_of(self.model),
            device=device_name(self.model),
            attention=str(vars(config).get("_attn_implementation_internal") or ""),
            sampling=self._sampling,
            fingerprint=model_fingerprint(self.model),
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self._sites.values())

    def encode(self, data: DataSet, max_tokens: int) -> tuple[Ids, ...]:
        encoded = tokens.encode(data, self.subject.tokenizer, max_tokens=max_tokens)
        return tuple(group[0].ids for group in encoded.sequences)

    @torch.no_grad()
    def logits(self, ids: Ids, on_call: OnCall | None = None, *, modules: Collection[str] | None = None) -> Tensor:
        self._last = {}

        def listen(call: RecordedCall) -> Any:
            self._last[call.unit.module] = call
            if on_call is None or not (modules is None or call.unit.module in modules):
                return None
            return self._report(call, on_call)

        batch = torch.tensor([ids], device=input_device(self.model))
        everything = watch(self.model, listen, lambda unit, operator: True, anatomy=self._anatomy)
        with evaluating(self.model), everything:
            y = self.model(input_ids=batch, **without_cache(self.model)).logits
        found: Tensor = y[0].detach()
        return found

    def _report(self, call: RecordedCall, on_call: OnCall) -> Any:
        x, y = call.first_input, call.output_tensor
        if x is None or y is None:
            return None
        site, shape = self._sites[call.unit.module], y.shape

        def again(other: Tensor) -> Tensor:
            found = call.again(other.reshape(x.shape).to(x))
            return _flat(found if isinstance(found, Tensor) else found[0])

        new = on_call(EngineCall(site, _flat(x), _flat(y), again))
        if new is None:
            return None
        given = new.reshape(shape).to(y)
        return (given, *call.output[1:]) if isinstance(call.output, tuple) else given

    @torch.no_grad()
    def apply(self, site: Site, x: Tensor) -> Tensor | None:
        call = self._last.get(site.module)
        if call is None or call.first_input is None:
            return None
        args, kwargs = with_tensor(
            call.args, call.kwargs, call.first_input, x.reshape(call.first_input.shape).to(call.first_input)
        )
        with evaluating(self.model):
            y = call.callee(*args, **kwargs)
        return _flat(y[0] if isinstance(y, tuple) else y)

    def reported(self, ids: Ids) -> Reported:
        rows = reported_rows(self.logits(ids)[:-1], self._sampling)
        following = torch.tensor(ids[1:], device=rows.device)
        return Reported(rows.gather(1, following[:, None])[:, 0], rows)

    def generate(self, ids: Ids, count: int) -> Ids:
        text = list(ids)
        for _ in range(count):
            text.append(int(self.logits(tuple(text))[-1].argmax()))
        return tuple(text[len(ids) :])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        parameters = self.model.named_parameters(remove_duplicate=False)  # a head may share the embedding's weight
        yield from ((name, tensor.detach()) for name, tensor in parameters)
        yield from ((name, tensor.detach()) for name, tensor in self.model.named_buffers())

    def write(self, name: str, value: Tensor) -> None:
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        held = module._parameters.get(last)
        (module._buffers[last] if held is None else held.detach()).copy_(value)

    def settings(self) -> Mapping[str, Setting]:
        config = self.model.config.to_dict()
        found: dict[str, Setting] = {
            f"{_CONFIG}.{name}": value
            for name, value in config.items()
            if isinstance(value, (float, int, str, bool, type(None))) and name not in _IDLE
        }
        for path, module in self.model.named_modules():
            held = plain_attributes(module)
            plain = {name: value for name, value in held.items() if not isinstance(value, torch.dtype)}
            found |= {f"{path}.{name}": value for name, value in plain.items() if not _is_idle(module, name)}
        return found

    def set(self, name: str, value: Setting) -> None:
        path, _, attribute = name.rpartition(".")
        module = self.model.config if path == _CONFIG else self.model.get_submodule(path)
        if attribute not in vars(module):
            raise InvalidInput(f"{path} has no attribute {attribute}")
        module.__dict__[attribute] = value


def _flat(x: Tensor) -> Tensor:
    """The one prompt of a batch as [T, C]; ids as [T]. Per-head norms receive [1, T, H, D]."""
    return x[0] if x.dim() <= 2 else x[0].flatten(1)


def _is_idle(module: nn.Module, name: str) -> bool:
    """Attributes that have no effect in evaluation, or only name the module."""
    return "drop" in name.lower() or isinstance(module, nn.Dropout) or name in ("layer_idx", "config")


def _watched(anatomy: Anatomy) -> Anatomy:
    """The leaves (linears, norms, embeddings), the modules inside a block that contain some of them, and the blocks."""
    leaves = [unit for unit in anatomy.units if unit.kind == MODULE and unit.certain and unit.operators[0] in _LEAVES]
    blocks = {unit.module: unit for unit in anatomy.units if unit.operators == ("residual",)}
    holders: dict[str, Unit] = {}
    for leaf in leaves:
        parent = leaf.module.rpartition(".")[0]
        while isinstance(leaf.place, int) and parent and parent not in blocks:
            holders.setdefault(parent, Unit(parent, MODULE, leaf.place, leaf.component, (WHOLE,)))
            parent = parent.rpartition(".")[0]
    return dataclasses.replace(anatomy, units=(*leaves, *holders.values(), *blocks.values()))


_ARGUMENTS = ("device", "dtype", "attn_implementation", "device_map", "revision")


def open_engine(model: str, sampling: Sampling, arguments: dict[str, Setting]) -> TransformersEngine:
    """Open the engine; `--engine-args` are passed to `load`."""
    for name in arguments:
        if name not in _ARGUMENTS:
            raise unknown("argument of the engine transformers", name, (*_ARGUMENTS, *vars(Sampling())))
    given: dict[str, Any] = dict(arguments)
    return TransformersEngine(load(model, **given), sampling)
