"""The vLLM engine, in this process: its modules under transformers' names.

vLLM merges q, k, v and gate, up into one projection each, hands (hidden, residual) from block to block, packs weights
for its kernels and runs all prompts as one row of tokens. Here one prompt runs at a time, so that row t is token t.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import demo
from noisescope.data import tokens
from noisescope.data.dataset import DataSet
from noisescope.engines.protocol import EngineCall, EngineFacts, Ids, OnCall, Reported, Sampling, Setting
from noisescope.engines.vllm_modules import BLOCK, ModuleMap, Projection
from noisescope.errors import InvalidInput
from noisescope.model.forwards import device_name, dtype_of
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import WHOLE, Site
from noisescope.text_escaping import last_part

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # modules can be reached in this process alone
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model takes a function
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_TOP = 20  # log-probabilities of each token that are asked for
_IDENTITY_ROWS = 1024


class VllmEngine:
    """vLLM with one model; `arguments` are passed to vllm.LLM.

    Forwards are eager, because compiled graphs can't be observed.
    """

    def __init__(self, model: str, sampling: Sampling | None = None, **arguments: Any) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self._sampling = sampling or Sampling()
        mode = "processed_logprobs" if self._sampling.processed else "raw_logprobs"
        settings = {"max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": False, "logprobs_mode": mode}
        folder = str(demo.folder()) if model == "demo" else model
        chosen = {**settings, **arguments, "enforce_eager": True, "disable_log_stats": True}
        try:
            self._llm = LLM(folder, **chosen)
        except ValueError as error:  # a model with fewer positions
            if "max_model_len" in arguments or "max_model_len" not in str(error):
                raise
            self._llm = LLM(folder, **{**chosen, "max_model_len": None})
        self._source = model
        self.model: Any = self._llm.apply_model(_itself)[0]
        self._map = ModuleMap.of(self.model)

    @functools.cached_property
    def facts(self) -> EngineFacts:
        config = self._llm.llm_engine.vllm_config
        attention = next((m for name, m in self.model.named_modules() if name.endswith(".attn")), None)
        return EngineFacts(
            engine="vllm",
            version=_version(),
            model=last_part(self._source),
            architecture=type(self.model).__name__,
            dtype=dtype_of(self.model),
            device=device_name(self.model),
            attention="" if attention is None else type(vars(attention)["impl"]).__name__,
            chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
            prefix_cache=bool(config.cache_config.enable_prefix_caching),
            sampling=self._sampling,
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        return self._map.sites

    def encode(self, data: DataSet, max_tokens: int) -> tuple[Ids, ...]:
        encoded = tokens.encode(data, self._llm.get_tokenizer(), max_tokens=max_tokens)
        return tuple(group[0].ids for group in encoded.sequences)

    @torch.no_grad()
    def logits(self, ids: Ids, on_call: OnCall | None = None, *, modules: Collection[str] | None = None) -> Tensor:
        last: list[Tensor] = []
        listener = _Listener(self._map, on_call or _pass, modules, len(ids), last)
        with watch(self.model, listener.after, lambda unit, operator: True, before=listener.before,
                   anatomy=self._map.anatomy):  # fmt: skip
            self._run(ids)
        if listener.error is not None:
            raise listener.error
        hidden = torch.cat(last)
        if len(hidden) != len(ids):
            raise InvalidInput(
                f"vLLM ran {len(hidden)} tokens of a prompt of {len(ids)}: turn off prefix caching (--engine-args "
                f"enable_prefix_caching=false)"
            )
        y: Tensor = self.model.compute_logits(hidden)
        head = self._map.head
        if on_call is not None and head is not None and (modules is None or head.module in modules):
            new = on_call(EngineCall(head, hidden, y, lambda x: self.model.compute_logits(x.to(hidden))))
            y = y if new is None else new.to(y)
        return y.detach()

    def _run(self, ids: Ids, **settings: Any) -> Any:
        return self._generate([ids], max_tokens=1, temperature=0.0, **settings)[0]

    def _generate(self, prompts: list[Ids], **settings: Any) -> Any:
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        return self._llm.generate(given, SamplingParams(detokenize=False, **settings), use_tqdm=False)

    def apply(self, site: Site, x: Tensor) -> Tensor | None:
        projection = self._map.projections.get(site.module)
        if site.operator == WHOLE or site.operator == "residual" or projection is None:
            return None
        module = self.model.get_submodule(projection.module)
        return projection.part(_first(module(x.clone())))

    def reported(self, ids: Ids) -> Reported:
        vocabulary = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        rows = torch.full((len(ids) - 1, vocabulary), torch.nan, dtype=torch.float64)
        if self._sampling.processed:  # vLLM reports a prompt's own values unprocessed: each token is generated again
            chosen = self._sampling
            found = self._generate(
                [ids[:at] for at in range(1, len(ids))], max_tokens=1, logprobs=_TOP, temperature=chosen.temperature,
                top_p=chosen.top_p, top_k=chosen.top_k,
            )  # fmt: skip
            given = [output.outputs[0].logprobs[0] for output in found]
        else:
            given = self._run(ids, prompt_logprobs=_TOP).prompt_logprobs[1:]
        for row, values in zip(rows, given, strict=True):
            for token, value in values.items():
                row[token] = value.logprob
        following = torch.tensor(ids[1:])
        return Reported(rows.gather(1, following[:, None])[:, 0], rows)

    def generate(self, ids: Ids, count: int) -> Ids:
        return tuple(self._generate([ids], max_tokens=count, temperature=0.0, ignore_eos=True)[0].outputs[0].token_ids)

    # -- state

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            path, _, last = name.rpartition(".")
            tensor = self._without_padding(path, parameter.detach())
            if not tensor.numel():  # packed for a kernel: what it multiplies by shows on the unit vectors
                tensor = _effective_weight(self.model.get_submodule(path))
            yield from ((f"{other}.{last}", part) for other, part in self._map.taken_apart(path, tensor))
        rotary = self._map.rotary
        if rotary is not None:
            cache = self.model.get_submodule(rotary).cos_sin_cache.detach()
            cos, sin = cache[1].chunk(2)
            yield "model.rotary_emb.inv_freq", torch.atan2(sin.float(), cos.float()).to(cache.dtype)

    def _without_padding(self, path: str, tensor: Tensor) -> Tensor:
        """Embeddings have rows that no token uses, so that their number is a multiple of 64."""
        size = vars(self.model.get_submodule(path)).get("org_vocab_size")
        return tensor if size is None else tensor[:size]

    def write(self, name: str, value: Tensor) -> None:
        if name == "model.rotary_emb.inv_freq":
            self._write_rotary(value)
            return
        path, _, last = name.rpartition(".")
        projection = self._map.projections.get(path, Projection(path))
        module = self.model.get_submodule(projection.module)
        held = module._parameters[last]
        assert held is not None
        if held.numel():
            projection.part(self._without_padding(path, held.detach()), dim=0).copy_(value)
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        whole = _effective_weight(module).clone()
        projection.part(whole, dim=0).copy_(value)
        module.weight = nn.Parameter(whole, requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def _write_rotary(self, frequencies: Tensor) -> None:
        for module in self.model.modules():
            cache = module._buffers.get("cos_sin_cache")
            if cache is not None:
                angles = torch.outer(torch.arange(len(cache)).double(), frequencies.double().cpu())
                cache.copy_(torch.cat((angles.cos(), angles.sin()), -1))

    def settings(self) -> Mapping[str, Setting]:
        found: dict[str, Setting] = {}
        for name, module in self.model.named_modules():
            if name.endswith(".attn"):
                found[f"{name.removesuffix('.attn')}.scaling"] = float(vars(module)["impl"].scale)
            elif isinstance(vars(module).get("variance_epsilon"), float):
                found[f"{name}.variance_epsilon"] = vars(module)["variance_epsilon"]
        return found

    def set(self, name: str, value: Setting) -> None:
        path, _, attribute = name.rpartition(".")
        if attribute == "scaling":
            self.model.get_submodule(f"{path}.attn").impl.scale = value
        else:
            vars(self.model.get_submodule(path))[attribute] = value


class _Listener:
    """Calls of vLLM's modules as calls at sites."""

    def __init__(
        self, names: ModuleMap, on_call: OnCall, modules: Collection[str] | None, length: int, last: list[Tensor]
    ) -> None:
        self._map, self._on_call, self._modules, self._length, self._last = names, on_call, modules, length, last
        self._inputs: dict[str, Tensor] = {}
        self.error: Exception | None = None  # raised when the prompt is done: inside, it would leave vLLM stuck with it

    def before(self, call: RecordedCall) -> None:
        """Kernels overwrite their inputs, so these are copied: the sum of a (hidden, residual) pair."""
        given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
        hidden = given if call.operator == "embedding" else [x for x in given if x.is_floating_point()]
        pair = call.operator in ("norm", "residual") and len(hidden) == 2
        self._inputs[call.unit.module] = hidden[0] + hidden[1] if pair else hidden[0].clone()

    def after(self, call: RecordedCall) -> Any:
        name = call.unit.module
        x = self._inputs.pop(name)
        new = self._guarded(call, x) if len(x) == self._length and self.error is None else None
        if name == self._map.final_norm:
            self._last.append(_first(call.output if new is None else new).clone())
        return new

    def _guarded(self, call: RecordedCall, x: Tensor) -> Any:
        try:
            return self._reported(call, x)
        except Exception as error:
            self.error = error
            return None

    def _reported(self, call: RecordedCall, x: Tensor) -> Any:
        name, y = call.unit.module, call.output
        pair = isinstance(y, tuple) and len(y) == 2 and isinstance(y[1], Tensor)
        if BLOCK.fullmatch(name) and pair:
            new = self._ask(self._map.site(name), x, y[0] + y[1], _not_again)
            return None if new is None else (new.to(y[0]), torch.zeros_like(y[1]))
        parts = self._map.parts(name)
        outputs = [projection.part(_first(y)).reshape(len(x), -1) for projection in parts.values()]
        asked = [
            self._ask(self._map.site(part), x.reshape(len(x), -1) if x.is_floating_point() else x, output,
                      functools.partial(self._again, call, x, projection, pair and call.operator == "norm"))
            for (part, projection), output in zip(parts.items(), outputs, strict=True)
        ]  # fmt: skip
        if all(new is None for new in asked):
            return None
        whole = torch.cat([old if new is None else new.to(old) for old, new in zip(outputs, asked, strict=True)], -1)
        whole = whole.reshape(_first(y).shape)
        return (whole, *y[1:]) if isinstance(y, tuple) else whole

    def _ask(self, site: Site, x: Tensor, y: Tensor, again: Any) -> Tensor | None:
        if self._modules is not None and site.module not in self._modules:
            return None
        return self._on_call(EngineCall(site, x, y, again))

    def _again(self, call: RecordedCall, like: Tensor, projection: Projection, pair: bool, x: Tensor) -> Tensor:
        x = x.reshape(like.shape).to(like).clone()
        y = _first(call.repeat(x, torch.zeros_like(x)) if pair else call.repeat(x))
        return projection.part(y).reshape(len(y), -1)


def _itself(model: nn.Module) -> nn.Module:
    return model


def _pass(call: EngineCall) -> None:
    return None


def _not_again(x: Tensor) -> Tensor:
    raise InvalidInput("a vLLM block can't be called outside its forward")


def _first(y: Any) -> Tensor:
    found: Tensor = y[0] if isinstance(y, tuple) else y
    return found


@torch.no_grad()
def _effective_weight(module: Any) -> Tensor:
    """[out, in] of a linear whose weight is packed: its result for the unit vectors, which is exact."""
    width, dtype = module.input_size_per_partition, module.params_dtype
    rows = []
    for first in range(0, width, _IDENTITY_ROWS):
        unit = torch.eye(width, dtype=dtype)[first : first + _IDENTITY_ROWS]
        rows.append(module.cpu_linear(unit, module.weight, None))
    return torch.cat(rows).T.contiguous()


def _version() -> str:
    """The package is vllm, or vllm-cpu where it is built for CPUs."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("vllm-cpu")


def open_engine(model: str, sampling: Sampling, arguments: dict[str, Setting]) -> VllmEngine:
    """Open the engine; `--engine-args` are passed to vllm.LLM."""
    return VllmEngine(model, sampling, **arguments)
