"""Texts of a store's, as plots and pages show them."""

import re

# The exponent in a unit: m2 s-2, m**2 s**-2, m^2 s^-2.
EXPONENT = re.compile(r"(?<=[A-Za-z])(?:\*\*|\^)?(-?\d+)")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain(text: str) -> str:
    """A text as it is, where what is between dollars would be read as a formula."""
    return text.replace("$", r"\$")


def unit_label(unit: str) -> str:
    """A unit for a plot, with raised exponents, however they are written."""
    return EXPONENT.sub(r"$^{\1}$", plain(unit))


def superscript(unit: str) -> str:
    """A unit as plain text, with raised exponents, however they are written."""
    return EXPONENT.sub(lambda found: found[1].translate(RAISED), unit)
