"""The form of a prepared store: all channels stacked, cut by latitude.

A zarr group (version 3):

    fields     (time, channel, latitude, longitude)  float32
    static     (static, latitude, longitude)         float32
    time       (time)       int64, hours since 1900-01-01
    latitude   (latitude)   degrees, falling
    longitude  (longitude)  degrees

An inner chunk of `fields` holds one time, all channels and a few rows; a shard one time. Each chunk
carries a checksum. The fill value is NaN, and all files are written: one that isn't there is an
error. Without static fields there is no `static`. What the channels are is in the group's
attributes.
"""

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from credit_dp.data.schema import Channel
from credit_dp.errors import UserError

ATTRIBUTE = "credit_dp"
FORM = 1
TIME_UNITS = "hours since 1900-01-01"
EPOCH = np.datetime64("1900-01-01", "h")


@final
@dataclass(frozen=True)
class PreparedForm:
    """What the attributes of a prepared store say.

    Attributes:
        channels: of `fields`, in order.
        static: of `static`, in order.
        units, standard_names: by variable; empty where the source gave none.
        origin: where the fields came from, for people.
        model_levels: levels are those of a model, by number, not of pressure.
        title: what the source said that it is.
    """

    channels: tuple[Channel, ...]
    static: tuple[str, ...]
    units: dict[str, str]
    standard_names: dict[str, str]
    origin: str
    model_levels: bool = False
    title: str = ""

    def attributes(self) -> dict[str, Any]:
        """As JSON."""
        return {"form": FORM, **asdict(self)}

    @classmethod
    def of(cls, attributes: Any, where: str) -> "PreparedForm":
        """What `attributes` made.

        Raises:
            UserError: they are of another form, or damaged.
        """
        try:
            if attributes["form"] != FORM:
                raise ValueError
            return cls(
                tuple(Channel(**channel) for channel in attributes["channels"]),
                tuple(attributes["static"]),
                dict(attributes["units"]),
                dict(attributes["standard_names"]),
                str(attributes["origin"]),
                bool(attributes.get("model_levels", False)),  # earlier versions did not say
                str(attributes.get("title", "")),  # stores of before don't have it
            )
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: is not a store that this version prepared (form {FORM}). "
                "Prepare it again with `credit-dp data prepare`."
            ) from None
