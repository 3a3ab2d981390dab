"""Stores of an ensemble's members: each (member, time) is a sample."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.cache import NotComputedError, cache_folder
from credit_dp.data.inspection import inspect_source
from credit_dp.data.loader import Loader
from credit_dp.data.sampling import RolloutLengths, SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.opening import open_source
from credit_dp.data.statistics import StatisticsFile, input_description, statistics_path
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import ensemble_stores, stores
from tests.data.ensemble_stores import MEMBERS, STATIC
from tests.tables import each

DATA = ensemble_stores.dataset()
TRAIN = 8  # times
STEPS = 2  # of a rollout
STARTS = TRAIN - STEPS
WHOLE = slice(0, 12)


def netcdf(data, path):
    data.to_netcdf(path)
    return path


def write_grib(data, path):
    """One message a field, member by member, as MARS and the CDS send an ensemble."""
    eccodes = pytest.importorskip("eccodes")
    rows, columns = data.sizes["latitude"], data.sizes["longitude"]
    with path.open("wb") as file:
        for time in data["time"].values:
            for number in data["number"].values:
                message = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
                day = str(time.astype("M8[D]")).replace("-", "")
                keys = {
                    "productDefinitionTemplateNumber": 1, "Ni": columns, "Nj": rows,
                    "latitudeOfFirstGridPointInDegrees": 90.0,
                    "latitudeOfLastGridPointInDegrees": -90.0,
                    "longitudeOfFirstGridPointInDegrees": 0.0,
                    "longitudeOfLastGridPointInDegrees": 360 - 360 / columns,
                    "jDirectionIncrementInDegrees": 180 / (rows - 1),
                    "iDirectionIncrementInDegrees": 360 / columns,
                    "dataDate": int(day), "hour": int(time.astype("M8[h]").astype(int) % 24),
                    "shortName": "2t", "perturbationNumber": int(number),
                    "numberOfForecastsInEnsemble": data.sizes["number"], "bitsPerValue": 24,
                }  # fmt: skip
                for key, value in keys.items():
                    eccodes.codes_set(message, key, value)
                field = data["2m_temperature"].sel(time=time, number=number)
                eccodes.codes_set_values(message, field.values.astype(float).ravel())
                eccodes.codes_write(message, file)
                eccodes.codes_release(message)
    return path


FORMS = {
    "number first": (lambda path: stores.write(DATA, path), (0, 1, 2)),
    "realization last": (
        lambda path: stores.write(
            DATA.rename(number="realization").transpose(..., "realization"), path, zarr_format=2
        ),
        (0, 1, 2),
    ),
    "numbers from 1": (
        lambda path: netcdf(DATA.assign_coords(number=[1, 2, 5]), path.with_suffix(".nc")),
        (1, 2, 5),
    ),
    "no numbers": (
        lambda path: netcdf(
            DATA.drop_vars("number").rename(number="ensemble"), path.with_suffix(".nc")
        ),
        (0, 1, 2),
    ),
    "names": (
        lambda path: stores.write(
            DATA.rename(number="member_id").assign_coords(member_id=["r1", "r2", "r3"]),
            path,
            zarr_format=2,
        ),
        (0, 1, 2),
    ),
    "anemoi": (lambda path: ensemble_stores.anemoi(DATA, path), (0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["number first", "numbers from 1", "anemoi"],
        pytest.param(["realization last", "no numbers", "names"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_members_are_read_by_their_numbers(tmp_path, names):
    for name in names:
        check_members(*FORMS[name], tmp_path / f"{name}.zarr")


def check_members(write, numbers, path):
    path = write(path)
    store = Store.open(stores.config(path))
    assert store.source.members == numbers
    assert inspect_source(store.source, [1]).members == numbers
    times = stores.times(12)[[1, 7, 8]]
    for index, number in enumerate(numbers):
        alone = Store.open(stores.config(path, member=number))
        assert alone.num_members == 1
        assert alone.source.where == f"{path}, member {number}"
        data = ensemble_stores.member(DATA, index)
        wanted = np.stack([stores.expected(data, store.config, time) for time in times])
        for found in (alone, store.member(index)):
            np.testing.assert_array_equal(found.read_states(times, slice(None)), wanted)
            np.testing.assert_array_equal(found.read_states(times, slice(3, 5)), wanted[:, :, 3:5])
        statics = [DATA[name].values for name in STATIC]
        np.testing.assert_array_equal(alone.read_static(slice(None)), statics)
    first = ensemble_stores.member(DATA, 0)  # the one that is read without a choice
    np.testing.assert_array_equal(
        store.read_states(times[:1], WHOLE)[0], stores.expected(first, store.config, times[0])
    )


@pytest.mark.slow
def test_members_of_grib(tmp_path):
    path = write_grib(DATA, tmp_path / "eda.grib")
    names = {"prognostic": ["2m_temperature"], "forcing": [], "static": []}
    store = Store.open(stores.config(path, member=[2, 0], **names))
    assert store.source.members == (2, 0)
    for index, number in enumerate([2, 0]):
        found = store.member(index).read_states(store.times, WHOLE)[:, 0]
        wanted = DATA["2m_temperature"].sel(number=number).values
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    path = stores.write(DATA, tmp_path_factory.mktemp("members") / "store.zarr")
    return prepare_training_data(stores.config(path, step="6h"))


@pytest.mark.slow
def test_each_member_and_time_is_a_sample_once_an_epoch(ready):
    size = MEMBERS * STARTS
    sequence = SampleSequence(size, 2, seed=5)
    order = np.concatenate([sequence.indices(batch) for batch in range(size // 2)])
    assert sorted(order.tolist()) == list(range(size))
    rollout = RolloutLengths(STEPS, lambda batch: STEPS)
    prognostic = ready.store.config.prognostic
    settings = DataConfig(name="zarr", store="x", prognostic=prognostic, dates=DatesConfig())
    with Loader(ready, "train", WHOLE, SampleSequence(size, 2, seed=5), torch.float64,
                rollout_lengths=rollout) as loader:  # fmt: skip
        for first in range(0, size, 2):
            batch = next(loader)
            for sample, number in enumerate(order[first : first + 2].tolist()):
                # The first six samples are those of the first member, and so on.
                data = ensemble_stores.member(DATA, number // STARTS)
                time = stores.times(TRAIN)[number % STARTS]
                assert batch.times[sample] == time
                fields = [batch.state[sample], *batch.target[sample].chunk(STEPS)]
                for step, field in enumerate(fields):
                    wanted = stores.expected(data, settings, time + step * stores.STEP)
                    statistics = ready.statistics
                    wanted = (wanted - statistics.mean[:, None, None]) / statistics.std[
                        :, None, None
                    ]
                    np.testing.assert_allclose(field, wanted, rtol=1e-6, atol=1e-6)
                forcing = batch.forcing[sample].reshape(STEPS, 2, 12, 8)[:, 1]
                for step in range(STEPS):
                    wanted = data["solar"].sel(time=time + step * stores.STEP)
                    wanted = (
                        wanted - ready.statistics.forcing_mean[1]
                    ) / ready.statistics.forcing_std[1]
                    np.testing.assert_allclose(forcing[step], wanted, rtol=1e-5, atol=1e-5)


def areas(latitude):
    edges = np.array([90, *(latitude[1:] + latitude[:-1]) / 2, -90])
    return -np.diff(np.sin(np.deg2rad(edges))) / 2


def test_statistics_are_of_all_members(ready):
    weights = areas(DATA["latitude"].values)
    values = DATA["2m_temperature"].isel(time=slice(0, TRAIN)).transpose("number", "time", ...)
    values = values.values.astype(float)
    mean = np.average(values.mean(axis=(0, 1, 3)), weights=weights)
    std = np.sqrt(np.average(((values - mean) ** 2).mean(axis=(0, 1, 3)), weights=weights))
    # Changes over a step are within a member.
    changes = np.diff(values, axis=1)
    change = np.average(changes.mean(axis=(0, 1, 3)), weights=weights)
    spread = np.average(((changes - change) ** 2).mean(axis=(0, 1, 3)), weights=weights)
    place = [c.name for c in ready.store.channels.output_channels].index("2m_temperature")
    found = ready.statistics
    assert found.mean[place] == pytest.approx(mean, rel=1e-12)
    assert found.std[place] == pytest.approx(std, rel=1e-12)
    assert found.tendency_std[place] == pytest.approx(np.sqrt(spread), rel=1e-12)
    assert found.minimum[place] == values.min()
    assert found.maximum[place] == values.max()


def test_the_climatology_is_of_all_members(ready):
    time = stores.times(4)[1]
    found = ready.climatology.field(time, WHOLE)
    place = [c.name for c in ready.store.channels.output_channels].index("2m_temperature")
    # Two days have no seasons: the mean over the days and members of this hour.
    values = (
        DATA["2m_temperature"].isel(time=slice(0, TRAIN)).sel(time=[time, time + 4 * stores.STEP])
    )
    np.testing.assert_allclose(found[place], values.mean(["number", "time"]), rtol=1e-6)


def test_quantiles_are_of_all_members(tmp_path):
    data = DATA.copy(deep=True)
    data["own"] = data["solar"].copy()
    data["own"][{"number": 2}] += 1000
    path = stores.write(data, tmp_path / "store.zarr")
    variables = {"own": VariableConfig(normalise="quantile")}
    config = stores.config(path, prognostic=["2m_temperature", "own"], variables=variables)
    ready = prepare_training_data(config)
    values = data["own"].isel(time=slice(0, TRAIN))
    weights = np.broadcast_to(areas(DATA["latitude"].values)[:, None], values.shape)
    for score in (-1, 0, 1):  # one third of the values is around 1100
        quantile = ready.statistics.quantiles[1][64 + 16 * score]
        below = weights[values.values < quantile].sum() / weights.sum()
        assert below == pytest.approx((1 + math.erf(score / math.sqrt(2))) / 2, abs=2e-3)


def test_masks_are_of_all_members(tmp_path):
    data = DATA.copy(deep=True)
    data["2m_temperature"][{"latitude": 3}] = np.nan
    data["2m_temperature"][{"number": 1, "latitude": 4}] = np.nan
    path = stores.write(data, tmp_path / "store.zarr")
    variables = {"2m_temperature": VariableConfig(fill="mean")}
    settings = {"prognostic": ["2m_temperature"], "variables": variables}
    for member, rows in ((None, [3, 4]), ([0, 2], [3])):
        ready = prepare_training_data(stores.config(path, member=member, **settings))
        [mask] = ready.store.masks.values()
        assert np.flatnonzero(~mask.all(axis=1)).tolist() == rows


def test_statistics_are_of_the_members_or_of_more(tmp_path):
    path = stores.write(DATA, tmp_path / "store.zarr")
    alone = stores.write(ensemble_stores.member(DATA, 0), tmp_path / "alone.zarr")

    def file(where, member=None):
        described = input_description(Store.open(stores.config(where, member=member)), 1)
        return StatisticsFile(json.loads(json.dumps(described)), {})

    def refused(statistics, where, member=None):
        with pytest.raises(UserError) as raised:
            statistics.check(Store.open(stores.config(where, member=member)), "stats.json")
        return str(raised.value)

    of_all, of_first, of_pair = file(path), file(path, 0), file(path, [1, 0])
    for statistics, where, member in (
        (of_all, path, [2, 1, 0]), (of_all, path, 1), (of_pair, path, 0), (of_first, alone, None),
    ):  # fmt: skip
        statistics.check(Store.open(stores.config(where, member=member)), "stats.json")
    assert "members" not in of_first.input_description
    for statistics, member, words in (
        (of_pair, None, "2 members, 0, 1, but the config has 3 members, 0 to 2"),
        (of_pair, 2, "2 members, 0, 1, but the config has member 2"),
        (of_first, [0, 1], "a single member, but the config has 2 members, 0, 1"),
    ):
        line = f"stats.json: has statistics of {words}. Change data.member or data.statistics."
        assert refused(statistics, path, member) == line
    assert "3 members, 0 to 2, but the config has no members." in refused(of_all, alone)


@pytest.mark.slow
def test_a_member_may_have_the_scaling_of_the_ensemble(ready, tmp_path):
    config = ready.store.config
    table = StatisticsFile.load(statistics_path(ready.store, cache_folder(config.cache)))
    table.save(tmp_path / "all.json")
    settings = {"member": 1, "statistics": str(tmp_path / "all.json")}
    one = prepare_training_data(replace(config, **settings))
    assert one.store.num_members == 1
    np.testing.assert_array_equal(one.statistics.mean, ready.statistics.mean)
    np.testing.assert_array_equal(one.statistics.std, ready.statistics.std)


BAD = {
    3: "data.member: needs members of .*store.zarr, which has 3 members, 0 to 2, got 3. Choose",
    (0, 7): "0 to 2, got 7. Choose some of these.",
    (): r"data.member: needs the number of a member, or a list of them, got \[\]",
    -1: "needs the number of a member, or a list of them, got -1",
    "x": "needs the number of a member, or a list of them, got 'x'",
    False: "needs the number of a member, or a list of them, got False",
    "": "needs the number of a member, or a list of them, got ''",
    (1, 1): "data.member",
}


@each("value", BAD)
def test_bad_members_are_refused(ready, value):
    path = ready.store.config.store
    member = list(value) if isinstance(value, tuple) else value
    with pytest.raises(UserError, match=BAD[value]) as raised:
        open_source(stores.config(path, member=member))
    assert "\n" not in str(raised.value)


def test_a_member_of_a_store_without_is_refused(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    with pytest.raises(UserError, match=r"which has no members, got 0\. Set it to null\."):
        open_source(stores.config(path, member=0))


def test_joined_stores_need_the_same_members(tmp_path):
    early = stores.write(DATA.isel(time=slice(0, 6)), tmp_path / "early.zarr")
    late = DATA.isel(time=slice(6, 12))
    fewer = stores.write(late.isel(number=[0, 1]), tmp_path / "fewer.zarr")
    line = "fewer.zarr: has 2 members, 0, 1, but .*early.zarr 3 members, 0 to 2. Stores"
    settings = stores.config(early)
    with pytest.raises(UserError, match=line):
        open_source(stores.config(early, store=[str(early), str(fewer)]))
    late = stores.write(late, tmp_path / "late.zarr")
    store = Store.open(stores.config(early, store=[str(early), str(late)]))
    assert len(store.times) == 12
    for index in range(MEMBERS):
        data = ensemble_stores.member(DATA, index)
        wanted = [stores.expected(data, settings, time) for time in store.times]
        np.testing.assert_array_equal(store.member(index).read_states(store.times, WHOLE), wanted)


@pytest.mark.slow
def test_a_store_of_one_member_is_not_of_all(tmp_path):
    own = stores.write(DATA.drop_vars("solar"), tmp_path / "own.zarr")
    only = DATA[["solar"]].isel(number=[1])
    one = stores.write(only, tmp_path / "one.zarr")
    line = r"one.zarr: has member 1, but .*own.zarr 3 members, 0 to 2\. Stores .* or no dim"
    for both in ([str(own), str(one)], [str(one), str(own)]):
        with pytest.raises(UserError, match=line):
            open_source(stores.config(own, store=both))
    late = stores.write(DATA.isel(number=[0], time=slice(8, 12)), tmp_path / "late.zarr")
    early = stores.write(DATA.isel(time=slice(0, 8)), tmp_path / "early.zarr")
    with pytest.raises(UserError, match=r"late.zarr: has member 0, but .*early.zarr 3 members"):
        open_source(stores.config(own, store=[str(late), str(early)]))
    # A number without a dim, as cfgrib writes it, says nothing of the ensemble.
    free = stores.write(only.squeeze("number"), tmp_path / "free.zarr")
    store = Store.open(stores.config(own, store=[str(own), str(free)]))
    for index in range(MEMBERS):
        forcing = store.member(index).read_forcing(stores.times(1), WHOLE)
        np.testing.assert_array_equal(forcing[0, 1], DATA["solar"][1, 0])


@pytest.mark.slow
def test_a_store_of_one_member_is_one_without(tmp_path):
    number = 5
    one = DATA.isel(number=[1]).assign_coords(number=[number])
    path = stores.write(one, tmp_path / "one.zarr", chunks={"time": 1})
    alone = stores.write(ensemble_stores.member(DATA, 1), tmp_path / "alone.zarr")
    early = stores.write(one.isel(time=slice(0, 6)), tmp_path / "early.zarr")
    late = ensemble_stores.member(DATA, 1).isel(time=slice(6, 12))
    late = stores.write(late, tmp_path / "late.zarr")
    wanted = Store.open(stores.config(alone)).read_states(stores.times(12), WHOLE)
    for where in (str(path), [str(late), str(early)]):
        for member in (None, number) if where == str(path) else ([number],):
            store = Store.open(stores.config(path, store=where, member=member))
            assert store.num_members == 1
            assert store.source.members == ()
            np.testing.assert_array_equal(store.read_states(stores.times(12), WHOLE), wanted)
        line = f"which has member {number}, got 3. Choose"
        with pytest.raises(UserError, match=line):
            open_source(stores.config(path, store=where, member=3))


def test_a_store_without_members_belongs_to_each(tmp_path):
    own = stores.write(DATA.drop_vars(["solar", *STATIC]), tmp_path / "own.zarr")
    common = stores.dataset(seed=9)[["solar", *STATIC]]
    shared = stores.write(common, tmp_path / "shared.zarr")
    store = Store.open(stores.config(own, store=[str(own), str(shared)]))
    assert store.num_members == MEMBERS
    time = stores.times(1)
    for index in range(MEMBERS):
        member = store.member(index)
        np.testing.assert_array_equal(member.read_forcing(time, WHOLE)[0, 1], common["solar"][0])
        found = member.read_states(time, WHOLE)[0, 3]
        np.testing.assert_array_equal(found, DATA["2m_temperature"][index, 0])


def test_members_are_regridded(tmp_path):
    path = stores.write(DATA, tmp_path / "store.zarr")
    alone = stores.write(ensemble_stores.member(DATA, 1), tmp_path / "alone.zarr")
    found, wanted = (Store.open(stores.config(where, grid="6x8")) for where in (path, alone))
    assert found.num_members == MEMBERS
    times = stores.times(3)
    np.testing.assert_array_equal(
        found.member(1).read_states(times, slice(1, 4)), wanted.read_states(times, slice(1, 4))
    )


@pytest.mark.slow
def test_members_that_no_variable_has_are_no_samples(tmp_path):
    data = stores.dataset().assign(spare=DATA["solar"])
    path = stores.write(data, tmp_path / "store.zarr")
    assert Store.open(stores.config(path)).num_members == 1
    store = Store.open(stores.config(path, prognostic=["2m_temperature", "spare"]))
    assert store.num_members == MEMBERS


def test_static_fields_that_differ_are_refused(tmp_path):
    sea = DATA["land_sea_mask"].expand_dims(number=DATA["number"]).copy()
    alike = stores.write(DATA.assign(land_sea_mask=sea), tmp_path / "alike.zarr")
    differing = sea.copy(deep=True)
    differing[1, 5, 2] += 0.01
    path = stores.write(DATA.assign(land_sea_mask=differing), tmp_path / "differing.zarr")

    def check(where, **changes):
        prepare_training_data(stores.config(where, **changes), compute=False)

    line = "differing.zarr, member 1: land_sea_mask is not that of the other members"
    # Before anything is computed.
    with pytest.raises(UserError, match=line):
        check(path)
    for where, changes in (
        (alike, {}), (path, {"member": 1}), (path, {"static": ["geopotential_at_surface"]})
    ):  # fmt: skip
        with pytest.raises(NotComputedError):
            check(where, **changes)


def test_static_fields_that_members_share_are_read_once(ready, monkeypatch):
    reads = []
    read_static = Store.read_static
    monkeypatch.setattr(
        Store, "read_static", lambda self, rows: reads.append(rows) or read_static(self, rows)
    )
    size = MEMBERS * (TRAIN - 1)
    with Loader(ready, "train", WHOLE, SampleSequence(size, 2)) as loader:
        static = next(loader).static
    assert reads == [WHOLE]
    assert static.shape[1] == 2


def test_a_value_out_of_range_names_its_member(tmp_path):
    data = DATA.copy(deep=True)
    data["2m_temperature"][2, 4, 0, 0] = np.nan
    path = stores.write(data, tmp_path / "store.zarr")
    with pytest.raises(
        UserError, match=r"store.zarr, member 2: 2m_temperature has NaN at 2000-01-02"
    ):
        prepare_training_data(stores.config(path))


def test_a_missing_chunk_of_a_member_is_damage(tmp_path):
    path = stores.write(DATA, tmp_path / "store.zarr", chunks={"time": 1, "number": 1})
    chunk = path / "2m_temperature" / "c" / "1" / "4" / "0" / "0"
    chunk.unlink()
    store = Store.open(stores.config(path))
    store.member(0).read_states(stores.times(12), WHOLE)
    with pytest.raises(UserError, match="member 1"):
        store.member(1).read_states(stores.times(12), WHOLE)
