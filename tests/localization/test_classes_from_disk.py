"""Classes as they are on disk."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import transformers.cache_utils as caches
import transformers.models.llama.modeling_llama as llama
from torch import nn

from noisescope.localization import classes_from_disk
from noisescope.localization.classes_from_disk import as_on_disk, restore_code


def test_a_class_of_transformers_is_read_again(monkeypatch):
    """With the functions of its file, so that what was replaced in memory does not take part."""
    monkeypatch.setattr(llama, "rotate_half", lambda x: x)
    again = as_on_disk(llama.LlamaAttention)
    assert again is not llama.LlamaAttention and again.__name__ == "LlamaAttention"
    x = torch.arange(4.0)
    assert sys.modules[again.__module__].rotate_half(x).tolist() == [-2, -3, 0, 1]
    assert as_on_disk(llama.LlamaAttention) is again
    assert llama.rotate_half(x) is x  # memory is left alone


def test_classes_of_others_are_used_as_they_are():
    class Local(llama.LlamaMLP):
        pass

    assert as_on_disk(nn.Linear) is nn.Linear and as_on_disk(Local) is Local
    Local.__module__ = llama.__name__  # defined in a function: not to be found in a file
    assert as_on_disk(Local) is Local
    from transformers import PretrainedConfig

    assert as_on_disk(PretrainedConfig) is PretrainedConfig  # in a file that is neither a model's nor of caches


def test_a_class_that_the_file_does_not_have(monkeypatch):
    made = type("MadeInMemory", (), {"__module__": llama.__name__})
    assert as_on_disk(made) is made


@pytest.mark.parametrize(
    ("text", "found"), [("class Made:\n    pass\n", True), ("raise RuntimeError('once only')\n", False), (None, False)]
)
def test_a_file_that_can_not_be_run_again(tmp_path, monkeypatch, text, found):
    """Then its classes are used as they are in memory, and nothing stays in sys.modules."""
    name = f"transformers.models.made.modeling_made_{found}_{text is None}"  # each is read once in a process
    module = types.ModuleType(name)
    if text is not None:
        module.__file__ = str(tmp_path / "modeling_made.py")
        (tmp_path / "modeling_made.py").write_text(text, encoding="utf-8")
    monkeypatch.setitem(sys.modules, name, module)
    made = type("Made", (), {"__module__": name})
    assert (as_on_disk(made) is not made) == found
    assert (f"{name}_as_on_disk" in sys.modules) == found
    sys.modules.pop(f"{name}_as_on_disk", None)


def test_a_cache_gets_the_methods_on_disk_and_keeps_its_class(monkeypatch):
    """Deep inside as well, and new layers of it too."""
    cache = caches.DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    monkeypatch.setattr(caches.DynamicLayer, "update", lambda self, keys, values, *args, **kwargs: (keys + 9, values))
    restore_code(cache)
    assert isinstance(cache, caches.DynamicCache) and isinstance(cache.layers[0], caches.DynamicLayer)
    keys, _ = cache.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 0, 1]
    keys, _ = cache.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 1)
    assert keys.max() == 1 and isinstance(cache.layers[1], caches.DynamicLayer)


def test_restoring_looks_into_containers_and_leaves_others_alone():
    class Own:
        pass

    own = Own()
    held: dict[str, Any] = {"cache": [caches.DynamicCache(), (caches.DynamicLayer(),)], "own": own, "number": 3}
    restore_code(held)
    assert type(held["cache"][0]) is not caches.DynamicCache and type(held["cache"][1][0]) is not caches.DynamicLayer
    assert type(own) is Own
    restore_code(caches.DynamicCache)  # a class is no object to be changed
    assert caches.DynamicCache.__name__ == "DynamicCache"
    deep: Any = caches.DynamicCache()
    for _ in range(7):
        deep = [deep]
    restore_code(deep)  # too deep to be somebody's cache
    assert classes_from_disk._restored(Own) is Own


def test_bases_that_can_not_be_put_in_one_order(monkeypatch):
    class Base:
        pass

    class Child(Base):
        pass

    monkeypatch.setattr(classes_from_disk, "as_on_disk", lambda cls: Base)  # a class before its own subclass
    assert classes_from_disk._restored.__wrapped__(Child) is Child


def test_tables_of_cache_layers_stay_as_they_are(monkeypatch):
    """Their classes enter themselves when they are defined: those that are read again do not."""

    def tables() -> dict[str, Any]:
        return {name: dict(value) for name, value in vars(caches).items() if name.isupper() and isinstance(value, dict)}

    before = tables()
    apart = f"{caches.__name__}_as_on_disk"
    monkeypatch.setitem(sys.modules, apart, sys.modules.get(apart))  # what others have read stays theirs
    again = classes_from_disk.read_again.__wrapped__(caches.__name__)
    assert again is not None and again.DynamicLayer is not caches.DynamicLayer
    assert tables() == before and before
    monkeypatch.setattr(classes_from_disk, "as_on_disk", lambda cls: getattr(again, cls.__name__))
    assert issubclass(classes_from_disk._restored.__wrapped__(caches.DynamicLayer), caches.DynamicLayer)
    assert tables() == before
