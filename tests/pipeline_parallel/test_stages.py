"""Where models are cut; their stages, one after the other, equal the model."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.recomputation import SavedTensors
from credit_dp.domain_parallel.verify import relative_error
from credit_dp.errors import UserError
from credit_dp.models import build_model
from credit_dp.models.segments import Segment, SegmentedModel
from credit_dp.pipeline_parallel.stages import (
    OtherStageModule,
    cut_model,
    measure_stage,
    segment_costs,
    stage_slices,
)
from tests.domain_parallel.equality import RANDOM_LOCK
from tests.pipeline_parallel.models import (
    COLUMNS,
    FIELDS,
    NAMES,
    SAMPLES,
    Own,
    band,
    batch,
    build,
    shape,
)
from tests.ranks import on_threads
from tests.tables import entry
from tests.tier_cases import tiers
from tests.training.runs import tiny_unet

FAST = ["unet with all", "pangu", "own", "globe"]
MODELS = tiers([(n,) for n in FAST], [(n,) for n in NAMES if n not in FAST])


def alone() -> DomainParallelManager:
    """One process that holds all stages."""
    return DomainParallelManager(1, 1)


def every_segment(model, of_each=1):
    """Stages of one segment each, or of several."""
    return [slice(at, at + of_each) for at in range(0, len(model.segments()), of_each)]


def run(stages, x):
    """Run the stages one after the other, and check the shapes that they declare."""
    state = (x,)
    for stage in stages:
        assert_fits(stage.input_specs, state)
        made = stage.module(*state)
        state = made if isinstance(made, tuple) else (made,)
        assert all(y.is_contiguous() for y in state)
        assert_fits(stage.output_specs, state)
        assert stage.model_output_specs == stages[-1].output_specs
    return state[0]


def assert_fits(slots, state):
    assert [slot.empty(len(state[0]), "meta").shape for slot in slots] == [x.shape for x in state]
    assert [slot.dtype for slot in slots] == [x.dtype for x in state]
    assert [slot.has_gradient for slot in slots] == [x.requires_grad for x in state]


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_model_and_have_its_parameters(name):
    model = build(name, 16)
    for of_each in (1, 2):
        cuts = every_segment(model, of_each)
        stages = cut_model(model.eval(), alone(), cuts, shape(name, 16))
        x, _ = batch(name, 16)
        # Stages make their outputs contiguous, so that torch may sum in another order.
        assert relative_error(run(stages, x), model(x)) < 1e-14
        held = [pair for stage in stages for pair in stage.module.named_parameters()]
        assert sorted(key for key, _ in held) == sorted(key for key, _ in model.named_parameters())
        assert all(parameter is model.get_parameter(key) for key, parameter in held)
        saved = [key for stage in stages for key in stage.module.state_dict()]
        assert set(saved) == set(model.state_dict())


def assert_stages_are_shards(manager, name, rows):
    with RANDOM_LOCK:
        model = build(name, rows).eval()
        cuts = every_segment(model)
        sharded = shard_model(model, manager, shape(name, rows))
        before, drawn = copy.copy(manager.transport.traffic), torch.get_rng_state()
        stages = cut_model(sharded, manager, cuts, shape(name, rows))
        assert manager.transport.traffic == before
        assert torch.equal(torch.get_rng_state(), drawn)
        x = band(batch(name, rows)[0], manager)
    assert relative_error(run(stages, x), sharded(x)) < 1e-12


@pytest.mark.parametrize(
    "name",
    tiers(
        fast=[("globe",)],
        slow=[("unet with all",)],
        # "spectral norm" is a crossformer, and has more state.
        exhaustive=[(n,) for n in NAMES if n not in ("globe", "unet with all", "crossformer")],
    ),
)
def test_stages_of_shards_in_a_row_are_the_sharded_model(name):
    on_threads(2, assert_stages_are_shards, name, 33)


def assert_footprints_are_real(manager):
    with RANDOM_LOCK:
        model = shard_model(build("globe", 33), manager, shape("globe", 33))
        stages = cut_model(model, manager, every_segment(model), shape("globe", 33))
        footprints = [measure_stage(stage, manager, SAMPLES) for stage in stages]
    state = (band(batch("globe", 33)[0], manager),)
    for stage, footprint in zip(stages, footprints, strict=True):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in state]
        held = [*stage.module.parameters(), *stage.module.buffers()]
        saved = SavedTensors(held if stage.is_first else [*held, *inputs])
        before = manager.transport.traffic.bytes
        fields = []

        def save(x, saved=saved, fields=fields):
            fields.append(x)
            return saved.add(x)

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            made = stage.module(*inputs)
        state = made if isinstance(made, tuple) else (made,)
        # What fields may have fetched or moved after they were saved.
        for x in fields:
            if type(x) is BandTensor:
                rows = x.fetched.rows if x.fetched else ()
                moved = x.others.parts.values() if x.others else ()
                for y in (*rows, *moved, *(x.kept or ())):
                    saved.add(y)
        for x in state:
            saved.add(x)
        torch.autograd.backward(state, [torch.ones_like(x) for x in state])
        assert footprint.saved_bytes == pytest.approx(saved.bytes, rel=0.02), stage.index
        sent = manager.transport.traffic.bytes - before
        assert footprint.sent[manager.domain_rank].bytes == sent > 0, stage.index


def test_plans_of_stages_on_tensors_of_the_globe_are_real():
    on_threads(2, assert_footprints_are_real)


def test_stages_keep_single_precision():
    model = build("unet", 16).float()
    stages = cut_model(model, alone(), every_segment(model), shape("unet", 16))
    run(stages, batch("unet", 16)[0].float())


@pytest.mark.slow
def test_cutting_leaves_the_model_as_it_was():
    model = build("spectral norm", 16)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    named = [key for key, _ in model.named_modules()]
    segment_costs(model, shape("spectral norm", 16))
    cut_model(model, alone(), every_segment(model), shape("spectral norm", 16))
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert [key for key, _ in model.named_modules()] == named
    assert model.active_segments == slice(None)


def test_what_other_stages_use_is_freed():
    model = build("unet", 16)
    first, second = cut_model(model, alone(), [slice(0, 3), slice(3, 5)], shape("unet", 16))
    kept = weakref.ref(model.stem.conv.weight)
    gone = weakref.ref(model.head.weight)
    del model, second
    gc.collect()
    assert kept() is first.module.stem.conv.weight
    assert gone() is None


def test_a_module_of_another_stage_can_not_be_called():
    model = build("unet", 16)
    first, _ = cut_model(model, alone(), [slice(0, 3), slice(3, 5)], shape("unet", 16))
    assert isinstance(first.module.head, OtherStageModule)
    assert isinstance(first.module.decoder[0][0], OtherStageModule)
    with pytest.raises(UserError, match="stage 0 calls head"):
        first.module.head(torch.zeros(1))


def refusal(model, cuts=((0, 2), (2, 4))) -> str:
    with pytest.raises(UserError) as error:
        cut_model(
            model, alone(), [slice(*cut) for cut in cuts], (SAMPLES, FIELDS.inputs, 16, COLUMNS)
        )
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_parameter_of_two_stages_is_refused():
    model = Own()
    model.idle.weight = nn.Parameter(torch.zeros(8, 8, 1, 1))
    model.middle.mix.weight = model.idle.weight
    text = refusal(model)
    assert "idle.weight (also middle.mix.weight) is used by stages 0, 1" in text
    assert "parallel.stages" in text


def test_a_shared_parameter_in_one_stage_is_fine():
    model = Own().double()
    model.idle.weight = nn.Parameter(torch.ones(8, 8, 1, 1).double())
    model.idle.padding = (0, 0)
    model.middle.mix.weight = model.idle.weight
    cuts = [slice(0, 1), slice(1, 4)]
    stages = cut_model(model, alone(), cuts, shape("own", 16))
    x, _ = batch("own", 16)
    assert torch.equal(run(stages, x), model(x))


class Silent(Own):
    """Does not declare that its last segment uses the first one's module."""

    def _finish(self, state):
        return (self.last(torch.cat([self.first(state[1]), state[1]], 1)),)


class Folded(SegmentedModel):
    """Passes columns on as if they were samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(FIELDS.inputs, 4, 1), nn.Conv1d(4, 4, 1)

    def segments(self):
        return [
            Segment("a", lambda s: (self.a(s[0]).permute(0, 3, 1, 2).flatten(0, 1),), ("a",)),
            Segment("b", lambda s: (self.b(s[0]),), ("b",)),
        ]


def test_models_that_do_not_declare_what_they_do_are_refused():
    text = refusal(nn.Sequential(nn.Conv2d(1, 1, 1)))
    assert text.startswith("parallel.pipeline: ")
    assert "Sequential declares no segments" in text
    with pytest.raises(UserError, match="declares no segments"):
        segment_costs(nn.Identity(), (1, 1, 4, 4))
    model = Own()
    model.scale = nn.Parameter(torch.ones(1))
    assert "with the parameter scale" in refusal(model)
    assert "stage 1 calls first" in refusal(Silent())
    assert "samples in its first dimension" in refusal(Folded(), ((0, 1), (1, 2)))
    with pytest.raises(UserError, match="Again has several segments called idle"):
        segment_costs(Again(), shape("own", 16))


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_a_real_run(name):
    model = build(name, 16)
    costs = segment_costs(model, shape(name, 16))
    assert list(costs) == [segment.name for segment in model.segments()]
    # Of the kernels for attention on a CPU only the plain one is counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(batch(name, 16)[0])
    assert sum(costs.values()) == counter.get_total_flops() // 2


class Again(Own):
    """Runs one of its modules in two segments."""

    def segments(self):
        *before, idle, last = super().segments()
        return [*before, idle, idle, last]


@pytest.mark.parametrize(
    ("upsample", "points"), tiers([("bilinear", 1 / 4)], [], [("transpose", 1)])
)
def test_costs_of_convolutions_and_transposed_ones(upsample, points):
    """The 1x1 convolution acts on the points of the coarser level, before resizing."""
    model = build_model(tiny_unet(upsample=upsample), FIELDS, (16, COLUMNS))
    costs = segment_costs(model, shape("unet", 16))
    size = SAMPLES * 16 * COLUMNS
    assert costs["stem"] == size * 9 * FIELDS.inputs * 8
    assert costs["head"] == size * 8 * FIELDS.outputs
    up = points * size * 16 * 8
    assert costs["decoder.0.0"] == up + size * (9 * 16 * 8 + 9 * 8 * 8 + 16 * 8)


class Attentive(SegmentedModel):
    """Attention as torch has it, in fused form."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(COLUMNS, 3 * COLUMNS, bias=False)

    def segments(self):
        return [Segment("mix", self._mix, ("mix",))]

    def _mix(self, state):
        return (nn.functional.scaled_dot_product_attention(*self.mix(state[0]).chunk(3, -1)),)


def test_costs_count_attention():
    costs = segment_costs(Attentive(), (2, 3, 16, COLUMNS))
    assert costs == {"mix": 2 * 3 * 16 * (3 * COLUMNS * COLUMNS + 2 * 16 * COLUMNS)}


@given(
    costs=st.lists(st.integers(0, 50), min_size=1, max_size=7),
    stages=st.integers(1, 7),
)
def test_no_cut_has_a_cheaper_dearest_stage(costs, stages):
    stages = min(stages, len(costs))
    cuts = stage_slices({f"s{i}": cost for i, cost in enumerate(costs)}, stages)
    assert len(cuts) == stages
    assert list(itertools.chain(*(range(cut.start, cut.stop) for cut in cuts))) == [
        *range(len(costs))
    ]
    assert all(cut.stop > cut.start for cut in cuts)
    best = math.inf
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        pairs = itertools.pairwise([0, *inner, len(costs)])
        best = min(best, max(sum(costs[a:b]) for a, b in pairs))
    assert max(sum(costs[cut]) for cut in cuts) == best


COSTS = dict.fromkeys(["stem", "encoder.0", "encoder.1", "decoder.0", "head"], 1)


def test_cuts_by_name():
    assert stage_slices(COSTS, 3, ["encoder.1", "head"]) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_cuts_that_can_not_be_are_refused():
    for stages, named, virtual, words in [
        (2, ["decodr.0"], 1, "no segment 'decodr.0'. Did you mean decoder.0? The segments are st"),
        (3, ["head"], 1, "of the 3 stages but the first, 2 in all, got 1"),
        (2, ["stem"], 1, "in the model's order, without the first one, got stem"),
        (3, ["head", "encoder.0"], 1, "in the model's order"),
        (6, None, 1, "6 stages need as many segments, but the model has 5. Choose at most 5."),
        (6, None, 2, "Choose at most 2 with 2 stages on each rank"),
    ]:
        with entry(words), pytest.raises(UserError, match=re.escape(words)) as error:
            stage_slices(COSTS, stages, named, virtual=virtual)
        key = "parallel.pipeline: " if named is None else "parallel.stages"
        assert str(error.value).startswith(key), words
        assert "\n" not in str(error.value), words
