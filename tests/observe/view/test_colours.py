"""The page's colours: readable in both themes, and the dark theme is the same however it is chosen."""

from __future__ import annotations

import re

from practicum.observe.view.web_app import STATIC

READABLE, VISIBLE = 4.5, 3.0
"""Least contrasts of WCAG 2.2, level AA: of text, and of lines and marks."""

Colour = tuple[float, float, float]


def themes() -> list[dict[str, Colour]]:
    """The variables of the light theme, and of the dark one as the system and as the button choose it."""
    text = (STATIC / "style.css").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"(--bg:.*?)\}", text, re.DOTALL):
        hexes = {
            name: tuple(bytes.fromhex(value)) for name, value in re.findall(r"--([\w-]+): #(\w{6})", block)
        }
        plain = {
            name: tuple(map(int, value.split(",")))
            for name, value in re.findall(r"--(\w+): ([\d, ]+);", block)
        }
        found.append(hexes | plain)
    return found


def luminance(colour: Colour) -> float:
    shares = [part / 255 for part in colour]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, two: Colour) -> float:
    darker, lighter = sorted((luminance(one), luminance(two)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_dark_theme_is_one():
    light, dark, chosen = themes()
    assert dark == chosen
    assert {*dark} <= {*light}


def test_text_and_curves_are_readable_in_both_themes():
    for theme in themes():
        for name in ("text", "muted", "accent", "good", "warn", "bad"):
            for ground in ("bg", "raised", "chosen", "warn-bg", "bad-bg"):
                assert contrast(theme[name], theme[ground]) >= READABLE, (name, ground)
        for number in range(8):
            assert contrast(theme[f"series-{number}"], theme["bg"]) >= VISIBLE, number


def test_tokens_are_readable_on_the_strongest_shades():
    source = (STATIC / "colours.js").read_text(encoding="utf-8")
    share = float(re.findall(r"STRONGEST = ([\d.]+)", source)[0])
    for theme in themes():
        for scale in ("positive", "negative", "sequential"):
            pairs = zip(theme[scale], theme["bg"], strict=True)
            red, green, blue = (share * shade + (1 - share) * ground for shade, ground in pairs)
            assert contrast(theme["text"], (red, green, blue)) >= READABLE, scale
