"""Checkpoints are written whole or not at all, and refused where they do not fit."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
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


def test_complex_numbers_of_both_precisions_come_back(tmp_path):
    for dtype in (torch.complex64, torch.complex128):
        torch.manual_seed(5)
        saved, loaded = state_of_model(Spectral(dtype)), state_of_model(Spectral(dtype))
        take_step(saved)
        path = save_checkpoint(tmp_path / str(dtype), saved, "")
        load_checkpoint(path, loaded)
        assert same_tensors(saved, loaded), dtype
        names = ("model.weight", "model.scale", "model.mask")
        assert {Checkpoint.open("resume", path).dtype(name) for name in names} == {dtype}
        assert Checkpoint.open("resume", path).dtype("random.generator") == torch.uint8
        other = state_of_model(Spectral(torch.complex128))
        load_checkpoint(path, other)
        weight = other.tensors()["model.weight"].to(dtype)
        assert torch.equal(weight, saved.tensors()["model.weight"]), dtype


class Scaled(nn.Conv2d):
    """Has a weight of float64 without dimension."""

    def __init__(self) -> None:
        super().__init__(4, 4, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()) * self.scale


def test_moments_keep_their_precision_but_for_another_dtype_of_the_config(tmp_path):
    saved, loaded = state_of_model(Scaled()), state_of_model(Scaled())
    take_step(saved)
    load_checkpoint(save_checkpoint(tmp_path / "scaled", saved, ""), loaded)
    assert loaded.tensors()["optimiser.scale.exp_avg"].dtype == torch.float64
    assert same_tensors(saved, loaded)
    for dtype, other in permutations((torch.float32, torch.float64)):
        saved = state_of_model(nn.Conv2d(4, 4, 3).to(dtype))
        saved.parts[0](torch.ones(1, 4, 8, 8, dtype=dtype)).sum().backward()
        saved.optimizer.step()
        path = save_checkpoint(tmp_path / str(dtype), saved, "")
        loaded = state_of_model(nn.Conv2d(4, 4, 3).to(other))
        load_checkpoint(path, loaded)
        ours, theirs = loaded.tensors(), saved.tensors()
        for name in ("model.weight", "optimiser.weight.exp_avg", "optimiser.weight.exp_avg_sq"):
            assert torch.equal(ours[name], theirs[name].to(other)), (dtype, name)


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


CONFIGS = (
    (AdamWConfig(lr=1e-5), 10),
    (AdamWConfig(betas=(0.5, 0.6), eps=1e-4, weight_decay=0.5), 10),
    (AdamWConfig(warmup_steps=1, final_lr=1e-4), 10),
    (AdamWConfig(warmup_steps=1), 40),
)


def test_settings_of_the_config_win_over_those_saved(tmp_path):
    for number, (config, steps) in enumerate(CONFIGS):
        saved = small_state(config=AdamWConfig(warmup_steps=1))
        wanted = small_state(config=config, steps=steps)  # has these settings from the start
        for _ in range(3):
            take_step(saved)
            take_step(wanted)
        path = save_checkpoint(tmp_path / str(number), saved, "")
        resumed = small_state(config=config, steps=steps)
        load_checkpoint(path, resumed)
        assert settings(resumed) != settings(saved), config
        name = "optimiser.0.weight.exp_avg"
        assert torch.equal(resumed.tensors()[name], saved.tensors()[name])
        for _ in range(2):  # now, and once the schedule has moved on
            assert settings(resumed) == settings(wanted), config
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
    with pytest.MonkeyPatch.context() as patch:  # no error of the disk
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, state, "")


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_files_need_no_pickle_and_carry_the_config(tmp_path, monkeypatch):
    state = small_state()
    path = save_checkpoint(tmp_path, state, "seed: 0\n")
    state_file, shard = sorted(path.iterdir(), reverse=True)
    content = json.loads(state_file.read_text())
    assert content["config"] == "seed: 0\n"
    tensors = load_file(shard)
    model = small_state().parts[0].state_dict()
    assert set(tensors) == {f"model.{name}" for name in model} | {"random.generator"}
    assert content["tensors"] == {name: list(tensor.shape) for name, tensor in tensors.items()}
    # torch reads them.
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state.tensors().items()}
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.tensors().items())
    # No pickle is ever opened.
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    monkeypatch.setattr("pickle.load", None)
    monkeypatch.setattr("pickle.Unpickler", None)
    load_checkpoint(path, small_state())


def test_a_full_disk_and_a_file_in_the_way_keep_the_previous_checkpoint(tmp_path):
    for limit in (100, 5000):
        folder, state = tmp_path / str(limit), small_state()
        path = save_checkpoint(folder, state, "")
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        take_step(state)
        with full_disk(limit), pytest.raises(UserError, match="step 1 could not be") as error:
            save_checkpoint(folder, state, "")
        assert "\n" not in str(error.value)
        assert "File too large" in str(error.value)
        assert "The previous one is untouched" in str(error.value)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before, limit
        assert file_names(folder) == ["step-00000000"]
    line = r"100/step-00000000/state.json/x: .* could not be written \(Not a dir\w+\)\. Free space"
    with pytest.raises(UserError, match=line):
        save_checkpoint(tmp_path / "100/step-00000000/state.json/x", small_state(), "")


def test_resume_takes_auto_or_any_folder_around_a_checkpoint(tmp_path):
    own, other = tmp_path / "a" / "checkpoint", tmp_path / "b" / "checkpoint"
    assert find_checkpoint("auto", other) is None
    (other / ".step-00000000.part").mkdir(parents=True)
    assert find_checkpoint("auto", other) is None
    path = save_checkpoint(other, small_state(), "")
    assert find_checkpoint("auto", other) == path
    assert find_checkpoint(None, other) is None
    for given in (path, other, other.parent):
        assert find_checkpoint(str(given), own) == path
    shutil.rmtree(path)
    (tmp_path / "model.safetensors").touch()
    for given, said in {
        tmp_path / "c": "does not exist",
        "~nosuchuser/run": "does not exist",
        "a" * 5000: "does not exist",
        other.parent: "b holds no checkpoint",
        tmp_path / "model.safetensors": "is a file, as exported models",
    }.items():
        with pytest.raises(UserError, match=rf"^resume: .*{said}"):
            find_checkpoint(str(given), own)


def test_another_model_is_refused_by_the_first_difference(tmp_path):
    for channels, layers, said in (
        (5, 2, "has (5,) for 0.bias, which is (4,) in the model"),
        (4, 1, "has no 1.bias, which the model has"),
        (4, 3, "has 2.bias, which the model does not have"),
    ):
        path = save_checkpoint(tmp_path / said[:9], small_state(channels, layers=layers), "")
        before, state = small_state(), small_state()
        with pytest.raises(UserError) as error:
            load_checkpoint(path, state)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
        assert same_tensors(before, state), said


SHARD = "shard-00001-model-00001-of-00001.safetensors"
DAMAGED_FILES = (  # name, content, what is said
    (METADATA_FILE, b"", "is not a readable checkpoint"),
    (METADATA_FILE, b"not a checkpoint", "is not a readable checkpoint"),
    (METADATA_FILE, b"PK\x03\x04", "is not a readable checkpoint"),
    (METADATA_FILE, b'{"format": 4', "is not a readable checkpoint"),
    (METADATA_FILE, b"[" * 200_000, "is not a readable checkpoint"),
    (METADATA_FILE, b"[]", "not a checkpoint of this version"),
    (METADATA_FILE, b"{}", "not a checkpoint of this version"),
    (METADATA_FILE, b'{"format": "6"}', "not a checkpoint of this version"),
    (SHARD, b"", f"{SHARD} has 0 bytes, not the "),
    (SHARD, b"not a checkpoint", f"{SHARD} has 16 bytes, not the "),
    (SHARD, b"\xff" * 64, f"{SHARD} has 64 bytes, not the "),
    (SHARD, bytes(10**5), f"{SHARD} has 100000 bytes, not the "),
    (SHARD, None, f"({SHARD}"),
    ("other.safetensors", b"", "(other.safetensors"),
)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint after a step."""
    state = small_state()
    take_step(state)
    return save_checkpoint(tmp_path, state, "")


def refused_load(path: Path) -> str:
    """Return the error of loading a damaged checkpoint."""
    kinds = "is damaged|is not a |was written by|holds no checkpoint"
    with pytest.raises(UserError, match=rf"^resume: .* ?({kinds})") as error:
        load_checkpoint(path, small_state())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_missing_foreign_and_older_files_are_refused(checkpoint):
    whole = {file: file.read_bytes() for file in checkpoint.iterdir()}
    for name, content, said in DAMAGED_FILES:
        if content is None:
            (checkpoint / name).unlink()
        else:
            (checkpoint / name).write_bytes(content)
        assert said in refused_load(checkpoint), (name, (content or b"")[:20])
        (checkpoint / name).unlink(missing_ok=True)
        for file, before in whole.items():
            file.write_bytes(before)
    load_checkpoint(checkpoint, small_state())
    for version in (5, 7):
        (checkpoint / METADATA_FILE).write_text(f'{{"format": {version}}}')
        line = refused_load(checkpoint)
        assert f"by another version of this package (format {version}, this one" in line
        assert line.endswith("`code.diff` in the run's folder names, or start a new run.")
        assert "copy" not in line


def test_a_pipe_for_a_file_is_refused(checkpoint):
    """Opening it would never end."""
    for name, said in ((SHARD, f"{SHARD}: is a pipe, a socket or a device"),
                       (METADATA_FILE, "holds no checkpoint")):  # fmt: skip
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        assert said in refused_load(checkpoint)


DEEP, BOMB = "[" * 20_000, "a: &a [1]\nb: [*a, *a]\n"


def test_numbers_that_were_changed_or_can_not_be_are_refused(checkpoint):
    file = checkpoint / METADATA_FILE
    whole = json.loads(file.read_text())
    for changes in (
        {"step": True},
        {"tensors": {"model.0.bias": 4}},
        {"shards": {"../a.safetensors": {"bytes": 1, "header": ""}}},
        {"schedule": {}},
        {CHECKSUM_KEY: None},
    ):
        content = {**whole, **changes}
        file.write_text(json.dumps(content))
        assert "state.json is not as it was written (checksum)" in refused_load(checkpoint), changes
        file.write_text(json.dumps({name: content[name] for name in whole if name != CHECKSUM_KEY}))
        assert "state.json is not as it was written (checksum)" in refused_load(checkpoint), changes
    for changes, said in (  # with a right checksum
        ({"tensors": None}, "state.json lacks tensors"),
        ({"config": DEEP}, "its config: .* exceeded maximum nesting depth .*"),
        ({"config": BOMB}, r"its config: has an alias, \*a: write the values instead"),
    ):
        content = {name: value for name, value in {**whole, **changes}.items() if value is not None}
        del content[CHECKSUM_KEY]
        file.write_text(json.dumps({**content, CHECKSUM_KEY: metadata_checksum(content)}))
        line = refused_load(checkpoint)
        assert re.fullmatch(rf"resume: .* is not a readable checkpoint \({said}\).*", line), line


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


def test_a_file_of_another_save_is_refused(tmp_path):
    """Files of the same step of another run have the same names, shapes and sizes."""
    paths, others = save_three(tmp_path / "a"), save_three(tmp_path / "b", seed=1)
    first, second, third = paths
    (tmp_path / "a" / "link").symlink_to(second)
    for name, other in product((SHARD, METADATA_FILE), (first, others[1])):
        before = (second / name).read_bytes()
        shutil.copy(other / name, second / name)
        for path in (second, tmp_path / "a" / "link"):
            line = refused_load(path)
            assert f"is damaged: {SHARD} " in line, (name, other)
            assert "written with its state.json" in line
            assert f"Use {first}, the checkpoint before it." in line
        (second / name).write_bytes(before)
    load_checkpoint(third, small_state())


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
