"""Tokens and where scoring begins, judging, generation: what is scored is the answer, all of it and nothing else."""

from __future__ import annotations

import functools
import logging
import logging.handlers
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import noisescope as ns
from noisescope import progress
from noisescope.cli.progress_display import ProgressDisplay
from noisescope.data.answers import answers_match, extract_number
from noisescope.data.dataset import DataSet, Item, gather
from noisescope.data.generation import generate
from noisescope.data.tokens import Encoded, Sequence, chance, encode, from_batches, prompts
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model

CORPUS = [
    "Question: how many apples are there?\nAnswer: there are 42 apples.\n#### 42",
    "The sky is blue, the grass is green and the answer is 18.",
    "user: hello\nassistant: hello there, how are you?",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Slow:
    """A tokenizer that can't tell which characters a token stands for."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self.fast = fast

    def __call__(self, text: str, **settings: Any) -> Any:
        return self.fast(text, **settings)

    def decode(self, ids: Any, **settings: Any) -> str:
        return str(self.fast.decode(ids, **settings))


@functools.cache
def tokenizer(kind: str) -> Any:
    """Byte-level BPE ("plain"); behind one or two tokens and before eos ("bos", "two"); with tokens that run across
    words ("greedy"); as Llama's ("spm"); of whole words ("words"); "slow ..." can't tell characters.
    """
    trainer = trainers.BpeTrainer(
        vocab_size=400 if "greedy" in kind else 330,
        special_tokens=["<s>", "</s>", "<m>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if kind == "words":
        made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    made = Tokenizer(models.BPE())
    if kind == "spm":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="greedy" not in kind)
        made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainer)
    if kind in ("bos", "two"):
        begin = "<s>" if kind == "bos" else "<m> <s>"
        tokens = [(name, made.token_to_id(name)) for name in ("<s>", "</s>", "<m>")]
        made.post_processor = processors.TemplateProcessing(single=f"{begin} $A </s>", special_tokens=tokens)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    if kind.startswith("slow"):
        return Slow(fast)
    fast.chat_template = CHATML
    return fast


def data(*items: Item) -> DataSet:
    return gather(items, "test.jsonl")


def parts(one: Sequence, kind: str = "plain") -> tuple[str, str, str]:
    """What is given, what is scored, and what of it decides."""
    decode = functools.partial(tokenizer(kind).decode, clean_up_tokenization_spaces=False)
    return decode(list(one.ids[: one.start])), decode(list(one.ids[one.start :])), decode(list(one.ids[one.final :]))


def only(encoded: Encoded) -> Sequence:
    ((one,),) = encoded.sequences
    return one


# -- encode


@pytest.mark.parametrize(("kind", "first"), [("plain", []), ("bos", ["<s>"]), ("two", ["<m>", "<s>"])])
def test_a_text_is_scored_from_its_first_predictable_token(kind: str, first: list[str]) -> None:
    """With a beginning that is the first of the text, without one the second; eos behind the text is left out."""
    plain = tokenizer(kind)("The sky is blue", add_special_tokens=False)["input_ids"]
    encoded = encode(data(Item(0, text="The sky is blue")), tokenizer(kind))
    one = only(encoded)
    assert list(one.ids) == tokenizer(kind).convert_tokens_to_ids(first) + plain
    assert one.start == one.final == max(1, len(first)) and encoded.tokens == len(one.ids)
    assert encoded.truncated == 0 and encoded.notes == ()


def test_a_long_text_keeps_its_front() -> None:
    """It is cut at its end, bos counted, and the loss is reported."""
    whole = only(encode(data(Item(0, text=CORPUS[0])), tokenizer("bos")))
    encoded = encode(data(Item(0, text=CORPUS[0]), Item(1, text="apples are")), tokenizer("bos"), max_tokens=8)
    (cut,), (short,) = encoded.sequences
    assert cut.ids == whole.ids[:8] and (cut.sample, short.sample) == (0, 1) and encoded.truncated == 1
    assert encoded.notes == ("1 of 2 items are longer than 8 tokens (--max-tokens) and lost their end",)
    assert encoded.tokens == 8 + len(short.ids)


@pytest.mark.parametrize(
    ("prompt", "answer", "given_", "scored"),
    [
        ("there are", "42", "there are", " 42"),  # one space is put between
        ("there are ", "42", "there are", " 42"),  # the prompt's own space goes with the word behind it
        ("there are", " 42", "there are", " 42"),
        ("there are\n", "42", "there are\n", "42"),
        ("there are", "\n42", "there are", "\n42"),
        ("sky  ", "  blue", "sky  ", "  blue"),
    ],
)
def test_prompt_and_answer_meet(prompt: str, answer: str, given_: str, scored: str) -> None:
    """Exactly one space joins them where neither has white space there, and the answer alone is scored."""
    one = only(encode(data(Item(0, prompt=prompt, answer=answer)), tokenizer("plain")))
    assert parts(one)[:2] == (given_, scored) and one.final == one.start


pieces = st.text("aeps 4#:\n.é木", min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("kind", ["plain", "bos", "greedy", "slow", "slow greedy"])
@given(prompt=pieces, answer=pieces)
@settings(max_examples=60, deadline=None)
def test_no_letter_of_the_prompt_is_scored_and_none_of_the_answer_missed(kind: str, prompt: str, answer: str) -> None:
    """With every tokenizer, also one whose tokens run across words or that can't tell characters, bytes are kept."""
    one = only(encode(data(Item(0, prompt=prompt, answer=answer)), tokenizer(kind)))
    before, after, _ = parts(one, kind)
    joint = "" if prompt[-1].isspace() or answer[0].isspace() else " "
    assert before.removeprefix("<s>") + after == prompt + joint + answer
    assert before.removeprefix("<s>").strip() == prompt.strip() and after.strip() == answer.strip()


def test_a_token_that_straddles_is_taken_apart() -> None:
    """Where the vocabulary has a token of both sides, both are tokenised alone, whatever letters it would have held."""
    greedy = tokenizer("greedy")
    pairs = [(token, greedy.decode([token]).strip()) for token in greedy.get_vocab().values()]
    straddling = [(token, text) for token, text in pairs if " " in text and greedy(text)["input_ids"] == [token]]
    assert straddling  # the test would be empty without such a token
    for kind in ("greedy", "slow greedy"):
        for token, text in straddling:
            prompt, _, answer = text.partition(" ")
            one = only(encode(data(Item(0, prompt=prompt, answer=answer)), tokenizer(kind)))
            assert parts(one, kind)[:2] == (f"{prompt} ", answer) and token not in one.ids


def test_a_token_that_straddles_only_blanks_is_kept() -> None:
    """ ":" with a line end is one token in many vocabularies: the text stays as the model knows it."""
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE({**letters, ":Ċ": 256}, [(":", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    one = only(encode(data(Item(0, prompt="a:", answer="\nb")), fast))
    assert one.ids == (letters["a"], 256, letters["b"]) and one.start == 2
    one = only(encode(data(Item(0, prompt="a:\n", answer="b")), fast))
    assert one.ids == (letters["a"], 256, letters["b"]) and one.start == 2


@pytest.mark.parametrize("kind", ["plain", "spm", "greedy", "slow"])
@pytest.mark.parametrize("answer", ["there are 42 apples.\n#### 18", "x #### 3\n#### 18", "#### 18"])
def test_what_follows_the_last_mark_decides(kind: str, answer: str) -> None:
    """GSM8K: the working is scored too, but only the number after "####" decides accuracy."""
    one = only(encode(data(Item(0, prompt="Question: how many?\nAnswer:", answer=answer)), tokenizer(kind)))
    _, scored, final = parts(one, kind)
    assert scored.strip() == answer and final.strip() in {"18", "#### 18"[-len(final.strip()) :]}
    assert final.strip().endswith("18") and len(one.ids) - one.final <= 3


def test_a_mark_in_the_prompt_or_at_the_end_decides_nothing() -> None:
    """Few-shot prompts are full of marks; an answer that ends with one has nothing behind it."""
    for item in (Item(0, prompt="#### 1\nQ:", answer="42 apples"), Item(0, prompt="Q:", answer="42 apples ####")):
        one = only(encode(data(item), tokenizer("plain")))
        assert one.final == one.start


def test_a_long_prompt_loses_its_front() -> None:
    """bos and the whole answer stay; where even the answer is too long, its end stays and a note says so."""
    item = Item(0, prompt=CORPUS[1], answer="there are 42 apples.\n#### 42")
    whole = only(encode(data(item), tokenizer("bos")))
    answer = len(whole.ids) - whole.start
    encoded = encode(data(item), tokenizer("bos"), max_tokens=answer + 3)
    cut = only(encoded)
    assert cut.ids == (whole.ids[0], *whole.ids[whole.start - 2 :]) and cut.start == 3
    assert cut.ids[cut.final :] == whole.ids[whole.final :] and encoded.truncated == 1
    assert encoded.notes == (
        f"1 of 1 items are longer than {answer + 3} tokens (--max-tokens) and lost their beginning",
    )
    encoded = encode(data(item), tokenizer("bos"), max_tokens=5)
    cut = only(encoded)
    assert (
        cut.ids == (whole.ids[0], *whole.ids[-4:])
        and cut.start == 1
        and cut.ids[cut.final :] == whole.ids[whole.final :]
    )
    assert encoded.notes[1] == "1 of 1 answers fill 5 tokens alone: their prompt is not seen"
    bare = only(encode(data(item), tokenizer("plain"), max_tokens=5))
    assert bare.start == 1 and len(bare.ids) == 5  # without bos the first token is given


def test_choices_share_their_prompt() -> None:
    """One sequence a choice; where the longest is too long, all lose the same front, or they could not be compared."""
    item = Item(0, prompt=CORPUS[1], choices=("blue", "there are 42 apples", "green"), label=0)
    ((one, two, three),) = encode(data(item), tokenizer("bos")).sequences
    assert [parts(each, "bos")[1] for each in (one, two, three)] == [" blue", " there are 42 apples", " green"]
    assert [each.choice for each in (one, two, three)] == [0, 1, 2] and {each.sample for each in (one, two, three)} == {
        0
    }
    longest = len(two.ids)
    cut = encode(data(item), tokenizer("bos"), max_tokens=longest - 2)
    assert len({each.ids[: each.start] for each in cut.sequences[0]}) == 1 and cut.truncated == 1
    assert [each.ids[each.start :] for each in cut.sequences[0]] == [
        each.ids[each.start :] for each in (one, two, three)
    ]
    assert cut.tokens == sum(len(each.ids) for each in cut.sequences[0])
    with pytest.raises(InvalidInput, match=r"item 1: the choices leave no room for the prompt in max_tokens=3"):
        encode(data(item), tokenizer("bos"), max_tokens=3)


def chat(*contents: str) -> Item:
    roles = ["system", "user", "assistant"][3 - len(contents) :] if len(contents) < 4 else []
    return Item(0, messages=tuple(zip(roles, contents, strict=True)))


@pytest.mark.parametrize("kind", ["plain", "bos"])
@pytest.mark.parametrize("answer", ["hello there", "e", "\nassistant 42 ", "é木", "#### 42"])
def test_a_chat_is_scored_on_its_last_answer(kind: str, answer: str) -> None:
    """The template's own words, before and behind the answer, are not scored; bos is there once."""
    one = only(encode(data(chat("be kind", "hello", answer)), tokenizer(kind)))
    before, scored, _ = parts(one, kind)
    assert scored.strip() == answer.strip()
    assert before.rstrip() == ("<s>" if kind == "bos" else "") + (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"
    )


def with_template(template: str | None, kind: str = "plain") -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(kind)._tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "before"),
    [
        ("<s>" + CHATML, "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),  # bos is its own
        # an empty thought is shown in a finished chat only, or opened in the prompt only
        (CHATML.replace("{{ m.content }}", "{% if m.role != 'user' %}<m>\n{% endif %}{{ m.content }}"), None),
        (CHATML.replace("assistant\n{% endif", "assistant\n<m>{% endif"), None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", None),  # no prompt of its own
    ],
)
def test_templates_of_many_kinds(template: str, before: str | None) -> None:
    """The answer is found wherever the template puts it."""
    made = with_template(template, "bos")
    one = only(encode(data(chat("hello", " hello there ")), made))
    assert parts(one, "bos")[1].strip() == "hello there" and one.ids.count(made.bos_token_id) == 1
    assert before is None or parts(one, "bos")[0] == before


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, r"item 1: chat `messages` need a chat template, and this tokenizer has none: take the instruct version"),
        ("{{ raise_exception('no system role') }}", "the chat template refuses these messages: no system role"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "the chat template rewrites the assistant's"),
    ],
)
def test_templates_that_fail(template: str | None, words: str) -> None:
    """No template, one that refuses and one that rewrites the answer are reported with the item."""
    with pytest.raises(InvalidInput, match=words):
        encode(data(chat("hello", "hello there")), with_template(template))


def test_what_can_not_be_encoded() -> None:
    """No tokenizer, nothing to score, and a senseless limit."""
    with pytest.raises(
        InvalidInput, match=r"test\.jsonl holds texts, and this model has no tokenizer: .* tokenised batches"
    ):
        encode(data(Item(0, text="a")), None)
    with pytest.raises(InvalidInput, match=r"test\.jsonl, item 2 has no token that can be scored: 1 in all"):
        encode(data(Item(0, text="a b"), Item(1, text="a")), tokenizer("words"))
    assert only(encode(data(Item(0, text="a")), tokenizer("bos"))).start == 1  # predicted from bos
    for wrong in (1, 0, True, 2.5):
        with pytest.raises(InvalidInput, match="max_tokens must be an integer of at least 2"):
            encode(data(Item(0, text="a b")), tokenizer("words"), max_tokens=wrong)


# -- the user's own batches


def test_batches_lose_their_padding() -> None:
    """Tensors and dicts, padded left or right, in one list; samples are numbered through."""
    right = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    left = {"input_ids": torch.tensor([[0, 0, 3, 4]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    encoded = from_batches([torch.tensor([[1, 2]]), right, left])
    assert [one.ids for (one,) in encoded.sequences] == [(1, 2), (5, 6, 7), (8, 9), (3, 4)]
    assert [(one.sample, one.start, one.final) for (one,) in encoded.sequences] == [(i, 1, 1) for i in range(4)]
    assert encoded.tokens == 9 and encoded.notes == () and encoded.truncated == 0


def test_labels_say_what_is_scored() -> None:
    """-100 at the front is the prompt, at the end nothing; a gap inside is scored over, with a note."""
    ids = torch.tensor([[0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])

    def encoded(*labels: int) -> Encoded:
        return from_batches([{"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([labels])}])

    assert only(encoded(-100, -100, -100, 3, 4, 5)) == Sequence(0, (1, 2, 3, 4, 5), 2, 2)
    assert only(encoded(-100, 1, 2, 3, 4, 5)).start == 1  # nothing precedes the first
    assert only(encoded(-100, -100, 2, 3, -100, -100)) == Sequence(0, (1, 2, 3), 1, 1)
    gap = encoded(-100, -100, 2, -100, 4, 5)
    assert only(gap) == Sequence(0, (1, 2, 3, 4, 5), 1, 1)
    assert gap.notes == ("labels of 1 rows have gaps: scored from the first label to the last",)


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (IDS, r"got one Tensor: write \[batch\]"),
        ({"input_ids": IDS}, r"got one dict: write \[batch\]"),
        ([], "there are no batches to score"),
        ([IDS[0]], r"batch 0: input_ids must be a tensor \[B, T\] of whole numbers, got torch.int64 \(3,\)"),
        ([IDS, IDS.float()], r"batch 1: input_ids must be .* got torch.float32 \(1, 3\)"),
        (["a text"], "batch 0: input_ids must be .* got str"),
        ([{"ids": IDS}], "batch 0 has no input_ids; found: ids"),
        ([{"input_ids": IDS, "attention_mask": torch.ones(1, 2).long()}], r"attention_mask has shape \(1, 2\), but"),
        (
            [{"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1]])}],
            "row 0: the attention_mask must be one run",
        ),
        ([{"input_ids": IDS, "attention_mask": IDS * 0}], "row 0: the attention_mask must be one run"),
        ([torch.tensor([[1]])], "batch 0, row 0 has no token that can be scored: 1 tokens"),
        ([{"input_ids": IDS, "labels": IDS * 0 - 100}], "row 0 has no token that can be scored"),
        ([{"input_ids": IDS, "labels": torch.tensor([[2, 3, -100]])}], "labels differ from input_ids; .* not shifted"),
    ],
)
def test_wrong_batches(batches: Any, words: str) -> None:
    """Each wrong batch is reported with its number."""
    with pytest.raises(InvalidInput, match=words):
        from_batches(batches)


def test_chance() -> None:
    """The mean of one over the number of choices; nothing is right by chance elsewhere."""
    two, four = (Item(0, prompt="a", choices=tuple("abcd"[:n]), label=0) for n in (2, 4))
    assert chance(data(two, four)) == 0.375 and chance(data(Item(0, text="a"))) == 0.0


# -- judging


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 5 and 6\n#### 1,000", "1000"),
        ("#### 3\nno: #### 4", "4"),
        ("#### $-5.50.", "-5.5"),
        ("####-$5", "-5"),
        ("#### **42** apples and 3 pears", "42"),
        ("#### Step 1\nSo the answer is 5.", "5"),  # a headline, no mark
        ("The answer is 38.0. I hope that 2 of us agree", "38"),
        ("the final Answer is: $1,234,567.80", "1234567.8"),
        ("the answer is 3 + 4 = 7.", "7"),
        ("the answer is unknown, perhaps 9", "9"),
        (r"\boxed{7}, the answer is 8", "7"),
        (r"thus \boxed{\frac{6}{8}} of 9", "3/4"),
        (r"$\boxed{x = 1{,}000\%}$", "1000"),
        (r"\boxed{12", "12"),  # cut off
        ("10-5=5", "5"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("- 5 apples", "5"),  # a list
        ("it is -3 degrees", "-3"),
        ("x=-4", "-4"),
        ("\N{MINUS SIGN}7", "-7"),
        ("half of it, 1/2.", "1/2"),
        ("4/2", "2"),
        ("on 12/25/2020", "2020"),
        ("1,2,3", "3"),
        (".5 or 50%", "50"),
        (".50", "0.5"),
        ("007", "7"),
        ("-0.00", "0"),
        ("6.02e23", "602" + "0" * 21),
        ("the 5th", "5"),
        ("<<16-3-4=9>>9", "9"),
        ("9" * 5000, "9" * 5000),  # int() would refuse it
        ("H2O and v1.2 of GPT4", None),
        ("none", None),
        ("", None),
    ],
)
def test_extract_number(text: str, number: str | None) -> None:
    """The number a text gives as its answer, in one spelling."""
    assert extract_number(text) == number


numbers = st.decimals(-(10**12), 10**12, allow_nan=False, places=3)


@given(number=numbers, style=st.sampled_from(["{}", "{:,}", "${:,}", "{} %", "{}.", "**{}**", "({})", "= {} apples"]))
@settings(max_examples=200, deadline=None)
def test_every_spelling_is_the_same_number(number: Decimal, style: str) -> None:
    """Commas, $, %, trailing zeros and what stands around it don't change a number, marked or not."""
    written = style.format(number)
    for text in (
        written,
        f"12 and 13 make {written}",
        f"4 #### {written}\n",
        rf"7 \boxed{{{written}}} 8",
        f"The answer is {written}",
    ):
        found = extract_number(text)
        assert found is not None and Fraction(found) == Fraction(number)
        assert found == extract_number(found)
        assert answers_match(text, f"#### {number}")


@given(text=st.text("0123456789.,-/$%#{}\\ =eE\nansweri boxedfrac", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_a_number_or_none(text: str) -> None:
    """Nothing raises, and what comes back is a number in its one spelling."""
    found = extract_number(text)
    assert found is None or extract_number(found) == found
    assert found is None or str(Fraction(found).denominator) == "1" or "/" in found or "." in found
    assert answers_match(text, text)


@pytest.mark.parametrize(
    ("predicted", "answer", "right"),
    [
        ("it is 38.0", "38", True),
        ("The answer is 3/4", "#### 0.75", True),
        ("about 37.999999999999999999999999999999", "38", False),
        ("#### 5\n\nQuestion: what is 9?\nAnswer: 9 #### 9", "#### 5", True),  # it went on with the next question
        ("Question: 9? #### 9", "#### 9", True),
        ("many", "38", False),
        ("Paris.\nIt lies on the Seine", "paris", True),
        ("I think the answer is: Paris!", "Paris", True),
        ("  NEW   york ", "New York.", True),
        ("Paris, Texas", "Paris", False),
        ("", "Paris", False),
        ("...", "Paris", False),
        ("+", "+", True),
        ("-", "+", False),
    ],
)
def test_answers_match(predicted: str, answer: str, right: bool) -> None:
    """Numbers as numbers, words without case, blanks and punctuation."""
    assert answers_match(predicted, answer) is right


# -- generation


@functools.cache
def talker(**settings: Any) -> Any:
    return tiny_model("llama", vocab_size=330, **settings)


PROMPTS = ["The sky is", "Question: how many apples are there?\nAnswer:", "hello"]


@functools.cache
def by_hand(prompt: str, new: int, kind: str = "bos") -> str:
    """One prompt, no padding, no cache: the likeliest token again and again."""
    made = tokenizer(kind)
    ids = ([made.bos_token_id] if kind == "bos" else []) + made(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(new):
            token = int(talker()(torch.tensor([ids])).logits[0, -1].argmax())
            if token == talker().generation_config.eos_token_id:
                break
            ids.append(token)
    return str(made.decode(ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("kind", ["bos", "plain"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_generation_is_greedy_and_padding_changes_nothing(kind: str, batch_size: int) -> None:
    """Batches padded on the left give what each prompt gives alone, token by token; batches are announced."""
    seen: list[Any] = []
    answers = generate(
        talker(), tokenizer(kind), PROMPTS, max_new_tokens=6, batch_size=batch_size, device="cpu", samples=[4, 7, 9],
        on_batch=lambda samples, length: seen.append((samples, length)),
    )  # fmt: skip
    assert answers == [by_hand(prompt, 6, kind) for prompt in PROMPTS] and len(set(answers)) == 3
    lengths = [
        len(tokenizer(kind)(prompt, add_special_tokens=False)["input_ids"]) + (kind == "bos") for prompt in PROMPTS
    ]
    batches = [slice(at, at + batch_size) for at in range(0, 3, batch_size)]
    assert seen == [([4, 7, 9][batch], max(lengths[batch])) for batch in batches]


def test_generation_reports_each_token() -> None:
    """As a share of all batches; the answers are the same, and nobody is told where nobody listens."""
    shares: list[float] = []

    class Listener(ProgressDisplay):
        def advanced(self, share: float) -> None:
            shares.append(share)

    with progress.shown_by(Listener()):
        answers = generate(
            talker(), tokenizer("bos"), PROMPTS, max_new_tokens=6, batch_size=2, device="cpu", samples=[4, 7, 9]
        )
    assert answers == [by_hand(prompt, 6) for prompt in PROMPTS]
    assert shares[0] == pytest.approx(1 / 12) and shares == sorted(shares) and 7 < len(shares) <= 12


@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "top_h": 0.3},
        {"do_sample": False, "temperature": 0.3, "min_p": 0.2},  # transformers would complain about these
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "max_length": 3, "min_new_tokens": 5, "max_time": 0.0},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 9.0, "early_stopping": True},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "stop_strings": ["a"]},
    ],
)
def test_a_checkpoint_s_settings_have_no_effect(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, penalties and lengths of generation_config.json are neither used, nor mentioned, nor changed."""
    model, made = tiny_model("llama", vocab_size=330), tokenizer("bos")
    for name, value in own.items():  # as a file would bring them: unchecked
        setattr(model.generation_config, name, value)
    before, verbosity = model.generation_config.to_dict(), transformers_logging.get_verbosity()
    state, messages = torch.get_rng_state(), logging.handlers.BufferingHandler(1000)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [messages])
    answers = generate(model, made, PROMPTS, max_new_tokens=6, batch_size=3, device="cpu", samples=[0, 1, 2])
    assert answers == [by_hand(prompt, 6) for prompt in PROMPTS]
    assert [record.getMessage() for record in messages.buffer] == []
    assert model.generation_config.to_dict() == before and transformers_logging.get_verbosity() == verbosity
    assert torch.equal(torch.get_rng_state(), state) and (made.pad_token, made.padding_side) == (None, "right")


def test_generation_stops_at_any_of_the_ends() -> None:
    """Each row ends at the first end of its own; what its neighbours still write is not in it."""
    model, made = tiny_model("llama", vocab_size=330), tokenizer("plain")
    arguments: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 3, "device": "cpu", "samples": [0, 1, 2]}
    whole = generate(model, made, PROMPTS, **arguments)
    ids = [made(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    with torch.no_grad():
        first = [int(model(torch.tensor([row])).logits[0, -1].argmax()) for row in ids]
    assert len(set(first)) > 1
    model.generation_config.eos_token_id = [1, first[0]]
    stopped = generate(model, made, PROMPTS, **arguments)
    assert stopped[0] == "" and whole[0] != ""
    assert all(whole[row].startswith(stopped[row]) for row in range(3)) and any(stopped)


def test_noise_follows_the_sample_through_padding() -> None:
    """Rows named through `on_batch` draw the same noise alone and padded beside others, token by token."""
    model, made = tiny_model("llama", vocab_size=330), tokenizer("bos")
    probe = ns.inject(model, ns.Injection(ns.Gaussian(0.3), operators={"linear"}, seed=3))
    outputs = []
    with probe:
        for batch_size in (1, 3):
            outputs.append(
                generate(
                    model, made, PROMPTS, max_new_tokens=5, batch_size=batch_size, device="cpu", samples=[5, 6, 7],
                    on_batch=lambda samples, length: probe.rows(samples),
                )
            )  # fmt: skip
    assert outputs[0] == outputs[1]
    clean = generate(model, made, PROMPTS, max_new_tokens=5, batch_size=3, device="cpu", samples=[5, 6, 7])
    assert clean != outputs[0]


def test_an_encoder_decoder_answers_without_its_prompt() -> None:
    """T5 returns only what it wrote."""
    model = tiny_model("t5", vocab_size=330)
    answers = generate(
        model, tokenizer("plain"), PROMPTS, max_new_tokens=5, batch_size=2, device="cpu", samples=[0, 1, 2]
    )
    with torch.no_grad():
        ids = torch.tensor([tokenizer("plain")(PROMPTS[2], add_special_tokens=False)["input_ids"]])
        first = model(input_ids=ids, decoder_input_ids=torch.tensor([[0]])).logits[0, -1].argmax()
    assert len(answers) == 3 and answers[2].startswith(
        tokenizer("plain").decode([int(first)], skip_special_tokens=True)
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokenizer": None}, "generating answers needs a tokenizer"),
        ({"model": torch.nn.Linear(2, 2)}, r"needs a model with generate\(\), and Linear has none"),
        ({"samples": [1]}, "one sample number a prompt, .* 3 prompts, 1 sample numbers"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": ["a", "b " * 90, "c"]}, r"the longest prompt has \d+ tokens, and the model has 64 positions"),
        ({"tokenizer": "plain", "prompts": ["a", "", "b"]}, "prompt 2 has no tokens"),
    ],
)
def test_what_can_not_be_generated(arguments: dict[str, Any], words: str) -> None:
    """Wrong arguments are refused before the first batch."""
    settings: dict[str, Any] = {
        "model": talker(), "tokenizer": "bos", "prompts": PROMPTS, "batch_size": 2, "max_new_tokens": 5,
        "samples": [0, 1, 2], "device": "cpu", "on_batch": lambda *_: pytest.fail("a batch was begun"), **arguments,
    }  # fmt: skip
    if settings["tokenizer"] is not None:
        settings["tokenizer"] = tokenizer(settings["tokenizer"])
    with pytest.raises(InvalidInput, match=words):
        generate(**settings)


def test_prompts() -> None:
    """Prompts as they are, or the chat up to where the assistant answers; texts and choices have none."""
    assert prompts(data(Item(0, prompt="1+1=", answer="2")), None) == ["1+1="]
    (asked,) = prompts(data(chat("hello", "hello there")), tokenizer("bos"))
    assert asked == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for item in (Item(0, text="a"), Item(0, prompt="a", choices=("b", "c"), label=0)):
        with pytest.raises(InvalidInput, match=f"is of kind {item.kind}, which has no answer to generate"):
            prompts(data(item), tokenizer("bos"))
