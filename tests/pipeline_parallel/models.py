"""Tiny models in segments, and the comparison of a pipeline with the model on one process."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.verify import relative_error
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState
from credit_dp.pipeline_parallel.pipeline import Pipeline
from credit_dp.pipeline_parallel.stages import Stage, cut_model, segment_costs, stage_slices
from tests.training.runs import tiny_crossformer, tiny_pangu, tiny_sfno, tiny_swin, tiny_unet

COLUMNS = 16
SAMPLES = 4
# Two variables on three levels, two at the surface, a forcing.
FIELDS = Fields(((1, 2, 3), (5, 6, 7)), (0, 4), others=1, frames=1)
TWO_FRAMES = Fields(((1, 2, 3), (5, 6, 7)), (0, 4), others=1, frames=2)


CONFIGS = {
    "unet": tiny_unet(),
    "unet with all": tiny_unet(frames=2, squeeze_excite=True, global_conditioning=True),
    "computed again": tiny_unet(activation_checkpointing=True),
    "pangu": tiny_pangu(depths=[1, 2, 1, 1]),
    "swin": tiny_swin(depths=[0, 3, 0]),
    "crossformer": tiny_crossformer(depths=[1, 2]),
    "sfno": tiny_sfno(),
    "spectral norm": tiny_crossformer(depths=[1, 2], spectral_norm=True),
}
NAMES = [*CONFIGS, "own", "globe"]


class Own(SegmentedModel):
    """Passes its input to the last segment, with global means from a segment in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(FIELDS.inputs, 8, 3, padding=1)
        self.middle = _Anomalies()
        self.idle = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8 + FIELDS.inputs, FIELDS.outputs, 3, padding=1)

    def segments(self) -> list[Segment]:
        return [
            Segment("first", lambda state: (self.first(state[0]), state[0]), ("first",)),
            Segment("middle", lambda state: (self.middle(state[0]), state[1]), ("middle",)),
            Segment("idle", lambda state: (self.idle(state[0]), state[1]), ("idle",)),
            Segment("last", self._finish, ("last",)),
        ]

    def _finish(self, state: SegmentState) -> SegmentState:
        return (self.last(torch.cat(state, 1)),)


class _Anomalies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x - x.mean((-2, -1), keepdim=True))


class Spectral(SegmentedModel):
    """Computes on tensors of the globe, hands on all kinds: fields, whole ones, tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(FIELDS.inputs, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.query, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Conv2d(8, FIELDS.outputs, 1)

    def segments(self) -> list[Segment]:
        return [
            Segment("first", self._begin, ("first",)),
            Segment("norm", self._filter, ("norm",)),
            Segment("mix", self._attend, ("mix", "query")),
            Segment("last", self._finish, ("last",)),
        ]

    def _begin(self, state: SegmentState) -> SegmentState:
        y = self.first(state[0])
        # Rows in the second dimension; a whole value; few whole rows, which ranks may share.
        return y.permute(0, 2, 3, 1), y.mean((2, 3)), F.adaptive_avg_pool2d(y, (3, 1))

    def _filter(self, state: SegmentState) -> SegmentState:
        channels_last, mean, few = state
        y = self.norm(channels_last.permute(0, 3, 1, 2) - few.amax((2, 3), keepdim=True))
        waves = torch.fft.rfft2(y, norm="ortho") * mean[:, :, None, None].sigmoid()
        y = torch.fft.irfft2(waves, s=y.shape[-2:], norm="ortho")
        rows = torch.linspace(-1, 1, y.shape[-2], dtype=y.dtype, device=y.device)
        return y, (y + rows[:, None]).flatten(2).transpose(1, 2), few

    def _attend(self, state: SegmentState) -> SegmentState:
        y, tokens, few = state
        mixed = F.scaled_dot_product_attention(self.query(tokens), tokens, tokens)
        return y.transpose(-1, -2), self.mix(mixed), few, few

    def _finish(self, state: SegmentState) -> SegmentState:
        y, tokens, few, again = state
        y = y.transpose(-1, -2)
        return (self.last(y + tokens.transpose(1, 2).reshape(y.shape) * (few + again).mean()),)


def build(name: str, rows: int) -> nn.Module:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(0)
    if name in ("own", "globe"):
        return (Own() if name == "own" else Spectral()).double()
    return build_model(CONFIGS[name], fields(name), (rows, COLUMNS)).double()


def fields(name: str) -> Fields:
    return TWO_FRAMES if name == "unet with all" else FIELDS


def shape(name: str, rows: int) -> tuple[int, int, int, int]:
    return SAMPLES, fields(name).inputs, rows, COLUMNS


def batch(name: str, rows: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return input and target of a model."""
    torch.manual_seed(1)
    size = (samples, -1, rows, COLUMNS)
    both = torch.randn(samples, fields(name).inputs + FIELDS.outputs, *size[2:]).double()
    return both[:, : fields(name).inputs], both[:, fields(name).inputs :]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that adds up over bands."""
    return (output - target).square().sum()


def stages_of(
    manager: DomainParallelManager, name: str, rows: int, count: int
) -> tuple[nn.Module, list[Stage]]:
    """Return the plain model, and this rank's stages of the sharded one."""
    model = build(name, rows)
    cuts = stage_slices(segment_costs(model, shape(name, rows)), count)
    whole = copy.deepcopy(model)
    if manager.domain_parallel_size > 1:
        model = shard_model(model, manager, shape(name, rows))
    return whole, cut_model(model, manager, cuts, shape(name, rows))


def assert_pipeline_is_model(
    manager: DomainParallelManager, name: str, rows: int, schedule: str, micro: int
) -> None:
    """Compare losses, every gradient, buffers, and outputs of other batch sizes."""
    virtual = 2 if schedule == "interleaved" else 1
    whole, stages = stages_of(manager, name, rows, virtual * manager.pipeline_parallel_size)
    pipeline = Pipeline(stages, manager, schedule, micro)
    x, target = batch(name, rows)
    for _ in range(2):  # gradients add up
        wanted = train_step(whole, x, target, micro)
        found = pipeline.forward_backward(band(x, manager), band(target, manager), squared)
        if pipeline.stage_modules[-1] is stages[-1].module and stages[-1].is_last:
            assert relative_error(manager.transport.all_reduce(found), wanted) < 1e-11
        else:
            assert found == 0
    errors = gradient_errors(manager, pipeline.stage_modules, whole)
    assert max(errors.values()) < 1e-11, errors
    for part in pipeline.stage_modules:
        for key, buffer in part.named_buffers():
            assert relative_error(buffer, whole.get_buffer(key)) < 1e-11, key
    assert 0 <= pipeline.bubble() < 1
    whole.eval()
    for part in pipeline.stage_modules:
        part.eval()
    for samples in (1, 3):
        x, _ = batch(name, rows, samples)
        with torch.no_grad():
            wanted = band(whole(x), manager)
        made = pipeline.forward(band(x, manager))
        assert not made.requires_grad
        assert relative_error(made, wanted) < 1e-11


def train_step(whole: nn.Module, x: Tensor, target: Tensor, micro: int) -> Tensor:
    """Train a step on one process with the same micro-batches; return the sum of losses."""
    total = torch.zeros((), dtype=x.dtype)
    for part, wanted in zip(x.chunk(micro), target.chunk(micro), strict=True):
        loss = squared(whole(part), wanted)
        loss.backward()
        total += loss.detach()
    return total


def gradient_errors(
    manager: DomainParallelManager, parts: tuple[nn.Module, ...], whole: nn.Module
) -> dict[str, float]:
    """Return the errors of this rank's gradients, summed over the domain."""
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(grad.abs().max() for grad in wanted.values()).item()
    return {
        name: relative_error(manager.transport.all_reduce(p.grad), wanted[name], 1e-3 * largest)
        for part in parts
        for name, p in part.named_parameters()
    }


def band(x: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return this rank's rows."""
    return shard_tensor(x, manager=manager)
