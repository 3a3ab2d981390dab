"""Checkpoints are written whole or not at all, and refused where they do not fit."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from credit_dp.config import AdamWConfig, TrainerConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import (
    CheckpointSaver,
    find_checkpoint,
    load_checkpoint,
)
from credit_dp.training.checkpoint_files import CHECKSUM_KEY, METADATA_FILE, metadata_checksum
from credit_dp.training.checkpoint_shards import Checkpoint, TensorPart, read_entries, write_shard
from credit_dp.training.optim import WeightAverage
from credit_dp.training.state import TrainingState
from tests.checkpoints import save_checkpoint
from tests.full_disk import full_disk
from tests.training.states import (
    TiedAndUnused,
    file_names,
    same_tensors,
    small_state,
    state_of_model,
    take_step,
)


def test_everything_comes_back_bit_by_bit(tmp_path):
    saved, loaded = small_state(seed=1), small_state(seed=2)
    take_step(saved)
    folder = tmp_path / "run" / "checkpoint"
    assert save_checkpoint(folder, saved, "seed: 1\n") == folder / "step-00000001"
    load_checkpoint(folder / "step-00000001", loaded)
    assert (loaded.step, loaded.seed, loaded.sampler.value) == (1, 1, 3)
    assert same_tensors(saved, loaded)
    take_step(saved)
    take_step(loaded)
    assert same_tensors(saved, loaded)
    assert saved.schedule.get_last_lr() == loaded.schedule.get_last_lr()
    assert file_names(folder) == ["step-00000001"]


def test_a_checkpoint_before_the_first_step_has_no_moments(tmp_path):
    saved, loaded = small_state(seed=1), small_state(seed=2)
    take_step(loaded)  # what the optimiser knows by then has to go
    save_checkpoint(tmp_path, saved, "")
    load_checkpoint(tmp_path, loaded)
    assert same_tensors(saved, loaded)
    assert not loaded.optimizer.state


def test_tied_and_unused_tensors_come_back(tmp_path):
    torch.manual_seed(5)
    saved, loaded = state_of_model(TiedAndUnused()), state_of_model(TiedAndUnused())
    take_step(saved)
    save_checkpoint(tmp_path, saved, "")
    load_checkpoint(tmp_path, loaded)
    assert same_tensors(saved, loaded)
    assert loaded.parts[0].weight is loaded.parts[0].tied.weight
    for name, value in saved.parts[0].state_dict().items():
        assert torch.equal(value, loaded.parts[0].state_dict()[name]), name
    torch.manual_seed(6)
    take_step(saved)
    torch.manual_seed(6)
    take_step(loaded)
    assert same_tensors(saved, loaded)


def test_moments_of_a_parameter_without_dimension_keep_their_precision(tmp_path):
    class Scaled(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(4, 4, 3, dtype=torch.float64)
            self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.double()) * self.scale

    saved, loaded = state_of_model(Scaled()), state_of_model(Scaled())
    take_step(saved)
    save_checkpoint(tmp_path, saved, "")
    load_checkpoint(tmp_path, loaded)
    assert loaded.tensors()["optimiser.scale.exp_avg"].dtype == torch.float64
    assert same_tensors(saved, loaded)


class Spectral(nn.Module):
    """Complex weights, as those of Fourier operators; one has no dimension."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=dtype))
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.register_buffer("mask", torch.randn(3, 1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("io,bihw->bohw", self.weight, x.to(self.weight.dtype))
        return (y * self.scale).abs()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_of_both_precisions_come_back(tmp_path, dtype):
    torch.manual_seed(5)
    saved, loaded = state_of_model(Spectral(dtype)), state_of_model(Spectral(dtype))
    take_step(saved)
    path = save_checkpoint(tmp_path, saved, "")
    load_checkpoint(tmp_path, loaded)
    assert same_tensors(saved, loaded)
    names = ("model.weight", "model.scale", "model.mask")
    assert {Checkpoint.open("resume", path).dtype(name) for name in names} == {dtype}
    assert Checkpoint.open("resume", path).dtype("random.generator") == torch.uint8
    other = state_of_model(Spectral(torch.complex128))
    load_checkpoint(tmp_path, other)
    assert torch.equal(other.tensors()["model.weight"].to(dtype), saved.tensors()["model.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_dtype_of_the_config_is_taken(tmp_path, dtype):
    other = torch.float64 if dtype == torch.float32 else torch.float32
    saved = state_of_model(nn.Conv2d(4, 4, 3).to(dtype))
    saved.parts[0](torch.ones(1, 4, 8, 8, dtype=dtype)).sum().backward()
    saved.optimizer.step()
    save_checkpoint(tmp_path, saved, "")
    loaded = state_of_model(nn.Conv2d(4, 4, 3).to(other))
    load_checkpoint(tmp_path, loaded)
    ours, theirs = loaded.tensors(), saved.tensors()
    for name in ("model.weight", "optimiser.weight.exp_avg", "optimiser.weight.exp_avg_sq"):
        assert torch.equal(ours[name], theirs[name].to(other)), name


def test_something_else_than_tensors_is_refused(tmp_path):
    class Extra(nn.Conv2d):
        def get_extra_state(self) -> object:
            return {"any": "thing"}

    with pytest.raises(UserError, match=r"model: _extra_state .* is a dict"):
        save_checkpoint(tmp_path, state_of_model(Extra(4, 4, 3)), "")
    assert file_names(tmp_path) == []


def settings(state: TrainingState) -> list[dict[str, Any]]:
    groups = state.optimizer.param_groups
    return [{name: group[name] for name in group if name != "params"} for group in groups]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (AdamWConfig(lr=1e-5), 10),
        (AdamWConfig(betas=(0.5, 0.6), eps=1e-4, weight_decay=0.5), 10),
        (AdamWConfig(warmup_steps=1, final_lr=1e-4), 10),
        (AdamWConfig(warmup_steps=1), 40),
    ],
)
def test_settings_of_the_config_win_over_those_saved(tmp_path, config, steps):
    saved = small_state(config=AdamWConfig(warmup_steps=1))
    wanted = small_state(config=config, steps=steps)  # has these settings from the start
    for _ in range(3):
        take_step(saved)
        take_step(wanted)
    save_checkpoint(tmp_path, saved, "")
    resumed = small_state(config=config, steps=steps)
    load_checkpoint(tmp_path, resumed)
    assert settings(resumed) != settings(saved)
    name = "optimiser.0.weight.exp_avg"
    assert torch.equal(resumed.tensors()[name], saved.tensors()[name])
    for _ in range(2):  # now, and once the schedule has moved on
        assert settings(resumed) == settings(wanted)
        assert resumed.schedule.get_last_lr() == wanted.schedule.get_last_lr()
        take_step(resumed)
        take_step(wanted)


def test_the_newest_step_replaces_older_ones(tmp_path):
    state = small_state()
    for wanted in ("step-00000001", "step-00000002"):
        take_step(state)
        save_checkpoint(tmp_path, state, "")
        assert file_names(tmp_path) == [wanted]
    state.seed = 7
    save_checkpoint(tmp_path, state, "")  # the same step once more
    loaded = small_state()
    load_checkpoint(tmp_path, loaded)
    assert (loaded.step, loaded.seed) == (2, 7)
    assert file_names(tmp_path) == ["step-00000002"]


def test_leftovers_of_killed_writes_do_not_pile_up(tmp_path):
    state = small_state()
    save_checkpoint(tmp_path, state, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", killed)
        for _ in range(2):
            take_step(state)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, state, "")
            assert len(file_names(tmp_path)) == 2
            load_checkpoint(
                tmp_path, small_state()
            )  # the one before is found, not the unfinished one
            assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000000"
    save_checkpoint(tmp_path, state, "")
    assert file_names(tmp_path) == ["step-00000002"]


def killed(source: Path, target: Path) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_tensors_are_written_is_no_error_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, small_state(), "")


def interrupted(descriptor: int) -> None:
    raise KeyboardInterrupt


def test_the_files_need_no_pickle_and_carry_the_config(tmp_path):
    path = save_checkpoint(tmp_path, small_state(), "seed: 0\n")
    state_file, shard = sorted(path.iterdir(), reverse=True)
    content = json.loads(state_file.read_text())
    assert content["config"] == "seed: 0\n"
    tensors = load_file(shard)
    model = small_state().parts[0].state_dict()
    assert set(tensors) == {f"model.{name}" for name in model} | {"random.generator"}
    assert content["tensors"] == {name: list(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("limit", [100, 5000])
def test_full_disk_keeps_the_previous_checkpoint(tmp_path, limit):
    state = small_state()
    path = save_checkpoint(tmp_path, state, "")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    take_step(state)
    with full_disk(limit), pytest.raises(UserError, match="step 1 could not be written") as error:
        save_checkpoint(tmp_path, state, "")
    assert "\n" not in str(error.value)
    assert "File too large" in str(error.value)
    assert "The previous one is untouched" in str(error.value)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert file_names(tmp_path) == ["step-00000000"]


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path):
    (tmp_path / "run").touch()
    line = r"run/checkpoint: .* could not be written \(Not a dir\w+\)\. Free space there or"
    with pytest.raises(UserError, match=line):
        save_checkpoint(tmp_path / "run" / "checkpoint", small_state(), "")


def test_auto_takes_an_existing_checkpoint(tmp_path):
    own = tmp_path / "checkpoint"
    assert find_checkpoint("auto", own) is None
    (own / ".step-00000000.part").mkdir(parents=True)
    assert find_checkpoint("auto", own) is None
    path = save_checkpoint(own, small_state(), "")
    assert find_checkpoint("auto", own) == path
    assert find_checkpoint(None, own) is None


def test_a_path_may_be_any_folder_around_it_and_has_to_exist(tmp_path):
    own, other = tmp_path / "a" / "checkpoint", tmp_path / "b" / "checkpoint"
    path = save_checkpoint(other, small_state(), "")
    for given in (path, other, other.parent):
        assert find_checkpoint(str(given), own) == path
    with pytest.raises(UserError, match=r"resume: .*does not exist"):
        find_checkpoint(str(tmp_path / "c"), own)
    shutil.rmtree(path)
    with pytest.raises(UserError, match=r"resume: .*b holds no checkpoint"):
        find_checkpoint(str(other.parent), own)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"resume: .*is a file, as exported models"):
        find_checkpoint(str(tmp_path / "model.safetensors"), tmp_path)


@pytest.mark.parametrize(
    ("channels", "layers", "message"),
    [
        (5, 2, r"has \(5,\) for 0\.bias, which is \(4,\) in the model"),
        (4, 1, r"has no 1\.bias, which the model has"),
        (4, 3, r"has 2\.bias, which the model does not have"),
    ],
)
def test_another_model_is_refused_by_the_first_difference(tmp_path, channels, layers, message):
    save_checkpoint(tmp_path, small_state(channels, layers=layers), "")
    before, state = small_state(), small_state()
    with pytest.raises(UserError, match=message) as error:
        load_checkpoint(tmp_path, state)
    assert "\n" not in str(error.value)
    assert same_tensors(before, state)


def damaged(tmp_path: Path, name: str, content: bytes | None) -> str:
    """Return the refusal of a checkpoint of which one file has other content."""
    state = small_state()
    take_step(state)
    path = save_checkpoint(tmp_path, state, "")
    file = path / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"^resume: ") as error:
        load_checkpoint(path, small_state())
    assert "\n" not in str(error.value)
    return str(error.value)


DEEP, BOMB = "[" * 20_000, "a: &a [1]\nb: [*a, *a]\n"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"tensors": None}, "state.json lacks tensors"),
        ({"config": DEEP}, "its config: .* exceeded maximum nesting depth .*"),
        ({"config": BOMB}, r"its config: has an alias, \*a: write the values instead"),
    ],
)
def test_another_state_with_a_right_checksum_is_refused(tmp_path, entries, message):
    file = save_checkpoint(tmp_path, small_state(), "") / METADATA_FILE
    content = json.loads(file.read_text()) | entries
    del content[CHECKSUM_KEY]
    content = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(content | {CHECKSUM_KEY: metadata_checksum(content)}))
    with pytest.raises(UserError, match=rf"^resume: .* is not a readable checkpoint \({message}\)"):
        load_checkpoint(file.parent, small_state())


SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04", b'{"format": 4'])
def test_what_is_not_a_checkpoint_is_refused(tmp_path, content):
    assert "not a readable checkpoint" in damaged(tmp_path, "state.json", content)


@pytest.mark.parametrize("version", [5, 7])
def test_what_another_version_wrote_is_named_as_such(tmp_path, version):
    message = damaged(tmp_path, "state.json", f'{{"format": {version}}}'.encode())
    assert f"was written by another version of this package (format {version}, this one" in message
    assert message.endswith("`code.diff` in the run's folder names, or start a new run.")
    assert "copy" not in message


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"format": "6"}'])
def test_what_something_else_saved_is_refused(tmp_path, content):
    assert "not a checkpoint of this version" in damaged(tmp_path, "state.json", content)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": True},
        {"tensors": {"model.0.bias": 4}},
        {"shards": {"../a.safetensors": {"bytes": 1, "header": ""}}},
        {"schedule": {}},
        {"checksum": None},
    ],
)
def test_doctored_numbers_are_refused(tmp_path, changes):
    file = save_checkpoint(tmp_path, small_state(), "") / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert "state.json is not as it was written (checksum)" in refused_load(file.parent)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({name: content[name] for name in content if name != "checksum"}))
    assert "state.json is not as it was written (checksum)" in refused_load(file.parent)


def test_a_checkpoint_that_lacks_entries_of_a_tensor_is_refused(tmp_path, monkeypatch):
    def lossy(path: Path, parts: Sequence[TensorPart]) -> dict[str, Any]:
        return write_shard(path, [replace(part, tensor=cut(part)) for part in parts])

    def cut(part: TensorPart) -> torch.Tensor:
        return part.tensor[:-1].clone() if part.name == "model.1.bias" else part.tensor

    monkeypatch.setattr("credit_dp.training.checkpoint.write_shard", lossy)
    path = save_checkpoint(tmp_path, small_state(), "")
    assert "(its shards do not hold model.1.bias)" in refused_load(path)


def flip_bit(file: Path, part: bytes) -> None:
    """Flip a bit of the last occurrence of these bytes in a file."""
    content = bytearray(file.read_bytes())
    content[content.rindex(part)] ^= 4
    file.write_bytes(content)


def refused_load(path: Path) -> str:
    """Return the error of loading a damaged checkpoint."""
    with pytest.raises(UserError, match=r"^resume: .* is (damaged|not a )") as error:
        load_checkpoint(path, small_state())
    assert "\n" not in str(error.value)
    return str(error.value)


def save_two(folder: Path) -> tuple[TrainingState, Path]:
    """Save two checkpoints of a state, and return it and the newer one."""
    state = small_state()
    with CheckpointSaver(folder, TrainerConfig(keep_checkpoints=2)) as saver:
        saver.save(state, "")
        take_step(state)
        saver.save(state, "")
    return state, folder / "step-00000001"


def test_a_flipped_bit_of_a_tensor_is_found_when_it_is_loaded(tmp_path):
    state, path = save_two(tmp_path)
    name = "optimiser.0.bias.exp_avg"
    flip_bit(path / SHARD, state.tensors()[name].numpy().tobytes())
    line = refused_load(path)
    assert f"{path} is damaged: {name} in {SHARD} is not as it was written" in line
    advice = f"Use {tmp_path / 'step-00000000'}, the checkpoint before it."
    assert advice in line
    (tmp_path / "best").symlink_to(path.name)
    assert advice in refused_load(tmp_path / "best")
    state_file = path / "state.json"
    whole = state_file.read_text()
    state_file.write_text(whole[:-1])
    assert advice in refused_load(path)
    state_file.write_text(whole)
    shutil.rmtree(tmp_path / "step-00000000")
    assert "There is no older one" in refused_load(path)


def test_a_flipped_bit_of_a_tensors_place_or_of_a_number_is_found(tmp_path):
    _, path = save_two(tmp_path)
    whole = (path / SHARD).read_bytes()
    # In the header: places, a name, a type, the number of rows in a block.
    for part in (b"0, 0, 0, 0]", b", 0, 0, 0]", b"exp_avg_sq", b"32", b": [262144"):
        flip_bit(path / SHARD, part)
        refused_load(path)
        (path / SHARD).write_bytes(whole)
    flip_bit(path / "state.json", b'1, "seed"')
    assert "state.json is not as it was written" in refused_load(path)


def test_only_the_blocks_of_the_entries_that_are_read_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("credit_dp.training.checkpoint_shards.BLOCK_BYTES", 64)
    tensor = torch.arange(40.0).view(10, 4)  # four rows in a block
    file = tmp_path / "a.safetensors"
    write_shard(file, [TensorPart("t", (5, 0), tensor)])
    flip_bit(file, tensor[9].numpy().tobytes())
    with safe_open(str(file), framework="pt") as opened:
        written = json.loads(opened.metadata()["checksums"])["t"]
        assert written[0] == 4
        assert torch.equal(read_entries(opened, "t", (3, 1), (4, 2), written), tensor[3:7, 1:3])
        assert read_entries(opened, "t", (6, 0), (3, 4), written) is None


def test_torch_reads_the_shards(tmp_path):
    state = small_state()
    path = save_checkpoint(tmp_path, state, "")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state.tensors().items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.tensors().items())


def test_numbers_nested_without_end_are_refused(tmp_path):
    assert "not a readable checkpoint" in damaged(tmp_path, "state.json", b"[" * 200_000)


@pytest.mark.parametrize("path", ["~nosuchuser/run", "a" * 5000])
def test_a_path_that_cannot_be_is_one_line(tmp_path, path):
    with pytest.raises(UserError, match=r"resume: .* does not exist"):
        find_checkpoint(path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 64])
def test_a_damaged_shard_is_refused(tmp_path, content):
    assert f"{SHARD} has {len(content)} bytes, not the " in damaged(tmp_path, SHARD, content)


@pytest.mark.parametrize(
    ("file", "refusal"),
    [(SHARD, f"{SHARD}: is a pipe, a socket or a device"), ("state.json", "holds no checkpoint")],
)
def test_a_pipe_for_a_file_is_refused(tmp_path, file, refusal):
    """Opening it would never end."""
    path = save_checkpoint(tmp_path, small_state(), "")
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(UserError, match=rf"^resume: .*{refusal}"):
        load_checkpoint(path, small_state())


def test_a_missing_a_foreign_and_a_longer_shard_are_refused(tmp_path):
    assert "(shard-00001-model" in damaged(tmp_path / "a", SHARD, None)
    assert "(other.safetensors" in damaged(tmp_path / "b", "other.safetensors", b"")
    whole = save_checkpoint(tmp_path / "c", small_state(), "") / SHARD
    longer = damaged(tmp_path / "d", SHARD, whole.read_bytes() + bytes(10**5))
    assert f"{SHARD} has " in longer
    assert "written with its state.json" in longer


def save_three(folder: Path, seed: int = 0) -> list[Path]:
    """Save three steps in the background, with averaged weights and moments."""
    state = small_state(seed=seed)
    state.average = WeightAverage(state.parameters, decay=0.9)
    config = TrainerConfig(keep_checkpoints=3, checkpoint_async=True)
    with CheckpointSaver(folder, config) as saver:
        for _ in range(3):
            take_step(state)
            saver.save(state, "")
    return sorted(folder.glob("step-*"))


@pytest.mark.parametrize("file", [SHARD, "state.json"])
@pytest.mark.parametrize("same_run", [True, False])
def test_a_file_of_another_save_is_refused(tmp_path, file, same_run):
    paths = save_three(tmp_path / "a")
    # Files of the same step of another run have the same names, shapes and sizes.
    others = paths[:1] if same_run else save_three(tmp_path / "b", seed=1)[1:2]
    first, damaged_path = paths[0], paths[1]
    shutil.copy(others[0] / file, damaged_path / file)
    for path in (damaged_path, tmp_path / "a" / "link"):
        if not path.exists():
            path.symlink_to(damaged_path)
        line = refused_load(path)
        assert f"is damaged: {SHARD} " in line
        assert "written with its state.json" in line
        assert f"Use {first}, the checkpoint before it." in line
    load_checkpoint(paths[2], small_state())


def test_a_cut_shard_names_the_checkpoint_before_that_is_whole(tmp_path):
    first, second, third = save_three(tmp_path)
    (third / SHARD).write_bytes((third / SHARD).read_bytes()[:-10])
    assert f"Use {second}, the checkpoint before it." in refused_load(third)
    (second / SHARD).write_bytes(b"")
    size = (third / SHARD).stat().st_size
    assert refused_load(third) == (
        f"resume: {third} is damaged: {SHARD} has {size} bytes, not the {size + 10} that were "
        "written with its state.json; it was cut, or is of another step, rank or run. Use "
        f"{first}, the checkpoint before it."
    )
    shutil.copy(third / SHARD, first / SHARD)
    assert "There is no older one beside it" in refused_load(third)


def test_no_pickle_is_ever_opened(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, small_state(), "")
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    monkeypatch.setattr("pickle.load", None)
    monkeypatch.setattr("pickle.Unpickler", None)
    load_checkpoint(path, small_state())
