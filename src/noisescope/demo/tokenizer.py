"""The tokenizer of the bundled model: whole words, single digits, single punctuation marks, each with its space."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from noisescope.demo import problems

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_SPACE = "▁"  # sentencepiece's mark for a space, so "38" after a space is the two tokens "▁3" and "8"


def make() -> PreTrainedTokenizerFast:
    """A text becomes <bos> and its pieces; decoding gives the text back. The vocabulary is that of the templates."""
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
