"""Placement by the config, with sharded rows, and on real GPUs."""

import math

import pytest
import torch

from credit_dp.config import ParallelConfig
from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.errors import UserError
from credit_dp.pipeline_parallel import (
    model_output_device,
    parallelize_pipeline,
    place_model,
    unparallelize_pipeline,
)
from tests.pipeline_parallel.encoder_decoder import (
    Model,
    an_input,
    attributes,
    gradients,
    weights_moved,
)
from tests.pipeline_parallel.models import build, shape
from tests.ranks import on_threads

CPU = torch.device("cpu")


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


def test_the_output_goes_to_the_device_of_the_root(sent):
    assert model_output_device({}, CPU) == CPU
    assert model_output_device({"decoder": "cuda:1"}, CPU) == CPU
    assert model_output_device({"root": "cuda:1"}, CPU) == torch.device("cuda:1")
    assert model_output_device({"root": ["cuda:0", "cuda:1"]}, CPU, 2) == torch.device("cuda:3")


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
    assert ParallelConfig().gpus_per_rank == 1
    assert ParallelConfig(layout={"root": "cuda", "a": ["cuda:2", "cpu"]}).gpus_per_rank == 3


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
