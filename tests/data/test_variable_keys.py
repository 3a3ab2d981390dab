"""`data.variables.NAME.KEY` on the command line and in the config."""

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.setup import expected_data
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each


def composed(*texts: str) -> DataConfig:
    overrides = [str(override.input_line) for override in parse_overrides(texts)]
    return Composer("test").compose_config(overrides).data


@pytest.mark.slow
@each(
    "texts, name, expected",
    [
        (["sst.fill=mean"], "sst", VariableConfig(fill="mean")),
        (["2m_temperature.fill=-1.5"], "2m_temperature", VariableConfig(fill=-1.5)),
        (
            ["sst.normalise=minmax", "sst.fill=0", "other.fill=1"],
            "sst",
            VariableConfig(normalise="minmax", fill=0),
        ),
        (
            ['rain.normalise="log1p(1e-3)"', "rain.accumulated=true"],
            "rain",
            VariableConfig(normalise="log1p(1e-3)", accumulated=True),
        ),
        (
            ["skt.convert='degC->K'", "skt.nonnegative=false"],
            "skt",
            VariableConfig(convert="degC->K", nonnegative=False),
        ),
    ],
)
def test_keys_of_a_variable_are_set_one_by_one(texts, name, expected):
    config = composed(*(f"data.variables.{text}" for text in texts))
    assert config.variable_config(name) == expected
    assert config.variable_config("geopotential") == VariableConfig()


@each(
    "text, answer",
    [
        ("sst.normalise=log1p(1e-3)", r"needs quotes; write '.*=\"log1p\(1e-3\)\"'"),
        ("2m_t.normalise=log1p(1e-3)", r"write '.*\{2m_t: \{normalise: \"log1p\(1e-3\)\"\}\}'"),
        ("sst.fil=mean", "sst.fil: no such key.*Allowed.*fill"),
        ("sst.normalise=minmx", "sst.normalise: needs one of.*mean minmax"),
        ("sst.fill=men", "sst.fill: needs `mean`, a number or null"),
        ("sst.nonnegative=perhaps", "sst.nonnegative: needs true or false or null"),
        ("sst.convert=Pa", "sst.convert: needs FROM->TO"),
        ("a.b.fill=mean", "a name with dots"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(text, answer):
    with pytest.raises(UserError, match=answer) as caught:
        composed(f"data.variables.{text}")
    assert "\n" not in str(caught.value)


@each(
    "listed, key, names",
    [
        (["geopotential", "2m_temperature"], "t2m", ["2m_temperature"]),
        (["2t", "msl"], "2m_temperature", ["2t"]),
        (["geopotential"], "z", ["geopotential"]),
        (["z"], "geopotential", ["z"]),
        (["z_500", "z_850", "t_500"], "geopotential", ["z_500", "z_850"]),
        (["Z500"], "Z500", ["Z500"]),
        (["2t", "t2m"], "2t", ["2t"]),
    ],
)
def test_a_variable_may_go_by_another_name_here(listed, key, names):
    config = DataConfig(prognostic=listed, variables={key: VariableConfig(fill=1)})
    for name in listed:
        assert config.variable_config(name) == VariableConfig(fill=1 if name in names else None)
    assert sorted(config.variables) == sorted(names)


@each(
    "listed, keys, answer",
    [
        (["geopotential", "geopotential_at_surface"], ["z"], "z: stands for geopotential and geop"),
        (["2m_temperature"], ["t2m", "2m_temperature"], "t2m: 2m_temperature has another entry"),
        (["2m_temperature"], ["t2m", "2t"], "2t: 2m_temperature has another entry"),
    ],
)
def test_names_that_may_mean_two_things_are_refused(listed, keys, answer):
    with pytest.raises(UserError, match=f"data.variables.{answer}"):
        DataConfig(prognostic=listed, variables={key: VariableConfig(fill=1) for key in keys})


def test_names_that_are_no_variables_are_refused(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "s.zarr")
    for key in ("2m_temprature", "solr", "day_of_year_sin"):
        config = stores.config(path, variables={key: VariableConfig(fill=0)})
        with pytest.raises(UserError, match=rf"data\.variables\.{key}: ") as caught:
            Store.open(config)
        near = {"2m_temprature": "Nearest: 2m_temperature", "solr": "Nearest: solar"}
        assert near.get(key, "is computed") in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_variable_may_go_by_its_short_name(tmp_path):
    rain = stores.dataset().rename(solar="tp")
    path = stores.write(rain, tmp_path / "s.zarr")
    log = {"total_precipitation": VariableConfig(normalise="std")}
    lists = {"forcing": [], "static": [], "diagnostic": ["tp"]}
    assert Store.open(stores.config(path, variables=log, **lists)).channels.num_outputs == 8
    six_hours = {"total_precipitation_6hr": VariableConfig(normalise="std")}
    with pytest.raises(UserError, match="no list of the data config has a variable total_prec"):
        Store.open(stores.config(path, variables=six_hours, **lists))


def test_the_quickstart_refuses_them_before_it_is_built():
    with pytest.raises(UserError, match=r"data\.variables\.tempurature.*Nearest: temperature"):
        expected_data(composed("data.variables.tempurature.fill=mean"))


def test_channels_are_known_on_any_grid(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "s.zarr")
    config = stores.config(path, grid="90x180", regrid="bilinear")
    assert expected_data(config).channels == Store.open(stores.config(path)).channels


@pytest.mark.slow
def test_the_quickstart_has_computed_fields_too():
    config = composed("data.static=[latitude_sin,land_sea_mask]", "data.forcing=[insolation]")
    channels = expected_data(config).channels
    assert channels.static == ("latitude_sin", "land_sea_mask")
    assert channels.forcing == ("insolation",)
    with pytest.raises(UserError, match="Nearest: latitude_sin"):
        expected_data(composed("data.static=[latitude_sine]"))


def test_diagnostic_channels_come_out_last(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "s.zarr")
    config = stores.config(path, prognostic=["2m_temperature"], diagnostic=["temperature"])
    channels = Store.open(config).channels
    assert [channel.name for channel in channels.output_channels] == [
        "2m_temperature",
        "temperature_500",
        "temperature_850",
        "temperature_1000",
    ]
    assert (channels.num_states, channels.num_outputs) == (1, 4)
    assert channels.slice_of("temperature") == slice(1, 4)
    fields = channels.fields(frames=2)
    assert (fields.inputs, fields.outputs) == (2 + 4, 4)
