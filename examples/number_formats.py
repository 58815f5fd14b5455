"""What a number format costs in one operator, before anything is quantised: a format is a perturbation like noise."""

import torch

import noisescope as ns
from noisescope import demo
from noisescope.data.dataset import read_data
from noisescope.data.tokens import prompts


def main() -> None:
    subject = ns.load("demo")
    problems = read_data(demo.test_file(), limit=32)
    texts = prompts(problems, subject.tokenizer)
    tokens = [subject.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]

    def answers() -> list[int]:
        with torch.no_grad():
            return [int(subject.model(ids).logits[0, -1].argmax()) for ids in tokens]

    clean = answers()
    for name in ("bf16", "fp8_e4m3", "int8", "int4"):
        injection = ns.Injection(ns.Format(name), operators={"linear"}, phases={"forward"})
        with ns.inject(subject.model, injection, anatomy=subject.anatomy) as tally:
            same = sum(a == b for a, b in zip(answers(), clean, strict=True))
        print(f"linears in {name:>8}: {same} of {len(clean)} first tokens as before ({tally.forward} injections)")


if __name__ == "__main__":
    main()
