"""Devices by name, and moving what holds tensors."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from credit_dp.errors import UserError
from credit_dp.pipeline_parallel import get_device, move_to_device
from tests.pipeline_parallel.encoder_decoder import Model, an_input
from tests.tables import entry

CPU = torch.device("cpu")
META = torch.device("meta")


def test_devices_are_built_from_names():
    assert get_device("cpu") == CPU
    assert get_device(META) == META


def test_what_is_no_device_or_not_here_is_refused():
    for wrong in ("gpu", "", "cuda:x", None, 0):
        with entry(wrong), pytest.raises(UserError, match="is not a device, it needs a name like"):
            get_device(wrong)
    for missing in ("cuda:99", "xla:0", "cpu:5"):
        with entry(missing), pytest.raises(UserError, match=f"{missing} needs a machine that has"):
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


def test_containers_keep_their_type_and_what_is_no_tensor():
    for name, build in CONTAINERS.items():
        data = build(an_input())
        moved = move_to_device(data, "meta")
        assert type(moved) is type(data), name
        there = list(tensors_in(moved))
        assert len(there) == len(list(tensors_in(data))) > 0, name
        assert all(tensor.device == META for tensor in there), name
        assert all(tensor.device == CPU for tensor in tensors_in(data)), name
        assert move_to_device(data, "cpu") is data, name


def test_details_of_containers_survive():
    x = an_input()
    labelled = Labelled([x])
    labelled.label = "mine"
    assert move_to_device(labelled, "meta").label == "mine"
    assert move_to_device(Frozen(x, "kept"), "meta").note == "kept"
    assert list(move_to_device(OrderedDict(b=x, a=x), "meta")) == ["b", "a"]
    assert move_to_device(defaultdict(list, x=x), "meta")["new"] == []
    assert move_to_device((x, "text", 3.5, None), "meta")[1:] == ("text", 3.5, None)


def test_other_objects_are_returned_themselves():
    for data in (None, "text", 3, object(), {1, 2}, Model, torch.Size([2])):
        assert move_to_device(data, "meta") is data


def test_what_is_shared_is_moved_once_and_stays_shared(sent):
    x = an_input()
    move_to_device([x, {"x": x}], "cuda:1")
    assert sent == [(x, "cuda:1")]


def test_shared_objects_stay_one_object_and_those_that_contain_themselves_end():
    shared = [an_input()]
    left, right = move_to_device((shared, shared), "meta")
    assert left is right
    assert left is not shared
    shared.append(shared)
    assert move_to_device(shared, "meta")[0].device == META


def test_packed_sequences_move_as_one():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to_device(packed, "meta")
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU


def test_modules_are_moved_in_place(model):
    assert move_to_device(model, "meta") is model
    assert {p.device for p in model.parameters()} == {META}
