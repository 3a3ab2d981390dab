"""Blocks that backward computes again: the same bits, with no message sent twice."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.domain_parallel.layers import DomainParallelRowGroups
from credit_dp.domain_parallel.recomputation import checkpoint_modules, repeated_blocks
from credit_dp.domain_parallel.transport import ReceivedMessages
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training.forward_backward import recomputed_modules
from tests.domain_parallel.equality import in_both_ways
from tests.domain_parallel.models import RowGroupAttention
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.runs import (
    alone,
    make_config,
    tiny_crossformer,
    tiny_pangu,
    tiny_swin,
    tiny_unet,
)

ROWS = 24
FIELDS = Fields(((0, 1),), (2,), 2, 1)
MODELS = {
    "unet": tiny_unet(activation_checkpointing=True, global_conditioning=True, poles="earth"),
    "crossformer": tiny_crossformer(),
    "pangu": tiny_pangu(depths=[1, 2, 1, 1]),
    "swin": tiny_swin(depths=[0, 2, 0]),
}
NAMES = {
    "unet": ["encoder.0.0", "encoder.1.0", "decoder.0.0"],
    "crossformer": ["levels.0.blocks.0", "levels.1.blocks.0", "decoder.0", "head"],
    "pangu": [
        "embedding",
        *(f"stages.{n}" for n in ("0.0", "1.0", "1.1", "2.0", "3.0")),
        "recovery",
    ],
    "swin": ["embedding", "stages.1.0", "stages.1.1"],  # its recovery is one layer
}
# With `model.activation_checkpointing`.
BY_ITSELF = {
    "unet": NAMES["unet"],
    "crossformer": NAMES["crossformer"][:2],
    "pangu": NAMES["pangu"][1:-1],
    "swin": NAMES["swin"][1:],
}


class Branches(nn.Module):
    """Convolutions that read one tensor, and so share an exchange, around attention."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = (nn.Conv2d(3, 3, n, padding=n // 2) for n in (5, 3))
        self.norm = nn.GroupNorm(1, 3)
        self.attention = RowGroupAttention("windows", 4, 2, ROWS)

    def forward(self, x, scale=1.0):
        x = x + self.attention(self.wide(x) + self.narrow(x))
        return scale * self.norm(x).relu()


class Sequence(nn.Module):
    """Two blocks in a list, called with an argument by name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(2))
        self.last = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return self.last(x)


def gradients(manager, model, x, paths):
    """Return the gradients of input and parameters, and what was sent and saved."""
    rules = {RowGroupAttention: DomainParallelRowGroups}
    model = convert_to_domain_parallel(copy.deepcopy(model), manager, -2, rules, x.shape)
    checkpoint_modules(model, paths)
    band = shard_tensor(x, manager=manager).requires_grad_()
    kept = Counter()

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    before = copy.copy(manager.transport.traffic)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(band)
    forward = copy.copy(manager.transport.traffic)
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    found = [band.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    after = copy.copy(manager.transport.traffic)
    model.zero_grad()
    band.grad = None
    loss.backward()  # what was received is still there
    again = [band.grad, *(p.grad for p in model.parameters())]
    assert all(map(torch.equal, found, again))
    traffic = [vars(t) for t in (before, forward, after)]
    sent = [{k: b[k] - a[k] for k in a} for a, b in pairwise(traffic)]
    return found, sent, kept.total()


def compare(manager, model, x, paths):
    wanted, sent, kept = gradients(manager, model, x, [])
    found, sent_again, kept_again = gradients(manager, model, x, paths)
    assert sent_again == sent
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert kept_again < kept
    return sum(sent[0].values())


def built(name, checkpoint_activations="blocks", **options):
    torch.manual_seed(1)
    model_config = replace(MODELS[name], **options)
    config = make_config(
        "store", "run", model_config, checkpoint_activations=checkpoint_activations
    )
    model = build_model(config.model, FIELDS, (ROWS, 16)).double()
    return model, recomputed_modules(model, config, 3)


PAIRS = [("unet", False), ("crossformer", True), ("pangu", False), ("swin", True)]


@pytest.mark.parametrize(
    ("name", "by_itself"),
    tiers(fast=(), slow=PAIRS, exhaustive=[(name, not by_itself) for name, by_itself in PAIRS]),
)
def test_blocks_of_models_send_nothing_twice(name, by_itself):
    kind = "false" if by_itself else "blocks"
    model, paths = built(name, kind, activation_checkpointing=by_itself)
    assert paths == (BY_ITSELF if by_itself else NAMES)[name]
    x = torch.randn(2, FIELDS.inputs, ROWS, 16, dtype=torch.float64)
    assert sum(on_processes(3, compare, model, x, paths))


@pytest.mark.parametrize("name", tiers([], [("unet",), ("crossformer",)], [("pangu",), ("swin",)]))
def test_blocks_that_a_model_computes_again_by_itself_send_nothing_twice(name):
    model, paths = built(name, "false", activation_checkpointing=True)
    plain, _ = built(name, "false", activation_checkpointing=False)
    assert paths == BY_ITSELF[name]
    shape = (1, FIELDS.inputs, ROWS, 16)
    again = plan_report(model, shape, 3, recomputed=paths)
    whole = plan_report(plain, shape, 3)
    assert again.forward == whole.forward
    assert again.backward == whole.backward
    assert max(again.saved_bytes) < max(whole.saved_bytes)


def test_a_model_checkpoints_its_blocks_by_itself_alone_and_in_a_pipeline():
    config = make_config("store", "run", tiny_crossformer(activation_checkpointing=True))
    model = build_model(config.model, FIELDS, (ROWS, 16))
    stages = replace(config, parallel=replace(config.parallel, pipeline=2))
    for given, domain in ((config, 1), (stages, 3)):
        assert recomputed_modules(model, given, domain) == []
        assert model.checkpointing
    assert recomputed_modules(model, config, 3)
    assert not model.checkpointing


@pytest.mark.slow
@in_both_ways
def test_blocks_of_another_model_share_exchanges_when_computed_again():
    model, x = Sequence().double(), torch.randn(2, 3, ROWS, 8, dtype=torch.float64)
    assert repeated_blocks(model) == ["blocks.0", "blocks.1"]
    assert sum(on_processes(3, compare, model, x, ["blocks.0", "blocks.1"]))


def keep_wide_halos(manager, model, x):
    wanted, sent, _ = gradients(manager, model, x, [])
    found, sent_again, _ = gradients(manager, model, x, ["0"])
    assert all(map(torch.equal, found, wanted))
    assert sent_again[0] == sent[0]
    # Otherwise backward sends the rows of the forward once more.
    assert sent_again[1]["bytes"] == sent[1]["bytes"] - sent[0]["bytes"]


def test_halos_wider_than_a_band_are_kept_with_what_blocks_receive():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=9, dilation=9)).double()
    on_threads(3, keep_wide_halos, model, torch.randn(1, 3, ROWS, 8, dtype=torch.float64))


def test_other_messages_than_in_the_forward_are_refused():
    messages = ReceivedMessages("blocks.1")
    with messages.recording():
        messages.collective(lambda: torch.ones(1))
    with messages.replaying():
        messages.collective(lambda: torch.ones(1))
        with pytest.raises(UserError, match=r"checkpoint_activations: blocks\.1 must exchange"):
            messages.collective(lambda: torch.ones(1))


class Across(nn.Module):
    """Blocks that read the same tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Conv2d(3, 3, n, padding=n // 2), nn.Conv2d(3, 3, 1)) for n in (5, 3)
        )

    def forward(self, x):
        return self.a(x) + self.b(x)


def across(manager, model, x):
    wanted, _, _ = gradients(manager, model, x, [])
    found, sent, _ = gradients(manager, model, x, ["a", "b"])
    for ours, theirs in zip(found, wanted, strict=True):  # sums are in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert sent[0]["messages"] == sent[1]["messages"]  # nothing but the gradients of rows


@in_both_ways
def test_blocks_that_read_the_same_tensor_fetch_their_own_rows():
    x = torch.randn(2, 3, ROWS, 8, dtype=torch.float64)
    on_processes(3, across, Across().double(), x)


class Stage(nn.Module):
    """A list of blocks, as in a hierarchical transformer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Branches() for _ in range(2)))


def test_blocks_are_the_outermost_repeated_modules_but_not_lists_of_them():
    stages = nn.Sequential(Stage(), Stage())
    assert repeated_blocks(stages) == [f"{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)]
    assert repeated_blocks(Across()) == ["a", "b"]  # lists of layers
    single = nn.ModuleDict({"stem": nn.Conv2d(3, 3, 1), "body": Branches()})
    assert repeated_blocks(single) == ["body"]


def test_the_plan_counts_what_is_kept_and_computed_again():
    model, paths = built("unet")
    shape = (1, FIELDS.inputs, ROWS, 16)
    whole, again = (plan_report(model, shape, 2, recomputed=p) for p in ([], paths))
    assert again.forward == whole.forward
    assert again.backward == whole.backward
    assert max(again.saved_bytes) < max(whole.saved_bytes)
    plain = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
    report = plan_report(plain, (1, 3, ROWS, 8), 2, recomputed=[""])
    kept, recomputed = report.saved_bytes[0], report.recomputed_bytes[0]
    band = 3 * 12 * 8 * 4
    assert kept == band + 4 * 3 * 8 * 4  # the input, and a row for each layer
    # The other layers' inputs, and two rows for each, of which one is zero, beyond the pole.
    assert recomputed == 3 * band + 8 * 3 * 8 * 4


def test_the_plan_counts_rows_from_both_sides_that_are_kept():
    plain = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
    report = plan_report(plain, (1, 3, 24, 8), 4, recomputed=[""])
    row = 3 * 8 * 4
    # Bands of 6 rows, and for each layer a row from each neighbour.
    assert report.saved_bytes == tuple((6 + 4 * neighbours) * row for neighbours in (1, 2, 2, 1))


def test_spellings():
    for given, kept in [(True, "step"), (False, "false"), ("step", "step"), ("blocks", "blocks")]:
        config = make_config("store", "run", checkpoint_activations=given)
        assert config.trainer.checkpoint_activations == kept, given
    with pytest.raises(UserError, match=r"^trainer\.checkpoint_activations: .*'block'"):
        make_config("store", "run", checkpoint_activations="block")
    config = make_config("store", "run", checkpoint_activations="blocks")
    with pytest.raises(UserError, match=r"blocks can't be compiled"):
        replace(config, compile=True)


def test_a_forward_that_changes_a_buffer_is_refused():
    block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    model = convert_to_domain_parallel(nn.Sequential(block), alone(), input_shape=(1, 2, 6, 4))
    checkpoint_modules(model, ["0"])
    with pytest.raises(UserError, match=r"but 0 changes 1\.\w+, and would again"):
        model(torch.randn(1, 2, 6, 4))
