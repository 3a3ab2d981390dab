"""The many ways of writing one unit, read as one."""

import re
from collections import Counter

DIMENSIONLESS = "1"
# Whole texts that are no product of units; "~" is ECMWF's for a type or an index.
WORDS = {
    "dimensionless": "1",
    "unitless": "1",
    "none": "1",
    "fraction": "1",
    "proportion": "1",
    "numeric": "1",
    "index": "1",
    "~": "1",
    "-": "1",
    "0-1": "1",
    "percent": "%",
    "celsius": "degC",
    "degrees celsius": "degC",
    "degree celsius": "degC",
    "fahrenheit": "degF",
    "geopotential metre": "gpm",
    "geopotential meter": "gpm",
    "m of water equivalent": "m",
    "m of water": "m",
    "mm of water equivalent": "mm",
}
SYMBOLS = {
    "kelvin": "K",
    "degk": "K",
    "deg_k": "K",
    "c": "degC",
    "°c": "degC",
    "degc": "degC",
    "deg_c": "degC",
    "degree_c": "degC",
    "degrees_c": "degC",
    "degree_celsius": "degC",
    "degrees_celsius": "degC",
    "degf": "degF",
    "pascal": "Pa",
    "pascals": "Pa",
    "mb": "hPa",
    "mbar": "hPa",
    "millibar": "hPa",
    "millibars": "hPa",
    "hectopascal": "hPa",
    "metre": "m",
    "metres": "m",
    "meter": "m",
    "meters": "m",
    "millimetre": "mm",
    "millimeter": "mm",
    "second": "s",
    "seconds": "s",
    "sec": "s",
    "hour": "h",
    "hours": "h",
    "hr": "h",
    "knot": "kt",
    "knots": "kt",
    "radian": "rad",
    "radians": "rad",
}
FACTOR = re.compile(r"(/?)([A-Za-z°%_]+|1(?![\d.]))(?:\^?\(?([+-]?\d+)\)?)?")


def canonical(text: str) -> str:
    """`m**2 s**-2`, `m2 s-2` and `m^2/s^2` -> `m2 s-2`; `(0 - 1)` and `kg/kg` -> `1`; K -> `K`.

    A text that is no product of powers comes back as it is, without spaces around it.
    """
    bare = text.strip()
    word = re.sub(r"\s+", " ", bare.strip("()[] ")).lower()
    word = WORDS.get(word.replace(" - ", "-"), WORDS.get(word, ""))
    if word:
        return word
    factors = re.sub(r"\*\*", "^", re.sub(r"[{}]|^[(\[]|[)\]]$", "", bare))
    factors = re.sub(r"\s*([/^])\s*", r"\1", factors)
    factors = re.sub(r"(?<=[A-Za-z0-9)])[.*·](?=[A-Za-z])", " ", factors).replace("/", " /")
    powers: Counter[str] = Counter()
    for factor in factors.split():
        found = FACTOR.fullmatch(factor)
        if not found:
            return bare
        slash, symbol, power = found.groups()
        if symbol != DIMENSIONLESS:
            powers[SYMBOLS.get(symbol.lower(), symbol)] += int(power or 1) * (-1 if slash else 1)
    return _written(powers) if factors.split() else ""


def _written(powers: Counter[str]) -> str:
    """Positive powers first, then by name; `1` if all cancel."""
    order = sorted((power < 0, symbol) for symbol, power in powers.items() if power)
    parts = [symbol if powers[symbol] == 1 else f"{symbol}{powers[symbol]}" for _, symbol in order]
    return " ".join(parts) or DIMENSIONLESS
