"""The bundled model's tokenizer, and its training problems as tensors, made by several processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from noisescope.demo import problems
from noisescope.demo.problems import Problem

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_SPACE = "▁"  # sentencepiece's mark for a space, so "38" after a space is the two tokens "▁3" and "8"
TRAIN_SEED = 7_000
TRAIN_STEPS, TRAIN_WEIGHTS = (1, 2, 3, 4), (1, 2, 3, 4)  # easy problems first teach the single operations
LENGTH = 64  # tokens of the longest problem with its answer, rounded up
CHUNK = 10_000  # problems a worker makes at a time, with a seed of their own
SENTENCES = max(problems.STEPS) + 1  # the opening and one for each operation
NO_VALUE = 255


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words, single digits, single punctuation marks, each with its space; the vocabulary is the templates'.

    A text becomes <bos> and its pieces; decoding gives the text back.
    """
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always"),
            pre_tokenizers.Split(Regex(f"{_SPACE}?[0-9]|[.,?]"), "isolated"),
        ]
    )
    words = [word for template in problems.TEMPLATES for word in template.split() if "{" not in word]
    pieces = {f"{space}{digit}" for space in ("", _SPACE) for digit in range(10)} | set(".,?")
    for word in [*words, *problems.NAMES, *problems.THINGS]:
        pieces |= {piece for piece, _ in splitter.pre_tokenize_str(word)}
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *sorted(pieces)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
    core.pre_tokenizer = splitter
    core.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    core.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        padding_side="left",  # as generation wants it
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _question_mark() -> int:
    return int(make_tokenizer().convert_tokens_to_ids("?"))


def answer_mask(tokens: Tensor) -> Tensor:
    """[B, T - 1] for tokens [B, T]: True where the next token is one of the answer, behind the question mark."""
    return ((tokens[:, :-1] == _question_mark()).cumsum(1) > 0) & (tokens[:, 1:] != PAD)


@dataclass(frozen=True)
class Batch:
    """Problems as numbers, uint8: tokens [N, LENGTH], and for each sentence where it ends and the value then."""

    tokens: Tensor
    ends: Tensor  # [N, SENTENCES]
    values: Tensor  # [N, SENTENCES], NO_VALUE where the story has fewer sentences

    def pick(self, rows: Tensor) -> Batch:
        return Batch(self.tokens[rows].long(), self.ends[rows].long(), self.values[rows].long())

    def to(self, device: str) -> Batch:
        return Batch(self.tokens.to(device), self.ends.to(device), self.values.to(device))


def encode(items: Sequence[Problem]) -> Batch:
    """<bos> prompt answer <eos>, padded on the right."""
    core = make_tokenizer().backend_tokenizer
    stop = core.token_to_id(".")
    tokens = torch.full((len(items), LENGTH), PAD, dtype=torch.uint8)
    ends = torch.zeros(len(items), SENTENCES, dtype=torch.uint8)
    values = torch.full((len(items), SENTENCES), NO_VALUE, dtype=torch.uint8)
    texts = core.encode_batch([f"{item.prompt} {item.answer}" for item in items])
    for row, (item, text) in enumerate(zip(items, texts, strict=True)):
        ids = [*text.ids, EOS]
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.uint8)
        stops = [position for position, token in enumerate(ids) if token == stop]
        ends[row, : len(stops)] = torch.tensor(stops, dtype=torch.uint8)
        values[row, : len(stops)] = torch.tensor(item.values, dtype=torch.uint8)
    return Batch(tokens, ends, values)


def training_problems(chunk: int, count: int, without: frozenset[str]) -> list[Problem]:
    """The first problems of a chunk, none of whose prompts is in `without`."""
    source = problems.stream(TRAIN_SEED + chunk, steps=TRAIN_STEPS, weights=TRAIN_WEIGHTS, without=without)
    return [next(source) for _ in range(count)]


def _chunk(job: tuple[int, int, frozenset[str]]) -> list[Any]:
    """As numpy arrays, which go from process to process as bytes: tensors would fill /dev/shm."""
    batch = encode(training_problems(*job))
    return [batch.tokens.numpy(), batch.ends.numpy(), batch.values.numpy()]


def training_set(count: int, without: frozenset[str], *, workers: int) -> Batch:
    jobs = [(chunk, min(CHUNK, count - start), without) for chunk, start in enumerate(range(0, count, CHUNK))]
    if workers > 1:
        with Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            parts = pool.map(_chunk, jobs, chunksize=1)
    else:
        parts = [_chunk(job) for job in jobs]
    return Batch(*(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)))
