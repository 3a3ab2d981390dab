"""Over which span the sums of a forecast store are, where it says so as the CF conventions ask."""

import re

import numpy as np
import xarray as xr

from credit_dp.data.sources.address import reason_of
from credit_dp.errors import UserError

LEAD = "prediction_timedelta"
OTHER_LEADS = ("lead_time", "step", "leadtime")  # as others call it
# Source: the CF conventions, section 7.3: dimensions with colons, then the method.
SUM = re.compile(rf"\b(?:{'|'.join((LEAD, *OTHER_LEADS))}):(?: \w+:)* sum\b")


def is_sum(array: xr.DataArray) -> bool:
    """Whether a variable says that its values are sums over spans of lead time."""
    return SUM.search(str(array.attrs.get("cell_methods", ""))) is not None


def span_of_sums(dataset: xr.Dataset, where: str) -> np.timedelta64 | None:
    """The span before each lead time, by the bounds of these; None where there are no sums.

    Raises:
        UserError: spans differ, or do not end at the lead time.
    """
    if not any(is_sum(array) for array in dataset.data_vars.values()):
        return None
    name = dataset[LEAD].attrs.get("bounds", dataset[LEAD].encoding.get("bounds"))
    if name not in dataset.variables:
        return None
    lead = dataset[LEAD].variable
    given = dataset[name].variable
    if "units" not in given.attrs:  # they are those of the lead time
        units = lead.attrs.get("units", lead.encoding.get("units"))
        given = given.copy(deep=False)
        given.attrs |= {"units": units}
    bounds, leads = decoded(given, where).values, decoded(lead, where).values
    spans = np.diff(bounds).ravel()
    pairs = bounds.shape == (len(leads), 2)
    if not pairs or (bounds[:, 1] != leads).any() or (spans != spans[0]).any() or not spans[0] > 0:
        raise UserError(
            f"{where}: sums need to be over one span that ends at the lead time, but {name} has "
            "others. Leave these variables out with variables=[...]."
        )
    span: np.timedelta64 = spans[0].astype("m8[ns]")
    return span


def decoded(variable: xr.Variable, where: str) -> xr.Variable:
    """Lead times as time spans, which netCDF and older zarr stores have as numbers with a unit.

    Raises:
        UserError: the unit can't be understood.
    """
    if np.issubdtype(variable.dtype, np.timedelta64):
        return variable
    try:
        return xr.conventions.decode_cf_variable(LEAD, variable, decode_timedelta=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {LEAD} can't be read ({reason_of(error)}).") from error
