"""Archives of station reports, read as they are; the expected values are computed by hand."""

import gzip
import zipfile
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


# A radiosonde's two soundings and a ship's one, with three lines each.
PITTSBURGH = """\
#USM00072520 2000 01 02 12 1105    3 ncdc-nws ncdc-gts  405317  -802172
21  0000  97900A  360   -22B  735   200   200    31
10  0312  92500   812B  -60B  650    55   225    77
10  1820  50000B 5520B -233B-9999   150   270   205
#USM00072520 2000 01 03 00 9999    3 ncdc-gts ncdc-gts  405317  -802172
10 -9999  92500   799B-8888   640    50     0     0
20 -9999  40000  7123B -380B  100    90   250   300
10 -9999  50000 -9999 -9999 -9999 -9999   360    51
"""
SHIP = """\
#ZZV000EHOA7 2000 01 02 12 9999    3 ncdc-gts           -10500  1799000
10 -9999   7000 18500  -610 -9999 -9999 -9999    90
10 -9999   2000 -8888 -9999 -9999 -9999 -9999 -9999
30 -9999  -9999  5000 -9999 -9999 -9999    90    50
#ZZV000EHOA7 2000 01 02 99 9999    1 ncdc-gts           -10500  1799000
10 -9999  50000  5500B -100B-9999 -9999 -9999 -9999
#ZZV000EHOA7 2000 01 03 12 9999    1 ncdc-gts          -998888 -9998888
10 -9999  50000  5500B -100B-9999 -9999 -9999 -9999
"""


def test_soundings_of_igra_are_read_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "igra"
    folder.mkdir()
    (folder / "USM00072520-data.txt").write_text(PITTSBURGH)
    with zipfile.ZipFile(folder / "ZZV000EHOA7-data-beg2000.txt.zip", "w") as zipped:
        zipped.writestr("ZZV000EHOA7-data-beg2000.txt", SHIP)
    (folder / "igra2-station-list.txt").write_text("not a sounding")
    seen = Observations.open(str(folder))
    assert seen.names == ["USM00072520", "ZZV000EHOA7"]
    assert seen.latitude.tolist() == [40.5317, -1.05]
    assert seen.longitude.tolist() == [-80.2172, 179.9]
    assert np.isnan(seen.elevation).all()
    assert seen.notes == ["2 soundings without an hour or a place left out"]
    assert [str(time)[:13] for time in seen.times] == ["2000-01-02T12"] * 2 + ["2000-01-03T00"]
    assert seen.station.tolist() == [0, 1, 0]
    nan = np.nan
    # Not those on 979, 400 and 20 hPa: no standard levels, or without a value.
    expected = {
        "geopotential_925": ("m", [812, nan, 799]),
        "geopotential_500": ("m", [5520, nan, nan]),
        "geopotential_70": ("m", [nan, 18500, nan]),
        "temperature_925": ("degC", [-6, nan, nan]),
        "temperature_500": ("degC", [-23.3, nan, nan]),
        "temperature_70": ("degC", [nan, -61, nan]),
        "relative_humidity_925": ("%", [65, nan, 64]),
        "wind_speed_925": ("m s-1", [7.7, nan, 0]),
        "wind_speed_500": ("m s-1", [20.5, nan, 5.1]),
        "wind_speed_70": ("m s-1", [nan, 9, nan]),
        # From the south-west and a calm, from the west and from the north.
        "u_component_of_wind_925": ("m s-1", [7.7 / 2**0.5, nan, 0]),
        "v_component_of_wind_925": ("m s-1", [7.7 / 2**0.5, nan, 0]),
        "u_component_of_wind_500": ("m s-1", [20.5, nan, 0]),
        "v_component_of_wind_500": ("m s-1", [0, nan, -5.1]),
    }
    assert {*seen.values} == {*expected}
    for name, (unit, values) in expected.items():
        assert seen.units[name] == unit
        np.testing.assert_allclose(seen.values[name], values, atol=1e-12, err_msg=name)
    one = Observations.open(str(folder / "USM00072520-data.txt"))
    assert one.names == ["USM00072520"]
    np.testing.assert_array_equal(one.values["geopotential_500"], [5520, nan])


def test_soundings_of_igra_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "USM00072520-data.txt"
    unfit = "USM00072520-data.txt: needs soundings in IGRA's format, but it can't be read ("
    none = "needs soundings with an hour, a place and values on standard pressure levels"
    for text, said in (
        ("hello\n", none),
        (PITTSBURGH.replace(" 02 12", " 02 99").replace(" 03 00", " 03 99"), none),
        (PITTSBURGH.replace("\n10", "\n20"), none),
        (PITTSBURGH[72:], f"{unfit}no header before the first level"),
        (PITTSBURGH.replace("01 02", "02 30"), unfit),
        (PITTSBURGH.replace("812", "8I2"), unfit),
        (PITTSBURGH[:-30], unfit),
        (PITTSBURGH * 2, f"{unfit}USM00072520 has "),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            Observations.open(str(tmp_path))
        assert said in str(caught.value), text
        assert "\n" not in str(caught.value), text
    (tmp_path / "USM00072520-data-beg2000.txt.zip").write_text(PITTSBURGH)
    with pytest.raises(UserError, match=r"\.txt\.zip: needs .* \(File is not a zip file\)"):
        Observations.open(str(tmp_path))
    with zipfile.ZipFile(tmp_path / "USM00072520-data-beg2000.txt.zip", "w") as archive:
        archive.writestr("USM00072520-data-beg2000.txt", PITTSBURGH)
    packed = bytearray((tmp_path / "USM00072520-data-beg2000.txt.zip").read_bytes())
    packed[6] |= 1  # encrypted, in the header of the file and in the directory
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "USM00072520-data-beg2000.txt.zip").write_bytes(packed)
    with pytest.raises(UserError, match=r"\.txt\.zip: needs .* encrypted"):
        Observations.open(str(tmp_path))
    with pytest.raises(UserError, match="missing: has no effect on IGRA"):
        Observations.open(str(path), ["-9999"])
    (tmp_path / "USM00072520-data-beg2000.txt.zip").unlink()
    for name in (path.name, "USM00072520-data-beg2000.txt"):
        (tmp_path / name).write_text(PITTSBURGH)
    with pytest.raises(UserError, match="station USM00072520 has 2000-01-02T12:00 twice"):
        Observations.open(str(tmp_path))


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
