"""The forwards a model under test runs: shapes, padding, and decode steps with the model's own cache.

A covering design, not a product: every value that matters (one token, one more and one less than a power of two, a long
sequence, batch 1, 2 and 8, padding on either side, decode after each kind of prefill) occurs at least once, in seven
workloads, the cheap ones first, so that a time budget cuts the tail.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.localization.coverage import Phase
from noisescope.localization.inputs import (
    LENGTH,
    ROWS,
    Batch,
    are_ids,
    arguments_of,
    batches_for,
    check_positions,
    images,
    made_ids,
    on_device,
    paragraphs,
    positions_of,
    prompts_in,
)
from noisescope.model.forwards import sliding_window, vocabulary_size

STEPS = 4  # of decode, unless given
LONG = 257  # tokens: several tiles and one
MOST_PROMPTS = 8  # of a file are run as they are
WIDEST_WINDOW = 1024  # of sliding attention that is still worth a sequence one token longer
# What follows the base batches: (prefill, decode steps).
DESIGN = (
    (Phase("prefill", 1, 1), 2),  # no other token to attend to; a cache that begins with one slot
    (Phase("prefill", 2, 17), STEPS),  # one above a power of two
    (Phase("prefill", 1, 127), 2),  # a part of a tile; decode fills a block of 128 slots (or 64, 32) and begins another
    (Phase("prefill", 8, 15, padding="left"), 2),  # one below; rows of several lengths, as a server batches them
    (Phase("prefill", 1, LONG), 2),  # and decode that attends to all of it
    (Phase("prefill", 8, 33, padding="right"), 0),
)
MARGIN = 2  # positions left at the end of a sequence: some models look up one or two more than they have tokens
_OF_TOKENS = re.compile(r"tok|word|wte|vocab")  # in names of embeddings that are not of positions
_CROSS = re.compile(r"cross|encoder_attn")  # in names of attention that reads an encoder's states
_ENCODER_STATES = ("encoder_hidden_states", "encoder_outputs")
_ENCODED = Phase("prefill", 2, 17, encoded=True)
_STATES = 9  # of an encoder, for each sequence
_CACHES = ("past_key_values", "cache_params", "state")  # the names that models have for what they keep


@dataclass(frozen=True)
class Workload:
    """A prefill and the decode steps that follow it."""

    phase: Phase  # of the prefill
    inputs: Batch  # arguments of the prefill's forward, on the model's device
    decode: int = 0  # steps that follow, with the model's cache
    other: Batch | None = None  # other data of the same shape: old data in a buffer shows only when data changes
    required: bool = False  # the base, or what the caller requested: if it can't run, that is an error

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What runs, as named in the coverage."""
        after = dataclasses.replace(self.phase, kind="decode", steps=self.decode)
        return (self.phase, after) if self.decode else (self.phase,)

    def __str__(self) -> str:
        return " + ".join(map(str, self.phases))


def workloads_for(
    model: nn.Module,
    tokenizer: Any,
    inputs: Any = None,
    *,
    tokens: int | None = None,
    batch: int | None = None,
    decode: int | None = None,
    quick: bool = False,
    seed: int = 0,
) -> tuple[list[Workload], list[str]]:
    """The workloads, and the phases and shapes that will not be run, each with its reason.

    `inputs` (prompts, token ids, batches, or the path of a file with prompts) run as they are and replace the built-in
    text, of which the other workloads are made. `tokens`, `batch` and `decode` replace the design by one workload.
    `quick` leaves all but the base batches out.
    """
    texts, left_out = _prompts(inputs)
    base = _base(batches_for(model, tokenizer, inputs if texts is None else texts, seed))
    if quick:
        return base, [*left_out, "other lengths and batch sizes, padding, decode: skipped by quick"]
    maker = _Maker(model, tokenizer, base, texts, given=inputs is not None, seed=seed)
    if tokens is None and batch is None and decode is None:
        return [*base, *maker.design()], [*left_out, *maker.not_run]
    asked = Phase("prefill", batch or ROWS, tokens or min(LENGTH, positions_of(model) or LENGTH))
    made = maker.asked(asked, STEPS if decode is None else decode)
    return [*base, made], [*left_out, *maker.not_run, "other lengths and batch sizes, padding: one shape was requested"]


def _prompts(inputs: Any) -> tuple[list[str] | None, list[str]]:
    """The prompts, if the inputs are texts, and which prompts of a file are not run."""
    if isinstance(inputs, Path):
        found = prompts_in(inputs)
        rest = len(found) - MOST_PROMPTS
        return found[:MOST_PROMPTS], [f"{rest} more prompts of {inputs}: the first {MOST_PROMPTS} ran"] * (rest > 0)
    texts = [inputs] if isinstance(inputs, str) else inputs
    is_text = isinstance(texts, Sequence) and bool(texts) and all(isinstance(text, str) for text in texts)
    return (list(texts), []) if is_text else (None, [])


def _base(batches: Sequence[Batch]) -> list[Workload]:
    """Each batch with the next one of its shape, if there is one."""
    found, waiting = [], list(batches)
    while waiting:
        first = waiting.pop(0)
        other = next((one for one in waiting if _shapes(one) == _shapes(first)), None)
        waiting = [one for one in waiting if one is not other]
        found.append(Workload(_phase_of(first), first, other=other, required=True))
    return found


def _shapes(batch: Batch) -> dict[str, Any]:
    return {name: value.shape if isinstance(value, Tensor) else type(value) for name, value in batch.items()}


def _phase_of(batch: Batch) -> Phase:
    main = next((value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1), None)
    if main is None:
        return Phase("prefill", 1, 1)
    mask = batch.get("attention_mask")
    padding = ""
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        padding = "left" if not bool(mask[:, 0].all()) else "right"
    if "pixel_values" in batch and "input_ids" not in batch:
        return Phase("images", main.shape[0], 1)
    return Phase("prefill", main.shape[0], main.shape[1], padding=padding)


class _Maker:
    """Creates workloads that fit a model, and notes in `not_run` what does not."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        base: Sequence[Workload],
        texts: list[str] | None,
        *,
        given: bool,
        seed: int,
    ) -> None:
        self.model, self.tokenizer, self.texts, self.given, self.seed = model, tokenizer, texts, given, seed
        self.base = [batch for one in base for batch in (one.inputs, one.other) if batch is not None]
        self.name = type(model).__name__
        self.config = getattr(model, "config", None)
        self.two_stacks = bool(getattr(self.config, "is_encoder_decoder", False))
        self.room = self._positions()
        inner: Any = model
        inner = inner.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward takes anything
        known, listed, _ = arguments_of(inner)
        self.arguments = frozenset((*known, *listed))
        self.not_run: list[str] = []
        self.ids = next((name for name in ("input_ids", *self.base[0]) if are_ids(self.base[0].get(name))), "")
        of_ids = {self.ids, "decoder_input_ids"}
        self.takes_ids = all(set(one) <= of_ids and are_ids(one.get(self.ids)) for one in self.base)
        self.takes_images = not given and "pixel_values" in self.base[0]

    def asked(self, phase: Phase, decode: int) -> Workload:
        """The one workload that the caller requested."""
        if self.takes_images and phase.tokens == LENGTH:
            return dataclasses.replace(self._made(Phase("images", phase.batch, 1), 0, 1), required=True)
        if not self.takes_ids:
            raise InvalidInput(
                f"a number of tokens, a batch size and decode steps apply only to token ids, but {self.name} "
                f"received {', '.join(self.base[0])}: pass inputs of the shape you want instead"
            )
        steps = self._steps(decode)
        check_positions(self.model, phase.tokens + steps, "a sequence with its decode steps" if steps else "a sequence")
        return dataclasses.replace(self._made(phase, steps, 1), required=True)

    def design(self) -> Iterator[Workload]:
        """The parts of the design that fit the model."""
        if self.takes_images:
            self.not_run.append(f"lengths, padding, decode: {self.name} takes images of one size")
            yield from (self._made(Phase("images", batch, 1), 0, number) for number, batch in enumerate((1, 8), 1))
            return
        if not self.takes_ids:
            self.not_run.append("other lengths and batch sizes, padding, decode: only token ids can be resized")
            return
        self._check_arguments()
        seen = {(phase.batch, phase.tokens, phase.padding): 0 for phase in map(_phase_of, self.base)}
        for number, (phase, decode) in enumerate(DESIGN, 1):
            phase, steps = self._fitted(phase), self._steps(decode)
            tokens = self._length(phase, steps)
            key = (phase.batch, tokens, phase.padding)
            if tokens > 0 and steps > seen.get(key, -1):  # short models have one shape for several of the design
                seen[key] = steps
                yield self._made(dataclasses.replace(phase, tokens=tokens), steps, number)
        if self._reads_an_encoder():
            yield self._made(_ENCODED, self._steps(2), len(DESIGN) + 1)

    def _reads_an_encoder(self) -> bool:
        """A decoder with cross attention that a forward on tokens alone would not reach."""
        crosses = any(_CROSS.search(name) for name, _ in self.model.named_modules())
        return crosses and bool(self.arguments & {*_ENCODER_STATES}) and not self.two_stacks

    def _encoder_states(self, batch: int) -> Tensor:
        sizes = (vars(self.config).get("cross_attention_hidden_size"), getattr(self.config, "hidden_size", None))
        width = next(size for size in sizes if isinstance(size, int))
        draw = torch.Generator("cpu").manual_seed(self.seed)
        states = torch.randn(batch, _STATES, width, generator=draw)
        return states.to(next(p.dtype for p in self.model.parameters() if p.is_floating_point()))

    def _check_arguments(self) -> None:
        if "attention_mask" not in self.arguments:
            self.not_run.append(f"left and right padding: {self.name} takes no attention_mask")
        elif self.two_stacks:
            self.not_run.append("left padding: encoders are padded on the right")

    def _fitted(self, phase: Phase) -> Phase:
        """Without padding that the model does not accept; the long one exceeds a sliding window."""
        unpadded = "attention_mask" not in self.arguments or (phase.padding == "left" and self.two_stacks)
        if unpadded and phase.padding:
            phase = dataclasses.replace(phase, padding="")
        window = sliding_window(self.model) or 0
        if phase.tokens == LONG and window >= phase.tokens:
            if window <= WIDEST_WINDOW:
                return dataclasses.replace(phase, tokens=window + 1)
            self.not_run.append(f"more tokens than the sliding window of {window}: give --tokens {window + 1}")
        return phase

    def _steps(self, decode: int) -> int:
        if decode and not ("use_cache" in self.arguments and self.arguments & set(_CACHES)):
            why = f"decode: {self.name} keeps no cache"
            self.not_run += [why] * (why not in self.not_run)
            return 0
        return decode

    def _positions(self) -> int | None:
        """How many positions are certain to exist: on a GPU, an index beyond a table is fatal, not an exception."""
        named = positions_of(self.model)
        if self.config is not None:
            return None if named is None else max(1, named - MARGIN)
        tables = [(name, one) for name, one in self.model.named_modules() if isinstance(one, nn.Embedding)]
        longest = max(_phase_of(one).tokens for one in self.base)
        unnamed = len(tables) > (2 if named else 1)  # beside one of positions, a single other table is of tokens
        sizes = [one.num_embeddings for name, one in tables if unnamed and not _OF_TOKENS.search(name)]
        return min([*([] if named is None else [named]), *(size for size in sizes if size >= longest)], default=None)

    def _length(self, phase: Phase, steps: int) -> int:
        room = phase.tokens if self.room is None else self.room - steps
        if room < phase.tokens:
            self.not_run.append(f"{phase}: {self.name} has {positions_of(self.model) or self.room} positions")
        return min(phase.tokens, room)

    def _made(self, phase: Phase, decode: int, number: int) -> Workload:
        if self.takes_images:
            return Workload(phase, on_device(self.model, {"pixel_values": images(self.model, phase.batch, number)}))
        ids = self._ids((phase.batch, phase.tokens), number)
        batch: Batch = {self.ids: ids}
        if phase.padding:
            mask = _padded(phase)
            batch = {self.ids: ids.where(mask > 0, self._pad()), "attention_mask": mask}
            if phase.padding == "left" and "position_ids" in self.arguments:
                batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate() makes them
        if self.two_stacks:
            batch["decoder_input_ids"] = ids.flip(-1)
        if phase.encoded:
            states = self._encoder_states(phase.batch)
            named = "encoder_hidden_states" in self.arguments
            batch |= {"encoder_hidden_states": states} if named else {"encoder_outputs": (states,)}
        if decode:
            batch["use_cache"] = True
        return Workload(phase, on_device(self.model, batch), decode)

    def _ids(self, shape: tuple[int, int], number: int) -> Tensor:
        seed = self.seed + number
        if self.texts is not None:
            return made_ids(self.model, self.tokenizer, self.texts, shape, seed)
        if not self.given:
            return made_ids(self.model, self.tokenizer, paragraphs(seed), shape, seed)
        stream = torch.cat([one[self.ids].to("cpu").flatten() for one in self.base])
        return stream[(torch.arange(shape[0] * shape[1], device="cpu") + 7 * number) % len(stream)].reshape(shape)

    def _pad(self) -> int:
        for owner in (self.tokenizer, self.config):
            named = getattr(owner, "pad_token_id", None)
            if isinstance(named, int) and 0 <= named < (vocabulary_size(self.model) or 1):
                return named
        return 0


def _padded(phase: Phase) -> Tensor:
    """The mask: the first row is full, the last is half padding, the others are evenly spread between."""
    longest = phase.tokens // 2
    pads = torch.tensor([row * longest // max(1, phase.batch - 1) for row in range(phase.batch)], device="cpu")
    at = torch.arange(phase.tokens, device="cpu")
    mask = (at >= pads[:, None]) if phase.padding == "left" else (at < phase.tokens - pads[:, None])
    return mask.long()


# -- running


def run_workload(model: nn.Module, workload: Workload, forward: Callable[[Batch], Any]) -> str:
    """The prefill and its decode steps, each through `forward`; why steps were not run, or "".

    A cache grows in place: a `forward` that runs the model twice on the same arguments has to copy it.
    """
    given = workload.inputs
    output = forward(given)
    for _ in range(workload.decode):
        following, why = decode_inputs(model, given, output)
        if following is None:
            return why
        given = following
        output = forward(given)
    return ""


def decode_inputs(model: nn.Module, given: Batch, output: Any) -> tuple[Batch | None, str]:
    """Arguments of the forward that follows one on `given` with this output: the likeliest token, and the cache.

    None with the reason where the model gave no cache.
    """
    name, cache = _cache(model, output)
    if cache is None:
        return None, f"decode: {type(model).__name__} returned no cache"
    token = _next_token(model, given, output)
    following: Batch = {name: cache, "use_cache": True}
    mask = given.get("attention_mask")
    if "decoder_input_ids" in given:
        encoded = given.get("encoder_outputs") or (_field(output, "encoder_last_hidden_state"),)
        following |= {"encoder_outputs": encoded, "decoder_input_ids": token}
        return following | ({} if mask is None else {"attention_mask": mask}), ""
    following["input_ids"] = token
    if mask is not None:
        following["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
    following |= {name: given[name] for name in _ENCODER_STATES if name in given}
    if given.get("position_ids") is not None:
        following["position_ids"] = given["position_ids"][:, -1:] + 1
    return following, ""


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _cache(model: nn.Module, output: Any) -> tuple[str, Any]:
    """Its name among the model's arguments, and what came out under that name (or second, of a plain tuple)."""
    known, listed, takes_any = arguments_of(model)
    names = [name for name in _CACHES if takes_any or name in (*known, *listed)]
    for name in names:
        if _field(output, name) is not None:
            return name, _field(output, name)
    if names and type(output) is tuple and len(output) > 1 and not isinstance(output[1], Tensor):
        return names[0], output[1]
    return "", None


def _next_token(model: nn.Module, given: Batch, output: Any) -> Tensor:
    """[B, 1]: the likeliest after each row's last token, chosen on the host; that token again where no logits are."""
    ids: Tensor = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
    logits = output[0] if type(output) is tuple else output if isinstance(output, Tensor) else _field(output, "logits")
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return ids[:, -1:]
    last = torch.full((len(ids),), logits.shape[1] - 1, device=logits.device)
    mask = given.get("attention_mask")
    if mask is not None and mask.shape == ids.shape == logits.shape[:2]:
        last = last - mask.to(logits.device).long().flip(-1).argmax(-1)  # the last token lies before right padding
    chosen = logits[torch.arange(len(ids), device=logits.device), last].detach().to("cpu").float().nan_to_num()
    most = vocabulary_size(model) or chosen.shape[-1]
    return chosen[:, :most].argmax(-1, keepdim=True).to(ids)


def within_budget(
    workloads: Iterable[Workload],
    seconds: float | None,
    not_run: list[str],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Workload]:
    """Workloads as long as time remains; required ones always run, the others are listed in `not_run`."""
    begin = clock()
    for one in workloads:
        if one.required or seconds is None or clock() - begin < seconds:
            yield one
        else:
            not_run.append(f"{one}: the budget of {seconds:g} s was spent")
