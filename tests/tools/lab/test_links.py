"""Settings of emulated links, network presets, and what is said of delayed packets; no lab is built."""

import re
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from thinwire.tools import cli, options
from thinwire.tools.lab.links import DelayCost, LinkSettings, delay_json, delay_note, parse_hosts
from thinwire.tools.lab.presets import PRESETS, find_preset
from thinwire.tools.lab.units import format_delay, parse_delay, parse_loss, parse_rates

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "lab.md"


@given(st.integers(0, 60_000_000))
def test_delays_survive_being_written(microseconds: int) -> None:
    assert parse_delay(format_delay(microseconds / 1e6)) == pytest.approx(microseconds / 1e6, rel=1e-5)


def test_every_preset_is_usable_and_documented() -> None:
    guide = GUIDE.read_text()
    for name, preset in PRESETS.items():
        links = LinkSettings(preset.rate, preset.delay, preset.loss)
        assert links.emulated and links.lab(2).delay == links.seconds
        (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", guide, re.MULTILINE)
        between, up, down, delay, loss = (cell.strip() for cell in row.split("|"))
        assert between == preset.description
        for cell, text in ((up, preset.up), (down, preset.down)):
            number, unit = cell.split()
            assert parse_rates(f"{number}{unit.lower().removesuffix('/s')}") == parse_rates(text)
        assert parse_delay("0" if delay == "none added" else delay.replace(" ", "")) == links.seconds
        assert parse_loss("0%" if loss == "0" else loss.replace(" ", "")) == parse_loss(preset.loss)
    with pytest.raises(ValueError, match="there is no network preset 'moon'; there are lan, office"):
        find_preset("moon")


def test_what_settings_say_of_themselves() -> None:
    plain, mixed = LinkSettings("100mbit", "0"), LinkSettings(None, "0.025s", "1%", ((3, "80ms"),))
    assert (str(plain), plain.delays, plain.delayed, plain.emulated) == ("at 100mbit", "", False, True)
    assert str(mixed) == "without a rate limit, 25ms, h3 80ms one way, 1% loss"
    assert not LinkSettings("none", "0", "0%").emulated and LinkSettings(loss="1%").emulated
    assert LinkSettings(host_delays=((1, "5ms"),)).emulated
    assert (mixed.round_trip(3), mixed.round_trip(4)) == (0.05, 0.16)
    assert mixed.lab(4).delays == [0.025, 0.025, 0.025, 0.08]
    with pytest.raises(ValueError, match="there is no host 3"):
        mixed.lab(3)
    with pytest.raises(ValueError, match="the delay of host 2 'soon' is not understood"):
        LinkSettings(host_delays=((2, "soon"),))


def test_hosts_may_be_repeated_and_listed() -> None:
    assert parse_hosts(["1=5ms, 2=6ms", "3=7ms"], "--host-delay", "3=80ms") == {1: "5ms", 2: "6ms", 3: "7ms"}
    assert parse_hosts(None, "--host-delay", "3=80ms") == {}
    with pytest.raises(ValueError, match="--host-delay takes HOST=VALUE, such as 3=80ms, not 'x=5ms'"):
        parse_hosts(["x=5ms"], "--host-delay", "3=80ms")


def test_tables_state_the_cost_of_the_delay_line() -> None:
    first, second = DelayCost(0.1, 0.4, 100, 0), DelayCost(0.05, 0.7, 50, 2)
    worst = DelayCost.worst([first, None, second])
    assert worst == DelayCost(0.1, 0.7, 150, 2) and DelayCost.worst([None]) is None
    far = LinkSettings(delay="5ms")
    assert delay_note(far, first) == "Delay line: 10.0% of one core, p99 lateness 0.40 ms"
    assert delay_note(far, worst).endswith("p99 lateness 0.70 ms; it dropped 2 packets")
    assert delay_note(far, None) == "Delays by the kernel's netem" and delay_note(LinkSettings(), None) == ""
    assert delay_json(first) == {"share": 0.1, "p99_late_ms": 0.4, "packets": 100, "dropped": 0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [LinkSettings("100mbit", "0", "0%")]),
        (["--preset", "wan"], [LinkSettings("100mbit", "25ms", "0.01%")]),
        (["--preset", "home", "--rate", "80mbit", "--loss", "0%"], [LinkSettings("80mbit", "15ms", "0%")]),
        (["--preset", "wan", "--delay", "0"], [LinkSettings("100mbit", "0", "0.01%")]),
        (["--rate", "none", "--delay", "0,5ms"], [LinkSettings(None, "0", "0%"), LinkSettings(None, "5ms", "0%")]),
        (["--host-delay", "1=2ms", "--host-delay", "2=3ms"],
         [LinkSettings("100mbit", "0", "0%", ((1, "2ms"), (2, "3ms")))]),
    ],
)  # fmt: skip
def test_typed_options_override_the_preset(words: list[str], expected: list[LinkSettings]) -> None:
    seen: list[LinkSettings] = []

    def command(
        context: typer.Context,
        preset: options.Preset = None,
        rate: options.Rate = "100mbit",
        delay: options.Delays = "0",
        host_delay: options.HostDelay = None,
        loss: options.Loss = "0%",
    ) -> None:
        seen.extend(options.link_settings(context, 4))

    application = typer.Typer()
    application.command()(command)
    assert cli.run(words, application) == 0
    assert seen == expected
