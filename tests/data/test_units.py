import re
import shlex
from types import SimpleNamespace

import pytest

from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.quickstart import dataset
from credit_dp.data.sources.source import VariableInfo
from credit_dp.data.units import (
    CONVERSIONS,
    KNOWN_VARIABLES,
    canonical_unit,
    check_units,
    converted_unit,
    is_accumulated,
    is_nonnegative,
    parse_conversion,
    usual_unit,
)
from credit_dp.errors import UserError
from credit_dp.variable_names import (
    STATIC_NAMES,
    SURFACE_NAMES,
    UPPER_AIR_NAMES,
    all_names_of,
    canonical_name,
    long_name,
    possible_canonical_names,
)
from tests.tables import each


def source(**variables):
    """Return a source with variables `name=(units, standard_name)`."""
    named = {name: VariableInfo(True, (), *said) for name, said in variables.items()}
    return SimpleNamespace(where="s.zarr", variables=named)


def config(*names, convert=None):
    variables = {names[0]: VariableConfig(convert=convert)} if convert else {}
    return DataConfig(name="zarr", prognostic=list(names), variables=variables)


def pasted(message):
    """Return the overrides in a message as the command line parses them from a shell."""
    found = {}
    for text in re.findall(r"'data\.variables=[^']*'", message):
        (override,) = parse_overrides(shlex.split(text))
        assert override.key_or_group == "data.variables"
        found |= override.value()
    return {name: entry["convert"] for name, entry in found.items()}


def check(name, units, standard_name="", convert=None):
    check_units(source(**{name: (units, standard_name)}), config(name, convert=convert))


@each(
    "texts, expected",
    [
        (
            ["m**2 s**-2", "m2 s-2", "m^2/s^2", "m^2 s^-2", "m2/s2", "m2.s-2", "m^{2} s^{-2}"],
            "m2 s-2",
        ),
        (["(m2 s-2)", "s**-2 m**2", " m**2  s**-2 ", "m*m/s/s"], "m2 s-2"),
        (["m s**-1", "m/s", "m s-1", "m / s", "metres s-1", "meter/sec"], "m s-1"),
        (["(0 - 1)", "(0-1)", "0-1", "0 - 1", "1", "dimensionless", "~", "-", "Fraction"], "1"),
        (["kg kg**-1", "kg/kg", "kg kg-1", "m**3 m**-3", "(kg/kg)", "1/1"], "1"),
        (["K", "Kelvin", "kelvin", "degK"], "K"),
        (["degC", "°C", "C", "celsius", "degrees_C", "degrees Celsius"], "degC"),
        (["hPa", "mbar", "millibars"], "hPa"),
        (["Pa", "pascal"], "Pa"),
        (["g/kg", "g kg**-1"], "g kg-1"),
        (["1/s", "s**-1"], "s-1"),
        (["K m**2 kg**-1 s**-1", "m2 K kg-1 s-1"], "K m2 kg-1 s-1"),
        (["m of water equivalent", "m"], "m"),
        (["%", "percent"], "%"),
        (["", "  "], ""),
        (["what is it?"], "what is it?"),
        (["10 m"], "10 m"),
    ],
)
def test_a_unit_however_it_is_written(texts, expected):
    assert {canonical_unit(text) for text in texts} == {expected}


def test_units_that_differ_stay_different():
    texts = ["m", "mm", "m2", "m-1", "Pa", "hPa", "K", "degC", "1", "%", "g kg-1", "gpm", "J m-2"]
    assert len({canonical_unit(text) for text in texts}) == len(texts)


@each(
    "text, old, new",
    [
        ("hPa->Pa", 1013.25, 101325),
        ("degC->K", -40, 233.15),
        ("degF->K", -40, 233.15),
        ("degF->K", 212, 373.15),
        ("gpm->m2 s-2", 5500, 53936.575),
        ("m->m**2 s**-2", 1, 9.80665),
        ("g/kg->kg kg-1", 12, 0.012),
        ("g kg**-1 -> kg/kg", 12, 0.012),
        ("mm->m", 2.5, 0.0025),
        ("kg m-2->m", 2.5, 0.0025),
        ("%->1", 55, 0.55),
        ("%->(0 - 1)", 55, 0.55),
        ("kt->m/s", 36, 18.52),
        ("J kg**-1->m2 s-2", 7, 7),
        ("Pa->Pa", 5, 5),
        ("kg kg-1->1", 5, 5),
    ],
)
def test_conversions(text, old, new):
    scale, offset = parse_conversion(text)
    assert old * scale + offset == pytest.approx(new, rel=1e-12)


@each("text", ["Pa->K", "Pa->hPa", "foo->Pa", "K->degC"])
def test_an_unknown_conversion_lists_what_is_known(text):
    with pytest.raises(UserError) as caught:
        parse_conversion(text)
    assert "hPa->Pa, " in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_conversions_are_found_under_their_own_texts():
    for old, new in CONVERSIONS:
        assert (canonical_unit(old), canonical_unit(new)) == (old, new)
        assert parse_conversion(f"{old}->{new}") == CONVERSIONS[old, new]


@each("name", KNOWN_VARIABLES)
def test_what_is_needed_passes(name):
    known = KNOWN_VARIABLES[name]
    for standard_name in ("", "unknown", *known.standard_names):
        for units in ("", "unknown", known.unit):
            check(name, units, standard_name)


def test_the_quickstart_passes():
    for name, (standard_name, units) in (
        dataset.LEVEL_VARIABLES | dataset.SURFACE_VARIABLES | dataset.STATIC_VARIABLES
    ).items():
        check(name, units, standard_name)


@each(
    "name, units, convert",
    [
        ("mean_sea_level_pressure", "hPa", "hPa->Pa"),
        ("surface_pressure", "millibars", "hPa->Pa"),
        ("2m_temperature", "degC", "degC->K"),
        ("temperature", "C", "degC->K"),
        ("geopotential", "gpm", "gpm->m2 s-2"),
        ("geopotential", "m", "m->m2 s-2"),
        ("geopotential_at_surface", "m", "m->m2 s-2"),
        ("specific_humidity", "g/kg", "g kg-1->kg kg-1"),
        ("total_precipitation", "mm", "mm->m"),
        ("total_precipitation_6hr", "kg m**-2", "kg m-2->m"),
        ("sea_ice_cover", "%", "%->1"),
        ("relative_humidity", "1", "1->%"),
        ("10m_u_component_of_wind", "knots", "kt->m s-1"),
        ("2t", "degC", "degC->K"),
        ("z_500", "gpm", "gpm->m2 s-2"),
        ("t2m", "degC", "degC->K"),
        ("t", "degC", "degC->K"),
        ("q", "g/kg", "g kg-1->kg kg-1"),
    ],
)
def test_another_unit_is_refused_with_the_key_that_helps(name, units, convert):
    with pytest.raises(UserError) as caught:
        check(name, units)
    message = str(caught.value)
    assert message.startswith(f"s.zarr: {name} is in {units}, but ")
    assert message.endswith(f"Set 'data.variables={{{name}:{{convert:\"{convert}\"}}}}'.")
    assert pasted(message) == {name: convert}
    check(name, units, convert=convert)
    assert parse_conversion(convert)


@each("standard_name", ["geopotential", "surface_geopotential"])
def test_z_may_be_on_levels_or_at_the_surface(standard_name):
    check("z", "m**2 s**-2", standard_name)


def test_an_unknown_unit_is_refused_until_the_config_accepts_it():
    with pytest.raises(UserError) as caught:
        check("temperature", "furlongs")
    message = str(caught.value)
    assert "if only this name is wrong, set 'data.variables={temperature:" in message
    assert pasted(message) == {"temperature": "K->K"}
    check("temperature", "furlongs", convert="K->K")
    check("temperature", "furlongs", convert="degC->K")


@each(
    "name, standard_name, units, convert",
    [
        ("geopotential", "geopotential_height", "", "gpm->m2 s-2"),
        ("geopotential", "geopotential_height", "m2 s-2", "gpm->m2 s-2"),
        ("geopotential_at_surface", "surface_altitude", "", "gpm->m2 s-2"),
        ("temperature", "air_potential_temperature", "K", "K->K"),
        ("specific_humidity", "relative_humidity", "", "kg kg-1->kg kg-1"),
        ("mean_sea_level_pressure", "surface_air_pressure", "Pa", "Pa->Pa"),
        ("u_component_of_wind", "northward_wind", "m s-1", "m s-1->m s-1"),
    ],
)
def test_another_quantity_is_refused(name, standard_name, units, convert):
    with pytest.raises(UserError) as caught:
        check(name, units, standard_name)
    message = str(caught.value)
    assert f"{name} has the standard name {standard_name}, but " in message
    assert pasted(message) == {name: convert}


def test_all_wrong_units_come_at_once_with_one_override():
    units = {
        "2m_temperature": ("degC", ""),
        "geopotential": ("m2 s-2", ""),
        "msl": ("hPa", ""),
        "sea_ice_cover": ("%", ""),
        "surface_pressure": ("Pa", ""),
        "specific_humidity": ("furlongs", ""),
        "temperature": ("K", "air_potential_temperature"),
    }
    settings = DataConfig(
        name="zarr",
        prognostic=list(units),
        variables={
            "surface_pressure": VariableConfig(convert="hPa->Pa"),
            "sea_ice_cover": VariableConfig(fill=0),
        },
    )
    with pytest.raises(UserError) as caught:
        check_units(source(**units), settings)
    message = str(caught.value)
    assert "\n" not in message
    sure, _, unsure = message.partition("; change data.store, or if only these names are wrong")
    needed = {"2m_temperature": "degC->K", "msl": "hPa->Pa", "sea_ice_cover": "%->1"}
    assert pasted(sure) == needed | {"surface_pressure": None}
    assert pasted(unsure) == {"specific_humidity": "kg kg-1->kg kg-1", "temperature": "K->K"}
    assert "geopotential is" not in message


def test_the_override_keeps_other_keys_of_the_variables():
    with pytest.raises(UserError) as caught:
        check("total_precipitation_6hr", "mm")
    (text,) = shlex.split(str(caught.value).partition("Set ")[2].rstrip("."))
    overrides = parse_overrides(["data=weatherbench2", text, "data.variables.solar.fill=0"])
    config = Composer("test").compose_config([str(x.input_line) for x in overrides]).data
    whole = VariableConfig(normalise="log1p(1e-3)", convert="mm->m")
    assert config.variables == {
        "total_precipitation_6hr": whole,
        "solar": VariableConfig(fill=0),
    }


def test_unknown_variables_pass():
    check("my_own_index", "furlongs", "air_temperature")
    check("soil_type", "(Code table 4.213)")
    check_units(source(), config("insolation"))
    check("temperature", "K", "a_name_of_their_own")


@each(
    "units, convert, expected",
    [
        (
            "Pa",
            "hPa->Pa",
            "is in Pa, but data.variables.surface_pressure.convert is 'hPa->Pa'. Set "
            "'data.variables={surface_pressure:{convert:null}}'.",
        ),
        ("hPa", "kPa->Pa", "Set 'data.variables={surface_pressure:{convert:\"hPa->Pa\"}}'."),
        ("hPa", "hPa->kPa", "to Pa, got"),
        ("hPa", "K->Pa", "s.zarr: data.variables.surface_pressure.convert: needs one of"),
    ],
)
def test_a_conversion_that_contradicts_the_store_is_refused(units, convert, expected):
    with pytest.raises(UserError) as caught:
        check("surface_pressure", units, convert=convert)
    assert expected in str(caught.value)


def test_every_role_is_checked():
    for role in ("prognostic", "diagnostic", "forcing", "static"):
        settings = DataConfig(**{"name": "zarr", "prognostic": ["x"], role: ["surface_pressure"]})
        with pytest.raises(UserError):
            check_units(source(surface_pressure=("hPa", "")), settings)


def test_the_unit_that_a_model_sees():
    found = source(temperature=("degC", ""), other=("furlongs", ""))
    settings = config("temperature", "other", convert="degC->K")
    assert converted_unit(found, "temperature", settings) == "K"
    assert converted_unit(found, "other", settings) == "furlongs"


def test_short_names():
    assert long_name("z_500") == ("geopotential", 500)
    assert long_name("z") == ("geopotential_at_surface", None)
    assert long_name("10u") == ("10m_u_component_of_wind", None)
    assert long_name("swvl3") == ("volumetric_soil_water_layer_3", None)
    assert long_name("siconc") == ("sea_ice_cover", None)
    assert long_name("my_own_3") == ("my_own_3", None)
    assert long_name("Z500") == ("geopotential", 500)
    assert long_name("geopotential_850") == ("geopotential", 850)
    assert long_name("u100") == ("100m_u_component_of_wind", None)
    assert [long_name(name) for name in ("t2", "U10", "q2")] == [
        (name, None) for name in ("t2", "U10", "q2")
    ]
    assert possible_canonical_names("z") == {"geopotential", "geopotential_at_surface"}
    assert not set(SURFACE_NAMES) & set(STATIC_NAMES)
    assert set(UPPER_AIR_NAMES.values()) <= set(KNOWN_VARIABLES)


@each("name", sorted({*UPPER_AIR_NAMES, *SURFACE_NAMES, *STATIC_NAMES}))
def test_all_names_of_a_variable_share_its_units_and_signs(name):
    """Units, sums and signs."""
    settings = config(name)
    long = canonical_name(name)
    assert name in (*all_names_of(long), *all_names_of("geopotential"))
    assert is_accumulated(name, settings) == is_accumulated(long, settings)
    assert is_nonnegative(name, VariableConfig()) == is_nonnegative(long, VariableConfig())
    assert usual_unit(name) == (KNOWN_VARIABLES[long].unit if long in KNOWN_VARIABLES else "")
