"""Placement of modules on devices, by functions and by `parallel.layout`."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from credit_dp.config import ParallelConfig
from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.errors import UserError
from credit_dp.pipeline_parallel import (
    model_output_device,
    parallelize_module,
    parallelize_pipeline,
    place_model,
    unparallelize_module,
    unparallelize_pipeline,
)
from tests.domain_parallel.equality import RANDOM_LOCK
from tests.pipeline_parallel.encoder_decoder import (
    Coder,
    Model,
    an_input,
    attributes,
    gradients,
    weights_moved,
)
from tests.pipeline_parallel.models import build, shape
from tests.ranks import on_threads
from tests.tables import entry
from tests.tier_cases import every

CPU = torch.device("cpu")
META = torch.device("meta")


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


def test_input_keywords_and_output_go_where_the_pair_says(model, sent):
    parallelize_pipeline(model, {"encoder": ["cuda:1", torch.device("cuda:0")]})
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


@pytest.mark.slow
def test_one_list_of_modules_is_placed_and_taken_back(sent):
    model = Listed().double()
    before = attributes(model)
    parallelize_module(model.blocks, "cuda:1")
    assert vars(model.blocks[1])["forward"].processing == torch.device("cuda:1")
    unparallelize_module(model.blocks, "cuda:0")
    assert attributes(model) == before


@pytest.mark.slow
def test_the_root_moves_input_and_output(model, sent):
    parallelize_pipeline(model, {"": ("cuda:0", "cuda:2"), "decoder": ("cuda:1", "cuda:0")})
    sent.clear()
    model(an_input())
    assert [to for _, to in sent] == ["cuda:0", "cuda:1", "cuda:0", "cuda:2"]


def test_the_description_tells_the_devices(model):
    before = repr(model)
    parallelize_pipeline(model, {"": "cpu", "encoder": ("cpu", "meta")})
    assert "kind=own, processing_device=cpu, output_device=meta" in repr(model.encoder)
    assert "output_device" not in repr(model.decoder)
    unparallelize_pipeline(model)
    assert repr(model) == before


def test_an_optimiser_built_before_still_has_the_parameters(model):
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


@pytest.mark.slow
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


def test_wrong_places_are_refused_and_nothing_is_placed(model):
    for value in [[], ["cpu"], ("cpu", "cpu", "cpu"), ["cpu", None], 7, "gpu"]:
        with entry(value), pytest.raises(UserError, match="decoder: "):
            parallelize_pipeline(model, {"": "meta", "decoder": value})
        assert not any("forward" in vars(m) for m in model.modules()), value
        assert {p.device for p in model.parameters()} == {CPU}, value


def test_one_module_with_two_names_is_refused(model):
    model.decoder.first = model.encoder.first
    with pytest.raises(UserError, match=r"encoder\.first and decoder\.first are one module"):
        parallelize_pipeline(model, {"encoder.first": "cpu", "decoder.first": "cpu"})


def test_a_shared_parameter_cannot_be_in_two_places(model):
    model.decoder.first.weight = model.encoder.first.weight
    with pytest.raises(UserError, match=r"encoder\.first\.weight and decoder\.first\.weight are"):
        parallelize_pipeline(model, {"": "cpu", "decoder": "meta"})
    parallelize_pipeline(model, {"": "cpu", "decoder": "cpu"})


# --- undoing it ----------------------------------------------------------------------------


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_taking_back_what_was_not_placed_only_moves(model):
    before = attributes(model)
    assert unparallelize_module(model.encoder) is model.encoder
    unparallelize_pipeline(model, "meta")
    assert attributes(model) == before
    assert {p.device for p in model.parameters()} == {META}


@pytest.mark.slow
def test_placing_again_works_after_taking_back(model):
    expected = model(an_input())
    for _ in range(2):
        parallelize_pipeline(model, {"": "cpu", "decoder": "cpu"})
        assert torch.equal(model(an_input()), expected)
        unparallelize_pipeline(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - what was written one call before


@pytest.mark.parametrize(("copy_of", "placed"), [(copy.deepcopy, True), (pickled, False)])
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


@pytest.mark.exhaustive
def test_compiles_once_taken_back(model):
    expected = gradients(model, an_input())
    parallelize_pipeline(model, {"": "cpu", "decoder": ("cpu", "cpu")})
    unparallelize_pipeline(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for made, right in zip(gradients(compiled, an_input()), expected, strict=True):
        torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)


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


@pytest.mark.slow
def test_no_layout_leaves_the_model_alone(model):
    before = attributes(model)
    assert place_model(model, {}) is model
    assert attributes(model) == before


def test_the_output_goes_to_the_device_of_the_root(sent):
    assert model_output_device({}, CPU) == CPU
    assert model_output_device({"decoder": "cuda:1"}, CPU) == CPU
    assert model_output_device({"root": "cuda:1"}, CPU) == torch.device("cuda:1")
    assert model_output_device({"root": ["cuda:0", "cuda:1"]}, CPU, 2) == torch.device("cuda:3")


def test_errors_name_the_key(model):
    for layout in ({"encodr": "cpu"}, {"root": "cuda:99"}, {"root": "gpu"}):
        with entry(layout), pytest.raises(UserError, match=r"^parallel\.layout: ") as caught:
            place_model(model, layout)
        assert "\n" not in str(caught.value), layout


def test_the_config_refuses_what_is_no_place():
    refused = r"^parallel\.layout\.decoder: needs a device like"
    for value in [1, None, [], ["cpu"], ["cpu"] * 3, {"0": "cpu"}, "CPU 0", "meta"]:
        with entry(value), pytest.raises(UserError, match=refused):
            ParallelConfig(layout={"decoder": value})
    with pytest.raises(UserError, match=r"^parallel\.layout: needs parallel\.data_mode=ddp"):
        ParallelConfig(layout={"root": "cpu"}, data_mode="fsdp2")


def test_the_config_counts_the_gpus_of_a_rank():
    assert ParallelConfig().gpus_per_rank == 1
    assert ParallelConfig(layout={"root": "cuda", "a": ["cuda:2", "cpu"]}).gpus_per_rank == 3


def placed_and_sharded(manager, x):
    with RANDOM_LOCK:  # the ranks are threads
        torch.manual_seed(0)
        model = Model().double()
    convert_to_domain_parallel(model, manager, input_shape=tuple(x.shape))
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


@pytest.mark.parametrize("name", every(2, LAYOUTS, pytest.mark.exhaustive))
def test_our_models_are_placed(name):
    model = build(name, 16)
    x = torch.linspace(-1, 1, math.prod(shape(name, 16)), dtype=torch.float64)
    x = x.view(shape(name, 16))
    expected = model(x)
    place_model(model, LAYOUTS[name])
    assert torch.equal(model(x), expected)
