"""Each module's code on the host around recorded results: what it must notice, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization.call_tree import CallTree, Node
from noisescope.localization.data_flow import about_difference
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_twin import HostTwin
from noisescope.localization.twin_comparison import Comparison

X = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


class Bench:
    """A module in a small model, recorded, and compared by its twin."""

    def __init__(self, make: Callable[[nn.Module], nn.Module], record: Callable[..., CallTree]) -> None:
        self._make, self._record = make, record

    def __call__(
        self,
        inner: nn.Module,
        scope: Any = None,
        edit: Callable[[Node], None] = lambda node: None,
        module: str = "layers.0.inner",
    ) -> Comparison:
        model = self._make(inner)
        with host_arithmetic():
            twin = HostTwin(model)
        if scope is None:
            tree = self._record(model, X)
        else:
            with scope:
                tree = self._record(model, X)
        node = next(node for node in tree.nodes if node.module == module and node.is_module)
        for child in node.children:
            child.by_formula = True
        edit(node)
        with host_arithmetic():
            return twin.compare(node)


@pytest.fixture
def bench(blocks_around: Any, calls_of: Any) -> Bench:
    return Bench(blocks_around, calls_of)


class Sums(nn.Module):
    """Exact code around one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return 2 * x + self.linear(x.flip(-1)).transpose(-1, -2).contiguous().transpose(-1, -2)


class Inexact(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def last_bit(node: Node) -> None:
    node.output = node.output.clone()
    node.output[0, 1, 2] = torch.nextafter(node.output[0, 1, 2], torch.tensor(9.0))


def test_exact_code_is_compared_bit_for_bit(bench):
    found = bench(Sums())
    assert found.exact and not found.problem and not found.differences and not found.others
    assert found.compared == 2  # what the linear is given, and the output
    (difference,) = bench(Sums(), edit=last_bit).differences
    assert (difference.tensor, difference.path, difference.limit) == ("output", "", None)
    assert int((difference.got != difference.expected).sum()) == 1
    assert difference.node is difference.inside and difference.before is not None
    assert difference.before.module == "layers.0.inner.linear"


def test_what_a_call_inside_is_given_is_compared(bench):
    def other_input(node: Node) -> None:
        node.children[0].args = (node.children[0].args[0] + 1,)

    (difference,) = bench(Sums(), edit=other_input).differences
    assert (difference.node.module, difference.tensor, difference.path) == ("layers.0.inner.linear", "input", "0.0")


def test_a_wrong_result_inside_is_not_blamed_on_the_code_around_it(bench):
    """The device's own result takes part, whatever it is."""

    class Wrong(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            y = func(*args, **(kwargs or {}))
            return 3 * y if func is F.linear else y

    assert not bench(Sums(), scope=Wrong()).differences


class Ulps(torch.overrides.TorchFunctionMode):
    """exp and sum round up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func in (torch.exp, Tensor.exp, Tensor.sum):
            for _ in range(self.number):
                y = torch.nextafter(y, torch.full_like(y, torch.inf))
        return y


@pytest.mark.parametrize(("ulps", "wrong"), [(0, False), (1, False), (40, True), (4000, True)])
def test_inexact_code_has_a_tolerance_of_a_few_roundings(bench, ulps, wrong):
    found = bench(Inexact(), scope=Ulps(min(ulps, 1)), edit=lambda node: spoil(node, ulps if wrong else 0))
    assert not found.exact
    assert bool(found.differences) == wrong
    for difference in found.differences:
        assert difference.limit is not None and difference.limit.shape == difference.got.shape
        assert float(difference.limit.max()) < 1e-5


def spoil(node: Node, ulps: int) -> None:
    node.output = node.output * (1 + ulps * 2.0**-23)


class Otherwise(nn.Module):
    """A class's code, and what an instance runs in its place."""

    def __init__(self, code: Callable[[Tensor], Any], runs: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.code, self.forward = code, runs  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Any:
        return self.code(x)


def with_a_sink(x: Tensor) -> Tensor:
    return 2 * F.softmax(torch.cat([x, x[..., :1]], -1), -1)[..., :-1]


def test_a_function_of_another_shape_is_run_on_the_host(bench):
    """Softmax without the sink: its result can't take the place of the one with it."""
    found = bench(Otherwise(with_a_sink, lambda x: 2 * F.softmax(x, -1)))
    assert not found.problem and not found.other_arguments
    assert [(each.tensor, each.node.module) for each in found.differences] == [("output", "layers.0.inner")]
    assert not bench(Otherwise(with_a_sink, with_a_sink)).differences


def test_an_argument_by_position_is_the_one_by_name(bench):
    by_name, by_position = (lambda x: F.softmax(x, dim=-1) + 1), (lambda x: F.softmax(x, -1) + 1)
    assert not bench(Otherwise(by_name, by_position)).other_arguments
    assert bench(Otherwise(by_name, lambda x: F.softmax(x, 0) + 1)).other_arguments


def test_words_that_functions_are_given_are_compared(bench):
    gelu, tanh = F.gelu, lambda x: F.gelu(x, approximate="tanh")
    (found,) = bench(Otherwise(gelu, tanh)).other_arguments
    assert found.words == ("approximate is tanh, and not None",)
    assert not bench(Otherwise(tanh, tanh)).other_arguments


def test_a_cast_to_a_shorter_dtype_is_no_round_off(bench):
    """The code keeps float32; the device gives its numbers rounded to bfloat16."""
    (difference,) = bench(Otherwise(lambda x: (x, torch.exp(x)), lambda x: (x, torch.exp(x).bfloat16()))).differences
    assert difference.limit is not None and float(difference.limit.max()) < 1e-4


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Any:
        scores = torch.exp(x)
        return x, scores.argmax(-1)


def test_choices_that_round_off_can_not_turn_are_compared(bench):
    """An index is right or not; near a tie it may be either."""

    def other(node: Node) -> None:
        node.output = (node.output[0], (node.output[1] + 1) % 4)

    assert not bench(Chooses()).differences
    (difference,) = bench(Chooses(), edit=other).differences
    assert difference.path == "1" and difference.limit is not None and float(difference.limit.max()) == 0

    class Tie(Chooses):
        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.zeros_like(x) + 1e-9 * x)

    assert not bench(Tie(), edit=other).differences


def test_results_of_whole_numbers_are_exact(bench):
    """A running sum of positions makes nothing inexact."""

    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * torch.ones(3, dtype=torch.long).cumsum(0)[:, None]

    assert bench(Positions()).exact


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Any:
        chosen = x.exp().flatten()
        return x, chosen[chosen > chosen.median()]


def test_shapes_that_depend_on_numbers_have_no_limit(bench):
    def other(node: Node) -> None:
        node.output = (node.output[0], node.output[1] + 1)

    found = bench(Wide(), edit=other)
    assert not found.problem and len(found.differences) <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_on_one_side_are_differences(bench, value):
    def spoiled(node: Node) -> None:
        node.output = node.output.clone()
        node.output[0, 0, 0] = value

    assert len(bench(Inexact(), edit=spoiled).differences) == 1
    assert len(bench(Sums(), edit=spoiled).differences) == 1

    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.exp(x * value), x

    assert not bench(Overflows()).differences  # NaN on both


def test_another_shape_is_a_difference(bench):
    def other(node: Node) -> None:
        node.output = node.output[:, :2]

    (difference,) = bench(Inexact(), edit=other).differences
    assert difference.got.shape != difference.expected.shape


def test_code_that_raises_is_a_problem_with_its_reason(bench):
    """What it had given before it raised is compared."""

    class Raises(Sums):
        raising = False

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            if Raises.raising:
                raise ValueError("not here")
            return y

    def then_raises(node: Node) -> None:
        Raises.raising = True
        node.children[0].args = (node.children[0].args[0] + 1,)

    found = bench(Raises(), edit=then_raises)
    assert found.problem == "its code can't be run on the host (ValueError: not here)"
    assert [difference.tensor for difference in found.differences] == ["input"]


def test_calls_that_were_not_recorded_run_their_own_code(bench):
    """A branch that the device did not take, or a module that is called once more."""

    class Branches(Sums):
        again = False

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return self.linear(y) if Branches.again else y

    def take(node: Node) -> None:
        Branches.again = True

    found = bench(Branches(), edit=take)
    assert not found.problem and not found.exact  # F.linear on the host
    assert [difference.tensor for difference in found.differences] == ["output"]


class Scales(nn.Module):
    def forward(self, x: Tensor, scale: float, flag: bool, mask: Any = None, name: str = "cpu") -> Tensor:
        return x * scale


class Flags(nn.Module):
    """Its child is given a number, a flag and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Scales()

    def forward(self, x: Tensor) -> Any:
        return self.child(x, 0.5, flag=True, mask=None, name="cpu")


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((X, 0.5), {"flag": True, "mask": None, "name": "cuda"}, None),
        ((X, 0.25), {"flag": True, "mask": None}, "1 is 0.25, and not 0.5"),
        ((X, 0.5), {"flag": False, "mask": None}, "flag is False, and not True"),
        ((X, 0.5), {"flag": True, "mask": X}, "mask is a tensor, and not None"),
        ((X, 0.5), {"flag": True, "mask": nn.Identity()}, "mask is Identity, and not None"),
        ((None, 0.5), {"flag": True}, "0 is None, and not a tensor"),
    ],
)
def test_arguments_that_are_no_tensors_are_compared(bench, args, kwargs, words):
    def other(node: Node) -> None:
        child = node.children[0]
        child.args, child.kwargs = (child.args[0] if args[0] is X else args[0], *args[1:]), kwargs

    found = bench(Flags(), edit=other)
    assert [each.words for each in found.others] == ([] if words is None else [words])
    assert all((each.node.module, each.tensor) == ("layers.0.inner.child", "input") for each in found.others)


def test_an_output_that_is_missing(bench):
    def less(node: Node) -> None:
        node.output = (node.output[0], None)

    (other,) = bench(Chooses(), edit=less).others
    assert (other.tensor, other.words) == ("output", "1 is None, and not a tensor")


class Packed(torch.Tensor):
    """A weight whose product rounds what it is given, in its own way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            return ((x * 64).round() / 64) @ weight.as_subclass(Tensor).T
        return super().__torch_function__(func, types, args, kwargs or {})


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).as_subclass(Packed), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight)


def test_tensor_classes_do_their_own_part_and_modes_do_not(bench):
    """With plain F.linear the result would not be rounded; a fault of the caller's is a mode, and is not run here."""

    def as_device(node: Node) -> None:
        node.children.clear()

    class Louder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            y = func(*args, **(kwargs or {}))
            return 1.01 * y if func is F.linear and isinstance(args[1], Packed) else y

    assert not bench(PackedLinear(), edit=as_device).differences
    found = bench(PackedLinear(), scope=Louder(), edit=as_device)
    assert len(found.differences) == 1 and not found.exact


def test_modes_that_are_open_take_no_part(blocks_around, calls_of):
    """Nor are they lost: they are open again afterwards."""
    calls = []

    class Listens(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    model = blocks_around(PackedLinear())
    tree = calls_of(model, X)
    with host_arithmetic():
        twin = HostTwin(model)
    with Listens():
        with host_arithmetic():
            for node in tree.nodes:
                if node.is_module:
                    twin.compare(node)
        assert {func.__name__ for func in calls} <= {"_set_grad_enabled"}
        calls.clear()
        torch.ones(1) + 1
        assert calls


def test_parameters_that_others_read_are_known(blocks_around, calls_of):
    """As Mamba's mixer reads its convolution's weight, whose module is never called."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return x * self.held.weight.diagonal()

    model = blocks_around(Reads())
    tree = calls_of(model, X)
    with host_arithmetic():
        twin = HostTwin(model)
        twin.follow(tree.nodes, lambda node, found: None)
    assert twin.read_directly() >= {"layers.0.inner.held"}
    assert "layers.0.inner.unused" not in twin.read_directly()


def test_modules_are_followed_in_the_order_of_their_code(blocks_around, calls_of):
    """A parent begins before its children, and each call is compared once."""
    model = blocks_around(Sums())
    tree = calls_of(model, X)
    seen: list[str] = []
    with host_arithmetic():
        HostTwin(model).follow(tree.nodes, lambda node, found: seen.append(node.module))
    assert len(seen) == len(set(seen)) and seen.index("layers.0.first") < seen.index("layers.0.inner.linear")
    assert seen[-1] == ""  # reported when its code has ended
    for node in tree.nodes:
        node.by_formula = node.module.endswith(("linear", "first", "last"))
    with host_arithmetic():
        again: list[str] = []
        HostTwin(model).follow(tree.nodes, lambda node, found: again.append(node.module))
    assert not [name for name in again if name.endswith(("linear", "first", "last"))]


def test_autocast_is_that_of_the_caller(bench):
    """Sums of two dtypes, as the device made them."""

    class Mixed(Sums):
        def forward(self, x: Tensor) -> Any:
            return x + torch.mm(x[0], x[0].T).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not bench(Mixed()).differences


def test_two_tensors_that_are_one_stay_one(bench):
    """Code may ask whether they are."""

    class Asks(nn.Module):
        class Child(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return 2 * x if x is y else x + 3

        def __init__(self) -> None:
            super().__init__()
            self.child = Asks.Child()

        def forward(self, x: Tensor) -> Any:
            return self.child(x, x)

    assert not bench(Asks(), module="layers.0.inner.child").differences


class Kinds:
    """Goes the other way round once it is copied, as a set of words may."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __iter__(self) -> Any:
        return iter(self.names)

    def __deepcopy__(self, memo: Any) -> Kinds:
        return Kinds(self.names[::-1])


class Scaled(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x * (2 if kind == "full" else 4)


class ByKind(nn.Module):
    """Calls one module for each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.scaled = Kinds(("full", "sliding")), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        found = {kind: self.scaled(x, kind) for kind in self.kinds}
        return found["full"] - found["sliding"] / 8


def test_calls_are_answered_by_their_words_in_whatever_order(bench):
    result = bench(ByKind())
    assert not result.problem and not result.differences and not result.others


def test_a_cast_between_calls_is_a_truncation(bench):
    (found,) = bench(Otherwise(lambda x: (x, torch.exp(x)), lambda x: (x, torch.exp(x).bfloat16()))).differences
    hint = about_difference(found).hint
    assert hint is not None
    assert (hint.fault_class, hint.text) == ("truncation", "it arrives as bfloat16, which the code does not cast it to")
