"""The colours of every report: one table for the page (light and dark), the PDF and the figures.

A colour is named by its role. Tones say how alarming a value is, from blue to dark red; they differ in lightness too,
so that they hold for the colour-blind, and each is also a word. The heat ramp runs into the same red.
"""

from __future__ import annotations

Rgb = tuple[int, int, int]

# role: (light, dark)
ROLES = {
    "page": ("#f6f7f9", "#0f1216"),
    "card": ("#ffffff", "#171b21"),
    "line": ("#dde2e8", "#2b323b"),
    "text": ("#1a2129", "#e4e8ed"),
    "muted": ("#5a6674", "#98a4b1"),
    "accent": ("#0b5cad", "#7db8f5"),
    "hover": ("#eef2f6", "#1e242c"),
    "critical": ("#a0142f", "#ff7b8f"),
    "high": ("#c65300", "#ff9d4d"),
    "moderate": ("#a87800", "#f0c74a"),
    "low": ("#2274ad", "#63b3ec"),
    "unsure": ("#6b7480", "#9aa5b1"),
    "none": ("#53657a", "#8fa3b8"),
}
STEPS = 9  # of the heat ramp
_RAMP = (("#fdf1e3", "#f7bf83", "#e0662a", "#8f0f2c"), ("#2a2524", "#6b3120", "#cf5a2c", "#ffd3c2"))
WHITE, BLACK = "#ffffff", "#000000"


def rgb(colour: str) -> Rgb:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def mix(first: str, second: str, share: float) -> str:
    """`share` of the second colour in the first."""
    parts = (round(a + (b - a) * share) for a, b in zip(rgb(first), rgb(second), strict=True))
    return "#{:02x}{:02x}{:02x}".format(*parts)


def luminance(colour: str) -> float:
    """Relative luminance of sRGB, WCAG 2.2."""
    red, green, blue = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(background: str) -> str:
    """Black or white, whichever stands out more: never less than 4.58 : 1, the square root of 21."""
    light = luminance(background)
    return BLACK if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else WHITE


def _ramp(stops: tuple[str, ...]) -> tuple[str, ...]:
    """Even steps between the stops."""
    places = [step / (STEPS - 1) * (len(stops) - 1) for step in range(STEPS)]
    firsts = [min(int(place), len(stops) - 2) for place in places]
    return tuple(mix(stops[i], stops[i + 1], place - i) for i, place in zip(firsts, places, strict=True))


HEAT = tuple(zip(_ramp(_RAMP[0]), _ramp(_RAMP[1]), strict=True))  # (light, dark) of each step, the least first
COLOURS: dict[str, tuple[str, str]] = {
    **ROLES,
    **{f"heat-{step}": pair for step, pair in enumerate(HEAT)},
    **{f"heat-ink-{step}": (ink_on(light), ink_on(dark)) for step, (light, dark) in enumerate(HEAT)},
}


def on_paper(role: str) -> str:
    """The colour of a role where there is only a light theme; of an unknown tone the neutral one."""
    return COLOURS.get(role, COLOURS["none"])[0]


def tint(tone: str) -> tuple[str, str]:
    """The light ground and the dark ink of a tone on paper."""
    colour = on_paper(tone or "none")
    return mix(colour, WHITE, 0.86), mix(colour, BLACK, 0.25)


def css() -> str:
    """Every colour as a custom property that follows the theme."""
    lines = "\n".join(f"  --{role}: light-dark({light}, {dark});" for role, (light, dark) in COLOURS.items())
    return f":root {{\n{lines}\n}}\n"
