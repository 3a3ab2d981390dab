"""Modules on several devices: of the machine, or recorded where it has only one."""

import copy
import math
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from credit_dp.config import ParallelConfig
from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.errors import UserError
from credit_dp.pipeline_parallel import (
    get_device,
    home_device,
    move_to_device,
    moving,
    parallelize_module,
    parallelize_pipeline,
    place_model,
    unparallelize_module,
    unparallelize_pipeline,
)
from tests.pipeline_parallel.models import build, shape
from tests.ranks import on_threads

CPU = torch.device("cpu")
META = torch.device("meta")


class Coder(nn.Module):
    """Two convolutions, the second of them named with a dot."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.rest = nn.Sequential(nn.GELU(), nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, x, *, scale=None):
        x = self.rest(self.first(x))
        return x if scale is None else x * scale["by"]

    def extra_repr(self):
        return "kind=own"


class Model(nn.Module):
    """An encoder and a decoder, and a sum of both."""

    def __init__(self):
        super().__init__()
        self.encoder = Coder()
        self.decoder = Coder()
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x):
        encoded = self.encoder(x, scale={"by": x.new_tensor(2.0)})
        return encoded + self.decoder(encoded) + self.offset


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def sent(monkeypatch):
    """What is moved where, on a machine that seems to have four GPUs; nothing really moves."""
    moves = []
    monkeypatch.setattr(moving, "devices_there", lambda kind: 4)
    monkeypatch.setattr(moving, "send", lambda thing, to: moves.append((thing, str(to))) or thing)
    return moves


def an_input():
    return torch.linspace(-1, 1, 2 * 3 * 6 * 5, dtype=torch.float64).view(2, 3, 6, 5)


def gradients(model, x):
    """The output, and the gradients of input and parameters, all on the CPU."""
    x = x.clone().requires_grad_()
    made = model(x)
    weights = torch.arange(made.numel(), dtype=made.dtype, device=made.device).view(made.shape)
    made.mul(weights).sum().backward()
    of = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [tensor.detach().cpu() for tensor in (made, *of)]


def weights_moved(model, moves):
    """The layers whose weights were moved, and where to, in order."""
    names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
    named = [(names.get(id(thing), ""), to) for thing, to in moves]
    return [(name, to) for name, to in named if name and not name.endswith(".bias")]


def attributes(model):
    """What every module has of its own, and its text."""
    return [set(vars(m)) for m in model.modules()], repr(model)


# --- devices and moves -------------------------------------------------------------------


def test_devices_are_made_of_names():
    assert get_device("cpu") == CPU
    assert get_device(META) == META


@pytest.mark.parametrize("wrong", ["gpu", "", "cuda:x", None, 0])
def test_what_is_no_device_is_refused(wrong):
    with pytest.raises(UserError, match="is no device, it needs a name like cpu"):
        get_device(wrong)


@pytest.mark.parametrize("missing", ["cuda:99", "xla:0", "cpu:5"])
def test_devices_that_are_not_here_are_refused(missing):
    with pytest.raises(UserError, match=f"{missing} needs a machine that has it"):
        get_device(missing)


class Pair(NamedTuple):
    a: torch.Tensor
    b: object


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str = "note"


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class Labelled(list):
    label = "none"


def tensors_in(data) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (Frozen, Slotted)):
        yield data.x
    elif hasattr(data, "items"):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from tensors_in(value)


CONTAINERS = {
    "tensor": lambda x: x,
    "list": lambda x: [x, None, 3],
    "labelled list": lambda x: Labelled([x]),
    "tuple": lambda x: (x, "text", (x,)),
    "named tuple": lambda x: Pair(x, {"deep": [x]}),
    "return type of torch": lambda x: torch.max(x[0], dim=0),
    "frozen dataclass": lambda x: Frozen(x, "kept"),
    "dataclass with slots": lambda x: Slotted(x),
    "dict": lambda x: {"x": x, 2: None},
    "ordered dict": lambda x: OrderedDict(b=x, a=x),
    "default dict": lambda x: defaultdict(list, x=x),
    "read-only mapping": lambda x: MappingProxyType({"x": x}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type_and_what_is_no_tensor(name):
    data = CONTAINERS[name](an_input())
    moved = move_to_device(data, "meta")
    assert type(moved) is type(data)
    there = list(tensors_in(moved))
    assert len(there) == len(list(tensors_in(data))) > 0
    assert all(tensor.device == META for tensor in there)
    assert all(tensor.device == CPU for tensor in tensors_in(data))


def test_details_of_containers_survive():
    x = an_input()
    labelled = Labelled([x])
    labelled.label = "mine"
    assert move_to_device(labelled, "meta").label == "mine"
    assert move_to_device(Frozen(x, "kept"), "meta").note == "kept"
    assert list(move_to_device(OrderedDict(b=x, a=x), "meta")) == ["b", "a"]
    assert move_to_device(defaultdict(list, x=x), "meta")["new"] == []
    assert move_to_device((x, "text", 3.5, None), "meta")[1:] == ("text", 3.5, None)


@pytest.mark.parametrize("data", [None, "text", 3, object(), {1, 2}, Model, torch.Size([2])])
def test_other_objects_are_returned_themselves(data):
    assert move_to_device(data, "meta") is data


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_needs_no_move_is_returned_itself(name):
    data = CONTAINERS[name](an_input())
    assert move_to_device(data, "cpu") is data


def test_what_is_shared_is_moved_once_and_stays_shared(sent):
    x = an_input()
    move_to_device([x, {"x": x}], "cuda:1")
    assert sent == [(x, "cuda:1")]


def test_shared_objects_stay_one_object():
    shared = [an_input()]
    left, right = move_to_device((shared, shared), "meta")
    assert left is right
    assert left is not shared


def test_objects_that_contain_themselves_end():
    data = [an_input()]
    data.append(data)
    assert move_to_device(data, "meta")[0].device == META


def test_packed_sequences_move_as_one():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to_device(packed, "meta")
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU


def test_modules_are_moved_in_place(model):
    assert move_to_device(model, "meta") is model
    assert {p.device for p in model.parameters()} == {META}


# --- placing -------------------------------------------------------------------------------


def test_use_as_documented(model):
    x, before = an_input(), an_input()
    expected = gradients(model, before)
    places = {"": "cpu", "encoder": torch.device("cpu"), "decoder": ("cpu", "cpu")}
    assert parallelize_pipeline(model, places) is model
    assert all(map(torch.equal, gradients(model, x), expected))
    assert unparallelize_pipeline(model, common_device="cpu") is model
    assert all(map(torch.equal, gradients(model, x), expected))
    assert parallelize_module(model.encoder, "cpu", output_device="cpu") is model.encoder
    assert unparallelize_module(model.encoder, common_device="cpu") is model.encoder
    assert all(map(torch.equal, gradients(model, x), expected))


def test_deeper_entries_come_after_those_that_hold_them(model, sent):
    places = {
        "decoder.rest.1": "cuda:3",
        "encoder.first": "cuda:2",
        "decoder": "cuda:1",
        "": "cuda:0",
        "encoder": "cuda:1",
    }
    given = dict(places)
    parallelize_pipeline(model, places)
    assert dict(weights_moved(model, sent)) == {
        "encoder.first": "cuda:2",
        "encoder.rest.1": "cuda:1",
        "decoder.first": "cuda:1",
        "decoder.rest.1": "cuda:3",
    }
    assert len(weights_moved(model, sent)) == 4  # each once, straight to its last device
    assert [to for thing, to in sent if thing is model.offset] == ["cuda:0"]
    assert places == given
    assert list(places) == list(given)


def test_deeper_entries_override():
    model = Model()
    parallelize_pipeline(model, {"decoder.first": "cpu", "decoder": "meta"})
    on_meta = {name for name, p in model.named_parameters() if p.device == META}
    assert on_meta == {"decoder.rest.1.weight", "decoder.rest.1.bias"}


@pytest.mark.parametrize("pair", [("cuda:1", "cuda:0"), ["cuda:1", torch.device("cuda:0")]])
def test_input_keywords_and_output_go_where_the_pair_says(model, sent, pair):
    parallelize_pipeline(model, {"encoder": pair})
    sent.clear()
    x, by = an_input(), torch.tensor(2.0, dtype=torch.float64)
    made = model.encoder(x, scale={"by": by})
    assert [(id(thing), to) for thing, to in sent] == [
        (id(x), "cuda:1"),
        (id(by), "cuda:1"),
        (id(made), "cuda:0"),
    ]


class Listed(nn.Module):
    """Lists and tables of modules, which are never called themselves."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([shared, nn.Linear(5, 5), shared])
        self.heads = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(5, 5)])})

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"][0](x)


def test_a_list_of_modules_stands_for_those_in_it(sent):
    model = Listed().double()
    before = attributes(model)
    places = {"": "cuda:0", "blocks": ("cuda:1", "cuda:0"), "blocks.1": "cuda:2", "heads": "cuda:3"}
    parallelize_pipeline(model, places)
    sent.clear()
    model(an_input())
    there_and_back = ["cuda:1", "cuda:0"]
    assert [to for _, to in sent] == [
        "cuda:0",
        *there_and_back,
        "cuda:2",
        *there_and_back,
        "cuda:3",
    ]
    with pytest.raises(UserError, match=r"ModuleDict\.a\.0.*has been parallelized"):
        parallelize_module(model.heads, "cuda:0")
    unparallelize_pipeline(model)
    assert attributes(model) == before


def test_one_list_of_modules_is_placed_and_taken_back(sent):
    model = Listed().double()
    before = attributes(model)
    parallelize_module(model.blocks, "cuda:1")
    assert vars(model.blocks[1])["forward"].processing == torch.device("cuda:1")
    unparallelize_module(model.blocks, "cuda:0")
    assert attributes(model) == before


def test_without_a_second_device_the_output_stays(model, sent):
    parallelize_module(model.encoder, "cuda:1")
    sent.clear()
    model.encoder(an_input())
    assert [to for _, to in sent] == ["cuda:1"]


def test_root_takes_the_input_in_and_the_output_home(model, sent):
    parallelize_pipeline(model, {"": ("cuda:0", "cuda:2"), "decoder": ("cuda:1", "cuda:0")})
    sent.clear()
    model(an_input())
    assert [to for _, to in sent] == ["cuda:0", "cuda:1", "cuda:0", "cuda:2"]


def test_output_device_is_really_the_output_device(model):
    parallelize_module(model.encoder, "cpu", "meta")
    assert model.encoder(an_input()).device == META


def test_the_description_tells_the_devices(model):
    before = repr(model)
    parallelize_pipeline(model, {"": "cpu", "encoder": ("cpu", "meta")})
    assert "kind=own, processing_device=cpu, output_device=meta" in repr(model.encoder)
    assert "output_device" not in repr(model.decoder)
    unparallelize_pipeline(model)
    assert repr(model) == before


def test_an_optimiser_made_before_still_has_the_parameters(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_pipeline(model, {"": "cpu", "decoder": ("cpu", "cpu")})
    before = model.decoder.first.weight.detach().clone()
    model(an_input()).sum().backward()
    optimiser.step()
    assert not torch.equal(model.decoder.first.weight, before)


# --- what is refused -----------------------------------------------------------------------


def test_a_second_parallelize_is_refused(model):
    parallelize_pipeline(model, {"decoder": "cpu"})
    for again in (
        lambda: parallelize_pipeline(model, {"encoder": "cpu"}),
        lambda: parallelize_module(model.decoder, "cpu"),
        lambda: parallelize_module(model, "cpu"),
    ):
        with pytest.raises(UserError, match="has been parallelized") as caught:
            again()
        assert "\n" not in str(caught.value)
    parallelize_module(model.encoder, "cpu")  # which has not


def test_a_module_is_not_moved_from_under_those_in_it(model):
    parallelize_pipeline(model, {"": "cpu", "decoder.first": "cpu"})
    with pytest.raises(UserError, match=r"decoder\.first: .*has been parallelized"):
        unparallelize_module(model, "cpu")
    unparallelize_module(model)
    assert "forward" not in vars(model)
    assert "forward" in vars(model.decoder.first)


def test_unknown_names_list_the_nearest(model):
    with pytest.raises(UserError) as caught:
        parallelize_pipeline(model, {"encodr": "cpu", "decoder": "cpu", "zzz": "cpu"})
    text = str(caught.value)
    assert "Model: needs names of its modules" in text
    assert "'encodr' (nearest: encoder, decoder" in text
    assert "'zzz' (it has encoder, decoder)" in text
    assert "forward" not in vars(model.decoder)


@pytest.mark.parametrize("value", [[], ["cpu"], ("cpu", "cpu", "cpu"), ["cpu", None], 7, "gpu"])
def test_wrong_places_are_refused_and_nothing_is_placed(model, value):
    with pytest.raises(UserError, match="decoder: "):
        parallelize_pipeline(model, {"": "meta", "decoder": value})
    assert not any("forward" in vars(m) for m in model.modules())
    assert {p.device for p in model.parameters()} == {CPU}


def test_one_module_with_two_names_is_refused(model):
    model.decoder.first = model.encoder.first
    with pytest.raises(UserError, match=r"encoder\.first and decoder\.first are one module"):
        parallelize_pipeline(model, {"encoder.first": "cpu", "decoder.first": "cpu"})


def test_a_shared_parameter_cannot_be_in_two_places(model):
    model.decoder.first.weight = model.encoder.first.weight
    with pytest.raises(UserError, match=r"encoder\.first\.weight and decoder\.first\.weight are"):
        parallelize_pipeline(model, {"": "cpu", "decoder": "meta"})
    parallelize_pipeline(model, {"": "cpu", "decoder": "cpu"})


# --- taking it back ------------------------------------------------------------------------


def test_all_is_as_before_once_taken_back(model):
    before, tensors = attributes(model), model.state_dict(keep_vars=True)
    parallelize_pipeline(model, {"": "cpu", "encoder.rest.1": "cpu", "decoder": ("cpu", "cpu")})
    placed = model.state_dict(keep_vars=True)
    unparallelize_pipeline(model)
    after = model.state_dict(keep_vars=True)
    assert attributes(model) == before
    assert "forward" not in vars(model)
    assert model.decoder.forward.__func__ is Coder.forward
    for state in (placed, after):
        assert list(state) == list(tensors)
        assert all(state[name] is tensor for name, tensor in tensors.items())


def test_methods_set_on_the_module_itself_come_back(model):
    def doubled(x, *, scale=None):
        return 2 * x

    model.encoder.forward = doubled
    model.encoder.extra_repr = lambda: "doubled"
    parallelize_pipeline(model, {"encoder": "cpu"})
    assert torch.equal(model.encoder(an_input()), 2 * an_input())
    assert "doubled, processing_device=cpu" in repr(model.encoder)
    unparallelize_pipeline(model, "cpu")
    assert vars(model.encoder)["forward"] is doubled
    assert model.encoder.extra_repr() == "doubled"


def test_taking_back_what_was_not_placed_only_moves(model):
    before = attributes(model)
    assert unparallelize_module(model.encoder) is model.encoder
    unparallelize_pipeline(model, "meta")
    assert attributes(model) == before
    assert {p.device for p in model.parameters()} == {META}


def test_placing_again_works_after_taking_back(model):
    expected = model(an_input())
    for _ in range(2):
        parallelize_pipeline(model, {"": "cpu", "decoder": "cpu"})
        assert torch.equal(model(an_input()), expected)
        unparallelize_pipeline(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - what was written one call before


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled])
def test_copies_are_models_of_their_own(model, placed, copy_of):
    parallelize_pipeline(model, {"": "cpu", "decoder": ("cpu", "cpu")})
    if not placed:
        unparallelize_pipeline(model)
    expected = model(an_input())
    other = copy_of(model)
    assert torch.equal(other(an_input()), expected)
    with torch.no_grad():
        model.decoder.first.weight.zero_()
    assert torch.equal(other(an_input()), expected)
    unparallelize_pipeline(other)
    assert not any("forward" in vars(m) for m in other.modules())
    assert ("forward" in vars(model)) == placed


def test_compiles_once_taken_back(model):
    expected = gradients(model, an_input())
    parallelize_pipeline(model, {"": "cpu", "decoder": ("cpu", "cpu")})
    unparallelize_pipeline(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for made, right in zip(gradients(compiled, an_input()), expected, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


# --- from the config -----------------------------------------------------------------------


def test_root_is_the_config_name_of_the_model_itself(model, sent):
    assert place_model(model, {"root": "cuda:0", "decoder": ["cuda:1", "cuda:0"]}) is model
    assert weights_moved(model, sent) == [
        ("encoder.first", "cuda:0"),
        ("encoder.rest.1", "cuda:0"),
        ("decoder.first", "cuda:1"),
        ("decoder.rest.1", "cuda:1"),
    ]


def test_without_root_the_output_comes_back_to_the_model(model, sent):
    place_model(model, {"decoder": "cuda:1"})
    sent.clear()
    model(an_input())
    assert [to for _, to in sent] == ["cpu", "cuda:1", "cpu"]


def test_gpus_count_from_the_first_one_of_the_rank(model, sent):
    layout = {"root": "cuda", "encoder": "cpu", "decoder": ["cuda:1", "cuda:0"]}
    place_model(model, layout, first_gpu=2)
    assert dict(weights_moved(model, sent)) == {
        "encoder.first": "cpu",
        "encoder.rest.1": "cpu",
        "decoder.first": "cuda:3",
        "decoder.rest.1": "cuda:3",
    }
    assert vars(model.decoder)["forward"].output == torch.device("cuda:2")


def test_no_layout_leaves_the_model_alone(model):
    before = attributes(model)
    assert place_model(model, {}) is model
    assert attributes(model) == before


def test_home_is_where_the_output_of_the_root_goes(sent):
    assert home_device({}, CPU) == CPU
    assert home_device({"decoder": "cuda:1"}, CPU) == CPU
    assert home_device({"root": "cuda:1"}, CPU) == torch.device("cuda:1")
    assert home_device({"root": ["cuda:0", "cuda:1"]}, CPU, 2) == torch.device("cuda:3")


@pytest.mark.parametrize("layout", [{"encodr": "cpu"}, {"root": "cuda:99"}, {"root": "gpu"}])
def test_errors_name_the_key(model, layout):
    with pytest.raises(UserError, match=r"^parallel\.layout: ") as caught:
        place_model(model, layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [1, None, [], ["cpu"], ["cpu"] * 3, {"0": "cpu"}, "CPU 0", "meta"]
)
def test_the_config_refuses_what_is_no_place(value):
    with pytest.raises(UserError, match=r"^parallel\.layout\.decoder: needs a device like"):
        ParallelConfig(layout={"decoder": value})


def test_the_config_refuses_fsdp2_with_a_layout():
    with pytest.raises(UserError, match=r"^parallel\.layout: needs parallel\.data_mode=ddp"):
        ParallelConfig(layout={"root": "cpu"}, data_mode="fsdp2")


def test_the_config_counts_the_gpus_of_a_rank():
    assert ParallelConfig().gpus_of_rank == 1
    assert ParallelConfig(layout={"root": "cuda", "a": ["cuda:2", "cpu"]}).gpus_of_rank == 3


# --- with sharded rows, and on real GPUs ---------------------------------------------------


def placed_and_sharded(manager, x):
    torch.manual_seed(0)
    model = convert_to_domain_parallel(Model().double(), manager, input_shape=tuple(x.shape))
    band = shard_tensor(x, -2, manager)
    expected = gradients(model, band)
    names = list(model.state_dict())
    place_model(model, {"root": "cpu", "decoder.rest.1": ["cpu", "cpu"]})
    placed = gradients(model, band)
    assert list(model.state_dict()) == names
    unparallelize_pipeline(model)
    return expected, placed, gradients(model, band)


def test_a_model_with_sharded_rows_is_placed():
    for expected, placed, after in on_threads(2, placed_and_sharded, an_input()):
        assert all(map(torch.equal, placed, expected))
        assert all(map(torch.equal, after, expected))


def real_devices():
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    return (["cpu", *gpus] if len(gpus) == 1 else gpus)[:2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_flow_over_real_devices(model):
    first, second = real_devices()
    expected = gradients(model, an_input())
    parallelize_pipeline(model, {"": first, "decoder": (second, first)})
    assert {str(p.device) for p in model.decoder.parameters()} == {second}
    for made, right in zip(gradients(model, an_input()), expected, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-9)
    unparallelize_pipeline(model, "cpu")
    assert {str(p.device) for p in model.parameters()} == {"cpu"}


LAYOUTS = {
    "unet": {"root": "cpu", "encoder": "cpu", "decoder": ["cpu", "cpu"]},
    "crossformer": {"root": "cpu", "levels": ["cpu", "cpu"], "head": ["cpu", "cpu"]},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_our_models_are_placed(name):
    model = build(name, 16)
    x = torch.linspace(-1, 1, 4 * 9 * 16 * 16, dtype=torch.float64)[: math.prod(shape(name, 16))]
    x = x.view(shape(name, 16))
    expected = model(x)
    place_model(model, LAYOUTS[name])
    assert torch.equal(model(x), expected)
