"""Archives of station reports, read as they are; the expected values are computed by hand."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.observations import Observations

ASOS = """\
#DEBUG: Format Typ    -> comma
#DEBUG: Time Period   -> 2000-01-02 00:00:00+00:00 2000-01-03 00:00:00+00:00
station,valid,lon,lat,elevation,tmpf,dwpf,relh,drct,sknt,p01i,alti,mslp,skyc1,metar
DSM,2000-01-02 11:54,-93.66,41.53,292.00,50.00,M,67.2,270.00,20.00,T,30.01,1016.30,OVC,KDSM 021154Z
DSM,2000-01-02 12:54,-93.66,41.53,292.00,51.80,32.00,67.2,M,3.00,0.10,30.01,M,M,KDSM 021254Z
DSM,2000-01-02 11:54,-93.66,41.53,292.00,14.00,5.00,67.2,180.00,10.00,0.00,30.01,1016.40,OVC,COR
AMW,2000-01-02 11:53,-93.62,41.99,M,M,M,M,0.00,0.00,M,M,M,M,KAMW 021153Z
"""
KNOT = 1852 / 3600


def test_asos_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "asos.csv").write_text(ASOS)
    seen = Observations.open(str(tmp_path / "asos.csv"))
    assert seen.names == ["AMW", "DSM"]
    assert seen.latitude.tolist() == [41.99, 41.53]
    assert seen.longitude.tolist() == [-93.62, -93.66]
    np.testing.assert_array_equal(seen.elevation, [np.nan, 292])
    assert [str(time)[11:16] for time in seen.times] == ["11:53", "11:54", "12:54"]
    assert seen.notes == ["1 report corrected by a later row of the same station and time"]
    nan = np.nan
    # In the order of times: AMW, DSM corrected, DSM.
    expected = {
        "2m_temperature": ("degF", [nan, 14, 51.8]),
        "2m_dewpoint_temperature": ("degF", [nan, 5, 32]),
        "mean_sea_level_pressure": ("hPa", [nan, 1016.4, nan]),
        "10m_wind_speed": ("kt", [0, 10, 3]),
        # A calm, a wind of 10 knots from the south, and one from a direction that is not known.
        "10m_u_component_of_wind": ("kt", [0, 0, nan]),
        "10m_v_component_of_wind": ("kt", [0, 10, nan]),
        "total_precipitation_1hr": ("mm", [nan, 0, 2.54]),
    }
    assert {*seen.values} == {*expected}
    for name, (unit, values) in expected.items():
        assert seen.units[name] == unit
        np.testing.assert_allclose(seen.values[name], values, atol=1e-12, err_msg=name)


def test_traces_of_rain_are_none(tmp_path: Path) -> None:
    (tmp_path / "asos.csv").write_text(
        ASOS.replace("11:54,-93.66,41.53,292.00,14", "11:55,-93.66,41.53,292.00,14")
    )
    seen = Observations.open(str(tmp_path / "asos.csv"))
    assert seen.notes == []
    assert seen.values["total_precipitation_1hr"][1] == 0
    # From the west, so that it blows to the east.
    assert seen.values["10m_u_component_of_wind"][1] == pytest.approx(20)
    assert seen.values["10m_v_component_of_wind"][1] == pytest.approx(0, abs=1e-12)


HISTORY = """\
"USAF","WBAN","STATION NAME","CTRY","STATE","ICAO","LAT","LON","ELEV(M)","BEGIN","END"
"010010","99999","JAN MAYEN","NO","","ENJA","+70.933","-008.667","+0009.0","19310101","20250101"
"725460","14933","DES MOINES","US","IA","KDSM","+41.534","-093.653","+0291.7","19730101","20250101"
"999999","00001","NOWHERE","","","","+00.000","+000.000","-0999.0","20000101","20000102"
"""
JAN_MAYEN = """\
2000 01 02 06   -49   -68 10132    90   100     8     0    -1
2000 01 02 12 -9999 -9999 -9999 -9999 -9999 -9999 -9999 -9999
2000 01 02 18    12    -5 -9999     0     0     0    15    23
"""
DES_MOINES = "2000 01 02 12   100    50 10200   360    51 -9999 -9999 -9999\n"


def isd_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "isd-history.csv").write_text(HISTORY)
    (folder / "010010-99999-2000").write_text(JAN_MAYEN)
    (folder / "725460-14933-2000.gz").write_bytes(gzip.compress(DES_MOINES.encode()))
    (folder / "999999-00001-2000").write_text(DES_MOINES)
    (folder / "123456-99999-2000").write_text(DES_MOINES)
    (folder / "readme.txt").write_text("not a station")
    return folder


def test_a_folder_of_isd_lite_is_read_as_it_is(tmp_path: Path) -> None:
    seen = Observations.open(str(isd_folder(tmp_path / "isd")))
    assert seen.names == ["010010-99999", "725460-14933"]
    assert seen.latitude.tolist() == [70.933, 41.534]
    assert seen.longitude.tolist() == [-8.667, -93.653]
    assert seen.elevation.tolist() == [9.0, 291.7]
    assert seen.notes == ["2 files of stations without a place in isd-history.csv left out"]
    # The report without any value is left out.
    assert [str(time)[11:16] for time in seen.times] == ["06:00", "12:00", "18:00"]
    assert seen.station.tolist() == [0, 1, 0]
    nan = np.nan
    expected = {
        "2m_temperature": ("degC", [-4.9, 10, 1.2]),
        "2m_dewpoint_temperature": ("degC", [-6.8, 5, -0.5]),
        "mean_sea_level_pressure": ("hPa", [1013.2, 1020, nan]),
        "10m_wind_speed": ("m s-1", [10, 5.1, 0]),
        # From the east, from the north, and a calm.
        "10m_u_component_of_wind": ("m s-1", [-10, 0, 0]),
        "10m_v_component_of_wind": ("m s-1", [0, -5.1, 0]),
        "total_precipitation_1hr": ("mm", [0, nan, 1.5]),
        "total_precipitation_6hr": ("mm", [0, nan, 2.3]),
    }
    assert {*seen.values} == {*expected}
    for name, (unit, values) in expected.items():
        assert seen.units[name] == unit
        np.testing.assert_allclose(seen.values[name], values, atol=1e-12, err_msg=name)


def test_folders_of_isd_lite_that_are_refused(tmp_path: Path) -> None:
    for number, (name, text, said) in enumerate(
        (
            ("isd-history.csv", None, "isd-history.csv: no such file, which says where"),
            ("isd-history.csv", "USAF,WBAN,LAT,LON\n", "but ELEV(M) is missing"),
            ("isd-history.csv", HISTORY.splitlines()[0], "but has those of none"),
            ("010010-99999-2000", "2000 01 02 06 1 2\n", "it can't be read (6 columns)"),
            ("010010-99999-2000", JAN_MAYEN.replace("-49", "cold"), "it can't be read ("),
            ("010010-99999-2000", JAN_MAYEN.replace("01 02", "02 30"), "it can't be read ("),
            ("010010-99999-2000", "", "it can't be read ("),
            ("725460-14933-2000.gz", DES_MOINES, "it can't be read ("),
        )
    ):
        folder = isd_folder(tmp_path / str(number))
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
        with pytest.raises(UserError) as caught:
            Observations.open(str(folder))
        assert said in str(caught.value), (name, text)
        assert "\n" not in str(caught.value), (name, text)
        assert name in str(caught.value), (name, text)
    with pytest.raises(UserError, match="missing: has no effect on ISD-Lite"):
        Observations.open(str(folder), ["-9999"])


def test_elevations_of_csv_and_netcdf(tmp_path: Path) -> None:
    text = "station,time,lat,lon,{},t2m\nA,2000-01-02,1,2,30,280\nB,2000-01-02,3,4,NA,281\n"
    for heading in ("elevation", "Elev [m]", "altitude (metres)"):
        (tmp_path / "a.csv").write_text(text.format(heading))
        seen = Observations.open(str(tmp_path / "a.csv"))
        np.testing.assert_array_equal(seen.elevation, [30, np.nan], err_msg=heading)
        assert {*seen.values} == {"t2m"}
    (tmp_path / "a.csv").write_text(text.format("elevation [ft]"))
    with pytest.raises(UserError, match=r"elevation needs metres, but is in ft\. Convert it\."):
        Observations.open(str(tmp_path / "a.csv"))
    places = {
        "time": np.array(["2000-01-02"] * 2, "M8[ns]"),
        "latitude": ("station", [1.0, 3.0]),
        "longitude": ("station", [2.0, 4.0]),
    }
    altitude = ("station", [30.0, 40.0], {"standard_name": "surface_altitude", "units": "m"})
    (by_report, by_time) = (
        xr.Dataset({"t2m": (dims, values)}, places | {"time": (dims[0], places["time"][:count])})
        for dims, values, count in (
            (("station",), [280.0, 281.0], 2),
            (("time", "station"), [[280.0, 281.0]], 1),
        )
    )
    for name, data in (("by_report", by_report), ("by_time", by_time)):
        data.assign_coords(ground=altitude).to_netcdf(tmp_path / f"{name}.nc")
        assert Observations.open(str(tmp_path / f"{name}.nc")).elevation.tolist() == [30, 40]
        data.to_netcdf(tmp_path / f"{name}-without.nc")
        without = Observations.open(str(tmp_path / f"{name}-without.nc")).elevation
        assert np.isnan(without).all()
